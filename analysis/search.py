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
from dataclasses import replace
from typing import Any

from analysis import assignments, command_line
from analysis.align import BATCH_SIZE, validates_on_training_images
from analysis.assignments import Point, choose, is_best
from analysis.certificate import NOTE, columns
from analysis.costs import COSTS, Cost, Prices
from analysis.draws import Score
from analysis.hybrids import OWN, Choices, Hybrids
from analysis.laboratory import MEASUREMENTS_FILE, Laboratory
from analysis.trained import load_trained, read_sample
from attention import OptionError
from bench.choice import parse_budget
from engine.checkpoints.progress import is_score
from engine.config.objective_options import Distill
from engine.config.schema import Init
from engine.config.yaml_files import dump_yaml
from engine.reporting.tables import compact_table
from engine.run.load import dump_run
from engine.runtime.arguments import SEED, Count
from engine.runtime.errors import UserError
from engine.runtime.files import check_directory, dicts_to_csv, write_file
from engine.runtime.memory import limit_memory, refuse_too_large
from engine.runtime.ownership import (
    check_claim,
    claim_results,
    make_output,
    owned_files,
    remove_owned,
)
from engine.runtime.terminal import progress

NUM_IMAGES = 1000
"""Default number of classified images."""

STEPS = 150
"""Default number of steps of alignment."""

PER_BUDGET = 8
"""Default number of assignments that are measured for each budget, after the layers alone."""

BUDGETS = {kind: cost.meaning for kind, cost in COSTS.items()}
"""Kind of a budget -> what it limits."""

FILES = ("search.csv", "front.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_mechanisms(parser, "all of that file")
    text = f"steps of {BATCH_SIZE} training images in which mechanisms are aligned ({STEPS})"
    parser.add_argument("--align", type=Count(), default=STEPS, metavar="STEPS", help=text)
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in BUDGETS.items())
    text = f"largest costs of the model, all of one kind. {meanings}"
    parser.add_argument("--budget", nargs="+", required=True, metavar="KIND=LIMIT", help=text)
    text = "images of the forward pass that ms= and memory= limit (1)"
    parser.add_argument("--batch-size", type=Count(), metavar="N", help=text)
    text = "assignments to measure, those with at most one replaced layer included"
    text += f" (default: these, and {PER_BUDGET} for each budget)"
    parser.add_argument("--evaluations", type=Count(), metavar="N", help=text)
    strategies = "which assignments are measured: of the lowest predictions, at random, or all (sensitivity)"
    parser.add_argument("--strategy", choices=("sensitivity", "random", "all"), default="sensitivity", help=strategies)
    parser.add_argument("--seed", type=SEED, default=0, help="seed of alignment and of the random strategy (0)")
    command_line.add_images(parser, NUM_IMAGES)


def main(args: argparse.Namespace) -> None:
    kind, limits = read_budgets(args.budget)
    check_options(args, kind)
    make_output(args.output, [*FILES, MEASUREMENTS_FILE])
    check_directory(args.output / "front")
    check_claim(args.output / "front", [name for i in range(100) for name in front_files(f"{i:02}")])
    mechanisms = command_line.read_mechanisms(args.attention)
    trained = load_trained(args)
    laboratory = Laboratory(trained, read_sample(trained, args.images), args.output, args.align)
    if args.attention is None:
        mechanisms = possible(mechanisms, laboratory)
    hybrids = Hybrids(laboratory, mechanisms, args.seed)
    with refuse_too_large(f"lower --batch-size {args.batch_size or 1}"), limit_memory(trained.device):
        cost = COSTS[kind](hybrids, args.batch_size or 1)
        prices, budgets = cost.prices(), {text: limit * cost.unit for text, limit in limits.items()}
    check_reachable(budgets, prices, cost)
    points = measure(hybrids, cost, prices, list(budgets.values()), args)
    front = [point for point in points if is_best(point, points)]
    if not front:
        raise UserError(f"{args.checkpoint}: no measured assignment has a finite loss; raise --evaluations, or --align")
    report(hybrids, cost, points, front, budgets, args)


