"""The counted figures of docs/scale.md are counted again; those in italics are proportional."""

import re
from pathlib import Path

import pytest
import torch

from bench import scale
from engine.config.load import load_run
from engine.runtime.distributed import World
from engine.training.plan import estimate_memory
from models import create_model

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/scale.md").read_text()
ROWS = {
    name: cells
    for name, *cells in (
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")
    )
}
"""First cell of a row -> the others."""

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "s": 1, "min": 60, "hours": 3600, "days": 86400}
UNITS |= {"million": 1e6, "billion": 1e9, "": 1}

IMAGES, RANKS, TOKENS = 1_281_167, (8, 80, 800, 8000), (784, 7744, 65_536, 784_000)
SIZES = (1, 10, 100, 1000)
C, HEADS, ATTENDED = 192, 3, 49 + 49
FAILURE_RATE = 419 / (54 * 86400 * 16384)
"""Failures of a GPU in a second."""


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(name, attention="softmax").parameters())


TINY, BASE = parameters("deit_tiny_p8"), parameters("deit_base_p4")
MODELS = (TINY, BASE, 1e9, 1e10)
DATA = (ROOT / "docs/data.md").read_text()
SPEED = int(re.search(r"fed (\d+) images a second", DATA)[1])
"""Images that a core feeds in a second, from JPEG files."""
COUNTED = {
    "JPEG files of 104 kB": [size * IMAGES * 104e3 for size in SIZES],
    "order of an epoch, in every rank": [8 * size * IMAGES for size in SIZES],
    "listing of class folders, in every rank": [1.9 * size for size in SIZES],
    "cores for an epoch in an hour, from JPEG": [size * IMAGES / SPEED / 3600 for size in SIZES],
    "images of a rank in an update": [1024 / ranks for ranks in RANKS],
    "gradients that a rank sends in an update": [2 * (ranks - 1) / ranks * 4 * TINY for ranks in RANKS],
    "gradients that a rank gathers on a CPU": [ranks * 4 * TINY for ranks in RANKS],
    "values exchanged beside them": [5 * 8 * ranks for ranks in RANKS],
    "read at a start: the checkpoint, by all ranks": [3 * 4 * TINY * ranks for ranks in RANKS],
    "time between two failures": [1 / (FAILURE_RATE * ranks) for ranks in RANKS],
    "softmax attention: MACs of a layer / of its projections": [2 * n * n * C / (4 * n * C * C) for n in TOKENS],
    "EVA with windows of 49 and 49 landmarks: the same": [2 * n * ATTENDED * C / (4 * n * C * C) for n in TOKENS],
    "attention matrices of a layer, bf16, if they are stored": [2 * HEADS * n * n for n in TOKENS],
    "parameters": MODELS,
    "bytes of a rank with DistributedDataParallel": [24 * count for count in MODELS],
    "with FSDP2 over 8 ranks": [3 * count for count in MODELS],
}


@pytest.mark.parametrize("name", COUNTED)
def test_counted_figures(name: str):
    assert len(ROWS[name]) == len(COUNTED[name]) == 4
    for cell, expected in zip(ROWS[name], COUNTED[name], strict=True):
        number, unit = re.fullmatch(r"\*?([\d.,]+) ?(\w*)\*?", cell).groups()
        digits = len(number.replace(".", "").strip("0"))
        assert float(number) * UNITS[unit] == pytest.approx(expected, rel=0.5 / 10 ** (min(digits, 3) - 1)), cell


@pytest.mark.parametrize(("row", "name"), [("softmax attention", "softmax"), ("EVA", "eva")])
def test_activations(row: str, name: str):
    """The third column takes minutes to trace, and the fourth is refused."""
    cells = ROWS[f"activations of an image, bf16, {row}"]
    for cell, size in zip(cells[:2], (224, 704), strict=False):
        run = load_run(ROOT / f"configs/deit_tiny_p8/{name}.yaml", [f"model.img_size={size}"])
        found = estimate_memory(run, World(torch.device("cpu")), 1)["activations of 1 images"] / 2**20
        assert cell == f"{found:.0f} MB"
    assert cells[3] == "refused"


@pytest.mark.parametrize("order", scale.ORDERS)
def test_a_run_of_invented_images_starts(order):
    found = scale.start(2000, order)
    assert all(value > 0 for value in found.values()), found


@pytest.mark.stress
def test_memory_of_a_keyed_order_does_not_grow_with_the_images(capsys):
    """That of a list does, by 8 bytes an image; both as processes of their own."""
    scale.main(["--images", "1e3", "1e7"])
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in capsys.readouterr().out.splitlines()[1:]}
    keyed, listed = (
        [float(rows[number, order][1]) for number in ("1,000", "10,000,000")] for order in ("keyed", "list")
    )
    assert keyed[1] - keyed[0] < 20
    assert 60 < listed[1] - listed[0] < 160


@pytest.mark.parametrize("images", ["63", "1e11", "nan", "inf"])
def test_numbers_of_images_that_cannot_be_simulated_are_refused(capsys, images):
    with pytest.raises(SystemExit):
        scale.main(["--images", images])
    assert "--images must be 64 to 1e10" in capsys.readouterr().err


def test_cores_that_feed_a_gpu():
    """By the speeds of a core in the table beside it."""
    found = [re.search(rf"\| {name}[^|]*\| (\d+) \|[^|]*\| (\d+) \|", DATA) for name in ("JPEG", "prepared, short")]
    speeds = [int(speed) for row in found for speed in row.groups()]
    assert speeds[0] == SPEED
    prepared = float(re.search(r"the core fed ([\d.]+) times as many images", DATA)[1])
    assert prepared == pytest.approx(speeds[2] / SPEED, rel=0.02)  # the median of the rounds' ratios
    rows = re.findall(r"^\| DeiT-\w+/16 \| (\d+) \| (.*) \|$", DATA, re.M)
    assert len(rows) == 3
    for images, cells in rows:
        assert cells.split(" | ") == [f"{int(images) / speed:.1f}" for speed in speeds]
