"""Checkpoints are written completely or not at all, verified and ranked; foreign files; one format for export.

The rows C1 to C4 of the stress suite.
"""

import copy
import errno
import gc
import io
import itertools
import json
import math
import os
import pickle
import random
import resource
import stat
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import validate
from engine.checkpoints import export as export_module
from engine.checkpoints.export import export, to_safetensors
from engine.checkpoints.files import kept_weights, load_checkpoint, newest_checkpoint, open_weights, save_checkpoint
from engine.checkpoints.format import ForeignObject, read_archive
from engine.checkpoints.identify import Kind, identify, list_checkpoints
from engine.checkpoints.progress import Progress, rank_epoch
from engine.checkpoints.weight_sources import read_weights
from engine.checkpoints.weights import load_weights
from engine.evaluation.inference import load
from engine.run.load import dump_run, load_run, parse_run
from engine.runtime import files
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.ownership import MARKER
from engine.training.resume import Checkpoints, Resumed
from models import create_model
from tests.engine.test_resume import digest, light_and_full
from tests.support.launcher import ROOT
from tests.support.partition import chosen
from tests.support.refusals import refusal

ALONE = World(torch.device("cpu"))
OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=8", "attention={name: softmax}", "data.workers=0"]


@pytest.fixture(scope="module")
def run():
    return load_run(ROOT / "configs/quickstart.yaml", [*OPTIONS, "train.keep_checkpoints=2", "train.device=cpu"])


@pytest.fixture
def checkpoints(run, tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, run, ALONE, 100)


@pytest.fixture(scope="module")
def whole(run) -> dict:
    """A checkpoint of a model that can be validated."""
    model = create_model(attention=run.attention, **run.model)
    metadata = {"config": dump_run(run), "processes": 1, "images": 100, "progress": vars(Progress(epoch=1, step=3))}
    return {**metadata, "model": model.state_dict(), "model_ema": model.state_dict()}


class Weight(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))


def test_a_failed_save_leaves_the_old_file(whole, tmp_path: Path):
    save_checkpoint(tmp_path / "last.pt", whole)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):  # the latter since Python 3.14
        save_checkpoint(tmp_path / "last.pt", whole | {"unpicklable": lambda: None})
    assert step_of(tmp_path / "last.pt") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def export_plain(path: Path, checkpoint: dict) -> None:
    files.write_file(path, to_safetensors(checkpoint, "plain"))


WRITERS = {"checkpoint": (save_checkpoint, "x.pt"), "export": (export_plain, "x.safetensors")}


def step_of(path: Path) -> int:
    return load_checkpoint(path)["progress"]["step"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_that_is_replaced_is_whole_whenever_that_ends(
    writer: str, renamed: bool, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The program ends before and after the rename, as if killed."""
    write, name = WRITERS[writer]
    path, rename = tmp_path / name, os.replace

    def end(source: Path, target: Path) -> None:
        if renamed:
            rename(source, target)
        raise KeyboardInterrupt

    write(path, change(whole, progress__step=1))
    monkeypatch.setattr(os, "replace", end)
    with pytest.raises(KeyboardInterrupt):
        write(path, change(whole, progress__step=2))
    assert step_of(path) == 1 + renamed


class FailAt:
    """A function of the system, whose call of this number fails with this error."""

    def __init__(self, call: int, function: Callable, number: int):
        self.call, self.function, self.number, self.num_calls = call, function, number, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.call:
            raise OSError(self.number, os.strerror(self.number))
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("write", "name", "read"),
    [
        (save_checkpoint, "x.pt", step_of),
        (export_plain, "x.safetensors", step_of),
        (lambda path, x: files.write_file(path, b"%d" % x["progress"]["step"]), "x.csv", lambda y: int(y.read_text())),
        (
            lambda path, x: export(f"{path}/", parse_run(x["config"], "x"), x, "plain"),
            *("x", lambda path: open_weights(path).checkpoint["progress"]["step"]),
        ),
    ],
    ids=["checkpoint", "export", "text", "directory"],
)
@pytest.mark.parametrize(
    "where", chosen(["os.fsync", "os.replace", "os.open", "io.open"], ("os.fsync", "os.replace").__contains__)
)
def test_a_file_is_whole_whichever_call_fails(
    where: str, write: Callable, name: str, read: Callable, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every call of the system fails once, also after the file is renamed; the file has its old or its new content."""
    path, module, attribute = tmp_path / name, {"os": os, "io": io}[where[:2]], where[3:]
    write(path, change(whole, progress__step=1))
    names = {file.name for file in tmp_path.rglob(f"{name}*")}
    for call in itertools.count(1):
        old, message = read(path), None
        failing = FailAt(call, getattr(module, attribute), errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, failing)
            try:
                write(path, change(whole, progress__step=call + 1))
            except (UserError, OSError) as error:
                message = str(error)
        assert {file.name for file in tmp_path.rglob(f"{name}*")} == names
        assert read(path) == call + 1 or (message and read(path) == old)
        assert read(path) == old or "unchanged" not in (message or "")
        if failing.num_calls < call:
            break
    assert call > 1
    assert message is None


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_does_not_sync_directories(
    number: int, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    save_checkpoint(tmp_path / "x.pt", whole)
    save_checkpoint(tmp_path / "x.pt", change(whole, progress__step=7))
    assert step_of(tmp_path / "x.pt") == 7


NOT_SAFE, NO_IDENTITY = "damaged, or no checkpoint that can be loaded safely", "class names or digests that are none"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"path": Path("x")}, "no checkpoint that can be loaded safely"),
        *(
            ({"trained_config": none}, NOT_SAFE)
            for none in ([], {"model": "deit"}, {"model": {"img_size": torch.ones(2)}})
        ),
        *((none, NO_IDENTITY) for none in ({"classes": "cat"}, {"classes": [1]}, {"val_files": [0]})),
        *(({"model_ema": none}, "loaded safely .*ema are no weights") for none in ({"a": "x"}, {1: torch.zeros(1)})),
    ],
)
def test_values_of_the_wrong_kind_are_refused(change: dict, problem: str, whole, tmp_path: Path):
    torch.save(whole | change, tmp_path / "x.pt")
    with pytest.raises(UserError, match=problem):
        load_checkpoint(tmp_path / "x.pt")


