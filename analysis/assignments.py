"""Assignments of mechanisms to layers: predicted losses and costs, the order of measurements, and the front.

The predicted loss of an assignment is the trained model's loss, plus the increase for each layer that was measured with
that layer alone replaced. The cost is predicted from single layers too.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.costs import Prices
from analysis.draws import Score
from analysis.hybrids import Choices
from engine.checkpoints.progress import is_score

MOST_CANDIDATES = 100_000
"""Largest number of assignments that are all predicted; of a larger number, only a beam is."""

WIDTH = 20_000
SLICES = 100
"""Assignments in the beam, and slices of cost that share it equally."""


class Candidate(NamedTuple):
    """An assignment.

    predicted: loss of the trained model, plus the increase measured for each replaced layer. cost: by `Prices`.
    """

    choices: Choices
    predicted: float
    cost: float


@dataclass(frozen=True)
class Point:
    """A measured assignment. number: number of its measurement, from 0 on. cost: measured cost, see `Cost`."""

    number: int
    candidate: Candidate
    score: Score
    cost: float


def search(
    own: Choices,
    prices: Prices,
    budgets: Sequence[float],
    limit: int,
    evaluate: Callable[[Choices], tuple[Score, float]],
) -> list[Point]:
    """Searches for the assignments of the lowest loss within each of several budgets.

    Args:
        own: assignment of the trained model. prices: prices of all layers and choices. limit: number of measurements.
            evaluate: measures an assignment and its cost.
    Returns:
        The measured assignments, in the order of their measurements.
    """
    points: dict[Choices, Point] = {}
    rises = {}
    for layer, name in prices.layers:
        choices = (*own[:layer], name, *own[layer + 1 :])
        if choices not in points:
            score, cost = evaluate(choices)
            candidate = Candidate(choices, score.loss, prices.predict(choices))
            points[choices] = Point(len(points), candidate, score, cost)
        rises[layer, name] = points[choices].score.loss - points[own].score.loss
    order = predict(points[own].score.loss, rises, prices)
    order.sort(key=lambda candidate: (candidate.predicted, candidate.cost))
    cheapest = prices.cheapest()  # its measured cost may be within a budget that its predicted cost is not
    queues = [iter([each for each in order if each.cost <= budget or each.choices == cheapest]) for budget in budgets]
    while queues and len(points) < limit:
        for queue in [*queues]:
            candidate = next((each for each in queue if each.choices not in points), None)
            if candidate is None:
                queues.remove(queue)
            elif len(points) < limit:
                points[candidate.choices] = Point(len(points), candidate, *evaluate(candidate.choices))
    return list(points.values())


def predict(loss: float, rises: Mapping[tuple[int, str], float], prices: Prices) -> list[Candidate]:
    """Predicts loss, as a sum over layers, and cost of assignments: of all, or of a beam.

    The beam keeps the lowest losses within each of `SLICES` slices of cost, layer after layer.

    Args:
        loss: of the trained model. rises: layer and choice -> the loss that it adds; the own attention adds 0.
    """
    found = [Candidate((), loss, prices.start)]
    for layer in range(1 + max(layer for layer, _ in prices.layers)):
        options = [pair for pair in prices.layers if pair[0] == layer]
        found = [
            Candidate((*choices, pair[1]), predicted + rises[pair], prices.combine(cost, prices.layers[pair]))
            for (choices, predicted, cost), pair in itertools.product(found, options)
        ]
        if len(found) > MOST_CANDIDATES:
            found = thin(found)
    return found


def thin(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns at most `WIDTH` candidates: those with the lowest predictions in each of `SLICES` slices of cost."""
    low, high = (bound(candidate.cost for candidate in candidates) for bound in (min, max))
    slices: list[list[Candidate]] = [[] for _ in range(SLICES)]
    for candidate in candidates:
        share = (candidate.cost - low) / (high - low) if high > low else 0.0
        slices[min(SLICES - 1, int(SLICES * share))].append(candidate)
    kept = (sorted(part, key=lambda candidate: candidate.predicted)[: WIDTH // SLICES] for part in slices)
    return list(itertools.chain.from_iterable(kept))


def is_best(point: Point, points: Iterable[Point]) -> bool:
    """Returns whether no other point has a loss as low at a cost as low.

    The first of equal points is best. A point of infinite loss never is.
    """

    def rank(one: Point) -> tuple[float, float, int]:
        return one.score.loss, one.cost, one.number

    beaten = any(other.cost <= point.cost and rank(other) < rank(point) for other in points)
    return not beaten and is_score(point.score.loss)


def choose(points: Iterable[Point], budget: float) -> Point:
    """Returns the point of the lowest loss within a budget; of equal ones the cheapest."""
    within = [point for point in points if point.cost <= budget]
    return min(within, key=lambda point: (point.score.loss, point.cost, point.number))
