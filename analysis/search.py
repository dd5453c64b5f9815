"""Search for the mechanism of every layer of a trained model under a budget: a front of loss against cost.

python analyze.py search runs/softmax --attention lara eva linear --budget macs=0.7
python analyze.py search runs/softmax --attention eva linear '{name: eva, window_size: 2}' --budget macs=0.6 macs=0.8
python analyze.py search runs/softmax --attention eva linear --budget ms=12 ms=15      # measured on this machine

Each mechanism is first aligned once, and measured in every layer alone: the first table. From these layers, losses and
costs of assignments are predicted (`analysis.assignments`). For each budget the assignments with the lowest predictions
are then measured.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import assignments
from analysis.assignments import Point, is_best
from analysis.certificate import Certificate
from analysis.command_line import BUDGETS, PER_BUDGET, SEARCHED, read_mechanisms
from analysis.costs import COSTS, Cost, Prices, Time
from analysis.draws import Score
from analysis.front import FILES, Front, files_of
from analysis.hybrids import Choices, Hybrids
from analysis.laboratory import MEASUREMENTS_FILE, Laboratory
from analysis.trained import load_trained, read_sample
from attention import OptionError
from bench.choice import parse_budget
from engine.runtime.errors import UserError
from engine.runtime.files import check_directory
from engine.runtime.memory import limit_memory, refuse_too_large
from engine.runtime.ownership import check_claim, make_output
from engine.runtime.terminal import progress


def main(args: argparse.Namespace) -> dict[str, tuple[Path, Certificate]]:
    """Searches; returns what `Front.report` does."""
    kind, limits = read_budgets(args.budget)
    mechanisms = read_mechanisms(args.attention or SEARCHED)
    trained = load_trained(args)
    sample = read_sample(trained, args.images)
    make_output(args.output, [*FILES, MEASUREMENTS_FILE])
    check_directory(args.output / "front")
    check_claim(args.output / "front", [name for i in range(100) for name in files_of(f"{i:02}")])
    laboratory = Laboratory(trained, sample, args.output, args.align)
    if args.attention is None:
        mechanisms = possible(mechanisms, laboratory)
    hybrids = Hybrids(laboratory, mechanisms, args.seed)
    with refuse_too_large(f"lower --batch-size {args.batch_size}"), limit_memory(trained.device):
        cost = COSTS[kind](hybrids, args.batch_size)
        prices, budgets = cost.prices(), {text: limit * cost.unit for text, limit in limits.items()}
    check_reachable(budgets, prices, cost, args.question == "convert")
    points = measure(hybrids, cost, prices, list(budgets.values()), args)
    front = [point for point in points if is_best(point, points)]
    if not front:
        raise UserError(f"{args.checkpoint}: no measured assignment has a finite loss; raise --evaluations, or --align")
    time = cost if isinstance(cost, Time) else Time(hybrids, args.batch_size)
    return Front(hybrids, cost, time, points, front).report(budgets, args)


def read_budgets(texts: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Returns the kind of budgets ``["macs=0.7", "macs=0.8"]``, and text -> limit.

    Raises:
        OptionError: a budget has another form, or is more than all. UserError: the budgets are of several kinds.
    """
    budgets = {text: parse_budget(text, BUDGETS) for text in texts}
    for text, (kind, limit) in budgets.items():
        if kind == "macs" and limit > 1:
            problem = "more than the model's own attention takes; macs is a share of that, as macs=0.7"
            raise OptionError("--budget", f"{text!r}: {problem}")
    kinds = dict.fromkeys(kind for kind, _ in budgets.values())
    if len(kinds) > 1:
        problem = f"{' and '.join(kinds)} are of several kinds; run the command once for each kind"
        raise UserError(f"--budget {' '.join(texts)}: {problem}")
    return next(iter(kinds)), {text: limit for text, (_, limit) in budgets.items()}


def possible(mechanisms: Mapping[str, Mapping[str, Any]], laboratory: Laboratory) -> dict[str, Mapping[str, Any]]:
    """Returns the mechanisms that a layer of the model can have; says on stderr why each of the others is left out."""
    found = {}
    for name, mechanism in mechanisms.items():
        try:
            Hybrids(laboratory, {name: mechanism}, 0)
            found[name] = mechanism
        except OptionError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def check_reachable(budgets: Mapping[str, float], prices: Prices, cost: Cost, is_for_one: bool) -> None:
    """Raises a UserError for a budget below the cheapest assignment; for one model, also if its own is within it."""
    cheapest, own_cost = cost.cheapest(prices), cost.measure(cost.hybrids.own)
    own = cost.text(own_cost)
    for text, budget in budgets.items():
        if is_for_one and budget >= own_cost:
            raise UserError(f"--budget {text}: the model's own attention takes {own}, which is within it; lower it")
        if budget < cheapest:
            least = math.ceil(1000 * cheapest / cost.unit) / 1000
            problem = f"the cheapest assignment of these mechanisms takes {cost.name}={least:g}, the model's own {own}"
            raise UserError(f"--budget {text}: {problem}; raise it, or add cheaper mechanisms to --attention")


def measure(
    hybrids: Hybrids, cost: Cost, prices: Prices, budgets: Sequence[float], args: argparse.Namespace
) -> list[Point]:
    """Measures assignments until `--evaluations` are measured."""
    number = len(hybrids.pairs) + 1
    limit = number + PER_BUDGET * len(budgets) if args.evaluations is None else args.evaluations
    if limit < number:
        raise UserError(
            f"--evaluations {limit}: the layers alone with each mechanism, and none, are {number}; raise it"
        )
    limit = min(limit, hybrids.number)
    with progress("search", limit, "assignments") as bar:

        def evaluate(choices: Choices) -> tuple[Score, float]:
            score, found = hybrids.score(choices), cost.measure(choices)
            bar.update()
            return score, found

        try:
            return assignments.search(hybrids.own, prices, budgets, limit, evaluate)
        except FloatingPointError as error:
            raise UserError(f"{error}; leave the mechanism out of --attention, or try another --seed") from error