def test_ranking_keeps_the_best_and_of_equals_the_earlier():
    ranking = []
    for epoch, top1 in enumerate((50.0, 70.0, 70.0, 60.0, 40.0), start=1):
        ranking = rank_epoch(ranking, epoch, top1, keep=3)
    assert ranking == [[70.0, 2], [70.0, 3], [60.0, 4]]


NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("place", range(4))
def test_an_epoch_whose_score_is_not_finite_has_no_rank(place: int, bad: float):
    """Wherever it comes; a ranking that has one loses it."""
    scores = [0.9, 0.5, 0.4]
    scores.insert(place, bad)
    ranking = []
    for epoch, score in enumerate(scores):
        ranking = rank_epoch(ranking, epoch, score, keep=3)
    assert [score for score, _ in ranking] == [0.9, 0.5, 0.4]
    assert rank_epoch([[bad, 0], [0.5, 1]], 2, 0.7, keep=3) == [[0.7, 2], [0.5, 1]]


@pytest.mark.parametrize(("best_by", "other"), [("loss", {"top1": 50.0, "ema_top1": 50.0}), (None, {})])
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_the_best_epoch_is_kept_beside_one_whose_loss_is_not_finite(bad, best_by, other, checkpoints, tmp_path: Path):
    """By the loss, of plain and of averaged weights; where no accuracy is known, by itself."""
    progress = Progress()
    for epoch, loss in enumerate([bad, 0.2, 0.4, bad, 0.6], 1):
        progress.metrics = {"loss": loss, "ema_loss": loss} | other
        progress.rank(epoch, keep=1, best_by=best_by)
        assert progress.unranked() == ({} if epoch in (2, 3, 5) else {"loss": loss, "ema_loss": loss})
        assert progress.best() == ({} if epoch == 1 else {"best_loss": 0.2, "best_ema_loss": 0.2})
        progress.epoch = progress.step = epoch
        checkpoints.save(progress, {"model": Weight(epoch), "model_ema": Weight(-epoch)})
    assert names(tmp_path) == [f"step_{epoch}_epoch_{epoch}.pt" for epoch in (5, 4, 2)]
    for weights in ("plain", "ema"):
        assert open_weights(tmp_path, weights=weights).checkpoint["progress"]["epoch"] == 2


def save_epochs(checkpoints: Checkpoints, *top1s: float) -> None:
    """A run with these results, and one checkpoint within each epoch."""
    progress = Progress()
    for epoch, top1 in enumerate(top1s, start=1):
        progress.step, progress.images = 2 * epoch - 1, 8
        checkpoints.save(progress, {"model": Weight(-epoch)})
        progress.ranking = rank_epoch(progress.ranking, epoch, top1, keep=2)
        progress.epoch, progress.step, progress.images = epoch, 2 * epoch, 0
        checkpoints.save(progress, {"model": Weight(epoch)})


def test_a_checkpoint_that_was_put_there_by_hand_is_not_written_over(run, checkpoints: Checkpoints, tmp_path: Path):
    """A run that is stopped before its first update has nothing to save, and one that would replace it says so."""
    save_epochs(checkpoints, 50.0)
    (tmp_path / MARKER).unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    checkpoints = Checkpoints(tmp_path, run, ALONE, 100)
    progress = Resumed(checkpoints).progress
    checkpoints.save(progress, {"model": Weight(3)})
    progress.epoch, progress.step, progress.images = 0, 1, 8
    with pytest.raises(UserError, match=r"step_1\.pt: is there already, .*; move it away"):
        checkpoints.save(progress, {"model": Weight(3)})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_of_the_name_of_the_next_checkpoint_is_refused_in_advance(run, checkpoints: Checkpoints, tmp_path: Path):
    """The checkpoints before and after an evaluation have the same step."""
    progress = Progress(epoch=0, step=2, images=16)
    checkpoints.save(progress, {"model": Weight(1)})
    (tmp_path / "step_2_epoch_1.pt").write_text("mine")
    with pytest.raises(UserError, match=r"step_2_epoch_1\.pt: no whole checkpoint, and none that this run made"):
        Resumed(Checkpoints(tmp_path, run, ALONE, 100))


def test_each_kind_of_weights_has_its_own_best(checkpoints: Checkpoints, tmp_path: Path):
    """Plain weights rank epochs 2 and 3 best, averaged weights 1 and 4."""
    progress = Progress()
    for epoch, (top1, ema_top1) in enumerate([(50.0, 90.0), (86.0, 20.0), (70.0, 20.0), (60.0, 80.0), (40.0, 24.0)], 1):
        progress.metrics = {"top1": top1, "ema_top1": ema_top1}
        progress.rank(epoch, keep=2)
        progress.epoch = progress.step = epoch
        checkpoints.save(progress, {"model": Weight(epoch), "model_ema": Weight(-epoch)})
    assert names(tmp_path) == [f"step_{epoch}_epoch_{epoch}.pt" for epoch in (5, 4, 3, 2, 1)]
    for progress.step, progress.images in ((6, 8), (7, 16)):
        checkpoints.save(progress, {"model": Weight(6), "model_ema": Weight(-6)})
    assert names(tmp_path) == ["step_7.pt", "step_6.pt", *(f"step_{epoch}_epoch_{epoch}.pt" for epoch in (4, 3, 2, 1))]
    assert progress.best() == {"best_top1": 86.0, "best_ema_top1": 90.0}
    for weights, epoch in (("plain", 2), ("ema", 1)):
        path, checkpoint, kind, _, kept = open_weights(tmp_path, weights=weights)
        assert (path.name, kind, [*kept]) == (f"step_{epoch}_epoch_{epoch}.pt", weights, [weights])
        assert checkpoint["progress"]["epoch"] == epoch
    both = {kind: path.name for kind, (path, _) in open_weights(tmp_path).kept.items()}
    assert both == {"plain": "step_2_epoch_2.pt", "ema": "step_1_epoch_1.pt"}


