"""Datasets, loaders, samplers and losses: one path for folders, tar files and digits, one order at any world size."""

import dataclasses
import hashlib
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler

import train
from attention.options import OptionError
from engine.config.schema import Augment, Data, Run, Train
from engine.data import prepare
from engine.data.arrays import DIGITS
from engine.data.augment import create_mixup
from engine.data.identity import identify_split
from engine.data.loaders import create_loaders, create_val_loader
from engine.data.sampler import EpochSampler
from engine.data.splits import count_data_classes, open_split
from engine.objectives.copying import NO_AUGMENTATION
from engine.runtime.distributed import World, seed_everything
from engine.runtime.errors import UserError
from tests.support.launcher import ROOT, use_few_images

CPU = World(torch.device("cpu"))
UNCHANGED = Augment(**NO_AUGMENTATION)
CLASSES = ("n02", "n10", "n100")


def make_run(augment: Augment = UNCHANGED, total_batch_size: int = 16, grad_accum_steps: int = 1, **options) -> Run:
    data = Data(**{"dataset": "digits", "workers": 0} | options)
    train = Train(total_batch_size=total_batch_size, grad_accum_steps=grad_accum_steps)
    return Run(model={}, attention="softmax", data=data, augment=augment, train=train)


def make_loaders(run: Run, world: World = CPU, num_classes: int = 10, img_size: int = 8):
    return create_loaders(run, world, img_size=img_size, num_classes=num_classes)


def test_the_limits_of_waiting_are_those_of_the_run(tmp_path, monkeypatch, capsys):
    training, validation, _ = make_loaders(make_run(workers=1))
    assert (training.timeout, validation.timeout) == (300, 300)

    def leave(*limits) -> None:
        raise UserError(f"limits: {limits}")

    monkeypatch.setattr("train.init_distributed", leave)
    options = "train.device=cpu", "train.timeout_minutes=3", "--output", str(tmp_path)
    with pytest.raises(SystemExit):
        train.main([str(ROOT / "configs/quickstart.yaml"), *options])
    assert "limits: ('cpu', 3.0)" in capsys.readouterr().err


def read_epoch(run: Run, epoch: int, world: World = CPU, loader=None) -> torch.Tensor:
    """All training images of an epoch, as a training script gets them."""
    loader = loader or make_loaders(run, world)[0]
    loader.sampler.set_epoch(epoch)
    return torch.cat([images for images, _ in loader])


def read_order(sampler: EpochSampler) -> list[int]:
    return [index for index, _, _ in sampler]


