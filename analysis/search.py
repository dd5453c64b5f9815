"""Search for the mechanism of every layer of a trained model under a budget: a front of loss against cost.

python analyze.py search runs/softmax --attention lara eva linear --budget macs=0.7
python analyze.py search runs/softmax --attention eva linear '{name: eva, window_size: 2}' --budget macs=0.6 macs=0.8

Mechanisms are aligned first, each once. The rise of the loss when one layer alone has a mechanism predicts that of any
assignment, as a sum over layers. For each budget the assignments of the lowest predictions are then measured.
"""

import argparse
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from analysis import command_line
from analysis.align import BATCH_SIZE
from analysis.hybrids import OWN, Choices, Hybrids
from analysis.laboratory import FILE, Laboratory, Score
from analysis.trained import load_trained, read_sample
from engine.config.load import dump_run
from engine.config.schema import Init
from engine.config.yaml_files import dump_yaml
from engine.objectives.distillation import Distill
from engine.reporting.plots import BLUE, GREY, ORANGE, encode, in_style, new_figure
from engine.reporting.tables import compact_table
from engine.runtime.errors import UserError
from engine.runtime.files import make_output, to_csv, write_file

NUM_IMAGES = 1000
"""Default number of classified images."""

STEPS = 150
"""Default number of steps of alignment."""

PER_BUDGET = 8
"""Default number of assignments that are measured for each budget, after the layers alone."""

MOST_CANDIDATES = 100_000
"""Largest number of assignments that are all predicted; of more, those of a beam are."""

WIDTH = 20_000
SLICES = 100
"""Assignments in the beam, and slices of cost that share it equally."""

FILES = ("search.csv", "front.csv", "search.png")


class Candidate(NamedTuple):
    """An assignment. predicted: loss, the trained model's and the rises of its layers, or nan. macs: of the model."""

    choices: Choices
    predicted: float
    macs: int


@dataclass(frozen=True)
class Point:
    """A measured assignment. number: of its measurement, from 0 on."""

    number: int
    candidate: Candidate
    score: Score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_mechanisms(parser, "all of that file")
    text = f"steps of {BATCH_SIZE} training images in which mechanisms are aligned ({STEPS})"
    parser.add_argument("--align", type=int, default=STEPS, metavar="STEPS", help=text)
    text = "largest multiply-accumulates of the model as a share of those with its own attention: macs=0.7"
    parser.add_argument("--budget", nargs="+", required=True, metavar="macs=SHARE", help=text)
    text = f"assignments to measure, those with one replaced layer included ({PER_BUDGET} a budget beside these)"
    parser.add_argument("--evaluations", type=int, metavar="N", help=text)
    strategies = "which assignments are measured: of the lowest predictions, at random, or all (sensitivity)"
    parser.add_argument("--strategy", choices=("sensitivity", "random", "all"), default="sensitivity", help=strategies)
    parser.add_argument("--seed", type=int, default=0, help="seed of alignment and of the random strategy (0)")
    images = f"number of validation images, evenly spaced ({NUM_IMAGES})"
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help=images)


def main(args: argparse.Namespace) -> None:
    command_line.check_positive(args, "align", "images", *["evaluations"] * (args.evaluations is not None))
    shares = [read_budget(text) for text in args.budget]
    make_output(args.output, [*FILES, FILE])
    mechanisms = command_line.read_mechanisms(args.attention)
    trained = load_trained(args)
    laboratory = Laboratory(trained, read_sample(trained, args.images), args.output, ["evaluation"], args.align)
    hybrids = Hybrids(laboratory, mechanisms, args.seed)
    budgets = {text: share * hybrids.own_macs for text, share in zip(args.budget, shares, strict=True)}
    prices = {pair: hybrids.macs(hybrids.single(*pair)) - hybrids.own_macs for pair in pairs_of(hybrids)}
    check_reachable(budgets, prices, hybrids)
    points = measure(hybrids, prices, list(budgets.values()), args)
    front = [point for point in points if is_best(point, points)]
    report(hybrids, points, front, budgets, args)