@pytest.mark.parametrize(("ranking", "epoch"), [([[math.nan, 1], [0.5, 2]], 2), ([[math.inf, 1]], 3)])
def test_a_score_that_is_not_finite_is_never_the_best(ranking: list, epoch: int, checkpoints, tmp_path: Path):
    """As an earlier version may have ranked it; without another one, the newest counts."""
    for number in (1, 2, 3):
        progress = Progress(epoch=number, step=number, ranking=[[90.0, 1], [80.0, 2]] if number < 3 else ranking)
        checkpoints.save(progress, {"model": Weight(number)})
    assert open_weights(tmp_path).checkpoint["progress"]["epoch"] == epoch


def test_averaged_weights_that_are_kept_no_more_are_forgotten(checkpoints, tmp_path: Path):
    """The next evaluation forgets the epochs that were best by them."""
    progress = Progress()
    for epoch, averaged in enumerate([{"ema_top1": 90.0}, {}], 1):
        progress.metrics = {"top1": 50.0 + epoch, **averaged}
        progress.rank(epoch, keep=2)
        progress.epoch = progress.step = epoch
        checkpoints.save(progress, {"model": Weight(epoch)} | ({"model_ema": Weight(-epoch)} if averaged else {}))
    assert progress.best() == {"best_top1": 52.0}
    path, _, _, _, kept = open_weights(tmp_path)
    assert (path.name, [*kept]) == ("step_2_epoch_2.pt", ["plain"])


A, B, OTHER = (letter * 64 for letter in "abc")
DIGESTS = {"train_files": A, "train_content": B, "val_files": B, "val_content": A, "teacher_weights": "none"}
IDENTITY = {"classes": ["cat", "dog"], **DIGESTS}
OTHERS = {name: (OTHER, f"{digest} there, {OTHER} here") for name, digest in DIGESTS.items()}
OTHERS["classes"] = (["cat", "cow"], "only in the run there: dog (1); only in the data here: cow (1)")


@pytest.mark.parametrize("key", OTHERS)
def test_other_data_is_refused_until_allowed(key: str, run, tmp_path: Path):
    other, message = OTHERS[key]
    Checkpoints(tmp_path, run, ALONE, 100, IDENTITY).save(Progress(step=7), {"model": Weight(1)})
    checkpoints = Checkpoints(tmp_path, run, ALONE, 100, IDENTITY | {key: other})
    with pytest.raises(UserError) as caught:
        Resumed(checkpoints).restore({})
    assert str(caught.value).splitlines()[1:] == [f"  {key}: {message}"]
    assert Resumed(checkpoints, [key]).restore({}).step == 7


MANY = {
    "ImageNet-21k": [f"n{i:08}" for i in range(21_841)],
    "long names": [f"{i:080}" for i in range(25_000)],
    "numbers": [*map(str, range(200_000))],
}


@pytest.mark.parametrize("classes", chosen(MANY.values(), lambda classes: len(classes) < 100_000), ids=MANY)
def test_many_classes_can_be_kept(classes: list[str], run, tmp_path: Path):
    Checkpoints(tmp_path, run, ALONE, 100, IDENTITY | {"classes": classes}).save(Progress(), {"model": Weight(1)})
    assert newest_checkpoint(tmp_path)[1]["classes"] == classes


