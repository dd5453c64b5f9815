"""Evaluation: exact counts and loss at any number of processes and any batch size."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn

from engine.config.schema import Data, Run, Train
from engine.data.arrays import DIGITS
from engine.data.images import BrokenImage
from engine.data.loaders import create_val_loader, indices_read
from engine.data.splits import classes_of
from engine.evaluation.evaluate import evaluate
from engine.evaluation.predictions import PredictionTable, gather_predictions
from engine.reporting.outputs import classes_csv, confusion_matrix, confusion_picture, predictions_csv
from engine.runtime.distributed import World, init_distributed, precision

CPU = World(torch.device("cpu"))
NUM_IMAGES = 1003  # of which every rank and batch has its own share: 17 x 59
BATCH_SIZES = (1, 7, 64)
COLUMNS = ("indices", "label", "loss", "classes", "probability")
BROKEN = (0, 4, 9)
"""Indices of broken images among the ten of another split."""


class Linear(nn.Module):
    """Logits in float64, so that they do not depend on how images are batched."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(192, 10, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).double() @ self.weight


def create_loader(root: str, world: World, batch_size: int, split: str = "digits"):
    data = Data(root=root, workers=0, val_split=split, broken_val="skip" if split == "few" else "refuse")
    run = Run(model={}, attention="softmax", data=data)
    return create_val_loader(run, world, img_size=8, batch_size=batch_size)


def test_a_log_has_lines_of_progress(monkeypatch, capsys):
    def batches():
        yield torch.zeros(2, 10), torch.zeros(2, dtype=torch.long)
        time.sleep(0.3)

    monkeypatch.setattr("engine.runtime.terminal.LINE_SECONDS", 0.01)
    evaluate(nn.Identity(), batches(), CPU, None)
    assert "\nevaluation: 2 of ? images in 00:00" in capsys.readouterr().err


def evaluate_digits(root: str, world: World) -> list[dict[str, float]]:
    return [evaluate(Linear(), create_loader(root, world, size), world, None) for size in BATCH_SIZES]


def record_digits(root: str, world: World, split: str) -> PredictionTable:
    loader, rows = create_loader(root, world, 7, split), []
    evaluate(Linear(), loader, world, None, rows=rows)
    return gather_predictions(rows, indices_read(loader), loader.dataset, classes_of(loader.dataset), world)


def refuse(is_broken: bool):
    yield torch.zeros(2, 10), torch.arange(2)
    if is_broken:
        raise BrokenImage("x.png: of the last rank")


