"""The search against all 216 assignments of docs/data/search.csv, and the numbers of docs/results_trained.md."""

import csv
import operator
from pathlib import Path
from statistics import mean, stdev

import pytest

from analysis.assignments import choose, search
from analysis.costs import Prices
from analysis.hybrids import OWN, Choices
from analysis.laboratory import Score
from analysis.search import PER_BUDGET

DOCS = Path(__file__).parents[2] / "docs"
SHARES = 0.68, 0.72, 0.8, 0.85, 0.9
EVALUATIONS = 43
"""A fifth of all assignments."""
BY_DEFAULT = 56
"""The layers alone, and `PER_BUDGET` for each budget."""


def read() -> dict[Choices, tuple[Score, int]]:
    with (DOCS / "data/search.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
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


def regrets(strategy: str, seed: int = 0, limit: int = EVALUATIONS) -> list[tuple[float, float]]:
    """Top-1 points and loss that are lost to the best assignment within each budget, by loss."""
    evaluated: list[Choices] = []

    def evaluate(choices: Choices) -> tuple[Score, int]:
        evaluated.append(choices)
        return EVERY[choices]

    points = search(OWN3, prices(), BUDGETS, limit, evaluate, strategy, seed)
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
    found = regrets("sensitivity")
    assert max(top1 for top1, _ in found) < 0.5
    assert len(prices().layers) - len(OWN3) + 1 + PER_BUDGET * len(BUDGETS) == BY_DEFAULT
    assert regrets("sensitivity", limit=BY_DEFAULT) == found
    random = [regrets("random", seed) for seed in range(20)]
    assert sum(loss for _, loss in found) < mean(sum(loss for _, loss in run) for run in random)


@pytest.mark.parametrize("share", SHARES)
def test_the_best_of_each_budget_is_stated(share):
    within = {choices: score for choices, (score, macs) in EVERY.items() if macs <= share * OWN_MACS}
    best = min(within, key=lambda choices: within[choices].loss)
    line = f"| {share:g} | {', '.join(f'`{name}`' for name in best)} | {within[best].top1:.1f} |"
    assert line in (DOCS / "results_trained.md").read_text()


DEEPER_SHARES = 0.7, 0.8, 0.9


def deeper() -> dict[tuple[str, int], list[Score]]:
    """For both strategies and each seed, the measurement of the lowest loss within each budget, in six layers."""
    with (DOCS / "data/search_six_layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in rows:
        runs.setdefault((row["strategy"], int(row["seed"])), []).append(row)
    assert {len(run) for run in runs.values()} == {55}
    best = {}
    for key, run in runs.items():
        within = [[row for row in run if float(row["macs_share"]) <= share] for share in DEEPER_SHARES]
        chosen = [min(rows, key=lambda row: float(row["loss"])) for rows in within]
        best[key] = [Score(float(row["top1"]), float(row["loss"]), 0) for row in chosen]
    return best


def test_the_search_in_six_layers_beside_a_random_one():
    """With equally many measurements, from the same aligned layers of each of three seeds."""
    best, seeds = deeper(), range(3)
    assert {*best} == {(strategy, seed) for strategy in ("sensitivity", "random") for seed in seeds}
    section = (
        (DOCS / "results_trained.md")
        .read_text()
        .partition("### The search in a deeper model\n")[2]
        .partition("\n## ")[0]
    )
    with (DOCS / "data/search_six_layers.csv").open(newline="") as file:
        own = next(row for row in csv.DictReader(file) if {row[f"layer {n}"] for n in range(6)} == {OWN})
    stated = f"own attention has a loss of {float(own['loss']):.4f} and a top-1 of {float(own['top1']):.1f} on"
    assert stated in " ".join(section.split())
    for n, share in enumerate(DEEPER_SHARES):
        searched, random = ([best[strategy, seed][n] for seed in seeds] for strategy in ("sensitivity", "random"))
        assert all(one.loss < other.loss for one, other in zip(searched, random, strict=True))
        cells = [
            f"{mean(getattr(score, name) for score in scores):.{digits}f}"
            f" ± {stdev(getattr(score, name) for score in scores):.{digits}f}"
            for name, digits in (("loss", 4), ("top1", 1))
            for scores in (searched, random)
        ]
        line = f"| {share:g} | {' | '.join(cells)} |"
        assert line in section, line
