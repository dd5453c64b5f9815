"""Augmentation in batches (`augment.batched`): timm's draws, timm's pixels, and loaders that depend on places alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from torchvision.transforms.functional import pil_to_tensor

from attention.options import OptionError
from engine.config.schema import Augment, Data, Run, Train
from engine.data.augment import create_transform, posterize
from engine.data.batch_operations import OPERATIONS
from engine.data.batch_policy import Drawn, stack_drawn, substitute
from engine.data.loaders import create_loaders
from engine.run.load import load_run
from engine.runtime.distributed import World, seed_everything
from engine.runtime.errors import ConfigError

CPU = World(torch.device("cpu"))
RECIPE = "rand-m9-mstd0.5-inc1"
DIFFERENCES = {  # largest, and mean, difference of levels from Pillow's
    **dict.fromkeys(("Rotate", "ShearX", "ShearY"), (8, 0.7)),
    **dict.fromkeys(("TranslateX", "TranslateY", "TranslateXRel", "TranslateYRel"), (8, 0.7)),
    **dict.fromkeys(("GaussianBlur", "GaussianBlurRand"), (8, 0.8)),
}
"""Operations that interpolate; the others are exact."""


def photograph(seed: int, mode: str, size: tuple[int, int] = (43, 38)) -> Image.Image:
    """An image with coarse shapes and fine ones, not of all levels; every fifth is white."""
    if seed % 5 == 4:
        return Image.new(mode, size, "white")
    rng, pixels = np.random.default_rng(seed), np.full((size[1], size[0], 3), 120.0)
    for scale, std in ((8, 40), (2, 12), (1, 2)):
        coarse = rng.normal(0, std, (3, size[1] // scale, size[0] // scale)).astype(np.float32)
        channels = [Image.fromarray(channel).resize(size, Image.Resampling.BICUBIC) for channel in coarse]
        pixels += np.stack(channels, -1)
    return Image.fromarray(pixels.clip(10, 240).astype(np.uint8)).convert(mode)


def tensors(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([pil_to_tensor(image) for image in images])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", timm_ops.NAME_TO_OP)
def test_every_operation_of_timm_has_timms_pixels(name: str, mode: str):
    images, differences = [photograph(seed, mode) for seed in range(10)], []
    for magnitude in (0, 1, 4.5, 8, 10):
        for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR):
            hparams = {"img_mean": (124, 116, 104)[: len(mode)], "interpolation": method, "translate_const": 17}
            op = timm_ops.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=hparams)
            seed_everything(0)
            expected = tensors([op(image) for image in images])
            state = random.getstate()
            seed_everything(0)
            substitute([op], posterize)
            drawn = [op(Drawn(pil_to_tensor(image))) for image in images]
            assert random.getstate() == state
            found = stack_drawn([(one, 0) for one in drawn])[0].to(CPU.device)
            differences.append((found.int() - expected.int()).abs().float())
    largest, mean = max(d.max() for d in differences), max(d.mean() for d in differences)
    most, most_on_average = DIFFERENCES.get(name, (0, 0))
    assert largest <= most
    assert mean <= most_on_average


def next_numbers() -> tuple[float, float, float]:
    """The next numbers of all three sources of random numbers, which transforms may use."""
    return random.random(), float(np.random.mtrand.random()), float(torch.rand(1))


POLICIES = [
    *(RECIPE, "rand-m7-n3-p0.25", "rand-m15-mmax20-mstd101", "rand-t3a", "rand-t3aw-inc1", "rand-tweights-mstd1"),
    *("original-mstd0.5", "originalr", "v0", "v0r-mstd1", "3a", None),
]


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_draws_are_those_of_timm(policy: str | None, in_chans: int):
    """The same random numbers are drawn in the same order, and give the same images where nothing interpolates."""
    augment = Augment(auto_augment=policy, interpolation="random", vflip=0.3, scale=(0.9, 1.0), ratio=(1.0, 1.0))
    run = Run(model={"in_chans": in_chans}, attention="softmax", augment=augment)
    batched = replace(run, augment=replace(augment, batched=True))
    transforms = [create_transform(one, (38, 43), is_training=True, as_bytes=True) for one in (run, batched)]
    found, means = set(), []
    for number in range(60):
        image = photograph(number % 4, "RGB" if in_chans == 3 else "L")
        seed_everything(number)
        expected, state = transforms[0](image), next_numbers()
        seed_everything(number)
        drawn = transforms[1](image)
        assert next_numbers() == state
        augmented = stack_drawn([(drawn, 0)])[0].to(CPU.device)[0]
        found |= {operation for operation, _ in drawn.steps}
        means.append((augmented.float() - expected.float()).abs().mean().item())
        if not drawn.steps:
            assert means[-1] < 0.1  # the crop alone
    assert np.mean(means) < 1.0
    assert np.median(means) < 0.5
    assert found <= set(OPERATIONS)
    assert found


def test_the_crop_has_nearly_pillows_levels():
    run = Run(model={"in_chans": 3}, attention="softmax", augment=Augment(auto_augment=None, color_jitter=0.0))
    batched = replace(run, augment=replace(run.augment, batched=True))
    transforms = [create_transform(one, 224, is_training=True, as_bytes=True) for one in (run, batched)]
    differences = []
    for number in range(8):
        image = photograph(number % 4, "RGB", (500, 375))
        seed_everything(number)
        expected = torch.as_tensor(np.asarray(transforms[0](image))).int()
        seed_everything(number)
        differences.append((transforms[1](image).image.int() - expected).abs())
    found = torch.stack(differences)
    assert found.max() <= 3
    assert found.float().mean() < 0.1


@pytest.mark.parametrize("black_and_white", [False, True])
def test_the_crop_of_noise_is_pillows_with_the_width_first(black_and_white: bool):
    """Pillow 13 resizes the height of some tall crops first, and clips in between: levels then differ much more."""
    run = Run(model={"in_chans": 3}, attention="softmax", augment=Augment(auto_augment=None, color_jitter=0.0, hflip=0))
    batched = replace(run, augment=replace(run.augment, batched=True))
    transforms = [create_transform(one, 224, is_training=True, as_bytes=True) for one in (run, batched)]
    rng, resize = np.random.default_rng(0), Image.Resampling.BICUBIC
    for number in range(24):
        levels = 255 * rng.integers(2, size=(375, 500, 3)) if black_and_white else rng.integers(256, size=(375, 500, 3))
        image = Image.fromarray(levels.astype(np.uint8))
        seed_everything(number)
        top, left, height, width = transforms[1].crop.get_params(image, transforms[1].crop.scale, (3 / 4, 4 / 3))
        cropped = image.crop((left, top, left + width, top + height))
        expected = np.asarray(cropped.resize((224, height), resize).resize((224, 224), resize)).astype(int)
        seed_everything(number)
        found = transforms[1](image).image.permute(1, 2, 0).numpy()
        assert np.abs(found - expected).max() <= 2
        assert np.abs(found - expected).mean() < 0.02
        seed_everything(number)
        assert np.abs(found - np.moveaxis(np.asarray(transforms[0](image)), 0, 2).astype(int)).max() <= 31


def test_every_operation_occurs_as_often_as_drawn():
    """15 operations, two of them an image, each done half the time."""
    run = Run(model={"in_chans": 3}, attention="softmax", augment=Augment(batched=True))
    transform, image = create_transform(run, 12, is_training=True, as_bytes=True), photograph(0, "RGB", (12, 12))
    seed_everything(0)
    number = 3000
    steps = [operation for _ in range(number) for operation, _ in transform(image).steps]
    shares = {"table": 5, "bicubic": 5, "equalize": 1, "autocontrast": 1, "contrast": 1, "color": 1, "sharpness": 1}
    assert set(steps) == set(shares)
    for operation, of_15 in shares.items():
        expected = number * of_15 / 15
        assert steps.count(operation) == pytest.approx(expected, abs=4 * expected**0.5)


def test_groups_keep_the_order_of_an_images_steps():
    images = [photograph(seed, "RGB", (9, 8)) for seed in range(4)]
    drawn = [Drawn(pil_to_tensor(image)) for image in images]
    drawn[0].add("equalize").add("contrast", 1.5).add("equalize")
    drawn[2].add("contrast", 0.2)
    drawn[3].add("contrast", 1.5).add("equalize")
    planned, targets = stack_drawn([(one, number) for number, one in enumerate(drawn)])
    names = ["contrast", "equalize", "contrast", "equalize", "equalize"]
    assert [(name, n) for name, n, _ in planned.groups] == [*zip(names, (2, 1, 1, 1, 1), strict=True)]
    assert [a for _, _, a in planned.groups] == [1, 0, 1, 0, 0]
    assert planned.rows.tolist() == [2, 3, 0, 0, 3, 0]
    assert targets.tolist() == [0, 1, 2, 3]
    alone = torch.cat([stack_drawn([(one, 0)])[0].to(CPU.device) for one in drawn])
    together = planned.to(CPU.device)
    assert torch.equal(together, alone)
    assert torch.equal(together[1], pil_to_tensor(images[1]))


def make_run(root, total_batch_size: int = 8, workers: int = 0, augment: Augment | None = None, **data) -> Run:
    data = Data(**{"root": str(root), "workers": workers, "max_broken": 4} | data)
    augment, train = augment or Augment(batched=True), Train(total_batch_size=total_batch_size)
    return Run(model={"in_chans": 3}, attention="softmax", data=data, augment=augment, train=train)


def load(run: Run, world: World = CPU, epoch: int = 1, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = create_loaders(run, world, img_size=24, num_classes=2)[0]
    loader.sampler.set_epoch(epoch, start)
    batches = []
    for images, labels in loader:
        batches.append((images.clone(), labels.clone()))
        seed_everything(5, len(batches))  # an update draws numbers, too
    return batches


def same(found, expected) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Class folders of 20 training images, one of them broken, in several formats."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 10), ("val", 2)):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                mode = ("RGB", "L", "CMYK")[i % 3]
                image = photograph(i, "RGB", (40 + i, 30)).convert(mode)
                image.save(root / split / name / f"{i}.{'jpg' if i % 2 or mode == 'CMYK' else 'png'}")
    (root / "train" / "b" / "3.jpg").write_bytes(b"no image")
    return root


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_depend_on_neither_workers_nor_where_a_run_begins(root):
    expected = load(make_run(root))
    assert [images.shape[1:] for images, _ in expected] == [(3, 24, 24)] * 2
    assert sorted(len(images) for images, _ in expected) in ([7, 8], [8, 8])  # one image is broken
    assert same(load(make_run(root, workers=2)), expected)
    assert same(load(make_run(root), start=8), expected[1:])
    assert not same(load(make_run(root), epoch=2)[:1], expected[:1])


def test_ranks_have_the_images_of_one_process(root):
    """Without erasing, whose numbers depend on the first image of a batch, as on a GPU."""
    augment = Augment(batched=True, reprob=0.0)
    alone = load(make_run(root, augment=augment))
    ranks = [load(make_run(root, augment=augment), World(CPU.device, rank, 2)) for rank in range(2)]
    for (images, _), *shares in zip(alone, *ranks, strict=True):
        assert sum(len(share) for share, _ in shares) == len(images)
        rows = {image.numpy().tobytes() for share, _ in shares for image in share}
        assert rows == {image.numpy().tobytes() for image in images}


def test_the_images_are_those_of_timm_within_a_level(root):
    """Normalised, with mean differences far below a level's 1 / 58; and those of validation are the same."""
    augment = Augment(reprob=0.0, auto_augment="rand-m9-tweights")
    expected = load(make_run(root, augment=augment))
    found = load(make_run(root, augment=replace(augment, batched=True)))
    for (images, labels), (others, other_labels) in zip(found, expected, strict=True):
        assert images.dtype == others.dtype == torch.float32
        assert torch.equal(labels, other_labels)
        assert (images - others).abs().median() < 1 / 58
        assert (images - others).abs().mean() < 1 / 20
    runs = [make_run(root, augment=replace(augment, batched=value)) for value in (False, True)]
    plain, batched = ([*create_loaders(run, CPU, img_size=24, num_classes=2)[1]] for run in runs)
    assert same(plain, batched)


