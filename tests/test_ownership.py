"""Files of others stay as they are, whatever runs among them, and only the modules named here can remove or replace."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ablate
import train
from ablation.report import FIGURES as SWEEP_FIGURES
from ablation.report import TABLES
from bench.results import FILES
from engine.checkpoints.export import check_target
from engine.data import prepare
from engine.reporting.recorder import RUN_FILES
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.files import TOKEN, write_atomically
from engine.runtime.locks import hold_lock, lock_directory
from engine.runtime.ownership import MARKER, claim, make_output, owned_files, remove_owned, write_together

ROOT = Path(__file__).parents[1]

REMOVERS = {
    "engine/data/cache.py": "removes what this call has written",
    "engine/runtime/files.py": "replaces what a caller has claimed or the user has named, by a new file",
    "engine/runtime/locks.py": "shortens a lock whose text is that of a lock of ours",
    "engine/runtime/ownership.py": "removes and replaces what the marker file names",
}
"""Module that removes, renames or shortens files -> how it knows that they are ours."""

WRITERS = {
    "ablation/worker.py": "marks of failures, which it has claimed",
    "engine/data/cache.py": "new files of `prepare`",
    "engine/runtime/files.py": "a new unfinished file",
}
"""Module that opens files for writing by itself -> why it may."""


def calls_of(path: Path) -> set[str]:
    """Names of the calls in a module that remove or replace files, or of those that write them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        of_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("os", "shutil")
        replaces = name == "replace" and (of_os or (len(node.args) == 1 and not node.keywords))
        if name in ("unlink", "rmtree", "rmdir", "rename", "renames", "removedirs", "ftruncate", "move") or replaces:
            found.add("removes")
        if (name == "remove" and of_os) or (name == "truncate" and isinstance(node.func, ast.Attribute)):
            found.add("removes")
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if name in ("write_text", "write_bytes") or (
            name == "open" and any(set(mode) & {*"wx"} for mode in modes[-1:])
        ):
            found.add("writes")
    return found


@pytest.mark.parametrize(("kind", "allowed"), [("removes", REMOVERS), ("writes", WRITERS)])
def test_only_these_modules_remove_or_write_by_themselves(kind: str, allowed: dict[str, str]):
    folders = ("engine", "ablation", "analysis", "bench", "attention", "models")
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert {str(path.relative_to(ROOT)) for path in paths if kind in calls_of(path)} == {*allowed}


# Writers: name -> (files of others there, what runs, words of the refusal or None: it runs to its end).

RUN = """
model: {name: deit, img_size: 28, patch_size: 14, embed_dim: 8, depth: 1, num_heads: 1, num_classes: 10}
attention: softmax
data: {dataset: digits, workers: 0}
schedule: {epochs: 3, warmup_epochs: 0}
train: {total_batch_size: 700, device: cpu, amp: null, keep_checkpoints: 1}
"""


def run_training(directory: Path, *more: str) -> None:
    config = directory.parent / "run.yaml"
    config.write_text(RUN)
    train.main([str(config), *more, "--output", str(directory)])


def run_sweep(directory: Path, *more: str) -> None:
    (directory.parent / "base.yaml").write_text(RUN)
    sweep = directory.parent / "plan.yaml"
    sweep.write_text("caption: x\nbase: base.yaml\ngrid: {train.seed: [0, 1]}\n")
    ablate.main([str(sweep), "--output", str(directory), "--no-wait", *more])


def run_preparation(directory: Path) -> None:
    source = directory.parent / "images/train/a"
    source.mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(source / "0.png")
    prepare.main([str(source.parents[1]), str(directory), "--splits", "train", "--workers", "0"])


def plan_sweep(directory: Path) -> None:
    run_sweep(directory, "--dry-run")


HARMLESS = ("thesis.tmp", "config.yaml.tmp", "x.tmp/folder.txt", "step_one.pt", "last.pt", "a.part")
HARMLESS += (".eav-0.0123456789abcdef",)
TABLE: dict[str, tuple[tuple[str, ...], Callable[[Path], object], str | None]] = {
    "a run": (HARMLESS, run_training, None),
    "a refused run": (HARMLESS, lambda directory: run_training(directory, "data.val_split=nowhere"), "nowhere"),
    **{f"a run, {name}": ((name,), run_training, "is there already") for name in RUN_FILES},
    "a run, a checkpoint": (("step_9.pt",), run_training, "step_9.pt"),
    "a run, its lock": (("lock",), run_training, "a file of another program"),
    **{f"a sweep, {name}": ((name,), run_sweep, "is there already") for name in (*TABLES, *SWEEP_FIGURES)},
    "a sweep, its plan": (("table.md",), plan_sweep, "is there already"),
    "a sweep, a failure": (("train.seed=1/ablate.failed",), run_sweep, "is there already"),
    "a sweep, the failure of a plan": (("train.seed=1/ablate.failed",), plan_sweep, "is there already"),
    "a sweep, its file": (("sweep.yaml",), run_sweep, "is there already"),
    **{f"results, {name}": ((name,), lambda d: make_output(d, FILES), "is there already") for name in FILES},
    "an export, DIR": (("README.md", "model.safetensors.tmp"), lambda d: write_together(d, {"config.json": b""}), None),
    **{
        f"an export, DIR/{name}": ((name,), lambda d: check_target(f"{d}/"), "is there already")
        for name in ("config.json", "model.safetensors")
    },
    **{
        f"a prepared split, {name}": ((name,), run_preparation, "is there already")
        for name in ("train.npz", "train.pixels")
    },
    "a file": (("x.csv.tmp", ".x.csv.unfinished"), lambda d: write_atomically(d / "x.csv", b"1"), None),
    "removal of what was claimed by others": (("a", "b"), lambda d: remove_owned(d, ["a", "b"]), None),
}