def read_budget(text: str) -> float:
    """Returns the share of a budget ``macs=0.7``.

    Raises:
        UserError: it is something else.
    """
    kind, _, number = text.partition("=")
    try:
        share = float(number)
    except ValueError:
        share = math.nan
    if kind != "macs" or not 0 < share < math.inf:
        raise UserError(f"--budget {text}: expected macs= and a number above 0, the share of the model's own: macs=0.7")
    return share


def pairs_of(hybrids: Hybrids) -> list[tuple[int, str]]:
    """Returns every layer with each mechanism that it can have."""
    return [(layer, name) for name, layers in hybrids.layers.items() for layer in layers]


def check_reachable(budgets: Mapping[str, float], prices: Mapping[tuple[int, str], int], hybrids: Hybrids) -> None:
    """Raises a UserError for a budget below the cheapest assignment."""
    cheapest = hybrids.own_macs
    for layer in range(len(hybrids.own)):
        cheapest += min([0, *(price for (number, _), price in prices.items() if number == layer)])
    for text, budget in budgets.items():
        if budget < cheapest:
            least = math.ceil(1000 * cheapest / hybrids.own_macs) / 1000
            problem = f"the cheapest assignment of these mechanisms takes macs={least:g}"
            raise UserError(f"--budget {text}: {problem}; raise it, or add cheaper mechanisms to --attention")


def measure(
    hybrids: Hybrids, prices: Mapping[tuple[int, str], int], budgets: Sequence[float], args: argparse.Namespace
) -> list[Point]:
    """Measures assignments in the order of the strategy, until `--evaluations` are measured."""
    number = len(prices) + 1
    count = math.prod(1 + sum(layer == number for layer, _ in prices) for number in range(len(hybrids.own)))
    limit = number + PER_BUDGET * len(budgets) if args.evaluations is None else args.evaluations
    limit = count if args.strategy == "all" else min(limit, count)
    if args.strategy == "sensitivity" and limit < number:
        raise UserError(
            f"--evaluations {limit}: the layers alone with each mechanism, and none, are {number}; raise it"
        )
    if args.strategy != "sensitivity" and count > MOST_CANDIDATES:
        raise UserError(f"--strategy {args.strategy}: {count:,} assignments are more than {MOST_CANDIDATES:,}")
    with command_line.progress("search", limit, "assignments") as bar:

        def evaluate(choices: Choices) -> Score:
            found = hybrids.score(choices, is_aligned=True)
            bar.update()
            return found

        return search(hybrids.own, hybrids.own_macs, prices, budgets, limit, evaluate, args.strategy, args.seed)


def search(
    own: Choices,
    own_macs: int,
    prices: Mapping[tuple[int, str], int],
    budgets: Sequence[float],
    limit: int,
    evaluate: Callable[[Choices], Score],
    strategy: str = "sensitivity",
    seed: int = 0,
) -> list[Point]:
    """Searches for the assignments of the lowest loss within each of several budgets.

    Args:
        own: assignment of the trained model, `own_macs` its multiply-accumulates. prices: layer and mechanism -> the
            multiply-accumulates that they add. limit: number of measurements. evaluate: measures an assignment.
        strategy: see `--strategy`; "random" and "all" predict nothing. seed: of "random".
    Returns:
        The measured assignments, in the order of their measurements.
    """
    points: dict[Choices, Point] = {}

    def add(candidate: Candidate) -> None:
        if len(points) < limit and candidate.choices not in points:
            points[candidate.choices] = Point(len(points), candidate, evaluate(candidate.choices))

    def single(layer: int, name: str) -> Choices:
        return (*own[:layer], name, *own[layer + 1 :])

    if strategy != "sensitivity":
        order = predict(own, math.nan, own_macs, dict.fromkeys(prices, 0.0), prices)
        if strategy == "random":
            random.Random(seed).shuffle(order)
    else:
        base = evaluate(own)
        points[own] = Point(0, Candidate(own, base.loss, own_macs), base)
        rises = {}
        for (layer, name), price in prices.items():
            score = evaluate(choices := single(layer, name))
            points[choices] = Point(len(points), Candidate(choices, score.loss, own_macs + price), score)
            rises[layer, name] = score.loss - base.loss
        order = predict(own, base.loss, own_macs, rises, prices)
        order.sort(key=lambda candidate: (candidate.predicted, candidate.macs))
    if strategy == "all":
        for candidate in order:
            add(candidate)
    queues = [iter([candidate for candidate in order if candidate.macs <= budget]) for budget in budgets]
    while queues and len(points) < limit:
        queues = [queue for queue in queues if take(queue, points, add)]
    return list(points.values())


