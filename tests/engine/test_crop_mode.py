"""data.crop_mode: timm's crops, and images in their native aspect ratio in validation and prediction."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.loader import PrefetchLoader, fast_collate
from torch import Tensor, nn

import analyze
import predict
import train
import validate
from engine.checkpoints.files import save_checkpoint
from engine.checkpoints.progress import Progress
from engine.config.load import dump_run, parse_run
from engine.config.schema import Run
from engine.data.augment import create_transform
from engine.data.images import BrokenImage
from engine.data.loaders import ImageLoader, create_val_loader, images_of, indices_read
from engine.data.native_aspect import native_grid
from engine.data.splits import classes_of
from engine.evaluation.evaluate import evaluate
from engine.evaluation.predictions import gather_predictions
from engine.runtime.distributed import World, init_distributed
from engine.runtime.errors import ConfigError
from models import create_model
from tests.support.comparisons import FP64

CPU = World(torch.device("cpu"))
SIZES = [(60, 80), (80, 60), (64, 64), (60, 80), (40, 90), (33, 100), (100, 100), (8, 8), (80, 61), (120, 160), (7, 5)]
"""Height and width of the images, pixels: several of one grid, and some of a grid of their own."""
DEIT = {
    **{"name": "deit", "img_size": 64, "patch_size": 8, "num_classes": 2, "dynamic_img_size": True},
    **{"embed_dim": 16, "depth": 2, "num_heads": 2},
}
PVT = {
    **{"name": "pvtv2_b0", "img_size": 64, "num_classes": 2, "embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    **{"num_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]},
}
CASES = [
    (DEIT, {"name": "softmax"}),
    (DEIT, {"name": "eva", "window_size": 4, "num_landmarks": 4}),
    (DEIT, {"name": "nystrom", "num_landmarks": 4}),
    ({**DEIT, "stem": "conv", "class_token": True}, {"name": "lara", "num_landmarks": 4}),
    (PVT, {"name": "sra"}),
    (PVT, {"name": "eva", "window_size": 2, "num_landmarks": 1}),
]
"""Models whose attention takes a key mask or refuses one, and whose outputs may depend on places in the grid."""
IDS = [f"{model['name']}-{attention['name']}" for model, attention in CASES]


class Exact(nn.Module):
    """A model in float64, in which only wrong images make a difference."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.double())


def make_run(root: Path | str, model: dict = DEIT, attention="softmax", **data) -> Run:
    sections = {"model": model, "attention": attention, "train": {"device": "cpu", "amp": None}}
    return parse_run({**sections, "data": {"root": str(root), "workers": 0, "crop_mode": "native", **data}}, "test")