@pytest.fixture(scope="module")
def image_root(tmp_path_factory):
    """Class folders of noise, 9 training and 6 validation images, PNG and JPEG."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 2)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.{('png', 'jpg', 'JPEG')[i]}")
    return root


@pytest.mark.complete
def test_vertical_flips_turn_images_upside_down():
    upright, flipped = (read_epoch(make_run(dataclasses.replace(UNCHANGED, vflip=p)), epoch=0) for p in (0.0, 1.0))
    assert torch.equal(flipped, upright.flip(-2))
    assert not torch.equal(flipped, upright)


def test_digits_are_the_published_ones():
    digest = hashlib.sha256()
    with np.load(DIGITS) as arrays:
        for name in sorted(arrays):
            digest.update(name.encode() + arrays[name].tobytes())
        train, val = np.bincount(arrays["train_labels"]), np.bincount(arrays["val_labels"])
        val_images = arrays["val_images"]
    assert digest.hexdigest() == "889315dd0cb0eb3cd7e9b84d96c4e659eb6b1c8bcc09a5d6fe42c40161dd29ea"
    assert (train.sum(), val.sum()) == (1437, 360)
    assert (train + val).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # UCI's test part, by class
    assert np.abs(val - (train + val) * 360 / 1797).max() < 1
    assert val_images.max() == 16


def test_digits_reach_the_model_unchanged():
    run = dataclasses.replace(make_run(), data=Data(dataset="digits", workers=0, crop_pct=1.0))
    images, labels = zip(*make_loaders(run)[1], strict=True)
    grey = torch.cat(images) * torch.tensor(run.data.std).view(3, 1, 1) + torch.tensor(run.data.mean).view(3, 1, 1)
    with np.load(DIGITS) as arrays:
        expected = torch.from_numpy(arrays["val_images"] / 16.0)[:, None].expand(-1, 3, -1, -1)
        assert torch.cat(labels).tolist() == arrays["val_labels"].tolist()
    assert (grey - expected).abs().max() <= 0.5 / 255 + 1e-6  # rounding to 8 bits


def test_batches_of_class_folders(image_root):
    train, val, _ = make_loaders(
        make_run(UNCHANGED, 6, dataset="folder", root=str(image_root)), num_classes=3, img_size=32
    )
    (images, _), (_, labels) = *train, *val
    assert images.shape == (6, 3, 32, 32)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.dataset.dataset.reader.class_to_idx == {name: index for index, name in enumerate(CLASSES)}


def test_the_identity_is_of_names_classes_and_sizes_wherever_files_are(image_root, tmp_path):
    def identify(root, **options) -> dict[str, str]:
        data = Data(root=str(root), **options)
        names = ("train", "val")
        return {k: v for name in names for k, v in identify_split(name, open_split(data, f"{name}_split")).items()}

    def changed() -> set[str]:
        return {name for name, digest in identify(moved).items() if digest != expected[name]}

    expected, moved = identify(image_root), tmp_path / "moved"
    assert len({*expected.values()}) == 4
    assert identify(image_root, subset=2)["train_content"] != expected["train_content"]
    shutil.copytree(image_root, moved)
    for root in (image_root, moved, f"{moved}/../moved/"):
        assert identify(root) == expected
    path = moved / "train" / CLASSES[1] / "0.png"
    path.rename(path.with_name("00.png"))
    assert changed() == {"train_files"}
    path.with_name("00.png").rename(path)
    assert not changed()
    (moved / "val" / CLASSES[0] / "0.png").rename(moved / "val" / CLASSES[1] / "4.png")
    assert changed() >= {"val_files"}
    (moved / "val" / CLASSES[1] / "4.png").rename(moved / "val" / CLASSES[0] / "0.png")
    path.write_bytes(path.read_bytes() + b"0")
    assert changed() == {"train_content"}
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    assert changed() == {"train_content"}


def test_validation_crop_is_the_papers(image_root):
    """Validation resizes the short side to img_size / 0.875, bicubic, and crops the centre."""
    run = make_run(total_batch_size=6, dataset="folder", root=str(image_root))
    val = make_loaders(run, num_classes=3, img_size=14)[1]
    image = Image.open(image_root / "val" / CLASSES[0] / "0.png").resize((24, 16), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image.crop((5, 1, 19, 15)))).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(Data.mean).view(3, 1, 1)) / torch.tensor(Data.std).view(3, 1, 1)
    torch.testing.assert_close(next(iter(val))[0][0], expected)


@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize(("size", "num_images"), [(2, 31), (4, 103), (8, 257)])
def test_ranks_share_the_batches_of_one_process(size, num_images, repeats):
    total = 16
    alone = read_order(EpochSampler(num_images, total, CPU, 5, repeats))
    ranks = [EpochSampler(num_images, total, World(CPU.device, rank, size), 5, repeats) for rank in range(size)]
    shares = [read_order(rank) for rank in ranks]
    assert len(alone) == num_images // total * total
    assert {len(share) for share in shares} == {len(rank) for rank in ranks} == {len(alone) // size}
    for step in range(len(alone) // total):
        union = [index for share in shares for index in share[step * total // size :][: total // size]]
        assert sorted(union) == sorted(alone[step * total :][:total])
    if not repeats:
        assert len(set(alone)) == len(alone)


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        sampler = EpochSampler(100, 10, CPU, seed)
        sampler.set_epoch(epoch)
        return read_order(sampler)

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize("rank", [0, 3])
def test_order_is_that_of_torch_and_timm(rank):
    """The order is that of the published recipes' samplers, given the same permutation (their seed is the epoch)."""
    size, epoch, num_images = 4, 7, 1300
    images = range(num_images)
    for repeats, published in (
        (0, DistributedSampler(images, num_replicas=size, rank=rank, drop_last=True)),
        (3, RepeatAugSampler(images, num_replicas=size, rank=rank, num_repeats=3)),
    ):
        sampler = EpochSampler(num_images, 256, World(CPU.device, rank, size), 0, repeats)
        sampler.order_seed = epoch
        published.set_epoch(epoch)
        assert read_order(sampler) == list(published)[: len(sampler)]
        assert len(sampler) == 1280 // size == len(published) // 64 * 64


