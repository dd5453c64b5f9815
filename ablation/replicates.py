"""What the runs of several seeds tell together."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantiles of Student's t distribution that 2.5 % lie above, for 1, 2, ... degrees of freedom."""


class Spread(NamedTuple):
    """Mean and standard deviation (over n - 1) of n values; that of one value is nan."""

    mean: float
    std: float
    n: int

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of Student's t around the mean; infinite for one value, a little wide above 31."""
        if self.n == 1:
            return math.inf
        return T_975[min(self.n - 1, len(T_975)) - 1] * self.std / math.sqrt(self.n)

    @property
    def is_noise(self) -> bool:
        """Whether that interval contains 0."""
        return abs(self.mean) <= self.half_width


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and standard deviation of `values`; None if there are none."""
    values = list(values)
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


@dataclass(frozen=True)
class Measured:
    """What the finished runs of a setting reach.

    Attributes:
        values: seed -> value. spread: of the values; None if there are none yet. difference: from the first setting's
            values of the same seeds; None likewise, and for that setting itself.
    """

    values: dict[int, float]
    spread: Spread | None
    difference: Spread | None


def measure(results: Sequence[Mapping[int, Mapping[str, Any]]], name: str) -> list[Measured]:
    """The measurement `name` of every setting, whose `results` are seed -> final record of train.py.

    A record may lack it: no average is kept, or no step was timed, as the run was stopped after its last.
    """
    values = [{seed: record[name] for seed, record in runs.items() if record.get(name) is not None} for runs in results]
    first = values[0]
    differences = [None, *(spread(own[seed] - first[seed] for seed in own if seed in first) for own in values[1:])]
    return [Measured(own, spread(own.values()), d) for own, d in zip(values, differences, strict=True)]


def plus_minus(spread: Spread | None, form: str) -> str:
    """Mean and, of several values, standard deviation as text; empty for None."""
    if spread is None:
        return ""
    return f"{spread.mean:{form}}" + (f" ± {spread.std:.2f}" if spread.n > 1 else "")
