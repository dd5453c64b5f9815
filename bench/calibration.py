"""Predicted time and memory of attention layers on this device, from a few measurements of each mechanism.

The prediction of a mechanism is a sum of non-negative multiples of the quantities of its `cost`: multiply-accumulates,
those of its projections, channels of all tokens, and weights of attention. A constant stands for launches.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from attention import ATTENTION, AttentionFactory, Grid, LayerContext, OptionError
from attention.fitting import fitted
from attention.options import to_yaml
from bench.comparison import Comparison, compare
from bench.workload import attention_layer
from models.costs import Costs

FACTORS = 1 / 4, 1 / 2, 1, 2, 4
"""Sizes of a mechanism relative to its default."""
STARTING_SIZE = 8
"""Size that stands for a default of null, which depends on the network."""
SCALES = (1 / 4, 1, 1), (1 / 2, 1, 1), (1 / 3, 1 / 2, 1), (4 / 3, 1, 1), (1 / 2, 1 / 2, 2), (2 / 3, 1, 1), (1 / 3, 1, 2)
"""Calibrated shapes relative to the asked one: sides of the grid, channels, heads; in the order of their use."""
SIZES_PER_SHAPE = 2
"""Number of sizes of a mechanism that are timed at a calibrated shape."""
ROUNDS, CALIBRATION_SAMPLE = 3, 0.005
"""Default number of measurements of each layer, and their least length."""
OVERHEAD_MACS = 2e8
"""MACs that take about as long as what precedes a measurement, for the length of a calibration."""
LEAST_POINTS = 4
"""Least number of measurements from which a mechanism's time is predicted, and of shapes that are timed in any case."""
COVERED = 0.9
"""Share of the calibration's own errors that lie within the interval of a prediction."""


class Shape(NamedTuple):
    """Tokens, channels, heads and images of a call of an attention layer."""

    grid: Grid
    dim: int
    num_heads: int
    batch: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens N of an image."""
        return math.prod(self.grid)

    def __str__(self) -> str:
        return f"{self.grid[0]}x{self.grid[1]} tokens, {self.dim} channels, {self.num_heads} heads"


@dataclass(frozen=True)
class Candidate:
    """A mechanism with options.

    Attributes:
        name: the mechanism. options: given options, name -> plain value; others have their defaults.
    """

    name: str
    options: dict[str, Any]

    @property
    def options_text(self) -> str:
        """The given options as ``"window_size=7,num_landmarks=49"``."""
        return ",".join(f"{key}={to_yaml(value)}" for key, value in self.options.items())

    @property
    def entry(self) -> str:
        """The candidate as an entry of ``benchmark.py --attention``."""
        return f"{self.name}:{self.options_text}" if self.options else self.name

    @cached_property
    def factory(self) -> AttentionFactory:
        """The mechanism with checked options."""
        return AttentionFactory.from_options({"name": self.name, **self.options})

    @cached_property
    def family(self) -> "Candidate":
        """The candidate without its size option, and without options that have their default values."""
        default, size = AttentionFactory.from_options(self.name).config, ATTENTION[self.name].size_option
        own = {
            key: x
            for key, x in self.options.items()
            if key != size and getattr(self.factory.config, key) != getattr(default, key)
        }
        return Candidate(self.name, own)

    @property
    def size(self) -> int | None:
        """Value of the mechanism's size option; None if it has none, or if the network determines it."""
        option = ATTENTION[self.name].size_option
        return getattr(self.factory.config, option) if option else None

    @property
    def modelled_as(self) -> str:
        """The family's entry: its sizes share a model, and a size that the network determines has its own."""
        return f"{self.family.entry} sized" if self.size else self.family.entry

    def with_size(self, size: Any) -> "Candidate":
        """Returns the mechanism with another value of its size option."""
        return Candidate(self.name, {**self.options, ATTENTION[self.name].size_option: size})

    def is_valid(self, shape: Shape) -> bool:
        """Returns whether the layer can be built for a shape; nothing is allocated."""
        try:
            with torch.device("meta"):
                self.factory(dim=shape.dim, num_heads=shape.num_heads, grid=shape.grid)
        except OptionError:
            return False
        return True

    def costs(self, shape: Shape) -> Costs:
        """Returns parameters and MACs of the layer for one image, by the mechanism's formulas."""
        context = LayerContext(dim=shape.dim, num_heads=shape.num_heads, grid=shape.grid)
        mechanism, C = ATTENTION[self.name], shape.dim
        beyond = mechanism.cost(context, fitted(mechanism, context, self.factory.config))
        return Costs(4 * C * (C + 1) + beyond.parameters, 4 * shape.num_tokens * C * C + beyond.macs)


