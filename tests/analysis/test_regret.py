"""The search against all 216 assignments of docs/data/search.csv."""

import operator
from pathlib import Path

from analysis.assignments import choose, search
from analysis.command_line import PER_BUDGET
from analysis.costs import Prices
from analysis.draws import Score
from analysis.hybrids import OWN, Choices
from tests.support.sweeps import read_table

STORED = Path(__file__).parents[2] / "docs/data/search.csv"
SHARES = 0.68, 0.72, 0.8, 0.85, 0.9
BY_DEFAULT = 56
"""The layers alone, and `PER_BUDGET` for each budget."""


def read() -> dict[Choices, tuple[Score, int]]:
    rows = read_table(STORED)
    scores = [(Score(float(row["top1"]), float(row["loss"]), 0), int(row["macs"])) for row in rows]
    return {tuple(row[f"layer {n}"] for n in range(3)): score for row, score in zip(rows, scores, strict=True)}


EVERY = read()
OWN3: Choices = (OWN,) * 3
OWN_MACS = EVERY[OWN3][1]
BUDGETS = [share * OWN_MACS for share in SHARES]


def prices() -> Prices:
    names = {name for choices in EVERY for name in choices} - {OWN}
    single = {(n, name): (*OWN3[:n], name, *OWN3[n + 1 :]) for n in range(3) for name in sorted(names)}
    of_own = {(layer, OWN): 0 for layer in range(3)}
    added = {pair: EVERY[choices][1] - OWN_MACS for pair, choices in single.items()}
    return Prices(OWN_MACS, of_own | added, operator.add)


def regrets(limit: int = 43) -> list[tuple[float, float]]:  # by default a fifth of all assignments
    """Top-1 points and loss that are lost to the best assignment within each budget, by loss."""
    evaluated: list[Choices] = []

    def evaluate(choices: Choices) -> tuple[Score, int]:
        evaluated.append(choices)
        return EVERY[choices]

    points = search(OWN3, prices(), BUDGETS, limit, evaluate)
    assert len(evaluated) == len({*evaluated}) == len(points) <= limit
    found = []
    for budget in BUDGETS:
        chosen = choose(points, budget).score
        within = [score for score, macs in EVERY.values() if macs <= budget]
        found.append((max(score.top1 for score in within) - chosen.top1, chosen.loss - min(x.loss for x in within)))
    return found


def test_all_assignments_are_there_and_their_costs_add_up():
    assert len(EVERY) == 216
    for choices, (_, macs) in EVERY.items():
        assert macs == prices().predict(choices)


def test_the_search_misses_less_than_half_a_point():
    """At five budgets, with a fifth of the measurements."""
    found = regrets()
    assert max(top1 for top1, _ in found) < 0.5
    assert len(prices().layers) - len(OWN3) + 1 + PER_BUDGET * len(BUDGETS) == BY_DEFAULT
    assert regrets(BY_DEFAULT) == found
