"""Checkpoints: whole or not at all, plain, ranked; a directory's run is not mixed with another."""

from pathlib import Path

import pytest
import torch

from attention import OptionError
from engine.checkpoint import find_last, load, rank_epoch, save, save_epoch
from engine.distributed import World

ALONE = World(torch.device("cpu"))
CONFIG = {"optim": {"lr": 0.1}, "data": {"root": None, "workers": 0}, "attention": [{"name": "eva"}, {"name": "sra"}]}


def checkpoint(epoch: int, ranking: list) -> dict:
    return {"config": CONFIG, "epoch": epoch, "ranking": ranking, "model": {"weight": torch.full((2,), float(epoch))}}


def test_a_failed_save_leaves_the_old_file(tmp_path: Path):
    save(tmp_path / "last.pt", checkpoint(1, []))
    with pytest.raises(AttributeError):
        save(tmp_path / "last.pt", checkpoint(2, []) | {"unpicklable": lambda: None})
    assert load(tmp_path / "last.pt")["epoch"] == 1


def test_only_plain_types_are_loaded(tmp_path: Path):
    save(tmp_path / "last.pt", checkpoint(1, []) | {"path": Path("x")})
    with pytest.raises(OptionError, match="no checkpoint that can be loaded safely"):
        load(tmp_path / "last.pt")


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(OptionError, match=r"best\.pt: no checkpoint there"):
        load(tmp_path / "best.pt")


def test_ranking_keeps_the_best_and_of_equals_the_earlier():
    ranking = []
    for epoch, top1 in enumerate((50.0, 70.0, 70.0, 60.0, 40.0), start=1):
        ranking = rank_epoch(ranking, epoch, top1, keep=3)
    assert ranking == [[70.0, 2], [70.0, 3], [60.0, 4]]


def test_last_best_and_the_ranked_epochs_stay(tmp_path: Path):
    ranking = []
    for epoch, top1 in enumerate((50.0, 70.0, 60.0, 40.0), start=1):
        ranking = rank_epoch(ranking, epoch, top1, keep=2)
        save_epoch(tmp_path, checkpoint(epoch, ranking))
    epochs = {path.name: load(path)["epoch"] for path in tmp_path.iterdir()}
    assert epochs == {"last.pt": 4, "best.pt": 2, "epoch_2.pt": 2, "epoch_3.pt": 3}
    assert torch.equal(load(tmp_path / "best.pt")["model"]["weight"], torch.tensor([2.0, 2.0]))


def test_an_epoch_before_the_first_evaluation_is_the_last_only(tmp_path: Path):
    save_epoch(tmp_path, checkpoint(1, []))
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_an_empty_directory_has_no_last_checkpoint(tmp_path: Path):
    assert find_last(tmp_path, CONFIG, ALONE) is None


def test_another_run_is_refused_with_the_differing_options(tmp_path: Path):
    save_epoch(tmp_path, checkpoint(1, []))
    here = {"optim": {"lr": 0.2}, "data": CONFIG["data"], "attention": [{"name": "eva"}, {"name": "sra", "extra": 1}]}
    with pytest.raises(OptionError) as caught:
        find_last(tmp_path, here, ALONE)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(str(tmp_path))
    assert "another directory" in first
    assert lines == ["  attention.1.extra: absent there, 1 here", "  optim.lr: 0.1 there, 0.2 here"]


def test_options_that_change_nothing_learned_may_differ(tmp_path: Path):
    save_epoch(tmp_path, checkpoint(1, []))
    here = CONFIG | {"data": {"root": "/elsewhere", "workers": 4}}
    assert find_last(tmp_path, here, ALONE)["epoch"] == 1
