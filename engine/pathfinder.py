"""Draws Pathfinder-like images, in IDX files: are two marked ends joined by one path, or do they belong to two?

    python -m engine.prepare --make pathfinder runs/data/pathfinder
    python -m engine.prepare --make pathfinder runs/data/pathfinder32 --tokens 32 --length 24 --distractors 4
    python -m engine.prepare --make pathfinder runs/data/graded --scenes 1 2 --length 9

After Linsley et al., 2018, "Learning long-range spatial dependencies with horizontal gated recurrent units". An image
has two dashed paths of one length, distractors of a third of that length, and a mark at two of the paths' four ends;
nothing touches or crosses. Class 1: one path joins the marks. `draw` says why no part of an image tells the classes
apart. Then learning has no first step; `--scenes` gives it one, a training split of images of many small scenes (see
`draw_graded`). The held-out split stays as it is. The same arguments give the same files, and image i does not depend
on how many there are.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engine.config import refuse_bad_input
from engine.errors import UserError
from engine.files import make_output
from engine.idx import IMAGES, LABELS, LIMIT, write_idx

SPLITS = ("train", "t10k")

PIXELS = 4
"""Side of a token, pixels."""

SEPARATION = 7
"""Tokens between two ends, along one axis at least: no window of so many tokens a side holds both."""

GAP = 1.5
"""Least distance of two curves, tokens."""

ATTEMPTS = 200
"""Ends of an image, or curves between two, before there is no room."""

GRADED_ATTEMPTS = 8
"""Curves between two ends of one scene among many, before others are drawn: giving up early is faster."""

STEP = 1 / 16
"""Distance of a curve's points, tokens."""

DASH, PERIOD = 0.75, 1.25
"""Length of a dash, and of a dash with the gap after it; tokens."""

MARK = np.hypot(*np.mgrid[-1.5:2, -1.5:2]) < 2
"""Pixels of a marked token: a disc."""

ALONG = np.linspace(0, 1, 65)
WAVES = np.stack([np.sin(k * np.pi * ALONG) / k**1.5 for k in (1, 2, 3)])
"""A curve leaves its chord by a random mixture of these."""

