"""Training augmentation: timm's policies run on this Pillow, posterize included."""

import numpy as np
import pytest
import timm.data
from PIL import Image, ImageOps
from timm.data.auto_augment import AugmentOp, rand_augment_choices

from attention.options import OptionError
from engine.data.augment import posterize
from engine.run.checks import check_policy
from engine.runtime.distributed import seed_everything


@pytest.fixture
def image():
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("bits", [0, -4])
def test_posterize_to_no_bits_is_black(image, bits):
    black = posterize(image, bits)
    assert (black.mode, black.size) == (image.mode, image.size)
    assert not np.asarray(black).any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_keeps_the_leading_bits(image, bits):
    kept = np.asarray(posterize(image, bits))
    assert (kept == np.asarray(image) >> (8 - bits) << (8 - bits)).all()
    assert (kept == np.asarray(ImageOps.posterize(image, bits))).all()


@pytest.mark.parametrize(
    ("name", "magnitude"), [("PosterizeIncreasing", 10), ("PosterizeIncreasing", 20), ("Posterize", 0)]
)
def test_policies_posterize_to_black_at_the_end_of_their_range(image, name, magnitude):
    op = AugmentOp(name, prob=1.0, magnitude=magnitude, hparams={"magnitude_max": 20})
    assert not np.asarray(op(image)).any()


def parse(policy: str):
    """Returns the transform that timm makes of a policy."""
    return timm.data.create_transform(32, is_training=True, auto_augment=policy, separate=True)[1].transforms[0]


def ops(policy) -> list[AugmentOp]:
    return policy.ops if hasattr(policy, "ops") else [op for ops in policy.policy for op in ops]


OP = {
    "m": lambda policy: {op.magnitude for op in ops(policy)},
    "p": lambda policy: {op.prob for op in ops(policy)},
    "mstd": lambda policy: {op.magnitude_std for op in ops(policy)},
    "mmax": lambda policy: {op.magnitude_max for op in ops(policy)},
}
UNDERSTOOD = {  # policy with a section: what timm understood, and what was meant
    "rand-m7": (OP["m"], {7}),
    "rand-m30-mmax30": (OP["m"], {30}),
    "rand-n3": (lambda policy: policy.num_layers, 3),
    "rand-n10-t3aw": (lambda policy: policy.num_layers, 10),
    "rand-p0.25": (OP["p"], {0.25}),
    "rand-p1": (OP["p"], {1}),
    "rand-mstd0.5": (OP["mstd"], {0.5}),
    "rand-mstd101": (OP["mstd"], {float("inf")}),  # uniform, as timm documents
    "rand-mmax20": (OP["mmax"], {20}),
    "rand-inc1": (lambda policy: [op.name for op in policy.ops], rand_augment_choices("", increasing=True)),
    "rand-inc0": (lambda policy: [op.name for op in policy.ops], rand_augment_choices("", increasing=False)),
    **{
        f"rand-t{name}": (lambda policy: [op.name for op in policy.ops], list(rand_augment_choices(name)))
        for name in ("weights", "3a", "3aw")
    },
    "augmix-m5": (OP["m"], {5}),
    "augmix-w4": (lambda policy: policy.width, 4),
    "augmix-d2": (lambda policy: policy.depth, 2),
    "augmix-a0.5": (lambda policy: policy.alpha, 0.5),
    "augmix-b1": (lambda policy: policy.blended, True),
    "augmix-mstd0.5": (OP["mstd"], {0.5}),
    **{f"{name}-mstd0.5": (OP["mstd"], {0.5}) for name in ("original", "originalr", "v0", "v0r", "3a")},
}


@pytest.mark.parametrize("policy", UNDERSTOOD)
def test_timm_understands_what_is_accepted(policy, image):
    check_policy(policy)
    understood, meant = UNDERSTOOD[policy]
    transform = parse(policy)
    assert understood(transform) == meant
    seed_everything(0)
    assert transform(image).size == image.size


@pytest.mark.parametrize(
    "policy",
    [
        *(
            "rand-mxyz-inc",
            "rand-m9-inc",
            "rand-m9-mstd",
            "rand-m9-mstdinf",
            "rand-m9-mstd0.5.5",
            "rand-m9.5",
            "rand-m999",
        ),
        *("rand-n0", "rand-n1000000000", "rand-p7", "rand-inc2", "rand-tweigths", "rand-w0", "rand--m9", "rand-m9\nn3"),
        *("random-m9", "augmix-m5-x1", "augmix-m5-w0", "augmix-m5-a0.0", "original-m9", "v1", "", "rand-m9\n"),
    ],
)
def test_policies_that_timm_would_bend_are_refused(policy):
    with pytest.raises(OptionError) as caught:
        check_policy(policy)
    assert str(caught.value).startswith(f"augment.auto_augment = {policy!r}: no policy of timm; write rand-m9-")
