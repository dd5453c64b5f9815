"""A stranger's file describes its model, and chooses no host, path, cache, number of processes or size of memory."""

import copy
import dataclasses
import shlex
import shutil
from pathlib import Path

import pytest

import train
import validate
from engine.checkpoints import export
from engine.checkpoints.files import load_checkpoint, save_checkpoint
from engine.checkpoints.origin import is_made_here
from engine.checkpoints.progress import Progress
from engine.config.schema import SECTIONS, Run
from engine.run import described
from engine.run.described import parse_described
from engine.run.load import dump_run, flatten, load_run
from engine.runtime.errors import UserError
from models import create_model
from tests.analysis.models import load_model
from tests.support.launcher import ROOT
from tests.support.refusals import refusal

OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=8", "attention={name: softmax}", "train.device=cpu"]
HANDS = {
    "data": {
        **{"dataset": "wds", "root": "http://127.0.0.1:9/x y", "train_split": "t", "val_split": "../v"},
        "classes": "/c",
        "workers": 200,
    },
    "train": {"device": "cuda", "compile": True, "timeout_minutes": 9.0},
}


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    run = load_run(ROOT / "configs/quickstart.yaml", OPTIONS)
    state = create_model(attention=run.attention, **run.model).state_dict()
    progress = vars(Progress(epoch=1, step=3))
    metadata = {"config": dump_run(run), "processes": 1, "images": 9, "progress": progress}
    return metadata | {"classes": [*"0123456789"], "model": state}


@pytest.fixture
def hostile(checkpoint: dict, tmp_path: Path) -> Path:
    """A checkpoint whose configuration has `HANDS`."""
    config = copy.deepcopy(checkpoint["config"])
    for section, values in HANDS.items():
        config[section] |= values
    save_checkpoint(tmp_path / "stranger.pt", checkpoint | {"config": config})
    return tmp_path / "stranger.pt"


NOT_BROUGHT = {
    *(f"data.{name}" for name in ("workers", "max_broken", "broken_val")),
    *(f"train.{name}" for name in ("keep_checkpoints", "checkpoint_minutes", "checkpoint_steps")),
    *(f"train.{name}" for name in ("timeout_minutes", "log_every")),
}
"""Options and sections that no file brings: the command line does, or the default applies."""


def test_every_option_is_in_one_list():
    """A new option must be classified: may a stranger's file bring it?"""
    options = {f"{name}.{field.name}": name for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
    options |= {field.name: field.name for field in dataclasses.fields(Run) if field.name not in SECTIONS}
    lists = [described.DESCRIBED, described.CHOICE_OF_IMAGES, described.PLACE, NOT_BROUGHT]
    for key, section in options.items():
        assert sum(key in names or section in names for names in lists) == 1, key
    assert set().union(*lists) <= {*options, *SECTIONS}


@pytest.mark.parametrize("is_own", [False, True])
def test_a_file_brings_what_describes_it(is_own: bool, hostile: Path):
    config = load_checkpoint(hostile)["config"]
    run = parse_described(config, "x", is_own=is_own)
    there, here = (flatten(options) for options in (config, dump_run(run)))
    allowed = described.DESCRIBED | (described.CHOICE_OF_IMAGES | described.PLACE if is_own else set())
    default = flatten(dump_run(Run(model={}, attention={})))
    for key in there:
        section = key.partition(".")[0]
        brought = {key, section} & allowed
        assert here[key] == (there[key] if brought else default[key]), key


def test_images_are_chosen_by_the_command_line(hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Nothing is opened or made; the line has the file's values as arguments."""
    monkeypatch.setattr(validate, "create_val_loader", lambda *args, **options: pytest.fail("opened"))
    (line,) = refusal(validate.main, [hostile], capsys).splitlines()
    assert line.startswith(f"error: {hostile}: does not choose what is opened")
    given = shlex.split(line.partition("; add ")[2].partition(" for the images")[0])
    assert sorted(text.partition("=")[0] for text in given) == sorted(described.CHOICE_OF_IMAGES)
    config = load_checkpoint(hostile)["config"]
    run = parse_described(config, "x", given, reads_images=True)
    here, there = flatten(dump_run(run)), flatten(config)
    assert all(here[key] == there[key] for key in described.CHOICE_OF_IMAGES)


def test_a_split_that_is_not_read_need_not_be_named(hostile: Path):
    given = ["data.val_fraction=0.5", "data.dataset=folder"]
    with pytest.raises(UserError, match=r"add .*data\.train_split=") as caught:
        parse_described(load_checkpoint(hostile)["config"], "x", given, reads_images=True)
    assert "val_split" not in str(caught.value)


@pytest.mark.parametrize("value", ["null", "017", "a: b", "{a: 1}", "it's", "$HOME `x`", "1e3", "-"])
def test_the_arguments_are_the_values(value: str, checkpoint: dict):
    config = copy.deepcopy(checkpoint["config"])
    config["data"] |= {"dataset": "folder", "root": value}
    with pytest.raises(UserError) as caught:
        parse_described(config, "x", reads_images=True)
    given = shlex.split(str(caught.value).partition("; add ")[2].partition(" for the images")[0])
    assert parse_described(config, "x", given, reads_images=True).data.root == value


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose images are in files."""
    base = tmp_path_factory.mktemp("runs")
    options = [*OPTIONS, "schedule.epochs=1", "schedule.warmup_epochs=0", "data.workers=0", "data.dataset=idx"]
    options += [f"data.root={ROOT}/reference", "data.train_split=t10k", "data.val_split=t10k", "data.subset=13"]
    options += ["model.in_chans=1", "train.total_batch_size=64"]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(base / "run")])
    return base / "run"


@pytest.mark.complete
def test_a_run_directory_of_this_machine_chooses_its_images(directory: Path, tmp_path: Path, capsys):
    """Under another name too. A copy of it does not, nor does its checkpoint alone."""
    moved = directory.with_name("moved")
    directory.rename(moved)
    try:
        assert is_made_here(moved)
        validate.main([str(moved), "data.workers=0"])
        assert " 2000 " in capsys.readouterr().out
        shutil.copytree(moved, tmp_path / "copy")
        file = next(moved.glob("step_*_epoch_1.pt"))
        for source in (tmp_path / "copy", file):
            assert f"add data.dataset=idx data.root={ROOT}/reference" in refusal(validate.main, [source], capsys)
    finally:
        moved.rename(directory)


@pytest.mark.complete
def test_a_run_that_goes_on_in_a_copy_is_no_run_of_this_machine(directory: Path, tmp_path: Path):
    shutil.copytree(directory, tmp_path / "copy")
    arguments = [str(directory / "config.yaml"), "schedule.epochs=2", "--allow-change", "schedule.epochs"]
    train.main([*arguments, "--output", str(tmp_path / "copy")])
    assert not is_made_here(tmp_path / "copy")


def test_an_export_of_a_strangers_file_keeps_its_model_alone(hostile: Path, capsys):
    output = hostile.with_name("x.safetensors")
    export.main([str(hostile), str(output)])
    config = load_checkpoint(output)["config"]
    assert config["data"]["root"] is None
    assert config["model"] == load_checkpoint(hostile)["config"]["model"]


def test_a_question_about_images_of_the_command_line_needs_no_others(hostile: Path):
    """As `analyze.py maps` asks it; all other questions read those of the run."""
    assert load_model(hostile, reads_images=False).run.data.root is None
    with pytest.raises(UserError, match="does not choose what is opened"):
        load_model(hostile)
