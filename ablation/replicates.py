"""Results of a setting over several seeds, and their differences to the first setting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from engine.reporting.tables import Spread, spread

MEASURED_COSTS = {"step_seconds": "step time (s)", "memory_mb": "peak memory (MB)"}
"""Costs that runs measure: key in their final records -> label of an axis."""

TIMES_SEEDS = 3
"""A measured cost has a panel if it varies this many times as much between settings as between seeds."""


@dataclass(frozen=True)
class Measured:
    """One measurement of the finished runs of a setting.

    Attributes:
        values: seed -> value. spread: spread of the values; None if there are none yet. difference: spread of the
            differences to the first setting with the same seeds; None if there are none, and for the first setting.
    """

    values: dict[int, float]
    spread: Spread | None
    difference: Spread | None


def measure(results: Sequence[Mapping[int, Mapping[str, Any]]], name: str) -> list[Measured]:
    """Returns the measurement `name` of every setting, whose `results` are seed -> final record of train.py.

    A record may lack it: the run keeps no averaged weights, or was resumed after its last step and has timed none.
    Steps of an accuracy (`top1` and its kin, in percent) are those of one of the evaluated `images`.
    """
    values = [{seed: record[name] for seed, record in runs.items() if record.get(name) is not None} for runs in results]
    images = [record.get("images", math.inf) for runs in results for record in runs.values() if name.endswith("top1")]
    first, step = values[0], 100 / min(images, default=math.inf)
    pairs = [[own[seed] - first[seed] for seed in own if seed in first] for own in values[1:]]
    differences = [None, *(spread(found, step) for found in pairs)]
    return [Measured(own, spread(own.values()), d) for own, d in zip(values, differences, strict=True)]


def tells_apart(measured: Sequence[Measured]) -> bool:
    """Returns whether a measurement varies more between settings than between their seeds, by `TIMES_SEEDS`.

    Variation is the standard deviation: of the settings' means, and of a setting's seeds (root of the mean square).
    That of a single seed is not known, and taken for none. False without two settings.
    """
    means = [own.spread.mean for own in measured if own.spread]
    squares = [own.spread.std**2 for own in measured if own.spread and own.spread.std is not None]
    between_seeds = math.sqrt(fmean(squares)) if squares else 0.0
    return len(means) > 1 and pstdev(means) > TIMES_SEEDS * between_seeds


def means_if_apart(measured: Sequence[Measured]) -> list[float | None]:
    """Returns the mean of every setting, None without a finished run; empty if `tells_apart` is false."""
    return [own.spread and own.spread.mean for own in measured] if tells_apart(measured) else []
