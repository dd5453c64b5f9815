"""Key masks of models: images of several sizes in one batch, padded sequences, and what refuses a mask."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from timm.models._features import FeatureGetterNet
from timm.models._features_fx import FeatureGraphNet
from torch import Tensor, nn

from attention import ATTENTION, OptionError
from models import create_model
from tests.support.cases import perturbed
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.partition import one_of_a_kind
from tests.uniform.test_key_mask import OF_A_SET, refusal

MASKED = [name for name in ATTENTION if refusal(name) is None]
CELL = {"deit": 8, "pvtv2_b0": 4}
SIZES = {"deit": [(24, 40), (40, 16), (32, 32)], "pvtv2_b0": [(97, 130), (70, 64), (128, 40)]}
LANDMARKS = {"lara": {"num_landmarks": 4}, "eva": {"window_size": 2, "num_landmarks": 1}}


def build(family: str, name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed_dims": (4, 4, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "mlp_ratios": (2, 2, 2, 2)}
    if family == "deit":
        sizes = {"patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2, "dynamic_img_size": True}
    sizes |= {"img_size": 64 if family == "deit" else 128, "num_classes": 5}
    attention = {"name": name, **LANDMARKS.get(name, {})}
    return perturbed(create_model(family, attention=attention, **sizes | options).double().eval(), 0.2)


def images(family: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = SIZES[family]
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def pad(images: Sequence[Tensor], cell: int) -> tuple[Tensor, Tensor]:
    """Images padded with zeros to the largest height and width, and the mask of their cells."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    padded, mask = [], torch.zeros(len(images), -(-height // cell), -(-width // cell), dtype=torch.bool)
    for number, image in enumerate(images):
        _, h, w = image.shape
        padded.append(F.pad(image, (0, width - w, 0, height - h)))
        mask[number, : -(-h // cell), : -(-w // cell)] = True
    return torch.stack(padded), mask


@pytest.mark.parametrize("options", [{}, {"class_token": True, "reg_tokens": 1}], ids=["mean", "class-token"])
@pytest.mark.parametrize("family", CELL)
@pytest.mark.parametrize("name", sorted(OF_A_SET | {"rala"}))
def test_a_padded_image_is_itself_alone(name: str, family: str, options: dict):
    """Outputs and gradients, for mechanisms whose weights do not depend on positions in the grid."""
    if options and (family != "deit" or ATTENTION[name].prefix_tokens == "refused"):
        pytest.skip("without prefix tokens")
    model, of_batch, alone = build(family, name, **options), images(family), images(family)
    y = model(*pad(of_batch, CELL[family]))
    expected = torch.cat([model(image[None]) for image in alone])
    torch.testing.assert_close(y, expected, rtol=FP64, atol=FP64)
    directions = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, [*of_batch, *model.parameters()], directions),
        torch.autograd.grad(expected, [*alone, *model.parameters()], directions),
        rtol=FP64_GRADIENT,
        atol=FP64_GRADIENT,
    )


@pytest.mark.parametrize("family", CELL)
@pytest.mark.parametrize("name", one_of_a_kind(MASKED))
def test_masked_patches_have_no_effect(name: str, family: str):
    """Nor a gradient; every mechanism that takes a mask, windows and groups included."""
    model = build(family, name)
    torch.manual_seed(2)
    x, mask = pad([image.detach() for image in images(family)], CELL[family])
    hidden = ~mask.repeat_interleave(CELL[family], 1).repeat_interleave(CELL[family], 2)[:, None]
    hidden = hidden[..., : x.shape[2], : x.shape[3]]
    edge = F.max_pool2d((~hidden).double(), 7, 1, 3) > 0  # a pyramid's stem sees three pixels around a patch
    noisy = torch.where(hidden & ~edge if family != "deit" else hidden, torch.randn_like(x), x).requires_grad_()
    y = model(noisy, mask)
    torch.testing.assert_close(y, model(x, mask), rtol=FP64, atol=FP64)
    (gradient,) = torch.autograd.grad(y.square().sum(), noisy)
    assert not gradient.masked_select(hidden & ~edge).any()
    assert gradient.masked_select(~hidden).any()


