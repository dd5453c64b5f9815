"""Calibration of this device: a few measurements of each mechanism, and the time and memory that they predict."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from tqdm import tqdm

from attention import OptionError
from bench.candidates import Candidate, Shape, sizes_of
from bench.comparison import Comparison, compare
from bench.cost_model import COVERED, CostModel, Prediction, features
from bench.workload import attention_layer

SCALES = (1 / 4, 1, 1), (1 / 2, 1, 1), (1 / 3, 1 / 2, 1), (4 / 3, 1, 1), (1 / 2, 1 / 2, 2), (2 / 3, 1, 1), (1 / 3, 1, 2)
"""Calibrated shapes relative to the asked one: sides of the grid, channels, heads; in the order of their use."""
SIZES_PER_SHAPE = 2
"""Number of sizes of a mechanism that are timed at a calibrated shape."""
ROUNDS, CALIBRATION_SAMPLE = 3, 0.005
"""Default number of measurements of each layer, and their least length."""
OVERHEAD_MACS = 2e8
"""MACs that take about as long as what precedes a measurement, for the length of a calibration."""
LEAST_POINTS = 4
"""Least number of measurements from which a mechanism's time is predicted."""
LEAST_SHAPES = 4
"""Number of shapes that are timed in any case."""


class Point(NamedTuple):
    """A measured call."""

    candidate: Candidate
    shape: Shape
    seconds: float
    peak_bytes: int


Measure = Callable[[Sequence[Candidate], Shape], list[Point]]
"""Candidates, shape -> measured calls; those that exceed the memory are left out."""


def stopwatch(mode: str, dtype: str, rounds: int, device: torch.device, clock: Callable[[], float]) -> Measure:
    """Returns the function that times layers in turns with random inputs; see `bench.comparison.compare`."""

    def measure(candidates: Sequence[Candidate], shape: Shape) -> list[Point]:
        subjects = [attention_layer(each.entry, shape.dim, shape.num_heads) for each in candidates]
        costs, first = [each.costs(shape) for each in candidates], subjects[0].name
        sizes = shape.grid, shape.batch, mode, dtype, "eager"
        rows = compare(
            Comparison("attention", subjects, first, costs, *sizes), rounds, device, clock, CALIBRATION_SAMPLE
        )
        pairs = zip(candidates, rows, strict=True)
        return [Point(each, shape, row["seconds"], row["peak_bytes"]) for each, row in pairs if row["seconds"]]

    return measure


def calibrated_shapes(asked: Shape) -> list[Shape]:
    """Returns the shapes that are calibrated for the asked one, by `SCALES`; the asked grid is none of theirs."""
    shapes = []
    for scale, width, heads in SCALES:
        grid = tuple(max(1, round(side * scale)) for side in asked.grid)
        dim, num_heads = round(asked.dim * width), asked.num_heads * heads
        if dim * 2 != asked.dim * 2 * width or dim % num_heads:
            dim, num_heads = asked.dim, asked.num_heads
        shapes.append(Shape(grid, dim, num_heads, asked.batch))
    return [shape for shape in dict.fromkeys(shapes) if shape.grid != asked.grid]


def planned(families: Sequence[Candidate], asked: Shape) -> list[tuple[Shape, list[Candidate]]]:
    """Returns the calibrated shapes with the candidates to time there; shapes that accept none are left out."""
    plan = []
    for number, shape in enumerate(calibrated_shapes(asked)):
        candidates = [each for family in families for each in _rotate(sizes_of(family, shape), number)]
        if candidates:
            plan.append((shape, candidates))
    return plan


@dataclass(frozen=True)
class Calibration:
    """Measurements of a device, and the predictions that they allow.

    Attributes:
        points: measured calls. shapes: calibrated shapes. skipped: those for which the time did not suffice.
    """

    points: list[Point]
    shapes: list[Shape]
    skipped: list[Shape]

    @classmethod
    def run(
        cls, families: Sequence[Candidate], asked: Shape, measure: Measure, limit: float, watch: Callable[[], float]
    ) -> "Calibration":
        """Times every family at several shapes and sizes, and skips shapes that would exceed the limit.

        The time of a shape is extrapolated from the last one, in proportion to MACs. Shapes without which there would
        be fewer than `LEAST_SHAPES` are timed in any case, unless they are larger than the asked one. The limit bounds
        the others alone.

        Args:
            limit: seconds. watch: clock of the limit.

        Raises:
            OptionError: no family has `LEAST_POINTS` at the calibrated shapes, however long it takes.
        """
        plan = planned(families, asked)
        points = Counter(each.modelled_as for _, candidates in plan for each in candidates)
        if max(points.values(), default=0) < LEAST_POINTS:
            names = ", ".join(dict.fromkeys(family.name for family in families))
            problem = f"{asked.grid[0]}x{asked.grid[1]}: too few of the calibrated grids around it accept {names}"
            raise OptionError("--tokens", f"{problem}; give more tokens, or another --attention")
        found, start, rate = cls([], [], []), watch(), 0.0
        for shape, candidates in tqdm(plan, desc="calibration", unit="shape", leave=False, disable=None):
            work = sum(each.costs(shape).macs for each in candidates) * shape.batch + OVERHEAD_MACS * len(candidates)
            needed = len(found.shapes) < LEAST_SHAPES and shape.num_tokens <= asked.num_tokens
            if watch() - start + rate * work > limit and not needed:
                found.skipped.append(shape)
                continue
            begun = watch()
            found.points.extend(measure(candidates, shape))
            found.shapes.append(shape)
            rate = (watch() - begun) / work
        return found

    def __str__(self) -> str:
        lines = [
            f"Calibrated with {len(self.points)} measurements: {'; '.join(map(str, self.shapes))}.",
            f"Intervals cover {COVERED:.0%} of its leave-one-out errors.",
            "Outside of the calibrated range they widen, and their upper ends count for budgets and order.",
        ]
        if self.skipped:
            lines += [f"No time for {'; '.join(map(str, self.skipped))}: --calibrate gives more seconds."]
        return "\n".join(lines)

    @cached_property
    def models(self) -> dict[str, tuple[CostModel, CostModel]]:
        """Models of seconds and bytes by `Candidate.modelled_as`, where there are enough measurements."""
        groups: dict[str, list[Point]] = {}
        for point in self.points:
            groups.setdefault(point.candidate.modelled_as, []).append(point)
        found = {}
        for key, points in groups.items():
            if len(points) >= LEAST_POINTS:
                rows = [features(point.candidate, point.shape) for point in points]
                seconds, peaks = ([getattr(p, name) for p in points] for name in ("seconds", "peak_bytes"))
                found[key] = CostModel.of(rows, seconds), CostModel.of(rows, peaks)
        return found

    def predict(self, candidate: Candidate, shape: Shape) -> tuple[Prediction, Prediction] | None:
        """Predicts seconds and bytes; None for a candidate without a model."""
        if candidate.modelled_as not in self.models:
            return None
        row = features(candidate, shape)
        seconds, peaks = self.models[candidate.modelled_as]
        return seconds.predict(row), peaks.predict(row)


def _rotate(sizes: list[Candidate], number: int) -> list[Candidate]:
    """Returns `SIZES_PER_SHAPE` of the sizes, others for the next number, and a default of null, if there is one."""
    default = [each for each in sizes if each.size is None]
    sized = [each for each in sizes if each.size is not None]
    if len(sized) > SIZES_PER_SHAPE:
        sized = [sized[(number + 2 * step) % len(sized)] for step in range(SIZES_PER_SHAPE)]
    return default + sized
