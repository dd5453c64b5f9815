"""Agreement of predictions with measurements."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Agreement(NamedTuple):
    """How well predicted values agree with measured ones.

    Attributes:
        count: number of values. correlation: Spearman's rank correlation. error: median factor, at least 1, between a
            predicted and a measured value.
    """

    count: int
    correlation: float
    error: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> "Agreement":
        """Compares positive values."""
        errors = [abs(math.log(x / y)) for x, y in zip(predicted, measured, strict=True)]
        return cls(len(errors), rank_correlation(predicted, measured), math.exp(statistics.median(errors)))

    def __str__(self) -> str:
        return f"rank correlation {self.correlation:.3f}, median factor {self.error:.2f}"


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank. nan if all values of one are equal."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, position, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
        return (counts.cumsum() - (counts - 1) / 2)[position]

    a, b = (each - each.mean() for each in map(ranks, (x, y)))
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else math.nan