BOUNDS = {
    "images": (2, 10**7),
    "tokens": (14, 64),
    "length": (8, 200),
    "distractors": (0, 100),
    "separation": (7, 63),
    "scenes": (1, 16),
    "seed": (0, 2**63),
}
"""Option -> its least and largest value."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.prepare --make pathfinder", description="Draw Pathfinder-like images, in IDX files."
    )
    parser.add_argument("output", type=Path, help="directory of the splits train and t10k")
    parser.add_argument(
        "--images", type=int, nargs=2, default=(20_000, 2_000), help="of each split (20000 2000)", metavar=("N", "M")
    )
    parser.add_argument("--tokens", type=int, default=14, help=f"a side, {PIXELS}x{PIXELS} pixels each (14)")
    parser.add_argument("--length", type=int, default=12, help="tokens that a path is long (12)")
    parser.add_argument("--distractors", type=int, default=1, help="curves of a third of that length (1)")
    parser.add_argument("--separation", type=int, default=SEPARATION, help=f"least tokens between ends ({SEPARATION})")
    parser.add_argument(
        "--scenes",
        type=int,
        nargs=2,
        help="grade train: so many small ones along a side of an image",
        metavar=("A", "B"),
    )
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args(arguments)
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= np.min(value) <= np.max(value) <= high:
            parser.error(f"--{name} must be {low} to {high}, got {value}")
    if any(count % 2 for count in args.images):
        parser.error(f"--images must be even, half of them of each class, got {args.images}")
    if args.scenes and args.scenes[0] > args.scenes[1]:
        parser.error(f"--scenes must be in ascending order, got {args.scenes}")
    if (size := max(args.images) * (PIXELS * args.tokens) ** 2) > LIMIT:
        parser.error(f"--images {max(args.images)} of {args.tokens} tokens a side: {size:,} bytes; at most {LIMIT:,}")
    with refuse_bad_input():
        make(**vars(args))


def make(output: Path, images: Sequence[int], scenes: tuple[int, int] | None, seed: int, **options: int) -> None:
    """Writes the splits, each of so many `images`, every other one of class 1, below `output`.

    Args:
        scenes: grade the training split, see `draw_graded`.
        options: tokens, length, distractors, separation, see `draw`.
    Raises:
        UserError: there is no room for the paths, or a split is there already or cannot be written.
    """
    files = [[output / f"{split}{ending}.gz" for ending in (IMAGES, LABELS)] for split in SPLITS]
    for path in itertools.chain(*files):
        if path.exists():
            raise UserError(f"{path}: is there already; remove it, or name another directory")
    make_output(output, [path.name for path in itertools.chain(*files)], "output")
    for split, (image_file, label_file), count in zip(range(len(SPLITS)), files, images, strict=True):
        labels = np.arange(count) % 2
        with tqdm(range(count), SPLITS[split], unit=" images", dynamic_ncols=True, disable=None) as bar:
            draw_one: Callable[..., np.ndarray] = draw
            if scenes and SPLITS[split] == "train":
                draw_one = partial(draw_graded, scenes=scenes)
            drawn = [draw_one(np.random.default_rng((seed, split, i)), labels[i], **options) for i in bar]
        write_idx(image_file, np.stack(drawn))
        write_idx(label_file, labels)


def draw(
    rng: np.random.Generator,
    label: int,
    tokens: int,
    length: float,
    distractors: int,
    separation: int = SEPARATION,
    attempts: int | None = None,
) -> np.ndarray:
    """One image, bytes of shape (4 tokens, 4 tokens).

    The four ends lie in a circle, where side i leads from end i to the next. They can be joined along sides 0 and 2,
    or along sides 1 and 3: curves are drawn for both, and a coin chooses one drawing. Another coin chooses what is
    marked, the ends of one of the two sides that the label leaves. So the drawing is independent of the label, and so
    are the four ends with their marks. A window of `separation` tokens a side holds one end at most, marked in half of
    the images whatever drawing and label are: it tells nothing, and a sum over windows has the same mean in both
    classes, so that by cross-entropy the best of such sums is a constant.

    Args:
        tokens: grid side. length: of a path along its curve, tokens. distractors: curves of a third of that length.
        separation: least tokens between two ends, see `SEPARATION`.
        attempts: curves between two ends, before others are drawn; by default `ATTEMPTS`.
    Raises:
        UserError: the paths found no room in many attempts.
    """
    for _ in range(ATTEMPTS):
        ends = _draw_ends(rng, tokens, length, separation)
        drawings = [
            _draw_curves(rng, ends, first, tokens, length, distractors, attempts or ATTEMPTS) for first in (0, 1)
        ]
        if all(drawings):
            first, half = rng.integers(2, size=2)
            side = (first + 1 - label + 2 * half) % 4
            return _render(drawings[first], ends[[side, (side + 1) % 4]], tokens)
    raise UserError(
        f"no room for paths of --length {length:g} and --distractors {distractors} on {tokens}x{tokens} tokens; name"
        " another length, fewer distractors or scenes, a smaller separation or more tokens"
    )


def draw_graded(
    rng: np.random.Generator,
    label: int,
    scenes: tuple[int, int],
    tokens: int,
    length: float,
    distractors: int,
    separation: int = SEPARATION,
) -> np.ndarray:
    """One image of equal squares side by side, each a scene of its own, bytes of shape (4 tokens, 4 tokens).

    The number of squares along a side is uniform within `scenes`, both included, and so is their side among those of
    which no more fit. A scene is what `draw` makes of so many tokens, with length and separation in proportion; all
    have one label, and each is as independent of it as an image of `draw`. So numbers of pixels or tokens still tell
    nothing, but windows of the size of a scene do. Distractors are where there is one scene.

    Args:
        scenes: least and largest number along a side. Others: of an image of `draw`.
    Raises:
        UserError: the paths of a scene found no room in many attempts.
    """
    count = int(rng.integers(scenes[0], scenes[1] + 1))
    largest = tokens // count
    side = int(rng.integers(min(tokens // (count + 1) + 1, largest), largest + 1))
    scale = side / tokens
    image = np.zeros((PIXELS * tokens, PIXELS * tokens), np.uint8)
    corner = PIXELS * rng.integers(tokens - count * side + 1, size=2)
    for offset in np.ndindex(count, count):
        y, x = corner + PIXELS * side * np.array(offset)
        image[y : y + PIXELS * side, x : x + PIXELS * side] = draw(
            rng,
            label,
            side,
            length * scale,
            distractors if count == 1 else 0,
            int(separation * scale),
            attempts=ATTEMPTS if count == 1 else GRADED_ATTEMPTS,
        )
    return image


def _draw_ends(rng: np.random.Generator, tokens: int, length: float, separation: int) -> np.ndarray:
    """Centres of four tokens in a circle, (4, 2), neighbours within the reach of a path; or none, (0, 2)."""
    for found in np.split(rng.integers(tokens, size=(1024, 4, 2)) + 0.5, 16):
        apart = np.abs(found[:, :, None] - found[:, None]).max(-1) + separation * np.eye(4)
        found = found[(apart >= separation).all((1, 2))]
        x, y = np.moveaxis(found - found.mean(1, keepdims=True), -1, 0)
        found = np.take_along_axis(found, np.arctan2(y, x).argsort(1)[..., None], 1)
        chords = np.linalg.norm(found - np.roll(found, 1, 1), axis=-1)
        if (fits := (chords < 0.95 * length).all(1)).any():
            return found[fits][0]
    return np.empty((0, 2))


def _draw_curves(
    rng: np.random.Generator, ends: np.ndarray, first: int, tokens: int, length: float, distractors: int, attempts: int
) -> list[np.ndarray]:
    """Paths along the sides `first` and `first` + 2, and distractors, (points, 2) each; none without room for all."""
    if not len(ends):
        return []
    sides = [partial(_draw_curve, rng, ends[i], ends[(i + 1) % 4], length) for i in (first, first + 2)]
    curves: list[np.ndarray] = []
    for draw_one in sides + [partial(_draw_distractor, rng, tokens, length / 3)] * distractors:
        tried = (draw_one() for _ in range(attempts))
        curve = next((curve for curve in tried if _fits(curve, curves, tokens)), None)
        if curve is None:
            return []
        curves.append(curve)
    return curves


def _draw_curve(rng: np.random.Generator, start: np.ndarray, end: np.ndarray, length: float) -> np.ndarray:
    """A smooth curve of this length that leaves its chord to either side at random: points (n, 2), `STEP` apart."""
    chord = end - start
    across = np.array([-chord[1], chord[0]]) / np.hypot(*chord)
    wave = rng.normal(size=len(WAVES)) @ WAVES
    rises = np.diff(wave)
    scales = np.linspace(0, length / np.abs(rises).sum(), 64)
    lengths = np.hypot(np.hypot(*chord) / len(rises), scales[:, None] * rises).sum(1)
    points = start + ALONG[:, None] * chord + np.interp(length, lengths, scales) * wave[:, None] * across
    reached = np.append(0, np.hypot(*np.diff(points, axis=0).T).cumsum())
    return np.stack([np.interp(np.arange(0, length, STEP), reached, axis) for axis in points.T], 1)


def _draw_distractor(rng: np.random.Generator, tokens: int, length: float) -> np.ndarray:
    """A curve of this length somewhere: points (n, 2)."""
    middle, angle = rng.uniform(1, tokens - 1, 2), rng.uniform(0, 2 * np.pi)
    half = rng.uniform(0.3, 0.475) * length * np.array([np.cos(angle), np.sin(angle)])
    return _draw_curve(rng, middle - half, middle + half, length)


def _fits(curve: np.ndarray, others: list[np.ndarray], tokens: int) -> bool:
    """Whether `curve` is half a token or more within the grid, and `GAP` from the others."""
    if curve.min() < 0.5 or curve.max() > tokens - 0.5:
        return False
    if not others:
        return True
    steps = curve[::4, None] - np.concatenate(others)[::4]
    return np.hypot(steps[..., 0], steps[..., 1]).min() >= GAP


def _render(curves: list[np.ndarray], marks: np.ndarray, tokens: int) -> np.ndarray:
    """White dashes and marks on black, (4 tokens, 4 tokens) bytes: a point's white is shared by the nearest pixels."""
    image = np.zeros((PIXELS * tokens, PIXELS * tokens))
    for curve in curves:
        dashed = PIXELS * curve[np.arange(len(curve)) * STEP % PERIOD < DASH] - 0.5
        corner = np.floor(dashed).astype(int)
        for shift in ((0, 0), (0, 1), (1, 0), (1, 1)):
            x, y = (corner + shift).T
            np.maximum.at(image, (y, x), np.prod(1 - np.abs(dashed - corner - shift), axis=1))
    image = np.minimum(2 * image, 1)
    for x, y in (PIXELS * (marks - 0.5)).astype(int):
        image[y : y + PIXELS, x : x + PIXELS][MARK] = 1
    return np.rint(255 * image).astype(np.uint8)