def take(queue: Iterable[Candidate], points: Mapping[Choices, Point], add: Callable[[Candidate], None]) -> bool:
    """Adds the next candidate of a queue that is not measured yet; returns whether there was one."""
    for candidate in queue:
        if candidate.choices not in points:
            add(candidate)
            return True
    return False


def predict(
    own: Choices,
    loss: float,
    macs: int,
    rises: Mapping[tuple[int, str], float],
    prices: Mapping[tuple[int, str], int],
) -> list[Candidate]:
    """Predicts loss and multiply-accumulates of assignments as sums over layers: of all, or of a beam.

    The beam keeps the lowest losses within each of `SLICES` slices of cost, layer after layer.
    """
    found = [Candidate((), loss, macs)]
    for layer in range(len(own)):
        options = {OWN: (0.0, 0)} | {name: (rises[n, name], prices[n, name]) for n, name in rises if n == layer}
        found = [
            Candidate((*choices, name), predicted + rise, cost + price)
            for (choices, predicted, cost), (name, (rise, price)) in itertools.product(found, options.items())
        ]
        if len(found) > MOST_CANDIDATES:
            found = thin(found)
    return found


def thin(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns at most `WIDTH` candidates: in each of `SLICES` slices of cost those of the lowest predictions."""
    low, high = (bound(candidate.macs for candidate in candidates) for bound in (min, max))
    slices: list[list[Candidate]] = [[] for _ in range(SLICES)]
    for candidate in candidates:
        slices[min(SLICES - 1, SLICES * (candidate.macs - low) // max(1, high - low))].append(candidate)
    kept = (sorted(part, key=lambda candidate: candidate.predicted)[: WIDTH // SLICES] for part in slices)
    return list(itertools.chain.from_iterable(kept))


def is_best(point: Point, points: Iterable[Point]) -> bool:
    """Returns whether no other point has a loss as low at a cost as low; of equal ones the first is best."""

    def rank(one: Point) -> tuple[float, int, int]:
        return one.score.loss, one.candidate.macs, one.number

    loss, macs, _ = rank(point)
    return not any(
        other is not point and other.score.loss <= loss and other.candidate.macs <= macs and rank(other) < rank(point)
        for other in points
    )


def choose(points: Iterable[Point], budget: float) -> Point:
    """Returns the point of the lowest loss within a budget; of equal ones the cheapest."""
    within = [point for point in points if point.candidate.macs <= budget]
    return min(within, key=lambda point: (point.score.loss, point.candidate.macs, point.number))


def report(
    hybrids: Hybrids,
    points: Sequence[Point],
    front: Sequence[Point],
    budgets: Mapping[str, float],
    args: argparse.Namespace,
) -> None:
    """Prints the front, and writes tables, figure, and the files of every point of the front."""
    own, front = hybrids.laboratory.own.score, sorted(front, key=lambda point: point.candidate.macs)
    names = {point: f"front/{number:02}" for number, point in enumerate(front)}
    title = f"{args.checkpoint}: top-1 {own.top1:.2f} %, loss {own.loss:.4f} with its own attention,"
    title += f" {len(hybrids.laboratory.sample.images)} images; {len(points)} assignments measured,"
    title += f" aligned in {args.align} steps, seed {args.seed}"
    table = compact_table([{name: str(x) for name, x in values(p, hybrids, names).items()} for p in front])
    print(f"{title}; the front:\n\n{table}\n")
    for text, budget in budgets.items():
        if any(point.candidate.macs <= budget for point in points):
            point = choose(points, budget)
            print(f"--budget {text}: {args.output / names[point]}.yaml, top-1 {point.score.top1:.2f} %")
        else:
            print(f"--budget {text}: nothing within it was measured; raise --evaluations")
    for file, table in ((FILES[0], points), (FILES[1], front)):
        lines = [values(point, hybrids, names) for point in table]
        write_file(args.output / file, to_csv(list(lines[0]), (line.values() for line in lines)))
    write_file(args.output / FILES[2], encode(draw(title, points, front, hybrids.own_macs, budgets)))
    (args.output / "front").mkdir(exist_ok=True)
    for suffix in ("yaml", "safetensors", "safetensors.sha256"):
        for former in (args.output / "front").glob(f"[0-9][0-9].{suffix}"):
            former.unlink()
    for point, name in names.items():
        weights = args.output / f"{name}.safetensors"
        hybrids.export(weights, point.candidate.choices)
        output = f"runs/{args.output.name}-{name.rpartition('/')[2]}"
        head = f"# {' | '.join(point.candidate.choices)}\n# MACs {point.candidate.macs / hybrids.own_macs:.3f} of"
        head += f" {args.checkpoint}, top-1 {point.score.top1:.2f} % as aligned. To train it on:\n"
        head += f"#   python train.py {args.output / name}.yaml --output {output}\n"
        run = hybrids.laboratory.trained.run
        run = replace(
            run,
            attention=hybrids.attention(point.candidate.choices),
            init=Init(weights=str(weights.resolve())),
            distill=Distill(),
            train=replace(run.train, freeze=None),
        )
        write_file(args.output / f"{name}.yaml", (head + dump_yaml(dump_run(run))).encode())


def values(point: Point, hybrids: Hybrids, names: Mapping[Point, str]) -> dict[str, Any]:
    """Returns the row of a CSV file, column -> value; names: point of the front -> its files."""
    candidate, score = point.candidate, point.score
    line: dict[str, Any] = {"front": names.get(point, ""), "number": point.number}
    line |= {f"layer {layer}": name for layer, name in enumerate(candidate.choices)}
    line |= {"macs": candidate.macs, "macs_share": round(candidate.macs / hybrids.own_macs, 4)}
    return line | {
        "predicted_loss": rounded(candidate.predicted),
        "loss": round(score.loss, 5),
        "top1": round(score.top1, 3),
    }


def rounded(loss: float) -> float | None:
    """Returns a loss for a CSV file; None if it was not predicted."""
    return None if math.isnan(loss) else round(loss, 5)


@in_style
def draw(
    title: str, points: Sequence[Point], front: Sequence[Point], own_macs: int, budgets: Mapping[str, float]
) -> Figure:
    """Draws loss and top-1 of the measured assignments against their multiply-accumulates, and the front."""
    question = "Which assignments of mechanisms to layers does no other beat in both loss and cost?"
    figure = new_figure(f"{question}\n{title}", 3.4)
    for axes, name, label in zip(figure.subplots(1, 2), ("loss", "top1"), ("loss (nats)", "top-1 (%)"), strict=True):
        kinds = {"measured": (points, {"color": GREY, "ms": 3}), "front": (front, {"color": BLUE, "marker": "D"})}
        for kind, (chosen, style) in kinds.items():
            shares = [point.candidate.macs / own_macs for point in chosen]
            values = [getattr(point.score, name) for point in chosen]
            axes.plot(shares, values, **{"marker": "o", "linestyle": "none", "label": kind} | style)
        for number, budget in enumerate(budgets.values()):
            label_once = {"label": "_" * bool(number) + "budget"}
            axes.axvline(budget / own_macs, color=ORANGE, linestyle=":", **label_once)
        axes.set(xlabel="multiply-accumulates, share of the model's own", ylabel=label)
        axes.grid()
    figure.axes[0].set_yscale("log")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
