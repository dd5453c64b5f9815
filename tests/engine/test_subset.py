"""data.subset and data.classes choose exactly the requested images of every class, in their order."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attention.options import OptionError
from engine.config.schema import Data, Run, Train
from engine.data.identity import digest_files
from engine.data.loaders import create_loaders
from engine.data.splits import classes_of, open_split, report_split
from engine.run.checks import list_checks
from engine.run.load import dump_run, load_run, parse_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError
from tests.support.refusals import assert_split_refused

ROOT = Path(__file__).parents[2]


def open_digits(split: str = "train_split", **options):
    return open_split(Data(dataset="digits", **options), split)


def pixels(images) -> list[bytes]:
    return [images.reader[index][0].read() for index in range(len(images))]


ALL = open_digits()
SPLITS = ("train_split", "val_split")
COUNTS = np.bincount(ALL.reader.labels)


@pytest.mark.parametrize(
    ("subset", "counts"),
    [(13, [13] * 10), (1, [1] * 10), (0.1, (COUNTS * 0.1).round()), (1e-9, [1] * 10), (1.0, COUNTS)],
)
def test_of_every_class_so_many_in_their_order(subset, counts):
    images = open_digits(subset=subset)
    assert np.bincount(images.reader.labels).tolist() == list(counts)
    assert (np.diff(images.reader.indices) > 0).all()
    whole = pixels(ALL)
    assert pixels(images) == [whole[index] for index in images.reader.indices]
    assert list(images.reader.filenames()) == [ALL.filename(index) for index in images.reader.indices]
    assert [images.reader[index][1] for index in range(len(images))] == images.reader.labels.tolist()
    assert len(open_digits("val_split", subset=subset)) == 360
    assert (digest_files(images) == digest_files(ALL)) == (len(images) == len(ALL))


def test_the_choice_is_that_of_its_seed():
    chosen = [open_digits(subset=13, subset_seed=seed).reader.indices.tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1]
    assert len({*chosen[0]} & {*chosen[2]}) < 65
    more = open_digits(subset=26).reader.indices
    assert {*chosen[0]} < {*more.tolist()}  # learning curves add images, and take none away
    sevens = np.flatnonzero(ALL.reader.labels == 7)
    positions = np.searchsorted(sevens, more[ALL.reader.labels[more] == 7])
    assert 40 < positions.mean() < 105  # of 143: from all of the class


@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 1e-9])
def test_images_held_out_validate_and_are_not_trained_on(val_fraction):
    train, val = (open_digits(split, val_fraction=val_fraction) for split in SPLITS)
    assert np.bincount(val.reader.labels).tolist() == [max(1, round(val_fraction * count)) for count in COUNTS]
    assert sorted([*train.reader.indices, *val.reader.indices]) == [*range(len(ALL))]
    whole = pixels(ALL)
    for images in (train, val):
        assert (np.diff(images.reader.indices) > 0).all()
        assert pixels(images) == [whole[index] for index in images.reader.indices]
    again, other = (open_digits("val_split", val_fraction=val_fraction, subset_seed=seed) for seed in (0, 1))
    assert {*again.reader.indices} == {*val.reader.indices} != {*other.reader.indices}
    assert len({digest_files(images) for images in (train, val, other, ALL)}) == 4


def test_images_are_held_out_of_the_subset():
    chosen, train, val = open_digits(subset=20), *(open_digits(s, subset=20, val_fraction=0.25) for s in SPLITS)
    assert (len(train), len(val)) == (150, 50)
    assert sorted([*train.reader.filenames(), *val.reader.filenames()]) == sorted(chosen.reader.filenames())


@pytest.mark.parametrize("folds", [2, 5, 7])
@pytest.mark.parametrize("seed", [0, 3])
def test_folds_partition_the_images_and_are_alike_in_their_classes(folds, seed):
    """Every image validates in one fold and is trained on in the others; counts, also of each class, differ by 1."""
    parts = [[open_digits(s, folds=folds, fold=f, subset_seed=seed).reader for s in SPLITS] for f in range(folds)]
    assert sorted(index for _, val in parts for index in val.indices) == [*range(len(ALL))]
    for train, val in parts:
        assert sorted([*train.indices, *val.indices]) == [*range(len(ALL))]
        assert (np.diff(val.indices) > 0).all()
    counts = np.array([np.bincount(val.labels, minlength=10) for _, val in parts])
    for sizes in (counts.sum(1, keepdims=True), counts):
        assert (sizes.max(0) - sizes.min(0)).max() <= 1
    again = open_digits("val_split", folds=folds, fold=1, subset_seed=seed).reader.indices
    assert (again == parts[1][1].indices).all()
    assert {*open_digits("val_split", folds=folds, fold=1, subset_seed=seed + 1).reader.indices} != {*again}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subset": 200}, r"data.subset = 200, but class '0' has 14\d images; lower it"),
        ({"subset": 1, "val_fraction": 0.1}, "val_fraction = 0.1, but class '0' has 1 images, and some must stay"),
        ({"subset": 4, "folds": 5}, "data.folds = 5, but class '0' has 4 images; lower it"),
    ],
)
def test_a_class_with_too_few_images_is_named(options, problem):
    with pytest.raises(OptionError, match=problem):
        open_digits(**options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subset": 13.0}, "data.subset = 13.0 is no fraction; write 13 for as many images of every class"),
        ({"subset_seed": 1}, "data.subset_seed = 1, but data.subset, data.val_fraction and data.folds are null"),
        ({"folds": 5, "val_fraction": 0.2}, "data.folds = 5, and data.val_fraction = 0.2: both hold images out"),
        ({"folds": 5, "fold": 5}, "data.fold = 5 is none of data.folds = 5: 0 to 4"),
        ({"fold": 1}, "data.fold = 1, but data.folds is null: give their number, or leave it out"),
    ],
)
def test_what_has_no_meaning_is_refused(options, problem):
    run = Run(model={"in_chans": 3}, attention="softmax", data=Data(**options))
    (found,) = (problem for check in list_checks() for problem in check(run) or ())
    assert str(found).startswith(problem)


def test_one_folder_of_class_folders_is_enough(tmp_path, capsys):
    """Without splits, the data names its remedy; then held-out images validate, and the log says so."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(10):
            (tmp_path / name / f"{index}.png").touch()
    remedy = "found there: cat, dog; if those .* data.train_split=. data.val_fraction="
    assert_split_refused(remedy, root=str(tmp_path))
    remedy = r"no 'val' in .*; in training, data.val_fraction=0.2 .* data.val_split=\.$"
    assert_split_refused(remedy, "val", root=str(tmp_path), train_split=".")
    data = Data(root=str(tmp_path), train_split=".", val_fraction=0.2)
    train, val = (open_split(data, split) for split in SPLITS)
    assert (len(train), len(val), classes_of(val)) == (16, 4, ["cat", "dog"])
    report_split(data, "val_split", val, img_size=28)
    told = "validation: 4 images held out of data.train_split = '.' (data.val_fraction = 0.2); data.val_split is not"
    assert capsys.readouterr().err.startswith(told)


