"""Cost model of a mechanism: time or memory of a call, as a sum of multiples of the quantities of its `cost`.

The multiples are non-negative. The quantities are multiply-accumulates, those of its projections, channels of all
tokens, and weights of attention. A constant stands for launches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.candidates import Candidate, Shape

COVERED = 0.9
"""Share of a calibration's leave-one-out errors that lie within the interval of a prediction."""


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
        low, high: interval that covers `COVERED` of the leave-one-out errors of the calibration. It widens outside of
            the calibrated range. beyond: largest factor by which the call is outside of it, in steps of 0.01; 1 if it
            is within.
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
class CostModel:
    """Prediction of one quantity of one mechanism.

    Attributes:
        weights: one for each of `features`. error: factor, at least 1, of the interval. least, most: calibrated range.
    """

    weights: np.ndarray
    error: float
    least: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], values: Sequence[float]) -> "CostModel":
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