def names(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


def test_the_newest_and_the_best_stay(checkpoints: Checkpoints, tmp_path: Path):
    save_epochs(checkpoints, 50.0, 70.0, 60.0, 40.0)
    assert names(tmp_path) == ["step_8_epoch_4.pt", "step_7.pt", "step_6_epoch_3.pt", "step_4_epoch_2.pt"]
    assert {path.name for path in tmp_path.iterdir()} == {*names(tmp_path), MARKER}
    assert newest_checkpoint(tmp_path)[1]["model"]["weight"].tolist() == [4.0, 4.0]
    assert open_weights(tmp_path).checkpoint["model"]["weight"].tolist() == [2.0, 2.0]


def test_a_damaged_checkpoint_is_passed_over(checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture):
    save_epochs(checkpoints, 50.0, 70.0, 60.0)
    (tmp_path / "step_6_epoch_3.pt").write_bytes(b"")
    path, checkpoint = newest_checkpoint(tmp_path)
    assert (path.name, checkpoint["progress"]["epoch"]) == ("step_5.pt", 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/step_6_epoch_3.pt: damaged")
    assert line.endswith("; passed over")
    for path in list_checkpoints(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of its checkpoints is whole"):
        newest_checkpoint(tmp_path)


def test_nothing_is_removed_for_a_checkpoint_that_is_damaged_at_once(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    save_epochs(checkpoints, 50.0, 70.0, 60.0)
    before = names(tmp_path)
    replace = os.replace

    def replace_and_damage(source: Path, target: Path) -> None:
        replace(source, target)
        if target.suffix == ".pt":
            target.write_bytes(target.read_bytes()[:-1])

    monkeypatch.setattr(os, "replace", replace_and_damage)
    save_epochs(checkpoints, 90.0, 80.0, 70.0, 60.0)
    assert set(before) <= set(names(tmp_path))
    assert "all older checkpoints are kept" in capsys.readouterr().err


def test_what_cannot_be_read_is_neither_written_nor_a_reason_to_remove(checkpoints: Checkpoints, tmp_path: Path):
    save_epochs(checkpoints, 50.0, 70.0, 60.0)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("step_*")}
    model, optimizer = Weight(1.0), torch.optim.SGD([torch.zeros(1)])
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"kind": torch.float16, "path": Path("x")})
    for step in (7, 8, 9):
        with pytest.raises(ValueError, match=rf"step_{step}\.pt: not written, as it could not be read again: .*Path"):
            checkpoints.save(Progress(epoch=3, step=step, images=8), {"model": model, "optimizer": optimizer})
    assert {path.name: path.read_bytes() for path in tmp_path.glob("step_*")} == before


def test_fewer_epochs_than_are_done_are_refused(run, tmp_path: Path):
    def resume(done: int, epochs: int, former: int = 4) -> Progress:
        allowed = ["schedule.epochs"]
        there, here = (
            Checkpoints(tmp_path, replace(run, schedule=replace(run.schedule, epochs=n)), ALONE, 100)
            for n in (former, epochs)
        )
        there.save(Progress(epoch=done, step=10 * done), {"model": Weight(0.0)})
        return Resumed(here, allowed).restore({"model": Weight(0.0)})

    assert resume(done=1, epochs=2).epoch == 1
    assert resume(done=4, epochs=5).epoch == 4
    assert resume(done=5, epochs=5, former=5).epoch == 5
    for epochs in (5, 6):
        message = rf"{tmp_path}: schedule.epochs = {epochs}, but 6 of 8 epochs are done there; choose more than 6"
        with pytest.raises(UserError, match=message):
            resume(done=6, epochs=epochs, former=8)


def test_weights_and_buffers_that_are_not_finite_are_neither_saved_nor_loaded(checkpoints, tmp_path: Path):
    model = nn.BatchNorm1d(3)
    model.running_var[1] = math.nan
    for bad, name in ((Weight(math.inf), "weight"), (model, "running_var")):
        with pytest.raises(FloatingPointError, match=rf"step 0: model\.{name} is not finite"):
            checkpoints.save(Progress(), {"model": bad})
        assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="x: the checkpoint's weights do not fit: 1 not finite: running_var"):
        load_weights(nn.BatchNorm1d(3), model.state_dict(), "x")


def test_a_checkpoint_is_due_by_steps_and_overdue_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["train.checkpoint_steps=5", "train.checkpoint_minutes=2"]
    checkpoints = Checkpoints(tmp_path, load_run(ROOT / "configs/quickstart.yaml", options), ALONE, 100)
    assert [step for step in range(1, 12) if checkpoints.is_due(step)] == [5, 10]
    now = checkpoints.saved_at
    monkeypatch.setattr(time, "monotonic", lambda: now + 120)
    for rank in (0, 1):  # the second only takes note of the time
        checkpoints.world = World(torch.device("cpu"), rank, 2)
        checkpoints.saved_at = now
        assert checkpoints.is_overdue()
        checkpoints.save(Progress(), {"model": Weight(0.0)})
        assert not checkpoints.is_overdue()


# C1