def main(arguments: list[str]) -> None:
    """One of several processes; the last writes its result."""
    (root,) = arguments
    world = init_distributed("cpu")
    is_last = world.rank == world.size - 1
    results = evaluate_digits(root, world)
    records = [record_digits(root, world, split) for split in ("digits", "few")]
    with pytest.raises(BrokenImage, match=r"x\.png: of the last rank"):  # on every rank
        evaluate(nn.Identity(), refuse(is_last), world, None)
    if is_last:
        tables = [{column: getattr(found, column).tolist() for column in COLUMNS} for found in records]
        Path(root, f"{world.size}.json").write_text(json.dumps([results, tables]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """NUM_IMAGES of the digits as files, and a few more, some of them broken."""
    root = tmp_path_factory.mktemp("root")
    for digit in range(10):
        (root / "digits" / str(digit)).mkdir(parents=True)
    with np.load(DIGITS) as arrays:
        for i, (image, label) in enumerate(zip(arrays["train_images"], arrays["train_labels"], strict=True)):
            if i < NUM_IMAGES:
                Image.fromarray(image * 15).save(root / "digits" / str(label) / f"{i}.png")
    for digit in range(10):
        (root / "few" / str(digit)).mkdir(parents=True)
        content = next((root / "digits" / str(digit)).iterdir()).read_bytes()
        (root / "few" / str(digit) / "x.png").write_bytes(content[:60] if digit in BROKEN else content)
    return str(root)


@pytest.fixture(scope="module")
def expected(root):
    images, labels = next(iter(create_loader(root, CPU, 2000)))
    assert len(images) == NUM_IMAGES
    logits = Linear()(images).detach()
    place = (logits > logits.gather(1, labels[:, None])).sum(1)  # how many classes stand before the right one
    log_prob = logits.log_softmax(1).gather(1, labels[:, None])
    recalls = {f"recall/{digit}": 100 * (place[labels == digit] == 0).double().mean().item() for digit in range(10)}
    return {
        "top1": 100 * (place == 0).sum().item() / NUM_IMAGES,
        "top5": 100 * (place < 5).sum().item() / NUM_IMAGES,
        "loss": -log_prob.sum().item() / NUM_IMAGES,
        "images": NUM_IMAGES,
        "balanced_accuracy": sum(recalls.values()) / 10,
        **recalls,
    }


def assert_exact(results, expected):
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, rel=1e-6 if name == "loss" else 1e-14)  # the loss is in fp32
    assert max(r["loss"] for r in results) - min(r["loss"] for r in results) < 1e-9


@pytest.mark.complete
def test_one_process_counts_every_image_once(root, expected):
    assert_exact(evaluate_digits(root, CPU), expected)


def assert_recorded(table, root, split):
    """Records equal logits of all images at once, and have every image that is not broken exactly once."""
    images, labels = next(iter(create_loader(root, CPU, 2000, split)))
    log_prob = Linear()(images).detach().float().log_softmax(1)
    index = [i for i in range(10) if i not in BROKEN] if split == "few" else [*range(NUM_IMAGES)]
    assert (table["indices"], table["label"]) == (index, labels.tolist())
    top = log_prob.topk(5)
    assert table["classes"] == top.indices.tolist()
    np.testing.assert_allclose(table["probability"], top.values.exp(), rtol=1e-5)
    np.testing.assert_allclose(table["loss"], -log_prob.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-6)


def test_one_process_records_every_image_that_can_be_read(root):
    found = record_digits(root, CPU, "few")
    assert_recorded({column: getattr(found, column).tolist() for column in COLUMNS}, root, "few")


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3, 4))])
def test_processes_count_every_image_once(root, expected, size, fork_server, tmp_path, figure):
    statuses, job = fork_server.run([root], tmp_path / "log", ranks=size, script=__name__)
    assert statuses == [0] * size, job.text
    results, tables = json.loads(Path(root, f"{size}.json").read_text())
    assert_exact(results, expected)
    for split, table in zip(("digits", "few"), tables, strict=True):
        assert_recorded(table, root, split)
    figure("P2", f"{size} ranks: {len(results)}/{len(BATCH_SIZES)} batch sizes count {NUM_IMAGES} images alike")


@pytest.mark.parametrize(("num_classes", "top5"), [(3, 100.0), (8, 75.0)])
def test_by_hand(num_classes, top5):
    """Classes 0, 1, 2 and the last, where logits fall with the class: one hit at the top, the last of 8 not in five."""
    logits = -torch.arange(float(num_classes)).repeat(4, 1)
    targets = torch.tensor([0, 1, 2, num_classes - 1])
    result = evaluate(nn.Identity(), [(logits[:3], targets[:3]), (logits[3:], targets[3:])], CPU, None)
    loss = F.cross_entropy(logits.double(), targets).item()
    assert result == {"top1": 25.0, "top5": top5, "loss": pytest.approx(loss, rel=1e-6), "images": 4}


def test_every_class_by_hand():
    logits = -torch.arange(8.0).repeat(5, 1)
    targets, rows = torch.tensor([0, 4, 0, 7, 4]), []
    evaluate(nn.Identity(), [(logits[:3], targets[:3]), (logits[3:], targets[3:])], CPU, None, rows=rows)
    found = gather_predictions(rows, range(5), range(5), "abcdefgh", CPU)
    header, *lines = classes_csv(found).decode().splitlines()
    assert header == "class,precision,recall,f1,top5,support"
    assert lines[0] == f"a,40.0,100.0,{400 / 7},100.0,2"
    assert lines[4] == "e,,0.0,0.0,100.0,2"
    assert lines[7] == "h,,0.0,0.0,0.0,1"
    assert [lines[i] for i in (1, 2, 3, 5, 6)] == [f"{name},,,,,0" for name in "bcdfg"]