def test_ignored_files_are_named_once_where_images_are_held_out(tmp_path, capsys):
    for name in ("a/0.png", "a/1.png", "a/2.png", "a/3.png", "a/._0.png", "a/notes.txt", "b/0.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    data = Data(root=str(tmp_path), train_split=".", val_fraction=0.5, workers=0)
    run = Run(model={}, attention="softmax", data=data, train=Train(total_batch_size=2))
    create_loaders(run, World(torch.device("cpu")), img_size=8, num_classes=2)
    told = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
    hidden = "1 hidden or of the system ('a/._0.png')"
    assert told == [f"data.train_split: ignored files: {hidden}, 1 *.txt ('a/notes.txt')"]


def test_loose_images_are_told_how_to_go_on(tmp_path):
    (tmp_path / "train").mkdir()
    for folder in (tmp_path, tmp_path / "train"):
        (folder / "a.png").touch()
    problem = "images in no class folder: 1, such as 'a.png'; move each .*dataset=csv"
    assert_split_refused(problem, root=str(tmp_path))
    problem = "no 'x' in .* 1 images in no folder, such as 'a.png', train; move each .*cs"
    assert_split_refused(problem, root=str(tmp_path), train_split="x")


def test_classes_are_chosen_and_ordered_by_a_file(tmp_path):
    (tmp_path / "classes.txt").write_text("\ufeff7\n\n2 \n")  # as Windows writes them
    images = open_digits(classes=str(tmp_path / "classes.txt"), subset=5)
    assert classes_of(images) == ["7", "2"]
    assert images.reader.num_available == 1437
    assert np.bincount(images.reader.labels).tolist() == [5, 5]
    whole = pixels(ALL)
    for content, label in zip(pixels(images), images.reader.labels, strict=True):
        assert [7, 2][label] == ALL.reader.labels[whole.index(content)]


def test_numbers_get_the_names_in_a_file(tmp_path):
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    images = open_digits(classes=str(tmp_path / "classes.txt"))
    assert classes_of(images) == names  # also one of which there is no image here
    assert images.reader.labels.tolist() == ALL.reader.labels.tolist()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file or directory; data.classes=null takes the classes of the data$"),
        ("\n \n", "names no class; write one a line"),
        ("1\n2\n1\n", "line 3 names '1' again; leave one out"),
        ("1\ntwo\n", "line 2: 'two' is no class of the data; known: 0, 1, 2, .*; data.classes=null takes the c"),
        ("one\ntwo\n", "line 1: 'one' is no class of the data"),
    ],
)
def test_a_file_that_names_no_classes_is_refused(tmp_path, text, problem):
    if text is not None:
        (tmp_path / "classes.txt").write_text(text)
    assert_split_refused(problem, key="data.classes", dataset="digits", classes=str(tmp_path / "classes.txt"))


def test_a_split_is_not_given_beside_images_that_are_held_out():
    """A checkpoint that has validated on held-out images would otherwise be evaluated on them under another name."""
    run = dump_run(load_run(ROOT / "configs/quickstart.yaml", ["data.val_fraction=0.1"]))
    with pytest.raises(ConfigError, match=r"^data.val_split = 'val': runs/x has data.val_fraction = 0.1, .*tion=null"):
        parse_run(run, "runs/x", ["data.val_split=val"])
    assert parse_run(run, "runs/x", ["data.val_split=val", "data.val_fraction=null"]).data.val_fraction is None
    assert parse_run(run, "runs/x", ["data.root=elsewhere"]).data.val_fraction == 0.1