@light_and_full(30, 3000)
def test_every_damage_is_noticed_or_changes_nothing(amount: int, whole, tmp_path: Path, figure: Callable):
    """Truncations, zeroed blocks, and flipped bits, which may only change a member's date or a padding byte."""
    content, rng, noticed = saved(whole), random.Random(0), 0
    expected, path = digest(whole), tmp_path / "x.pt"
    cut = [content[: rng.randrange(len(content))] for _ in range(amount // 3)]
    for place in (rng.randrange(len(content) - 4096) for _ in range(amount // 3)):
        cut.append(content[:place] + bytes(4096) + content[place + 4096 :])
    flipped = [flip_bit(content, rng.randrange(len(content)), rng.randrange(8)) for _ in range(amount)]
    for damaged in cut + flipped:
        path.write_bytes(damaged)
        try:
            assert digest(load_checkpoint(path)) == expected
        except UserError:
            noticed += 1
    assert noticed > len(cut) + amount // 3
    figure("C1", f"{noticed}/{len(cut) + amount} damages noticed, the others change no value")


# C2


class Gadget:
    """A pickle that writes a file when it is read."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def with_pickle(content: bytes, structure: bytes) -> bytes:
    """The archive `content` with another structure."""
    return archive(members(content) | {"archive/data.pkl": structure})


def hostile_files(directory: Path, whole: dict) -> dict[str, Path]:
    canary, content, legacy = directory / "canary", saved(whole), io.BytesIO()
    structure = members(content)["archive/data.pkl"]
    torch.save(whole | {"gadget": Gadget(canary)}, legacy, _use_new_zipfile_serialization=False)
    bomb: list = ["x"] * 9
    for _ in range(30):
        bomb = [bomb] * 9
    huge = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
    numbered = b"\x80\x02Kxr\xff\xff\xff\x7f."
    deep = b"\x80\x02}X\x06\x00\x00\x00config" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"s."
    contents = {
        "pickle gadget": saved(whole | {"gadget": Gadget(canary)}),
        "bare pickle": pickle.dumps(Gadget(canary)),
        "legacy pickle": legacy.getvalue(),
        "traversal": archive({"archive/data.pkl": structure, "archive/../../canary": b"x"}),
        "TorchScript": archive({"archive/data.pkl": structure, "archive/constants.pkl": b"", "archive/code/m.py": b""}),
        "compressed": archive({"archive/data.pkl": structure, "archive/data/0": bytes(2**24)}, zipfile.ZIP_DEFLATED),
        "1 TB tensor": with_pickle(content, claim_terabyte(structure)),
        "1 TB bytes": with_pickle(content, huge),
        "memo": with_pickle(content, numbered),
        "deep": with_pickle(content, deep),
        "long": with_pickle(content, b"\x80\x02" + b"N0" * 2**20 + b"N."),
        **{name: with_pickle(content, structure) for name, structure in slow_pickles().items()},
        "aliases": saved(whole | {"config": bomb}),
    }
    paths = {name: directory / f"{name}.pt" for name in (*contents, "link", "FIFO", "device")}
    for name, value in contents.items():
        paths[name].write_bytes(value)
    (directory / "good").write_bytes(content)
    paths["link"].symlink_to(directory / "good")
    os.mkfifo(paths["FIFO"])
    paths["device"] = Path("/dev/zero")
    deep_json = json.dumps({"__metadata__": {"run": "[" * 5000 + "]" * 5000}}).encode()
    paths["deep safetensors"] = directory / "deep.safetensors"
    paths["deep safetensors"].write_bytes(len(deep_json).to_bytes(8, "little") + deep_json)
    paths["1 TB safetensors"] = directory / "huge.safetensors"
    paths["1 TB safetensors"].write_bytes((2**40).to_bytes(8, "little") + b"{}")
    return paths


def pickled(value: object) -> bytes:
    """The operations of a plain value, without the first and the last."""
    return pickle.dumps(value, 2)[2:-1]


def slow_pickles() -> dict[str, bytes]:
    """Pickles of at most 2 MB that a plain unpickler would read for minutes, or with all memory."""
    many = 300_000
    nested = pickled("x") + b"q\0" + b"".join(b"h%ch%c\x87q%c" % (i, i, i + 1) for i in range(40))  # 3^40 texts
    mapping, rebuild = b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n"
    items = b"](" + b"".join(b"]q%c(" % i + pickled(i) + b"Ne" for i in range(200)) + b"eq\1"
    data = [pickled("storage"), b"ctorch\nFloatStorage\n", pickled("0"), pickled("cpu"), b"K\1"]
    storage, state = b"(" + b"".join(data) + b"tQ", pickled(dict.fromkeys(map(str, range(many // 6))))
    dimensions = pickled((1,) * 10**5) + b"q\2"
    tensor = storage + b"q\1" + dimensions + rebuild + b"q\3(h\1K\0h\2h\2tq\4"
    values = {
        "text of an integer": b"I" + b"1" * 2 * 10**6 + b"\n",
        "keys that collide": b"}(" + b"".join(pickled(1 + i * (2**61 - 1)) + b"N" for i in range(many // 2)) + b"u",
        "nested key": b"}" + nested + b"Ns",
        "copied mapping": items + mapping + b"q\2(" + b"h\2h\1\x85R" * many + b"t\x87",
        "state set again": mapping + b")R" + state + b"q\1" + b"bh\1" * many + b"b",
        "nested name of data": b"(" + b"".join([*data[:2], nested, *data[3:]]) + b"tQ",
        "nested size of data": b"(" + b"".join([*data[:4], nested]) + b"tQ",
        "many dimensions": b"(" + tensor + b"h\3h\4R" * many + b"t",
        "a list as a stride": rebuild + b"(" + storage + b"K\0" + pickled((2**32,)) + b"]Na\x85tR",
    }
    return {name: b"\x80\2}" + pickled("model") + value + b"s." for name, value in values.items()}


def claim_terabyte(structure: bytes) -> bytes:
    """The pickle, whose first tensor claims 2**38 elements."""
    place = structure.index(b"\x00cpu", structure.index(b"FloatStorage")) + 4
    while structure[place : place + 1] not in (b"K", b"M"):
        place += 1
    end = place + (2 if structure[place : place + 1] == b"K" else 3)
    return structure[:place] + b"\x8a\x05" + (2**38).to_bytes(5, "little") + structure[end:]


def change(whole: dict, **values) -> dict:
    """`whole` with other values at dotted paths; keywords write `__` for a dot."""
    changed = copy.deepcopy(whole)
    for path, value in values.items():
        *keys, last = path.split("__")
        container = changed
        for key in keys:
            container = container[key]
        container[last] = value
    return changed


def claim_storage(whole: dict, **options: int) -> dict:
    """A model with these options, all of whose weights share one storage."""
    changed = change(whole, **{f"config__model__{name}": value for name, value in options.items()})
    with torch.device("meta"):
        model = create_model(attention=changed["config"]["attention"], **changed["config"]["model"])
    shared = torch.zeros(max(x.numel() for x in model.state_dict().values()))
    weights = {name: shared[: x.numel()].view(x.shape) for name, x in model.state_dict().items()}
    return changed | {"model": weights, "model_ema": weights}


def two_directories(content: bytes) -> bytes:
    """An archive before which another one stands, with a directory of its own at the offset that both state.

    Python counts that offset from the start of the archive, torch from the start of the file, where the first weight
    has 16 MB.
    """
    content, name, size = archive(members(content)), b"archive/data/0", 2**24
    start = int.from_bytes(content[-6:-2], "little")
    directory, packer = bytearray(content[start:-22]), zlib.compressobj(wbits=-15)
    data, crc = packer.compress(bytes(size)) + packer.flush(), zlib.crc32(bytes(size))
    entry = directory.index(name) - 46
    struct.pack_into("<H", directory, entry + 10, zipfile.ZIP_DEFLATED)
    struct.pack_into("<3L", directory, entry + 16, crc, len(data), size)
    struct.pack_into("<L", directory, entry + 42, start + len(directory))
    header = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, crc, len(data), size, len(name), 0)
    return content[:start] + directory + header + name + data + content


def flip_bit(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def saved(checkpoint: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def hostile_checkpoints(directory: Path, whole: dict) -> dict[str, Path]:
    """Files that look like archives of plain values."""
    content, bias, stem = saved(whole), whole["model"]["head.bias"], "patch_embed.proj.1.running_var"
    config = [
        ("model__depth", 1000),
        ("model__img_size", 10**6),
        ("model__img_size", 4096),
        ("model__num_classes", 10**9),
        ("model__mlp_ratio", 1e300),
        ("model__reg_tokens", 10**9),
        ("model__in_chans", 10**9),
        ("model__embed_dim", 24 * 10**15),
        ("model__name", "\x1b[2J"),
        ("model__\x1b[2J", 1),
        ("model", []),
        ("attention", {"name": "reformer", "num_rounds": 10**9}),
        ("attention", {"name": "ra", "num_eval_samples": 10**9}),
        ("attention", {"name": "bigbird", "num_random": 10**9}),
        ("data", 5),
        ("data__crop_pct", 0.002),
        ("data__root", "\x1b[2J"),
        ("data__mean", [math.nan] * 3),
        ("train__timeout_minutes", 1e300),
        ("train__seed", 10**400),
    ]
    progress = [
        ("epoch", "\x1b[2J"),
        ("step", -1),
        ("images", 10**30),
        ("ranking", [[1.0]]),
        ("metrics", {"top1": "\x1b[2J"}),
    ]
    changes = [("config__" + key, value) for key, value in config]
    changes += [("progress__" + key, value) for key, value in progress]
    contents = {f"{key}={value!r}"[:80]: saved(change(whole, **{key: value})) for key, value in changes}
    contents |= {
        "progress": saved(whole | {"progress": [1, 2]}),
        "no progress": saved(whole | {"progress": {}}),
        "wide and deep": saved(claim_storage(whole, embed_dim=1008, depth=8)),
        "expanded": saved(change(whole, **{"model__head.bias": torch.zeros(1).expand(10)})),
        "name": saved(change(whole, **{"model__\x1b[2J\n": bias})),
        "NaN in BatchNorm": saved(change(whole, **{f"model__{stem}": torch.full_like(whole["model"][stem], math.nan)})),
        "infinite average": saved(change(whole, **{"model_ema__head.bias": bias / 0})),
        "flipped bit of a weight": flip_bit(content, content.index(torch.ones(4).numpy().tobytes()), 0),
        "prefix": b"#!/bin/sh\n" + content,
        "suffix": content + b"\n",
        "comment": content[:-2] + b"\x04\0PK\5\6",
        "two directories": two_directories(content),
        "two structures": archive(members(content) | {"other/data.pkl": b"\x80\x02}."}),
        "many files": b"PK\1\2" * 40_000 + content,
        "half": content[: len(content) // 2],
        "empty archive": archive({}),
    }
    paths = {name: directory / f"{i}.pt" for i, name in enumerate(contents)}
    for name, value in contents.items():
        paths[name].write_bytes(value)
    return paths


@contextmanager
def little_memory(amount: int = 2**30):
    """Context in which no more memory can be allocated."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def pickled_class(name: str, operation: bytes, arguments: bytes = b")") -> bytes:
    """A file of torch.save whose ``x.weight`` is an object of the class, made by REDUCE (R) or NEWOBJ (0x81)."""
    module, _, kind = name.rpartition(".")
    structure = b"\x80\x02}X\x08\0\0\0x.weightc" + f"{module}\n{kind}\n".encode() + arguments + operation + b"s."
    return archive({"archive/data.pkl": structure, "archive/data/0": bytes(8), "archive/version": b"3"})


def test_no_class_of_torch_is_made(monkeypatch: pytest.MonkeyPatch):
    """Classes and functions that torch lets into its own reading, made as objects or called with a size."""
    names = {*torch._weights_only_unpickler._get_allowed_globals(), "torch.CharTensor", "builtins.bytearray"}
    refused = 0
    for name, operation in itertools.product(sorted(names), (b"\x81", b"R")):
        for arguments in (b")", b"\x8a\x05\0\0\0\0\1\x85"):
            try:
                content = read_archive(pickled_class(name, operation, arguments))
            except (pickle.UnpicklingError, TypeError):
                refused += 1
                continue
            assert name == "collections.OrderedDict" or isinstance(content.values["x.weight"], ForeignObject), name
            assert name == "collections.OrderedDict" or content.class_names == (name,)
    assert refused > len(names)


@pytest.mark.parametrize("operations", [b"N}X\1\0\0\0xK\1s\x86b", b"(tb", b"NNs", b"Na"])
@pytest.mark.parametrize("target", [b"_rebuild_tensor_v2\n", b"R"])
def test_a_pickle_changes_no_tensor_and_no_function(target: bytes, operations: bytes):
    """BUILD, SETITEM and APPEND on a tensor, and on the function that makes it."""
    content = saved({"x.weight": torch.ones(2)})
    structure = members(content)["archive/data.pkl"]
    place = structure.rindex(target) + len(target)
    with pytest.raises((AttributeError, TypeError, pickle.UnpicklingError)):
        read_archive(with_pickle(content, structure[:place] + operations + structure[place:]))
    assert read_archive(content).values["x.weight"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["x.pth", "pytorch_model.bin"])
def test_weights_that_are_objects_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / name).write_bytes(pickled_class("torch.CharTensor", b"\x81", b"\x8a\x05\0\0\0\0\1\x85"))
    model = {"architecture": "deit", "num_classes": 10, "pretrained_cfg": {"input_size": [3, 8, 8]}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    source = tmp_path if name == "pytorch_model.bin" else tmp_path / name
    config = [] if name == "pytorch_model.bin" else ["--config", str(ROOT / "configs/quickstart.yaml"), *OPTIONS]
    assert "holds " in refusal(export_module.main, [source, tmp_path / "out.safetensors", *config], capsys)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.complete
def test_hostile_files_do_nothing(whole, tmp_path: Path, figure: Callable):
    """Each is refused within 1 GB beyond the imports, and within ten times the time of a plain file of its size."""
    paths, slowest = hostile_files(tmp_path, whole), 0.0
    gc.collect()
    gc.freeze()  # objects of other tests, which a collection while reading would visit
    plain = saved(whole | {"config": [2**20 + i for i in range(400_000)]})  # 2 MB
    begin = time.process_time()
    assert len(read_archive(plain).values["config"]) == 400_000
    allowed = 10 * (time.process_time() - begin)
    with little_memory():
        for path in paths.values():
            begin = time.process_time()
            with pytest.raises(UserError) as caught:  # noqa: PT012
                load_checkpoint(path)
                pytest.fail(f"{path} was read")
            slowest = max(slowest, time.process_time() - begin)
            assert "\n" not in str(caught.value)
            assert "MemoryError" not in str(caught.value)
    assert load_checkpoint(tmp_path / "good")
    assert not (tmp_path / "canary").exists()
    assert slowest < allowed
    figure("C2", f"{len(paths)}/{len(paths)} hostile files refused, the slowest after {slowest:.2f} of {allowed:.2f} s")


def test_hostile_checkpoints_are_refused_before_any_evaluation(
    whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, figure: Callable
):
    monkeypatch.setattr(validate, "evaluate", lambda *args: pytest.fail("evaluated"))
    paths, slowest = hostile_checkpoints(tmp_path, whole), 0.0
    with little_memory():
        for name, path in paths.items():
            begin = time.process_time()
            error = refusal(validate.main, [path, "data.workers=0"], capsys)
            slowest = max(slowest, time.process_time() - begin)
            assert error.startswith("error: "), name
            assert error[:-1].isprintable(), (name, error)
    assert slowest < 2
    figure("C2", f"{len(paths)}/{len(paths)} hostile checkpoints refused, the slowest after {slowest:.2f} s")


# C3


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_load(prefix: str, whole, run):
    model = create_model(attention=run.attention, **run.model)
    load_weights(model, {prefix + name: value for name, value in whole["model"].items()}, "x")
    assert all(torch.equal(value, whole["model"][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "override", "problem"),
    [
        ({"head.bias": None}, "", "1 missing: head.bias"),
        ({"extra": torch.zeros(1)}, "", "1 unexpected: extra"),
        ({"head.bias": torch.zeros(3)}, "", "1 of another shape: head.bias (3,) for (10,)"),
        ({"head.bias": torch.full((10,), float("nan"))}, "", "1 not finite: head.bias"),
        ({}, "model.depth=2", "12 missing: blocks.1."),
        ({}, "model.embed_dim=48", "of another shape: "),
        ({}, "attention={name: performer}", "blocks.0.attn."),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: dict, override: str, problem: str, whole, tmp_path: Path, capsys: pytest.CaptureFixture
):
    model = {name: value for name, value in (whole["model"] | change).items() if value is not None}
    torch.save(whole | {"model": model}, tmp_path / "x.pt")
    (line,) = refusal(validate.main, [tmp_path / "x.pt", *filter(None, [override])], capsys).splitlines()
    assert line.startswith("error: model: the checkpoint's weights do not fit: ")
    assert problem in line


# C4


@light_and_full(10, 100)
def test_validation_reads_while_training_writes(amount: int, checkpoints: Checkpoints, figure: Callable):
    model, ending, reads, progress = Weight(0.0), threading.Event(), 0, Progress(images=8)

    def write() -> None:
        while not ending.is_set():
            progress.step += 1
            checkpoints.save(progress, {"model": model})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not list_checkpoints(checkpoints.directory):
            time.sleep(0.01)
        while reads < amount or progress.step < 4:
            _, checkpoint = open_weights(checkpoints.directory)[:2]
            assert checkpoint["model"]["weight"].tolist() == [0.0, 0.0]
            reads += 1
    finally:
        ending.set()
        writer.join()
    written = newest_checkpoint(checkpoints.directory)[1]["progress"]["step"]
    assert written >= 3
    figure("C4", f"{reads}/{reads} loads succeed while {written} checkpoints are written")


# Export


def test_every_source_has_one_kind(whole, tmp_path: Path):
    """By its name, the content of a directory, or that of a file, whatever the file's name is."""
    model, released = whole["model"], {"norm_before_pooling.weight": torch.zeros(2)}
    layouts = {name: tmp_path / name for name in ("run", "ours", "timms", "nothing")}
    for directory in layouts.values():
        directory.mkdir()
    for name in ("run", "ours", "timms"):
        (layouts[name] / "config.json").write_text("{}")
    save_checkpoint(layouts["run"] / "step_1.pt", whole)
    (layouts["ours"] / "model.safetensors").write_bytes(to_safetensors(whole, "plain"))
    safetensors.torch.save_file(model, layouts["timms"] / "model.safetensors")
    save_checkpoint(tmp_path / "checkpoint", whole)
    for name, content in {
        **{"released": {"model": released}, "released alone": released, "timm": {"arch": "x", "state_dict": model}},
        **{"script": {"model": model}, "weights": model, "nothing known": {"x": 1}},
    }.items():
        torch.save(content, tmp_path / name)
    (tmp_path / "export").write_bytes(to_safetensors(whole, "ema"))
    safetensors.torch.save_file(model, tmp_path / "safetensors")
    safetensors.torch.save_file(released, tmp_path / "released safetensors")
    (tmp_path / "x.onnx").touch()
    kinds = {
        **{"run": Kind.RUN, "ours": Kind.EXPORT, "timms": Kind.LOCAL_DIR, "nothing": Kind.RUN, "x.onnx": Kind.GRAPH},
        **{"checkpoint": Kind.CHECKPOINT, "export": Kind.EXPORT, "nothing known": Kind.CHECKPOINT},
        **dict.fromkeys(("released", "released alone", "released safetensors"), Kind.RELEASED),
        "timm": Kind.TIMM,
        **dict.fromkeys(("script", "weights", "safetensors"), Kind.WEIGHTS),
    }
    assert {name: identify(tmp_path / name).kind for name in kinds} == kinds
    assert identify("timm:vit_tiny_patch16_224").kind is Kind.HUB
    assert identify(layouts["ours"]).path == layouts["ours"] / "model.safetensors"
    torch.save({"student": model, "teacher": model}, tmp_path / "dino")
    assert identify(tmp_path / "dino").kind is Kind.WEIGHTS


def test_timm_finds_the_averaged_weights(whole, run, tmp_path: Path):
    """timm loads them as its scripts do, with and without --use-ema; an exported file holds one kind."""
    averaged = {name: value + 1 if value.is_floating_point() else value for name, value in whole["model_ema"].items()}
    checkpoint = whole | {"model_ema": averaged, "classes": [*"0123456789"]}
    save_checkpoint(tmp_path / "x.pt", checkpoint)
    for kind in ("plain", "ema"):
        (tmp_path / f"{kind}.safetensors").write_bytes(to_safetensors(checkpoint, kind))
    loaded = load_checkpoint(tmp_path / "ema.safetensors")
    assert kept_weights(loaded) == ["ema"]
    assert all(loaded[name] == checkpoint[name] for name in ("config", "classes", "progress"))
    model = create_model(attention=run.attention, **run.model)
    for name, use_ema, expected in (
        ("x.pt", True, averaged),
        ("x.pt", False, whole["model"]),
        ("ema.safetensors", True, averaged),
        ("plain.safetensors", True, whole["model"]),
    ):
        timm.models.load_checkpoint(model, str(tmp_path / name), use_ema=use_ema)
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items()), name


# Contents of the wrong kind


DEEP = "[" * 100_000 + "]" * 100_000
NO_MAPPINGS: dict[str, Any] = {"list": [], "text": "x", "null": None, "number": 3}


def contents(whole: dict) -> dict[str, tuple[str, bytes]]:
    """Case -> name and content of a file of which a part is of the wrong kind, or nested deeply."""
    metadata = {name: whole[name] for name in ("config", "processes", "images", "progress")} | {"weights": "plain"}
    weights = {name: x.contiguous() for name, x in whole["model"].items()}
    made: dict[str, bytes] = {}
    wrong = {("config",): NO_MAPPINGS, ("config", "model"): NO_MAPPINGS, ("progress",): NO_MAPPINGS}
    wrong |= {("progress", "metrics"): {"list": [], "number": {"top1": 10**400, "ema_top1": 1.0}}}
    for keys, values in wrong.items():
        for name, value in values.items():
            changed = {keys[0]: value if len(keys) == 1 else whole[keys[0]] | {keys[1]: value}}
            made[f"archive {keys} {name}"] = saved(whole | changed)
            text = json.dumps(metadata | changed)
            made[f"export {keys} {name}"] = safetensors.torch.save(weights, {"run": text})
    runs = {name: json.dumps(value) for name, value in NO_MAPPINGS.items()}
    runs |= {"deep": DEEP, "no JSON": "{", "deep config": f'{json.dumps(metadata)[:-1]}, "config": {DEEP}}}'}
    runs |= {f"weights {value}": json.dumps(metadata | {"weights": value}) for value in ("x", [], None)}
    runs |= {f"trained {value}": json.dumps(metadata | {"trained_config": value}) for value in ([], "x", {})}
    made |= {f"export {name}": safetensors.torch.save(weights, {"run": text}) for name, text in runs.items()}
    headers = {"deep": f'{{"x": {DEEP}}}', "deep metadata": f'{{"__metadata__": {{"run": {DEEP}}}}}'}
    headers |= {f"metadata {value}": f'{{"__metadata__": {value}}}' for value in ("[]", "3", '{"run": 3}')}
    made |= {f"header {name}": struct.pack("<Q", len(text)) + text.encode() for name, text in headers.items()}
    found = {name: ("x.pt", content) for name, content in made.items()}
    own = {"architecture": "deit", "num_classes": 10, "pretrained_cfg": {"input_size": [3, 8, 8]}}
    configs = {name: json.dumps(value) for name, value in NO_MAPPINGS.items()}
    configs |= {"deep": DEEP, "no JSON": "{", "deep options": f'{json.dumps(own)[:-1]}, "model_args": {DEEP}}}'}
    for key, value in {"architecture": [], "num_classes": 10**400, "pretrained_cfg": [], "model_args": "x"}.items():
        configs[key] = json.dumps(own | {key: value})
    return found | {f"directory {name}": ("config.json", text.encode()) for name, text in configs.items()}


def test_contents_of_the_wrong_kind_are_refused_in_a_line(whole, tmp_path: Path):
    """By the readers of a trained model, of initial weights, and by validate.py."""
    for case, (name, content) in contents(whole).items():
        (tmp_path / name).write_bytes(content)
        path = tmp_path if name == "config.json" else tmp_path / name
        if path == tmp_path:
            safetensors.torch.save_file(whole["model"], tmp_path / "model.safetensors")
        for read in (
            load,
            lambda path: read_weights(str(path)),
            lambda path: validate.main([str(path), "data.workers=0"]),
        ):
            with pytest.raises((UserError, SystemExit)) as caught:  # noqa: PT012
                read(path)
                pytest.fail(f"{case} was read")
            assert getattr(caught.value, "code", 2) == 2, case
            assert str(caught.value).isprintable(), case