@pytest.mark.parametrize("family", CELL)
def test_masked_features_are_the_mean_of_the_others(family: str):
    """The logits are those of the features, as in timm's models."""
    model = build(family, "softmax", **({"class_token": True, "global_pool": "avg"} if family == "deit" else {}))
    x, mask = pad([image.detach() for image in images(family)], CELL[family])
    features = model.forward_features(x, mask)
    torch.testing.assert_close(model.forward_head(features), model(x, mask), rtol=0, atol=0)
    tokens, counts = (features[:, 1:], mask) if family == "deit" else (features.flatten(2).mT, mask[:, ::8, ::8])
    for y, own in zip(tokens, counts.flatten(1), strict=True):
        torch.testing.assert_close(y[~own], y[own].mean(0).expand_as(y[~own]), rtol=FP64, atol=FP64)
    assert not counts.all()


@pytest.mark.parametrize("options", [{}, {"class_token": True}, {"class_token": True, "global_pool": "avg"}], ids=str)
def test_padding_is_left_out_of_features(options: dict):
    """`forward_features`, `forward_intermediates` and timm's `features_only` leave padding out; heads need no mask."""
    options |= {"vocab_size": 7, "patch_size": 1, "in_chans": 1, "img_size": (1, 12), "dynamic_img_size": False}
    model = build("deit", "softmax", **options, pad_token=0)
    plain = build("deit", "softmax", **options)
    tokens = torch.randint(1, 7, (2, 1, 1, 12))
    tokens[1, ..., 5:] = 0
    counts = tokens[:, 0] != 0
    features = model.forward_features(tokens)
    torch.testing.assert_close(features, plain.forward_features(tokens, counts), rtol=0, atol=0)
    other = torch.where(counts[:, None], tokens, 3)
    torch.testing.assert_close(features, plain.forward_features(other, counts), rtol=FP64, atol=FP64)
    assert not torch.allclose(features[1], plain.forward_features(tokens)[1])
    torch.testing.assert_close(model.forward_head(features), model(tokens), rtol=0, atol=0)
    final, intermediates = model.forward_intermediates(tokens, norm=True)
    torch.testing.assert_close(final, features, rtol=0, atol=0)
    last = features[:, model.num_prefix_tokens :].mT.unflatten(2, (1, 12))
    torch.testing.assert_close(intermediates[-1], last, rtol=0, atol=0)
    x, grid = plain.embed(tokens, counts)
    graph = FeatureGraphNet(model, out_indices=[0, 1])(tokens)
    for block, y, z in zip(plain.blocks, FeatureGetterNet(model, out_indices=[0, 1])(tokens), graph, strict=True):
        x = block(x, grid, counts.flatten(1))
        torch.testing.assert_close(y, x[:, plain.num_prefix_tokens :].mT.unflatten(2, grid), rtol=0, atol=0)
        torch.testing.assert_close(z, x, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "mask", "message"),
    [
        ({"name": "sra"}, torch.ones(2, 5, 4, dtype=torch.bool), r"attention\(sra\): takes no key_mask"),
        ({}, torch.ones(2, 20, dtype=torch.bool), r"give torch.bool \(2, 5, 4\), \(B, H, W\)"),
        ({}, torch.ones(2, 5, 4), "got torch.float32"),
        ({}, torch.zeros(2, 5, 4, dtype=torch.bool), "rectangle at the upper left"),
        ({}, torch.eye(5, dtype=torch.bool)[None, :, :4].repeat(2, 1, 1), "rectangle at the upper left"),
        ({"stem": "conv"}, torch.ones(2, 5, 4, dtype=torch.bool), "model.stem = conv sees the padding"),
    ],
)
def test_masks_that_are_refused(options: dict, mask: Tensor, message: str):
    model = build("deit", **{"name": "softmax"} | options).train()
    with pytest.raises(ValueError, match=message):
        model(torch.randn(2, 3, 40, 32, dtype=torch.float64), mask)


def test_a_pad_token_is_one_of_the_vocabulary():
    with pytest.raises(OptionError, match=r"model.pad_token = 7 is not below model.vocab_size = 7; leave it out"):
        create_model("deit", vocab_size=7, patch_size=1, in_chans=1, img_size=(1, 12), pad_token=7)