def sizes_of(family: Candidate, shape: Shape) -> list[Candidate]:
    """Returns a mechanism at its default size and at multiples of it, by `FACTORS`, that its layer accepts at a shape.

    A refused size is replaced by the next one: filters have odd sides.
    """
    option = ATTENTION[family.name].size_option
    if option is None:
        return [family] if family.is_valid(shape) else []
    sizes = [family] if family.size is None and family.is_valid(shape) else []
    for factor in FACTORS:
        size = max(1, round((family.size or STARTING_SIZE) * factor))
        valid = (each for each in map(family.with_size, (size, size + 1)) if each.is_valid(shape))
        sizes += itertools.islice(valid, 1)
    return distinct(sizes)


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the first of all candidates that have the same options, given or by default."""
    return list({(each.name, each.factory.config): each for each in reversed(list(candidates))}.values())[::-1]


def features(candidate: Candidate, shape: Shape) -> tuple[float, ...]:
    """Quantities of a call; its time and memory are sums of their multiples. The first is 1, for the constant term.

    The others are MACs; MACs of projections alone; channels of all tokens; weights of attention; parameters; channels
    of all tokens times the size, for filters without MACs; and the same divided by the size, for the cost of a window.
    """
    N, C, B, costs = shape.num_tokens, shape.dim, shape.batch, candidate.costs(shape)
    projections, channels, size = 4 * N * C * C, B * N * C, candidate.size
    weights = abs(costs.macs - projections) * shape.num_heads / C
    by_size = (float(channels * size), channels / size) if size else (0.0, 0.0)
    return 1.0, float(B * costs.macs), float(B * projections), float(channels), B * weights, costs.parameters, *by_size


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """Returns non-negative weights w that minimise the squares of rows w / values - 1 (Lawson and Hanson, 1974)."""
    scaled = np.asarray(rows, float) / np.asarray(values, float)[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    scaled = scaled / norms
    weights, used = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], bool)
    for _ in range(3 * len(weights)):
        gain = np.where(used, -np.inf, scaled.T @ (1 - scaled @ weights))
        if gain.max() <= 1e-9:
            break
        used[gain.argmax()] = True
        while True:
            free = np.zeros(len(weights))
            free[used] = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
            below = used & (free <= 0)
            if not below.any():
                break
            weights += (weights[below] / (weights[below] - free[below] + 1e-300)).min() * (free - weights)
            used &= weights > 1e-12
            weights[~used] = 0
        weights = free
    return weights / norms


class Prediction(NamedTuple):
    """A predicted quantity.

    Attributes:
        low, high: interval that covers `COVERED` of the errors of calibrated measurements, each predicted from the
            others. It widens outside of the calibrated range. beyond: largest factor by which the call is outside of
            it, in steps of 0.01; 1 if it is within.
    """

    value: float
    low: float
    high: float
    beyond: float

    @property
    def counted(self) -> float:
        """The cost that counts for budgets and order: outside of the calibrated range the upper end of the interval."""
        return self.high if self.beyond > 1 else self.value


@dataclass(frozen=True)
class Model:
    """Prediction of one quantity of one mechanism.

    Attributes:
        weights: one for each of `features`. error: factor, at least 1, of the interval. least, most: calibrated range.
    """

    weights: np.ndarray
    error: float
    least: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], values: Sequence[float]) -> "Model":
        """Fits the model to measured values, which are positive."""
        rows, values = np.asarray(rows, float), np.maximum(np.asarray(values, float), np.finfo(float).tiny)
        ratios = []
        for left_out in range(len(rows)):
            others = np.arange(len(rows)) != left_out
            predicted = rows[left_out] @ fit_nonnegative(rows[others], values[others])
            ratios.append(abs(math.log(max(predicted, 1e-300) / values[left_out])))
        error = math.exp(min(float(np.quantile(ratios, COVERED)), 5.0))
        return cls(fit_nonnegative(rows, values), error, rows.min(0), rows.max(0))

    def predict(self, row: Sequence[float]) -> Prediction:
        """Predicts the quantity for a call with these features.

        The interval holds for all non-negative weights that agree on the nearest features within the calibrated range:
        a call with up to twice those features costs once to twice as much.
        """
        row = np.asarray(row, float)
        edge = float(np.clip(row, self.least, self.most) @ self.weights)
        used = (row > 0) & (self.most > 0)
        above = max(1.0, *(row[used] / self.most[used]))
        below = max(1.0, *(self.least[used] / row[used]))
        low, high = edge / below / self.error, edge * above * self.error
        return Prediction(float(row @ self.weights), low, high, round(float(max(above, below)), 2))


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

        A shape is taken to last as much longer than the last one as it has more MACs. Shapes without which there would
        be fewer than `LEAST_POINTS` are timed in any case, unless they are larger than the asked one. The limit bounds
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
            needed = len(found.shapes) < LEAST_POINTS and shape.num_tokens <= asked.num_tokens
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
            f"Intervals cover {COVERED:.0%} of its own errors, each measurement predicted from the others.",
            "Outside of the calibrated range they widen, and their upper ends count for budgets and order.",
        ]
        if self.skipped:
            lines += [f"No time for {'; '.join(map(str, self.skipped))}: --calibrate gives more seconds."]
        return "\n".join(lines)

    @cached_property
    def models(self) -> dict[str, tuple[Model, Model]]:
        """Models of seconds and bytes by `Candidate.modelled_as`, where there are enough measurements."""
        groups: dict[str, list[Point]] = {}
        for point in self.points:
            groups.setdefault(point.candidate.modelled_as, []).append(point)
        found = {}
        for key, points in groups.items():
            if len(points) >= LEAST_POINTS:
                rows = [features(point.candidate, point.shape) for point in points]
                seconds, peaks = ([getattr(p, name) for p in points] for name in ("seconds", "peak_bytes"))
                found[key] = Model.of(rows, seconds), Model.of(rows, peaks)
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