def test_micro_batches_fill_optimiser_steps():
    run = make_run(total_batch_size=48, grad_accum_steps=3)
    train = make_loaders(run, World(CPU.device, 1, 2))[0]
    sizes = [len(images) for images, _ in train]
    assert sizes == [8] * (1437 // 48 * 3) == [8] * len(train)


# Python 3.12 warns of fork, Linux's way to start workers there, where the operating system counts torch's idle threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_is_bit_identical(workers, monkeypatch):
    use_few_images(64, 64, monkeypatch.setattr)
    run = make_run(Augment(reprob=0.5), workers=workers)
    loader = make_loaders(run)[0]
    first, second = (read_epoch(run, epoch, loader=loader) for epoch in (0, 1))
    assert torch.equal(read_epoch(run, 1), second)
    assert not torch.equal(first, second)
    shares = [read_epoch(run, 1, World(CPU.device, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.stack(shares, 1).flatten(0, 1), second)  # an image is the same at any number of ranks
    loader.sampler.set_epoch(1, start=32)
    assert torch.equal(torch.cat([images for images, _ in loader]), second[32:])


@pytest.mark.complete
def test_repeated_views_differ_between_ranks():
    run = make_run(dataclasses.replace(Augment(), repeats=2))
    views = [read_epoch(run, 0, World(CPU.device, rank, 2)) for rank in range(2)]
    indices = [read_order(make_loaders(run, World(CPU.device, rank, 2))[0].sampler) for rank in range(2)]
    assert indices[0] == indices[1]
    same = (views[0] == views[1]).flatten(1).all(1)
    assert same.float().mean() < 0.1


def grey_twin(run: Run) -> Run:
    """`run` of a model of grey images; random erasing is left out, whose noise has as many channels as the image."""
    return dataclasses.replace(run, model={"in_chans": 1}, augment=dataclasses.replace(run.augment, reprob=0.0))


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", "original-mstd0.5", "3a", None])
def test_grey_images_are_those_of_rgb_in_one_channel(policy, monkeypatch):
    """The digits are grey, and every operation treats channels alike: the same image as in RGB, to the last bit."""
    use_few_images(48, 32, monkeypatch.setattr)
    grey_run = grey_twin(make_run(Augment(auto_augment=policy), mean=(0.5,) * 3, std=(0.25,) * 3))
    rgb_run = dataclasses.replace(grey_run, model={})
    grey, rgb = read_epoch(grey_run, 0), read_epoch(rgb_run, 0)
    assert grey.shape == (48, 1, 8, 8)
    assert rgb.shape == (48, 3, 8, 8)
    assert grey.std() > 0.5
    assert torch.equal(grey.expand_as(rgb), rgb)
    (grey, labels), (rgb, _) = next(iter(make_loaders(grey_run)[1])), next(iter(make_loaders(rgb_run)[1]))
    assert torch.equal(grey.expand_as(rgb), rgb)
    mixed, targets = make_loaders(grey_run)[2](grey.clone(), labels)
    assert mixed.shape == grey.shape
    assert targets.shape == (len(grey), 10)


def test_colours_become_their_luma(image_root, tmp_path):
    """Both image files and prepared images become grey by luma."""
    prepare.main([str(image_root), str(tmp_path), "--splits", "val", "--workers", "0", "--short-side", "0"])
    image = Image.open(image_root / "val" / CLASSES[0] / "0.png").convert("L")
    image = image.resize((24, 16), Image.Resampling.BICUBIC)
    expected = torch.from_numpy(np.array(image.crop((5, 1, 19, 15)))) / 255
    batches = []
    for kind, root in (("folder", image_root), ("cache", tmp_path)):
        run = grey_twin(make_run(dataset=kind, root=str(root), mean=(0.0,), std=(1.0,)))
        ((images, _),) = create_val_loader(run, CPU, img_size=14, batch_size=6)
        batches.append(images)
    assert batches[0].shape == (6, 1, 14, 14)
    assert torch.equal(batches[0][0, 0], expected)
    assert torch.equal(*batches)


class OnCuda(World):
    """Context in which any device takes the path for CUDA, timm's prefetcher."""

    on_cuda = True


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # there is nothing to pin it for without CUDA
@pytest.mark.parametrize("channels", [3, 1])
def test_prefetched_batches_equal_plain_ones(channels, monkeypatch):
    use_few_images(32, 32, monkeypatch.setattr)
    prefetching = OnCuda(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    run = make_run(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    run = run if channels == 3 else grey_twin(run)
    images = read_epoch(run, 0, prefetching)
    assert images.device == prefetching.device
    torch.testing.assert_close(images.cpu(), read_epoch(run, 0), rtol=1e-5, atol=1e-5)
    for mode in ("const", "rand", "pixel"):
        erasing = dataclasses.replace(run, augment=dataclasses.replace(UNCHANGED, reprob=1.0, remode=mode))
        assert (read_epoch(erasing, 0, prefetching) != images).flatten(1).any(1).all()
    loaders = make_loaders(erasing, prefetching)[1], make_loaders(erasing)[1]
    for (images, labels), (plain_images, plain_labels) in zip(*loaders, strict=True):
        torch.testing.assert_close(images.cpu(), plain_images, rtol=1e-5, atol=1e-5)
        assert labels.tolist() == plain_labels.tolist()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_a_prefetched_epoch_is_erased_alike_when_it_is_resumed(monkeypatch):
    use_few_images(64, 64, monkeypatch.setattr)
    run = make_run(dataclasses.replace(UNCHANGED, reprob=0.5))
    ranks = [OnCuda(CPU.device, rank, 2) for rank in range(2)]
    loader = make_loaders(run, ranks[1])[0]
    whole, again, other = (read_epoch(run, epoch, loader=loader) for epoch in (1, 1, 2))
    assert torch.equal(whole, again)
    assert not torch.equal(whole, other)
    loader.sampler.set_epoch(1, start=32)
    seed_everything(7)
    assert torch.equal(torch.cat([images for images, _ in loader]), whole[16:])
    untouched = [read_epoch(make_run(), 1, World(CPU.device, rank, 2)) for rank in range(2)]
    erased = [
        (read_epoch(run, 1, rank) - images).abs().flatten(1).amax(1) > 1e-4
        for rank, images in zip(ranks, untouched, strict=True)
    ]
    assert not torch.equal(*erased)
    assert 0 < torch.cat(erased).float().mean() < 1


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixup_and_cutmix_work_alone_and_together(mixup, cutmix):
    mix = create_mixup(Augment(mixup=mixup, cutmix=cutmix), num_classes=10)
    seed_everything(0)
    images, labels = torch.rand(16, 3, 8, 8), torch.arange(16) % 10
    before, changed, kinds = images.clone(), 0, set()
    for _ in range(20):
        mixed, targets = mix(images.clone(), labels)
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        assert targets.min() >= 0.01 - 1e-6  # label smoothing 0.1 over 10 classes
        changed += not torch.equal(mixed, before)
        pasted = torch.isclose(mixed, before) | torch.isclose(mixed, before.flip(0))
        kinds.add("cutmix" if pasted.all() else "mixup")
    assert changed >= 15
    assert kinds == {name for name, alpha in (("mixup", mixup), ("cutmix", cutmix)) if alpha}


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        ({"root": None}, "data.root", "required for data.dataset=folder"),
        ({"root": "{root}/nowhere"}, "data.root", "no directory"),
        ({"train_split": "training"}, "data.train_split", "no 'training' in .*; found there: .*train, val"),
        ({"val_split": "test"}, "data.val_split", "no 'test' in"),
        ({"val_split": "empty"}, "data.val_split", r"/empty': no images \(files named \*\.jpg, .*\.webp"),
        ({"val_split": "other"}, "data.val_split", r"only in training: n10 \(1\); only in validation: cat, dog \(2\)"),
        ({"dataset": "digits", "root": "/data"}, "data.root", "the digits need none"),
        ({"dataset": "digits", "root": None, "val_split": "test"}, "data.val_split", "known: train, val"),
        ({"num_classes": 5}, "model.num_classes", " = 5, but the images have 3 classes"),
        ({"total_batch_size": 10}, "train.total_batch_size", " = 10 exceeds the 9 training images"),
        ({"num_classes": 5, "total_batch_size": 10}, "model.num_classes", "(?s) = 5, .* = 10 exceeds the 9"),
    ],
)
def test_bad_data_is_named(image_root, tmp_path, change, key, problem):
    for path in image_root.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "empty").mkdir()
    for name in ("n02", "n100", "cat", "dog"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "0.png").symlink_to(image_root / "val" / CLASSES[0] / "0.png")
    options = {"dataset": "folder", "root": "{root}", "num_classes": 3, "total_batch_size": 6} | change
    num_classes, root = options.pop("num_classes"), options.pop("root")
    run = make_run(root=root and root.format(root=tmp_path), **options)
    with pytest.raises(OptionError, match=problem) as caught:
        make_loaders(run, num_classes=num_classes)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_splits_are_no_classes(image_root):
    with pytest.raises(OptionError, match="auto: the classes train, val have names of splits; set "):
        count_data_classes(Data(root=str(image_root), train_split="."))


def test_a_missing_split_has_the_remedy_of_its_command(image_root):
    for key, remedy in (("data.train_split", "data.train_split=. data.val_fraction=0.2"), ("--splits", "--splits .")):
        with pytest.raises(OptionError, match=f"{key}: no 'x' .* class folders: {re.escape(remedy)}$"):
            open_split(Data(root=str(image_root), train_split="x"), "train_split", key)


def test_validation_alone_reads_its_split(image_root):
    run = make_run(dataset="folder", root=str(image_root))
    assert [len(labels) for _, labels in create_val_loader(run, CPU, img_size=8, batch_size=4)] == [4, 2]
