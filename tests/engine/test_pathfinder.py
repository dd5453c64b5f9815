"""Pathfinder-like images: the whole tells the classes apart, and no part of it does."""

import re

import numpy as np
import pytest

from engine.data import draw as pathfinder
from engine.data.idx import read_idx
from tests.support.refusals import refusal

TOKENS = 14


def draw(index: int, label: int, distractors: int = 0) -> np.ndarray:
    return pathfinder.draw(np.random.default_rng((5, index)), label, TOKENS, 12, distractors)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Each drawing with the marks of either label, (n, label, height, width)."""
    return np.array([[draw(i, label, i % 2) for label in (0, 1)] for i in range(120)])


def tokens_of(images: np.ndarray) -> np.ndarray:
    """(..., 56, 56) -> (..., 14, 14, 16)"""
    blocks = images.reshape(*images.shape[:-2], TOKENS, 4, TOKENS, 4)
    return blocks.swapaxes(-3, -2).reshape(*images.shape[:-2], TOKENS, TOKENS, 16)


def marks_of(images: np.ndarray) -> np.ndarray:
    """Mask of the marked tokens, (..., 14, 14)."""
    return (tokens_of(images)[..., pathfinder.MARK.ravel()] == 255).all(-1)


def grow(area: np.ndarray) -> np.ndarray:
    """`area` and the eight neighbours of each of its pixels."""
    padded = np.pad(area, ((0, 0), (1, 1), (1, 1)))
    rows = padded[:, :-2] | padded[:, 1:-1] | padded[:, 2:]
    return rows[..., :-2] | rows[..., 1:-1] | rows[..., 2:]


@pytest.mark.complete
def test_the_marks_of_class_1_are_joined_and_those_of_class_0_are_not(images):
    for label in (0, 1):
        ink = grow(images[:, label] > 60)  # closes the gaps between dashes
        marks = [np.argwhere(marked) for marked in marks_of(images[:, label])]
        assert {len(found) for found in marks} == {2}
        joined, goal = np.zeros_like(ink), np.zeros_like(ink)
        for i, (begin, end) in enumerate(marks):
            joined[(i, *(4 * begin + 2))] = goal[(i, *(4 * end + 2))] = True
        while (grown := grow(joined) & ink).sum() > joined.sum():
            joined = grown
        assert ((joined & goal).any((1, 2)) == label).all()


def test_a_drawing_has_either_class_by_where_one_mark_is(images):
    """Curves, their number and length, and the other mark are the same to the pixel."""
    first, second = marks_of(images).swapaxes(0, 1)
    assert ((first & second).sum((1, 2)) == 1).all()
    tokens = tokens_of(images)
    assert ((tokens[:, 0] == tokens[:, 1]).all(-1) | (first ^ second)).all()


def test_no_window_of_7x7_tokens_holds_two_marks(images):
    windows = np.lib.stride_tricks.sliding_window_view(marks_of(images), (7, 7), (2, 3))
    assert windows.shape[2:4] == (8, 8)
    assert windows.sum((-2, -1)).max() == 1


def features(images: np.ndarray) -> dict[str, np.ndarray]:
    """Images -> numbers that might reveal a shortcut, (images, numbers)."""
    tokens, marks = tokens_of(images / 255), marks_of(images)
    ink = tokens.sum(-1)
    where = np.array([np.argwhere(marked) for marked in marks])
    distance = np.abs(where[:, 1] - where[:, 0])
    return {
        "pixels": images.reshape(len(images), -1) / 255,
        "tokens": np.stack([ink, marks], -1).reshape(len(images), -1),
        "marks": np.concatenate([where.reshape(-1, 4), distance, distance**2], 1),
    }


def accuracy(inputs: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy on the second half of the images of a ridge regression learned from the first half."""
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-9)
    half, targets = len(inputs) // 2, 2 * labels - 1
    products = inputs @ inputs[:half].T / inputs.shape[1]
    weights = np.linalg.solve(products[:half] + np.eye(half), targets[:half])
    return ((products[half:] @ weights > 0) == labels[half:]).mean()