def make_model(run: Run) -> Exact:
    torch.manual_seed(0)
    model = create_model(attention=run.attention, **run.model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Exact(model)


def losses(run: Run, world: World, batch_size: int) -> list[float]:
    """The loss of every image, in the order of the data."""
    loader, rows = create_val_loader(run, world, img_size=run.model["img_size"], batch_size=batch_size), []
    metrics = evaluate(make_model(run), loader, world, None, rows=rows)
    images = images_of(loader)
    found = gather_predictions(rows, indices_read(loader), images, classes_of(images), world)
    assert metrics["images"] == len(images) == len(SIZES)
    assert found.label.tolist() == images.reader.labels.tolist()
    assert metrics["loss"] == pytest.approx(found.loss.mean().item(), rel=1e-9)
    return found.loss.tolist()


def main(arguments: list[str]) -> None:
    """One of several processes; the last writes its result."""
    (root,) = arguments
    world = init_distributed("cpu")
    found = losses(make_run(root, *CASES[1]), world, 3)
    if world.rank == world.size - 1:
        Path(root, "losses.json").write_text(json.dumps(found))
    world.destroy()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Noisy images of `SIZES` in two classes, for training and validation."""
    root, rng = tmp_path_factory.mktemp("root"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number, size in enumerate(SIZES):
            folder = root / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
            coarse.resize(size[::-1], Image.Resampling.NEAREST).save(folder / f"{number:02}.png")
    return root


@pytest.mark.parametrize(
    ("size", "num_patches", "grid"),
    [
        ((224, 224), 196, (14, 14)),
        ((1, 1), 196, (14, 14)),
        ((375, 500), 196, (12, 16)),
        ((500, 375), 196, (16, 12)),
        ((224, 448), 196, (9, 19)),
        ((100, 160), 10 * 16, (10, 16)),
        ((1, 5000), 196, (1, 196)),
        ((5000, 1), 196, (196, 1)),
        ((3, 2), 1, (1, 1)),
    ],
)
def test_grids_by_hand(size, num_patches, grid):
    assert native_grid(*size, num_patches) == grid


def test_grids_have_at_most_as_many_patches_and_lose_less_than_one_along_a_side():
    for height in range(1, 60, 7):
        for width in range(1, 60, 5):
            rows, columns = native_grid(height, width, 50)
            exact = (50 * height / width) ** 0.5
            assert rows * columns <= 50
            assert 1 <= rows <= max(1, exact) < rows + 1 + 1e-9 or (rows == 50 and exact > 50)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("img_size", [64, (48, 80)])
def test_images_of_the_models_size_are_those_of_the_centre_crop(root, img_size, as_bytes):
    """To the last bit, whatever their resolution, as are those of its aspect ratio."""
    model, rng = {**DEIT, "img_size": list(np.broadcast_to(img_size, 2).tolist())}, np.random.default_rng(0)
    for times in (1, 3):
        pixels = rng.integers(0, 256, (*(times * side for side in model["img_size"]), 3), np.uint8)
        native, center = (
            create_transform(make_run(root, model, crop_mode=mode, crop_pct=1.0), img_size, False, as_bytes)
            for mode in ("native", "center")
        )
        assert torch.equal(native(Image.fromarray(pixels)), center(Image.fromarray(pixels)))


@pytest.mark.parametrize("channels", [1, 3])
def test_what_crops_show_by_hand(root, channels):
    """squash and native show all stripes of an image, border adds borders above and below, center shows the middle."""
    stripes = np.repeat(np.array([0, 100, 200], np.uint8), 32)[None].repeat(48, 0)  # 48 x 96
    image = Image.fromarray(stripes).convert("L" if channels == 1 else "RGB")
    shown = {}
    for mode in ("center", "squash", "border", "native"):
        model = {**DEIT, "in_chans": channels, "img_size": 48}
        run = make_run(root, model, crop_mode=mode, crop_pct=1.0, interpolation="nearest", mean=[0.4])
        shown[mode] = create_transform(run, 48, is_training=False, as_bytes=True)(image)
    assert {mode: tuple(x.shape) for mode, x in shown.items()} == {
        **dict.fromkeys(("center", "squash", "border"), (channels, 48, 48)),
        "native": (channels, 32, 64),
    }
    for x in shown.values():
        assert (x == x[:1]).all()
    assert shown["center"].unique().tolist() == [0, 100, 200]
    assert shown["center"][0, 0].bincount()[[0, 100, 200]].tolist() == [8, 32, 8]
    assert shown["squash"][0, 0].bincount()[[0, 100, 200]].tolist() == [16, 16, 16]
    assert (shown["border"][:, :12] == 102).all()
    assert (shown["border"][:, -12:] == 102).all()
    assert shown["border"][0, 24].bincount()[[0, 100, 200]].tolist() == [16, 16, 16]
    assert shown["native"].unique().tolist() == [0, 100, 200]


@pytest.mark.parametrize(("model", "attention"), CASES, ids=IDS)
def test_an_image_of_a_batch_is_itself_alone(root, model, attention):
    """The loss of every image in float64, whatever the batch size."""
    run = make_run(root, model, attention)
    exact, images = make_model(run), images_of(create_val_loader(run, CPU, img_size=64))
    alone = [
        nn.functional.cross_entropy(exact(pixels[None]).float(), torch.tensor([label])).item()
        for pixels, label in (images[index] for index in range(len(images)))
    ]
    for batch_size in (1, 3, 11):
        assert losses(run, CPU, batch_size) == pytest.approx(alone, rel=1e-6)  # the loss is taken in fp32
    pixels = [images[index][0] for index in range(len(images))]
    assert len({x.shape for x in pixels}) > 4
    same = [x for x in pixels if x.shape == pixels[0].shape]
    together = exact(torch.stack(same))
    torch.testing.assert_close(together, torch.cat([exact(x[None]) for x in same]), rtol=FP64, atol=FP64)


def test_two_processes_find_the_same(root, fork_server, tmp_path):
    statuses, job = fork_server.run([str(root)], tmp_path / "log", ranks=2, script=__name__)
    assert statuses == [0, 0], job.text
    found = json.loads((root / "losses.json").read_text())
    assert found == pytest.approx(losses(make_run(root, *CASES[1]), CPU, 4), rel=1e-6)


def test_workers_and_the_prefetcher_yield_the_same_images(root):
    """Bytes in timm's prefetcher, which is a GPU's; this one is on the CPU."""
    run = make_run(root, workers=2)
    plain = create_val_loader(run, CPU, img_size=64, batch_size=4)
    images = images_of(plain)
    as_bytes = type(images)(images.reader, create_transform(run, 64, False, as_bytes=True))
    options = {"stack": fast_collate, "limit": 0, "remedy": "", "sampler": range(len(images)), "num_workers": 2}
    prefetched = PrefetchLoader(
        ImageLoader(as_bytes, 4, **options), mean=run.data.mean, std=run.data.std, device=torch.device("cpu")
    )
    for (x, x_labels), (y, y_labels) in zip(plain, prefetched, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert torch.equal(x_labels, y_labels)
    assert indices_read(plain) == indices_read(prefetched.loader)
    assert sorted(indices_read(plain)) == [*range(len(SIZES))]
    assert indices_read(plain) != [*range(len(SIZES))]


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory) -> Path:
    """The directory of a run that crops images to train and evaluates them in their own aspect ratio."""
    place = tmp_path_factory.mktemp("trained")
    sections = {
        "model": DEIT,
        "attention": "softmax",
        "data": {"root": str(root), "workers": 0, "crop_mode": "native"},
        "augment": {"mixup": 0.0, "cutmix": 0.0},
        "schedule": {"epochs": 1, "warmup_epochs": 0, "sched": "constant"},
        "train": {"total_batch_size": 4, "device": "cpu", "amp": None, "ema_decay": 0.5},
    }
    (place / "run.yaml").write_text(json.dumps(sections))
    train.main([str(place / "run.yaml"), "optim.lr_base_size=4", "--output", str(place / "run")])
    return place / "run"


def report(capsys, *arguments) -> dict:
    validate.main([*map(str, arguments), "data.workers=0", "--json"])
    found = json.loads(capsys.readouterr().out)
    return {kind: {key: result[key] for key in ("top1", "loss", "images")} for kind, result in found.items()}


def test_a_run_is_trained_validated_exported_and_asked(trained, root, tmp_path, capsys):
    recorded = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    metrics = next(record for record in recorded if "ema_top1" in record)
    native = report(capsys, trained)
    assert [native[kind]["loss"] for kind in ("plain", "ema")] == pytest.approx([metrics["loss"], metrics["ema_loss"]])
    assert report(capsys, trained, "--batch-size", "2") == {k: pytest.approx(v) for k, v in native.items()}
    assert report(capsys, trained, "data.crop_mode=center")["ema"]["loss"] != pytest.approx(native["ema"]["loss"])

    tables = [tmp_path / name for name in ("validated.csv", "predicted.csv")]
    export = tmp_path / "x.safetensors"
    pictures = "--mistakes", str(tmp_path / "mistakes.png")
    validate.main([str(trained), "data.workers=0", "--predictions", str(tables[0]), *pictures, "--export", str(export)])
    assert (tmp_path / "mistakes.png").stat().st_size
    files = sorted(str(path) for path in (root / "val").glob("*/*.png"))
    for batch_size in ("1", "4", "128"):
        predict.main([str(export), *files, "--output", str(tables[1]), "--device", "cpu", "--batch-size", batch_size])
        validated = [line.split(",") for line in tables[0].read_text().splitlines() if line.startswith("ema")]
        _, *predicted = (line.split(",") for line in tables[1].read_text().splitlines())
        assert [row[0] for row in predicted] == files  # in the order of the command line
        assert [[row[1], row[3]] for row in predicted] == [[row[3], row[5]] for row in validated]
        shares = [[float(row[2]), float(row[4])] for row in predicted]
        np.testing.assert_allclose(shares, [[float(row[4]), float(row[6])] for row in validated], rtol=1e-5)


def test_images_too_narrow_for_the_attention_are_broken(root, tmp_path, capsys):
    """Named, refused, or left out and counted; the others are evaluated."""
    attention = {"name": "eva", "window_size": 4, "num_landmarks": 35}
    for folder in ("a", "b"):
        (tmp_path / "val" / folder).mkdir(parents=True)
        Image.new("RGB", (80, 60), "red").save(tmp_path / "val" / folder / "0.png")
    Image.new("RGB", (400, 40), "red").save(tmp_path / "val/b/narrow.png")
    run = make_run(tmp_path, DEIT, attention)
    problem = r"b/narrow.png: data.crop_mode = native makes 2 x 25 patches of it: attention\(eva\).num_landmarks = 35"
    with pytest.raises(BrokenImage, match=problem):
        list(create_val_loader(run, CPU, img_size=64))
    metrics = {
        "config": dump_run(run),
        "processes": 1,
        "images": 9,
        "progress": vars(Progress()),
        "classes": ["a", "b"],
    }
    save_checkpoint(tmp_path / "x.pt", {**metrics, "model": make_model(run).float().model.state_dict()})
    assert report(capsys, tmp_path / "x.pt", f"data.root={tmp_path}", "--skip-broken")["plain"]["images"] == 2
    with pytest.raises(SystemExit) as caught:
        predict.main([str(tmp_path / "x.pt"), str(tmp_path / "val"), "--device", "cpu"])
    output = capsys.readouterr()
    assert (caught.value.code, output.out.count("\n")) == (1, 2)
    assert "left out: 1 of 3 files" in output.err


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"model": {**DEIT, "dynamic_img_size": False}},
            "model.dynamic_img_size = false: with data.crop_mode = native, images have many sizes; set it to true",
        ),
        ({"train": {"compile": True}}, "train.compile = true: with data.crop_mode = native, .*; set it to false"),
        (
            {
                "model": {**DEIT, "mask_token": True, "num_classes": 0},
                "augment": {"mixup": 0.0, "cutmix": 0.0},
                "simmim": {"mask_size": 8},
            },
            "data.crop_mode = native: the masks are for images of one size; set it to center, squash or border",
        ),
        ({"data": {"crop_mode": "navit"}}, "data.crop_mode"),
    ],
)
def test_refusals(sections, problem):
    tree = {"model": DEIT, "attention": "softmax", "data": {"crop_mode": "native"}}
    with pytest.raises(ConfigError, match=problem):
        parse_run({**tree, **sections}, "test")


@pytest.mark.parametrize("mode", ["squash", "native"])
@pytest.mark.parametrize("dataset", ["copy", "idx"])
def test_sequences_of_tokens_have_no_crop(dataset, mode):
    tokens = {"vocab_size": 5, "patch_size": 1, "in_chans": 1, "img_size": [1, 8], "num_classes": 5}
    copy = {"global_pool": ""} if dataset == "copy" else {}
    neutral = {"scale": [1, 1], "ratio": [1, 1], "hflip": 0, "color_jitter": 0, "reprob": 0, "mixup": 0, "cutmix": 0}
    tree = {
        "model": {**DEIT, **tokens, **copy},
        "attention": {"name": "linear", "causal": True} if dataset == "copy" else "softmax",
        "data": {"dataset": dataset, "root": None if dataset == "copy" else ".", "crop_mode": mode},
        "augment": {**neutral, "smoothing": 0, "auto_augment": None},
    }
    with pytest.raises(ConfigError, match=rf"data.crop_mode = {mode}: .*tokens; set it to center"):
        parse_run(tree, "test")


@pytest.mark.parametrize("target", ["x/", "x.onnx", "x.pt2"])
def test_other_programs_have_images_of_one_size(trained, tmp_path, capsys, target, monkeypatch):
    for module in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, module, json)  # installed or not
    monkeypatch.setattr(validate, "validate", lambda *_: pytest.fail("before any work"))
    with pytest.raises(SystemExit):
        validate.main([str(trained), "--export", f"{tmp_path}/{target}"])
    assert f"{target}: other programs have no data.crop_mode = native; set" in capsys.readouterr().err


def test_analyses_take_images_of_one_size(trained, root, capsys):
    with pytest.raises(SystemExit) as caught:
        analyze.main(["maps", str(trained), str(root / "val/a/00.png")])
    assert caught.value.code == 2
    problem = "data.crop_mode = native: images are analysed together, at one size; set it to center, squash or border"
    assert capsys.readouterr().err == f"error: {problem}\n"