def read_budgets(texts: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Returns the kind of budgets ``["macs=0.7", "macs=0.8"]``, and text -> limit.

    Raises:
        OptionError: a budget has another form. UserError: the budgets are of several kinds.
    """
    budgets = {text: parse_budget(text, BUDGETS) for text in texts}
    kinds = dict.fromkeys(kind for kind, _ in budgets.values())
    if len(kinds) > 1:
        problem = f"{' and '.join(kinds)} are of several kinds; run the command once for each kind"
        raise UserError(f"--budget {' '.join(texts)}: {problem}")
    return next(iter(kinds)), {text: limit for text, (_, limit) in budgets.items()}


def check_options(args: argparse.Namespace, kind: str) -> None:
    """Raises a UserError for an option without effect."""
    if kind == "macs" and args.batch_size is not None:
        raise UserError(
            f"--batch-size {args.batch_size}: macs= is for one image; leave it out, or limit ms= or memory="
        )
    if args.strategy == "all" and args.evaluations is not None:
        raise UserError(f"--evaluations {args.evaluations}: --strategy all measures every assignment; leave it out")


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


def check_reachable(budgets: Mapping[str, float], prices: Prices, cost: Cost) -> None:
    """Raises a UserError for a budget below the cheapest assignment."""
    cheapest = cost.cheapest(prices)
    for text, budget in budgets.items():
        if budget < cheapest:
            least = math.ceil(1000 * cheapest / cost.unit) / 1000
            own = cost.text(cost.measure(cost.hybrids.own))
            problem = f"the cheapest assignment of these mechanisms takes {cost.name}={least:g}, the model's own {own}"
            raise UserError(f"--budget {text}: {problem}; raise it, or add cheaper mechanisms to --attention")


def measure(
    hybrids: Hybrids, cost: Cost, prices: Prices, budgets: Sequence[float], args: argparse.Namespace
) -> list[Point]:
    """Measures assignments in the order of the strategy, until `--evaluations` are measured."""
    number = len(hybrids.pairs) + 1
    count = hybrids.number
    limit = number + PER_BUDGET * len(budgets) if args.evaluations is None else args.evaluations
    limit = count if args.strategy == "all" else min(limit, count)
    if args.strategy == "sensitivity" and limit < number:
        raise UserError(
            f"--evaluations {limit}: the layers alone with each mechanism, and none, are {number}; raise it"
        )
    if args.strategy != "sensitivity" and count > assignments.MOST_CANDIDATES:
        raise UserError(
            f"--strategy {args.strategy}: {count:,} assignments are more than {assignments.MOST_CANDIDATES:,}"
        )
    with progress("search", limit, "assignments") as bar:

        def evaluate(choices: Choices) -> tuple[Score, float]:
            score, found = hybrids.score(choices), cost.measure(choices)
            bar.update()
            return score, found

        try:
            return assignments.search(hybrids.own, prices, budgets, limit, evaluate, args.strategy, args.seed)
        except FloatingPointError as error:
            raise UserError(f"{error}; leave the mechanism out of --attention, or try another --seed") from error


def report(
    hybrids: Hybrids,
    cost: Cost,
    points: Sequence[Point],
    front: Sequence[Point],
    budgets: Mapping[str, float],
    args: argparse.Namespace,
) -> None:
    """Prints the layers alone and the front, and writes tables, and the files of every point of the front."""
    own, front = hybrids.laboratory.own.score, sorted(front, key=lambda point: point.cost)
    if layers := tabulate_layers(points, own):
        print("One layer alone with another mechanism: rise of the loss (top-1 in %)\n")
        print(f"{compact_table(layers)}\n")
    names = {point: f"front/{number:02}" for number, point in enumerate(front)}
    takes = f"{args.checkpoint}: {cost.text(cost.measure(hybrids.own))}"
    if cost.columns:
        takes += f" in {hybrids.laboratory.trained.run.train.amp or 'fp32'}"
    title = f"{takes}, top-1 {own.top1:.2f} %, loss {own.loss:.4f} with its own attention,"
    title += f" {len(hybrids.laboratory.sample.images)} images; {len(points)} assignments measured,"
    title += f" aligned in {args.align} steps, seed {args.seed}"
    table = compact_table([{name: str(x) for name, x in values(p, hybrids, cost, names).items()} for p in front])
    print(f"{title}; the front:\n\n{table}\n")
    for text, budget in budgets.items():
        if any(point.cost <= budget for point in front):
            point = choose(front, budget)
            file = args.output / f"{names[point]}.yaml"
            print(f"--budget {text}: {file}, {cost.text(point.cost)}, top-1 {point.score.top1:.2f} %")
            print(f"  {hybrids.certify(point.score)}")
        else:
            print(f"--budget {text}: nothing within it was measured; raise --evaluations")
    print(NOTE)
    if cost.columns:
        deviation = max(abs(point.candidate.cost / point.cost - 1) for point in points)
        print(f"{cost.name} as predicted from single layers: at most {deviation:.1%} from the measured")
    if lost := sum(not is_score(point.score.loss) for point in points):
        print(f"warning: the loss of {lost} of {len(points)} assignments is not finite; they are not on the front")
    if noisy := [point for point in points if point.candidate.choices in cost.noisy]:
        remedy = "repeat the search in another directory on an idle machine, or with OMP_NUM_THREADS=1"
        print(f"warning: {len(noisy)} of {len(points)} times are noisy; {remedy}")
    for file, table in zip(FILES, (points, front), strict=True):
        lines = [values(point, hybrids, cost, names) for point in table]
        write_file(args.output / file, dicts_to_csv(lines))
    directory = args.output / "front"
    remove_owned(directory, [path.name for path in owned_files(directory)])  # those of an earlier search
    claim_results(directory, [file for name in names.values() for file in front_files(name.rpartition("/")[2])])
    for point, name in names.items():
        weights = args.output / f"{name}.safetensors"
        hybrids.export(weights, point.candidate.choices)
        output = f"runs/{args.output.name}-{name.rpartition('/')[2]}"
        head = f"# {' | '.join(point.candidate.choices)}\n# {cost.text(point.cost)} ({takes}),"
        head += f" top-1 {point.score.top1:.2f} % after alignment. To train it further, for a\n"
        head += "# tenth of the epochs of its model at a quarter of the learning rate, where the search was made:\n"
        head += f"#   python train.py {args.output / name}.yaml --output {output}\n"
        trained = hybrids.laboratory.trained
        run, split = trained.run, trained.run.data.train_split
        if validates_on_training_images(trained):  # which serve the alignment alone
            split = trained.train_split
        epochs, former = max(1, round(run.schedule.epochs / 10)), run.schedule
        lower = {"warmup_lr": former.warmup_lr / 4, "min_lr": former.min_lr / 4}
        warmup = min(former.warmup_epochs, epochs - 1)
        run = replace(
            run,
            data=replace(run.data, train_split=split),
            attention=hybrids.attention(point.candidate.choices),
            init=Init(weights=str(weights)),
            distill=Distill(),
            optim=replace(run.optim, lr=run.optim.lr / 4),
            schedule=replace(former, epochs=epochs, warmup_epochs=warmup, **lower),
            train=replace(run.train, freeze=None),
        )
        write_file(args.output / f"{name}.yaml", (head + dump_yaml(dump_run(run))).encode())


def front_files(name: str) -> list[str]:
    """Returns the names of the files of a point of the front."""
    return [f"{name}.yaml", f"{name}.safetensors"]


def tabulate_layers(points: Sequence[Point], own: Score) -> list[dict[str, str]]:
    """Returns a row for each mechanism that was measured in one layer alone: layer -> rise of the loss (top-1)."""
    rows: dict[str, dict[str, str]] = {}
    for point in points:
        choices, score = point.candidate.choices, point.score
        replaced = [layer for layer, name in enumerate(choices) if name != OWN]
        if len(replaced) == 1:
            name = choices[replaced[0]]
            row = rows.setdefault(name, {"attention": name} | {f"layer {layer}": "" for layer in range(len(choices))})
            row[f"layer {replaced[0]}"] = f"{score.loss - own.loss:+.4f} ({score.top1:.2f})"
    return list(rows.values())


def values(point: Point, hybrids: Hybrids, cost: Cost, names: Mapping[Point, str]) -> dict[str, Any]:
    """Returns the row of a CSV file, column -> value; names: point of the front -> its files."""
    candidate, score, macs = point.candidate, point.score, hybrids.macs(point.candidate.choices)
    line: dict[str, Any] = {"front": names.get(point, ""), "number": point.number}
    line |= {f"layer {layer}": name for layer, name in enumerate(candidate.choices)}
    line |= {"macs": macs, "macs_share": round(macs / hybrids.own_macs, 4)}
    costs = (round(each / cost.unit, 4) for each in (point.cost, candidate.cost))
    line |= dict(zip(cost.columns, costs, strict=False))
    return line | {
        "predicted_loss": rounded(candidate.predicted),
        "loss": round(score.loss, 5),
        "top1": round(score.top1, 3),
        **columns(hybrids.certify(score)),
    }


def rounded(loss: float) -> float | None:
    """Returns a loss for a CSV file; None if it was not predicted."""
    return None if math.isnan(loss) else round(loss, 5)