@pytest.mark.parametrize("case", TABLE)
def test_files_of_others_stay(case: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    names, runs, problem = TABLE[case]
    directory = tmp_path / "output"
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"mine: {name}")
    with contextlib.ExitStack() as stack:
        if problem:
            caught = stack.enter_context(pytest.raises((SystemExit, UserError)))
        runs(directory)
    if problem:
        text = capsys.readouterr().err + str(caught.value)
        assert problem in text
        assert text.count("error: ") <= 1
        assert "Traceback" not in text
    assert {name: (directory / name).read_text() for name in names} == {name: f"mine: {name}" for name in names}


def test_all_strange_files_are_named_at_once(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        make_output(tmp_path, "cbdx")
    assert str(caught.value) == (
        f"{tmp_path / 'b'}: is there already, and this program has no record of having made it (nor c);"
        " move them away, or name another directory"
    )


@pytest.mark.complete
def test_a_checkpoint_that_was_put_there_by_hand_is_not_rotated(tmp_path: Path, capsys: pytest.CaptureFixture):
    run_training(tmp_path / "one", "schedule.epochs=1")
    other = tmp_path / "two"
    other.mkdir()
    (first,) = (tmp_path / "one").glob("step_*_epoch_1.pt")
    (other / first.name).write_bytes(first.read_bytes())
    before = first.read_bytes()
    (other / "step_99.pt").write_text("mine")
    with pytest.raises(SystemExit):
        run_training(other, "--allow-change", "schedule.epochs")
    assert "step_99.pt: no whole checkpoint, and none that this run made" in capsys.readouterr().err
    assert (other / "step_99.pt").read_text() == "mine"
    (other / "step_99.pt").unlink()
    run_training(other, "--allow-change", "schedule.epochs")
    assert (other / first.name).read_bytes() == before
    assert len([*other.glob("step_*.pt")]) < 5, "its own are rotated"


def test_what_a_killed_process_was_writing_is_removed_by_the_next_run_alone(tmp_path: Path):
    with lock_directory(tmp_path, World(torch.device("cpu"))):
        pass
    mine, others = tmp_path / f".{TOKEN}.0123456789abcdef", tmp_path / ".eav-1.0123456789abcdef"
    for path in (mine, others):
        path.write_text("unfinished")
    with lock_directory(tmp_path, World(torch.device("cpu"))):
        assert not mine.exists()
        assert others.read_text() == "unfinished"


@pytest.mark.parametrize("text", ["", "process 12 on host since Monday\n", "process 1 on x since y\n" * 9])
def test_the_lock_of_an_earlier_process_is_taken_over(text: str, tmp_path: Path):
    """A lock may be of an earlier version, or cut when it was written: its first words prove that it is ours."""
    (tmp_path / "lock").write_text(text)
    with lock_directory(tmp_path, World(torch.device("cpu"))):
        assert (tmp_path / "lock").read_text().count("process ") == 1


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_claims_add_up_and_a_cut_line_spoils_none(tmp_path: Path):
    claim(tmp_path, ["a"])
    with (tmp_path / MARKER).open("ab") as file:
        file.write(b'\n{"kind": "resu')
    claim(tmp_path, ["b"])
    for name in "abc":
        (tmp_path / name).touch()
    assert [path.name for path in owned_files(tmp_path)] == ["a", "b"]
    claim(tmp_path, ["a", "b"])
    with pytest.raises(UserError, match=r"c: is there already, and this program has no record .*; move it away"):
        claim(tmp_path, ["a", "c"])


def hold_elsewhere(path: Path, code: str) -> subprocess.Popen:
    """A process that runs `code` and has printed a line."""
    code = f"import sys, time; from pathlib import Path; from engine.runtime.locks import hold_lock\n{code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline()
    return process


@pytest.mark.complete
def test_the_wait_for_a_lock_ends(tmp_path: Path):
    path = tmp_path / "lock"
    holder = hold_elsewhere(path, "with hold_lock(Path(sys.argv[1]), True): print(flush=True); time.sleep(600)")
    waiting = None
    try:
        problem = rf"{path}: another process has held this lock for 0.001 minutes; end that"
        with pytest.raises(UserError, match=problem), hold_lock(path, wait=True, minutes=0.001):
            raise AssertionError
        with hold_lock(path, wait=False) as is_held:
            assert not is_held
        code = "from engine.runtime.signals import end_at_interrupt\nwith end_at_interrupt():\n  print(flush=True)\n"
        waiting = hold_elsewhere(path, f"{code}  with hold_lock(Path(sys.argv[1]), True): pass")
        time.sleep(0.5)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(60) == 128 + signal.SIGTERM
    finally:
        for process in filter(None, (holder, waiting)):
            process.kill()
            process.wait()
            process.stdout.close()
    with hold_lock(path, wait=True, minutes=0.1) as is_held:
        assert is_held


def test_a_pipe_as_a_lock_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="cannot be locked: a pipe or device"), hold_lock(tmp_path / "lock", wait=True):
        raise AssertionError
    with (
        pytest.raises(UserError, match="cannot be written: a pipe or device"),
        lock_directory(tmp_path, World(torch.device("cpu"))),
    ):
        raise AssertionError