def test_linear_classifiers_stay_at_chance(images):
    labels = np.arange(2 * len(images)) % 2
    for name, inputs in features(images.reshape(-1, *images.shape[2:])).items():
        chance = accuracy(inputs, labels)
        assert abs(chance - 0.5) < 4 * (0.25 / (len(labels) / 2)) ** 0.5, (name, chance)
        told = accuracy(np.column_stack([inputs, np.tile(labels[:, None], inputs.shape[1] // 20 + 2)]), labels)
        assert told > 0.75, (name, told)  # a shortcut would be found


def test_every_scene_of_a_graded_image_has_either_class_by_where_one_mark_is():
    for count in (1, 2):
        for i in range(4):
            rngs = [np.random.default_rng((count, i)) for _ in range(2)]
            pair = np.array([pathfinder.draw_graded(rngs[y], y, (count, count), TOKENS, 9, 0) for y in (0, 1)])
            marks, tokens = marks_of(pair), tokens_of(pair)
            assert marks.sum((1, 2)).tolist() == 2 * [2 * count**2]
            assert (marks[0] & marks[1]).sum() == count**2
            assert ((tokens[0] == tokens[1]).all(-1) | (marks[0] ^ marks[1])).all()


def test_the_held_out_split_is_not_graded(tmp_path):
    plain, graded = (
        make(tmp_path / name, "--images", 2, 2, "--length", 9, *option)
        for name, option in (("plain", []), ("graded", ["--scenes", 2, 2]))
    )
    assert {name for name in plain if plain[name] != graded[name]} == {"train-images-idx3-ubyte.gz"}


def test_ends_are_as_far_apart_as_is_asked_for(tmp_path):
    make(tmp_path, "--images", 2, 10, "--separation", 9)
    where = np.array([np.argwhere(m) for m in marks_of(read_idx(tmp_path / "t10k-images-idx3-ubyte.gz", num_dims=3))])
    assert np.abs(where[:, 1] - where[:, 0]).max(-1).min() == 9


def make(root, *options: object) -> dict[str, bytes]:
    """File -> its bytes."""
    pathfinder.main(["pathfinder", str(root), "--distractors", "0", *map(str, options)])
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_files_depend_on_the_arguments_alone(tmp_path):
    first = make(tmp_path / "a", "--images", 6, 4)
    assert first == make(tmp_path / "b", "--images", 6, 4)
    assert sorted(first) == [f"{s}-{k}-ubyte.gz" for s in ("t10k", "train") for k in ("images-idx3", "labels-idx1")]
    make(tmp_path / "more", "--images", 8, 4)
    make(tmp_path / "seed", "--images", 6, 4, "--seed", 1)
    of = {name: read_idx(tmp_path / name / "train-images-idx3-ubyte.gz", num_dims=3) for name in ("a", "more", "seed")}
    assert np.array_equal(of["a"], of["more"][:6])
    assert not any(np.array_equal(*pair) for pair in zip(of["a"], of["seed"], strict=True))
    held_out = read_idx(tmp_path / "a" / "t10k-images-idx3-ubyte.gz", num_dims=3)
    assert not any(np.array_equal(*pair) for pair in zip(of["a"], held_out, strict=False))
    assert read_idx(tmp_path / "a" / "t10k-labels-idx1-ubyte.gz", num_dims=1).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--images", "2", "3"], r"--images must be multiples of 2, the number of classes, got \[2, 3\]"),
        (["--images", "400000", "2"], "--images 400000 of 3,136 pixels: 1,254,400,000 bytes; at most 1,073,741,82"),
        (["--length", "200"], "error: no room for paths of --length 200 and --distractors 0 on 14x14 tokens; name"),
        (["--scenes", "3", "2"], r"--scenes must be in ascending order, got \[3, 2\]"),
        (["--scenes", "5", "5"], "error: no room for paths of --length 1.71429 and --distractors 0 on 2x2 tokens"),
        (["--short-side", "0"], "unrecognized arguments: --short-side 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch, capsys, options, problem):
    monkeypatch.setattr(pathfinder, "ATTEMPTS", 2)
    error = refusal(lambda options: make(tmp_path, *options), options, capsys)
    assert list(tmp_path.iterdir()) == []
    assert re.search(problem, error.splitlines()[-1])


def test_what_is_there_is_kept(tmp_path, capsys):
    before = make(tmp_path, "--images", 2, 2)
    error = refusal(lambda options: make(tmp_path, *options), ["--images", 2, 2, "--seed", 1], capsys)
    assert "train-images-idx3-ubyte.gz: is there already; remove it, or name another dir" in error
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
