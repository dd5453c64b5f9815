"""Draws data sets in IDX files: clips of moving digits (see `engine.data.moving`), and images like those of Pathfinder.

Of the latter the class says whether one path joins the two marked ends, after Linsley et al., 2018, "Learning
long-range spatial dependencies with horizontal gated recurrent units". An image has two dashed paths of equal length,
distractors of a third of that length, and marks at two of the four ends of the paths; curves do not touch or cross. In
class 1 one path joins the marks. No part of an image tells the classes apart (`draw` explains why), so that learning
has no easy first step. `--scenes` gives it one: training images of many small scenes (see `draw_graded`); the held-out
split does not change. Equal arguments give equal files, and image i does not depend on the number of images.
"""

from collections.abc import Sequence
from functools import partial

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.data.command_lines:parse_draw")

import numpy as np

from engine.data import moving
from engine.data.arrays import DigitsReader
from engine.data.command_lines import PIXELS, SEPARATION, parse_draw
from engine.data.idx import LIMIT, write_splits
from engine.runtime.errors import UserError, refuse_bad_input

GAP = 1.5
"""Least distance between two curves, tokens."""

ATTEMPTS = 200
"""Number of ends tried for an image, and of curves tried between two ends, before it counts as having no room."""

STEP = 1 / 16
"""Distance between neighbouring points of a curve, tokens."""

DASH, PERIOD = 0.75, 1.25
"""Length of a dash, and of a dash plus the gap after it, tokens."""

MARK = np.hypot(*np.mgrid[-1.5:2, -1.5:2]) < 2
"""Pixels of a mark within its token: a disc."""

ALONG = np.linspace(0, 1, 65)
"""Positions along a chord, as fractions of it."""

WAVES = np.stack([np.sin(k * np.pi * ALONG) / k**1.5 for k in (1, 2, 3)])
"""Deviations from a chord. Each curve has a random mixture of them."""


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_draw(arguments)
    options = {name: getattr(args, name) for name in ("tokens", "length", "distractors", "separation")}
    is_moving = args.kind == "moving"
    digits = [DigitsReader(split).images for split in ("train", "val")] if is_moving else []

    def draw_one(number: int, i: int) -> tuple[np.ndarray, int]:
        """Classes take turns; images of the first split are graded with `--scenes`."""
        rng, label = np.random.default_rng((args.seed, number, i)), i % args.classes
        if is_moving:
            return moving.draw(rng, label, digits[number]), label
        is_graded = args.scenes and number == 0
        return draw_graded(rng, label, args.scenes, **options) if is_graded else draw(rng, label, **options), label

    with refuse_bad_input():
        pixels = moving.FRAMES * moving.SIDE**2 if is_moving else (PIXELS * args.tokens) ** 2
        if (size := max(args.images) * pixels) > LIMIT:
            raise UserError(f"--images {max(args.images)} of {pixels:,} pixels: {size:,} bytes; at most {LIMIT:,}")
        write_splits(args.output, args.images, draw_one)


def draw(
    rng: np.random.Generator,
    label: int,
    tokens: int,
    length: float,
    distractors: int,
    separation: int = SEPARATION,
    attempts: int | None = None,
) -> np.ndarray:
    """Draws one image, bytes of shape (4 tokens, 4 tokens).

    The four ends lie in a circle, where side i leads from end i to the next. Two paths can join them along sides 0 and
    2, or along sides 1 and 3: curves are drawn for both, and a coin chooses one drawing. The label leaves two sides
    whose ends may be marked; another coin chooses one of them. So the drawing is independent of the label, and so are
    the four ends with their marks. A window with sides of `separation` tokens holds one end at most, which is marked in
    half of the images whatever the drawing and the label are: it tells nothing about the label. A sum over windows has
    the same mean in both classes, so that the sum with the least cross-entropy is a constant.

    Args:
        tokens: side of the grid. length: length of a path along its curve, tokens.
        distractors: number of curves of a third of that length. separation: least distance of ends, see `SEPARATION`.
        attempts: curves tried between two ends before new ends are drawn; None: `ATTEMPTS`.
    Raises:
        UserError: many attempts found no room for the paths.
    """
    for _ in range(ATTEMPTS):
        ends = _draw_ends(rng, tokens, length, separation)
        drawn = [_draw_curves(rng, ends, first, tokens, length, distractors, attempts or ATTEMPTS) for first in (0, 1)]
        if all(drawn):
            first, half = rng.integers(2, size=2)
            side = (first + 1 - label + 2 * half) % 4
            return _render(drawn[first], ends[[side, (side + 1) % 4]], tokens)
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
    """Draws one image of equal squares side by side, each a scene of its own, bytes of shape (4 tokens, 4 tokens).

    The number of squares along a side is uniform within `scenes`, both included; the size of a square is uniform among
    the sizes at which so many squares fill the side. `draw` draws each scene, in proportion to its size. All scenes
    have one label, and each is as independent of it as an image of `draw`: counts of pixels or tokens still tell
    nothing, but windows of the size of a scene do. Only an image of a single scene has distractors.
    """
    count = int(rng.integers(scenes[0], scenes[1] + 1))
    largest = tokens // count
    side = int(rng.integers(min(tokens // (count + 1) + 1, largest), largest + 1))
    scale = side / tokens
    image = np.zeros((PIXELS * tokens, PIXELS * tokens), np.uint8)
    corner = PIXELS * rng.integers(tokens - count * side + 1, size=2)
    distractors, attempts = (distractors, ATTEMPTS) if count == 1 else (0, 8)  # then new ends; a few are fastest
    for offset in np.ndindex(count, count):
        y, x = corner + PIXELS * side * np.array(offset)
        scene = draw(rng, label, side, length * scale, distractors, int(separation * scale), attempts)
        image[y : y + PIXELS * side, x : x + PIXELS * side] = scene
    return image


def _draw_ends(rng: np.random.Generator, tokens: int, length: float, separation: int) -> np.ndarray:
    """Draws the centres of four tokens in a circle, (4, 2), neighbours within reach of a path; (0, 2) if it fails."""
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
    """Draws paths along the sides `first` and `first` + 2, and distractors, (points, 2) each; [] if one has no room."""
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
    """Draws a smooth curve of this length that leaves its chord at random: points (n, 2), `STEP` apart."""
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
    """Draws a curve of this length at a random position: points (n, 2)."""
    middle, angle = rng.uniform(1, tokens - 1, 2), rng.uniform(0, 2 * np.pi)
    half = rng.uniform(0.3, 0.475) * length * np.array([np.cos(angle), np.sin(angle)])
    return _draw_curve(rng, middle - half, middle + half, length)


def _fits(curve: np.ndarray, others: list[np.ndarray], tokens: int) -> bool:
    """Returns whether `curve` keeps half a token from the border of the grid, and `GAP` from the others."""
    if curve.min() < 0.5 or curve.max() > tokens - 0.5:
        return False
    if not others:
        return True
    steps = curve[::4, None] - np.concatenate(others)[::4]
    return np.hypot(steps[..., 0], steps[..., 1]).min() >= GAP


def _render(curves: list[np.ndarray], marks: np.ndarray, tokens: int) -> np.ndarray:
    """Renders white dashes and marks on black, (4 tokens, 4 tokens) bytes; the nearest pixels share a point."""
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


if __name__ == "__main__":
    main()
