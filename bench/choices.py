"""Candidates of a recommendation: the checked question, predicted costs and stored quality of every mechanism and size.

Candidates are all mechanisms at their default options, at multiples of their size, and with the options of stored
measurements.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attention import ATTENTION, AttentionFactory, Grid
from attention.options import OptionError
from bench.budgets import parse_budget
from bench.calibration import Calibration, calibrated_shapes
from bench.candidates import Candidate, Shape, distinct, sizes_of
from bench.cost_model import Prediction
from bench.devices import Roofline
from bench.quality import Match, Quality, default_measure, find_quality, read_quality
from bench.workload import read_options
from engine.runtime.ownership import make_output

BUDGETS = {
    "ms": "milliseconds of a call",
    "memory": "MiB that a call allocates at its peak",
    "macs": "multiply-accumulates relative to softmax attention's layer",
}
"""Key of a budget -> what it limits."""
RECOMMENDATION_FILE, VERIFICATION_FILE = "recommendation.csv", "verification.csv"
"""Files of the ranking, and of the measured candidates of held-out grids."""


@dataclass(frozen=True)
class Request:
    """A checked question.

    Attributes:
        shape: layer that is asked for. families: mechanisms in question, without sizes. budgets: key of `BUDGETS` ->
            limit. stored: quality by `measure`. held_out: grids that are timed exhaustively.
    """

    shape: Shape
    families: Sequence[Candidate]
    budgets: Mapping[str, float]
    measure: str
    stored: Sequence[Quality]
    held_out: Sequence[Grid]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Request":
        """Checks a command line before any work.

        Raises:
            OptionError, UserError: an option that cannot be honoured, or a file that cannot be used.
        """
        if args.output:
            make_output(args.output, [RECOMMENDATION_FILE, VERIFICATION_FILE])
        budgets, stored = parse_budgets(args.budget), read_quality()
        measure = args.measure or default_measure(stored)
        stored = [each for each in stored if each.measure == measure]
        if not stored:
            raise OptionError("--measure", f"{measure}: no stored values; python -m bench.quality derives them")
        shape = Shape(args.tokens[0], args.dim, args.num_heads, args.batch_size)
        Candidate("softmax", {}).factory(dim=shape.dim, num_heads=shape.num_heads, grid=shape.grid)
        known = [each.candidate.family for each in stored]
        if args.attention:
            families = [parse_family(text) for text in args.attention]
        else:
            families = [*(Candidate(name, {}) for name in ATTENTION), *known]
        held_out = [] if args.verify is None else args.verify or [shape.grid]
        calibrated = {each.grid for each in calibrated_shapes(shape)}
        for grid in held_out:
            if grid in calibrated:
                problem = "is calibrated, and would not be held out"
                raise OptionError("--verify", f"{grid[0]}x{grid[1]} {problem}; give --tokens or another grid")
        request = cls(shape, distinct(families), budgets, measure, stored, held_out)
        for key, grid in [("--tokens", shape.grid), *(("--verify", grid) for grid in held_out)]:
            if not request.candidates(shape._replace(grid=grid)):
                names = ", ".join(dict.fromkeys(family.name for family in families))
                raise OptionError(key, f"{grid[0]}x{grid[1]}: no size of {names} fits; give a larger grid")
        return request

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Returns all sizes of the families, and their stored options, that layers accept at a shape."""
        families = {(family.name, family.factory.config) for family in self.families}
        stored = [each.candidate for each in self.stored]
        stored = [c for c in stored if (c.name, c.family.factory.config) in families and c.is_valid(shape)]
        return distinct([*(each for family in self.families for each in sizes_of(family, shape)), *stored])


def parse_budgets(texts: Sequence[str]) -> dict[str, float]:
    """Parses ``["ms=5", "macs=0.5"]``.

    Raises:
        OptionError: a budget that `parse_budget` refuses, or a repeated key.
    """
    budgets: dict[str, float] = {}
    for text in texts:
        key, limit = parse_budget(text, BUDGETS)
        if key in budgets:
            raise OptionError("--budget", f"{text!r}: {key} is given twice; give it once")
        budgets[key] = limit
    return budgets


def parse_family(text: str) -> Candidate:
    """Parses ``"NAME[:OPTION=VALUE,...]"`` without a size, which the recommendation chooses.

    Raises:
        OptionError, ConfigError: unknown mechanism or option, or a size.
    """
    name, _, options = text.partition(":")
    candidate = Candidate(name, read_options(text, options))
    AttentionFactory.from_options({"name": name, **candidate.options}, "--attention")
    size = ATTENTION[name].size_option
    if size in candidate.options:
        raise OptionError("--attention", f"{text!r}: --recommend chooses {size}; leave it out")
    return candidate.family


@dataclass(frozen=True)
class Choice:
    """A candidate with its predicted costs and stored quality.

    Attributes:
        macs_ratio: MACs relative to softmax attention's layer. match: None without a stored quality.
    """

    candidate: Candidate
    seconds: Prediction
    peak_bytes: Prediction
    macs: int
    macs_ratio: float
    match: Match | None

    @property
    def loss(self) -> float:
        """Stored quality, infinite without one."""
        return self.match.quality.value if self.match else math.inf

    @property
    def order(self) -> tuple[float, float]:
        """Key that sorts the best first: by quality, then by predicted time."""
        return self.loss, self.seconds.counted

    def excess(self, budgets: Mapping[str, float]) -> float:
        """Returns the largest ratio of a predicted cost to its budget; 0 without budgets."""
        costs = cost_by_budget(self.seconds.counted, self.peak_bytes.counted, self.macs_ratio)
        return max((costs[key] / limit for key, limit in budgets.items()), default=0.0)

    def remarks(self, budgets: Mapping[str, float]) -> str:
        """Formats what is extrapolated, missing or close to a budget."""
        found = []
        if self.seconds.beyond > 1.005:
            found.append(f"time extrapolated: {self.seconds.beyond:.2g} x outside of the calibrated range")
        if self.match is None:
            found.append("no stored quality")
        elif self.match.extrapolated:
            found.append(self.match.extrapolated)
        if "ms" in budgets and self.seconds.value <= budgets["ms"] / 1e3 < self.seconds.high:
            found.append(f"may exceed ms={budgets['ms']:g}")
        return "; ".join(found)


def cost_by_budget(seconds: float, peak_bytes: float, macs_ratio: float) -> dict[str, float]:
    """Returns costs in the units of `BUDGETS`."""
    return {"ms": 1e3 * seconds, "memory": peak_bytes / 2**20, "macs": macs_ratio}


def choices(request: Request, shape: Shape, predictor: Calibration | Roofline) -> list[Choice]:
    """Returns all candidates whose costs can be predicted, the best first: by quality, then by predicted time."""
    softmax = Candidate("softmax", {}).costs(shape).macs
    found = []
    for candidate in request.candidates(shape):
        if predicted := predictor.predict(candidate, shape):
            macs = candidate.costs(shape).macs
            match = find_quality(candidate, shape, request.stored)
            found.append(Choice(candidate, *predicted, macs, macs / softmax, match))
    return sorted(found, key=lambda choice: choice.order)
