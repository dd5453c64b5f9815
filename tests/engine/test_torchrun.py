"""Two processes of torchrun (gloo) against one: the same training, one failure that stops both, and how it ends."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import train
from engine.checkpoints.files import newest_checkpoint
from tests.engine.test_train import RUN as DIGITS

ROOT = Path(train.__file__).parent

RUN = DIGITS | {
    # Not Adam: it would enlarge the rounding errors of gradients that are zero in exact arithmetic (key biases).
    "optim": {"opt": "sgd", "lr": 0.1, "lr_base_size": 70},
    "augment": DIGITS["augment"] | {"scale": [1.0, 1.0], "ratio": [1.0, 1.0], "hflip": 0.0},
    "train": {"total_batch_size": 70, "device": "cpu", "amp": None, "ema_decay": 0.9},
}
"""A run of 20 updates of 70 digits."""


def torchrun(*command: str) -> subprocess.CompletedProcess:
    """Runs a command in two processes of torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.complete
def test_two_processes_train_as_one(tmp_path: Path):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    train.main([str(config), "--output", str(tmp_path / "one")])
    done = torchrun("train.py", str(config), "train.grad_accum_steps=5", "--output", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr

    one, two = (newest_checkpoint(tmp_path / run)[1] for run in ("one", "two"))
    assert one["progress"]["step"] == two["progress"]["step"] == 20
    for weights in ("model", "model_ema"):
        difference = sum((two[weights][name] - value).double().square().sum() for name, value in one[weights].items())
        assert difference.sqrt() < 1e-5 * sum(v.double().square().sum() for v in one[weights].values()).sqrt()
    one, two = one["progress"]["metrics"], two["progress"]["metrics"]
    assert one["images"] == two["images"] == 360
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["top1"] == two["top1"]

    texts = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("one", "two")]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [line["kind"] for line in records[1]] == ["start", "train", "eval", "final"]  # one process writes
    assert records[1][0]["processes"] == 2
    assert records[0][1]["loss"] == pytest.approx(records[1][1]["loss"], rel=1e-5)  # the mean over both


@pytest.mark.complete
def test_a_refusal_of_all_ranks_is_said_once(tmp_path: Path):
    """Also where the first rank is the last to refuse."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from engine.runtime import errors, signals\n"
        "errors.PATIENCE, other = 120, pathlib.Path(__file__).with_name('other')\n"
        "with signals.end_at_interrupt(), errors.refuse_bad_input():\n"
        "    while os.environ['RANK'] == '0' and not other.exists():\n"
        "        time.sleep(0.01)\n"
        "    other.touch()\n"
        "    raise errors.UserError('no data')\n"
    )
    done = torchrun(str(script))
    assert done.returncode == 1
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("error", "interrupted"))]
    assert said == ["error: no data"]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("same", None),
        ("missing", "error: rank 1: override 'data.root="),
        ("renamed", "error: train_files: rank 1 has not those of rank 0; give every node the same files, or read"),
    ],
)
def test_ranks_read_copies_of_the_same_data(other: str, problem: str | None, tmp_path: Path):
    """As on the disks of two nodes, of which the second has another copy."""
    rng = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), "ab", range(4)):
        path = tmp_path / "0" / split / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)).save(path)
    if other != "missing":
        shutil.copytree(tmp_path / "0", tmp_path / "1")
    if other == "renamed":
        (tmp_path / "1/train/b/3.png").rename(tmp_path / "1/train/b/4.png")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN | {"model": RUN["model"] | {"num_classes": 2}}))
    options = f"data.dataset=folder data.root={tmp_path}/$RANK train.total_batch_size=8 --output {tmp_path}/run"
    done = torchrun("--no-python", "bash", "-c", f"exec {sys.executable} train.py {config} {options}")
    assert (done.returncode == 0) == (problem is None), done.stderr
    assert errors_of(done).count("\n") == 0
    assert not problem or errors_of(done).startswith(problem)
    if problem is None:
        (tmp_path / "1/val/b/3.png").rename(tmp_path / "1/val/b/4.png")
        validate = f"exec {sys.executable} validate.py {tmp_path}/run data.root={tmp_path}/$RANK"
        assert errors_of(torchrun("--no-python", "bash", "-c", validate)).startswith("error: val_files: rank 1 has not")


def errors_of(done: subprocess.CompletedProcess) -> str:
    """The errors of an ended command, without those of ranks that wait for another."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error") and "no answer from" not in line]
    return "\n".join(lines)