def test_erasing_is_done_after_the_policy(root):
    constant = Augment(batched=True, reprob=1.0, remode="const")
    for images, _ in load(make_run(root, augment=constant)):
        zeros = (images == 0).all(1).flatten(1).float().mean(1)  # the mean level lies between two levels
        assert (zeros > 0.015).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_images_of_a_cpu(root):
    """The exact operations are exact there too; the others may round a level otherwise."""
    run = make_run(root, 16, augment=Augment(batched=True, reprob=0.0))
    (on_cpu, _), *_ = load(run)
    (on_gpu, _), *_ = load(run, World(torch.device("cuda")))
    assert (on_gpu.cpu() - on_cpu).abs().max() <= 2 / 58
    assert (on_gpu.cpu() == on_cpu).float().mean() > 0.99


CONFIG = """\
model: {name: deit, img_size: 16, patch_size: 8, embed_dim: 12, depth: 1, num_heads: 2, num_classes: 10}
attention: {name: softmax}
data: {dataset: digits}
"""


def test_mixed_copies_are_refused(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    load_run(config, ["augment.batched=true", "augment.auto_augment=3a"])
    with pytest.raises(ConfigError, match=r"'augmix-m5' mixes copies .*, which augment\.batched cannot; set that to"):
        load_run(config, ["augment.batched=true", "augment.auto_augment=augmix-m5"])


def test_an_unknown_operation_is_refused(monkeypatch):
    monkeypatch.setitem(timm_ops.NAME_TO_OP, "Invert", lambda image, **_: image)
    run = Run(model={"in_chans": 3}, attention="softmax", augment=Augment(batched=True))
    with pytest.raises(OptionError, match=r"augment\.batched = true: timm's Invert has no batched version; set it to"):
        create_transform(run, 16, is_training=True, as_bytes=True)