def test_nothing_is_kept_of_single_images_where_no_one_asks(monkeypatch):
    monkeypatch.setattr("engine.objectives.classification.probabilities_of", None)
    assert evaluate(nn.Identity(), [(torch.eye(3), torch.arange(3))], CPU, None)["top1"] == 100


def test_a_rank_without_an_image_has_no_records():
    found = gather_predictions([], [], range(2), "abc", CPU)
    assert (len(found.indices), found.classes.shape) == (0, (0, 3))


def test_no_image_at_all_is_refused():
    with pytest.raises(BrokenImage, match="not one validation image could be read"):
        evaluate(nn.Identity(), [], CPU, None)


def test_equal_logits_hit_no_more_than_once():
    result = evaluate(nn.Identity(), [(torch.zeros(10, 10), torch.arange(10))], CPU, None)
    assert result == {"top1": 10.0, "top5": 50.0, "loss": pytest.approx(math.log(10), rel=1e-6), "images": 10}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_evaluation_and_is_restored(training):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).train(training)
    logits, targets = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 6
    results = [evaluate(model, [(logits, targets)], CPU, None) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)  # BatchNorm's eps
    assert model.training == model[1].training == training


@pytest.mark.parametrize(("amp", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_is_that_of_the_run(amp, dtype):
    seen = []
    model = nn.Linear(4, 6)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    evaluate(model, [(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))], CPU, amp)
    assert seen == [dtype]


@pytest.mark.parametrize(("instructions", "taken"), [((), "fp32"), (("amx_tile",), "bf16"), (("avx512_bf16",), "bf16")])
def test_a_cpu_takes_bf16_by_itself_only_with_instructions_for_it(instructions, taken, monkeypatch):
    for name in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in instructions)
    assert Train().amp == "auto"
    assert [precision(amp, CPU.device) for amp in ("auto", "bf16", "fp16", None)] == [taken, "bf16", "fp16", "fp32"]
    assert precision("auto", torch.device("cuda")) == "bf16"
    test_precision_is_that_of_the_run("auto", torch.bfloat16 if instructions else torch.float32)


class Overflowing(Linear):
    """Logits of which every third image has one that is not finite."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits, rows = super().forward(images), torch.arange(len(images))
        for remainder, value in enumerate((math.nan, math.inf, -math.inf)):
            logits[rows % 9 == 3 * remainder, remainder] = value
        return logits


@pytest.mark.complete
def test_logits_that_are_not_finite_are_wrong():
    """In top-1 and top-5, in every class, in the predictions and the confusion matrix; their loss is no number."""
    run = Run(model={}, attention="softmax", data=Data(dataset="digits", workers=0))
    loader, rows = create_val_loader(run, CPU, img_size=8, batch_size=360), []
    metrics = evaluate(Overflowing(), loader, CPU, None, rows=rows)
    table = gather_predictions(rows, indices_read(loader), loader.dataset, classes_of(loader.dataset), CPU)
    good = torch.arange(360) % 3 > 0
    reference, own = [], Linear()
    evaluate(own, loader, CPU, None, rows=reference)
    hits = reference[0][:, 2:7] == reference[0][:, :1]
    expected = 100 * hits[:, 0][good].sum().item() / 360
    assert (metrics["images"], metrics["not_finite"]) == (360, 120)
    assert math.isnan(metrics["loss"])
    assert metrics["top1"] == pytest.approx(expected)
    assert metrics["top5"] == pytest.approx(100 * hits[good].sum().item() / 360)
    hits_of_classes = [metrics[f"recall/{n}"] * (table.label == n).sum().item() for n in range(10)]
    assert sum(hits_of_classes) / 360 == pytest.approx(expected)
    assert table.predicted.eq(-1).tolist() == table.probability.isnan().all(1).tolist() == (~good).tolist()
    matrix = confusion_matrix(table)
    assert matrix[:, -1].sum() == 120
    assert 100 * np.trace(matrix) / 360 == pytest.approx(expected)
    line = predictions_csv(table).decode().splitlines()[1]
    assert line.endswith(",".join([""] + ["", "nan"] * 5))
    assert confusion_picture(table)
