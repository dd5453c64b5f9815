"""Front of a search: its tables, figure, remarks, and a configuration with weights for every point."""

import argparse
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.assignments import Point, choose
from analysis.certificate import NOTE, Certificate, columns
from analysis.command_line import BUDGETS
from analysis.costs import Cost, Time
from analysis.draws import Score
from analysis.hybrids import OWN, Hybrids
from analysis.tune import shorter
from bench.timing import MAX_ERROR
from engine.checkpoints.files import NOISE
from engine.checkpoints.progress import is_score
from engine.config.yaml_files import dump_yaml
from engine.reporting.plots import BLUE, GREY, encode, in_style, label_points, new_figure
from engine.reporting.tables import compact_table
from engine.run.load import dump_run
from engine.runtime.distributed import precision
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import claim_results, owned_files, remove_owned
from engine.runtime.terminal import progress

FILES = ("search.csv", "front.csv", "front.png")


class Front:
    """Measured assignments of a search, of which those on the front have a name.

    Args:
        points: all that were measured. front: those that no other beats in both loss and cost. time: of a forward pass.
    """

    def __init__(self, hybrids: Hybrids, cost: Cost, time: Time, points: Sequence[Point], front: Sequence[Point]):
        self.hybrids, self.cost, self.time, self.points = hybrids, cost, time, points
        self.trained = hybrids.laboratory.trained
        ordered = sorted(front, key=lambda point: point.cost)
        self.names = {point: f"front/{number:02}" for number, point in enumerate(ordered)}

    def report(self, budgets: Mapping[str, float], args: argparse.Namespace) -> dict[str, tuple[Path, Certificate]]:
        """Prints the tables, and writes all files into `args.output`.

        Returns:
            Budget -> configuration of the point that is chosen within it, and its certificate; none if there is none.
        """
        own, found = self.hybrids.laboratory.own.score, {}
        if layers := tabulate_layers(self.points, own):
            print("One layer alone with another mechanism: rise of the loss (top-1 in %)\n")
            print(f"{compact_table(layers)}\n")
        title = f"{args.checkpoint}: {self.cost.text(self.cost.measure(self.hybrids.own))}"
        title += f", {1e3 * self.time.start():.3g} ms" * (self.cost is not self.time)
        title += f" in {precision(self.trained.run.train.amp, self.trained.device)},"
        title += f" top-1 {own.top1:.2f} %, loss {own.loss:.4f} with its own attention,"
        title += f" {len(self.hybrids.laboratory.sample.images)} images; {len(self.points)} assignments measured,"
        title += f" aligned in {args.align} steps, seed {args.seed}"
        rows = []
        with progress("front", len(self.names), "timed assignments") as bar:
            for point in self.names:
                rows.append(self.values(point))
                bar.update()
        shown = ({name: f"{x:.5g}" if isinstance(x, float) else str(x) for name, x in row.items()} for row in rows)
        table = compact_table([*shown])
        print(f"{title}; the front:\n\n{table}\n")
        for text, budget in budgets.items():
            if not any(point.cost <= budget for point in self.names):
                print(f"--budget {text}: nothing within it was measured; raise --evaluations")
                continue
            point = choose(self.names, budget)
            found[text] = args.output / f"{self.names[point]}.yaml", self.hybrids.certify(point.score)
            print(f"--budget {text}: {found[text][0]}, {self.cost.text(point.cost)}, top-1 {point.score.top1:.2f} %")
            for line in (found[text][1], *self.remarks(point)):
                print(f"  {line}")
            if self.hybrids.laboratory.sample.is_labelled:
                print(f"  to train it: {self.command(args.output, point)}")
        print(NOTE, *self.warnings(), sep="\n")
        for file, lines in zip(FILES, ([self.values(point) for point in self.points], rows), strict=False):
            write_file(args.output / file, dicts_to_csv(lines))
        write_file(args.output / FILES[2], encode(draw(self, title)))
        self.write(args.output)
        return found

    def values(self, point: Point) -> dict[str, Any]:
        """Returns the row of a CSV file, column -> value."""
        cost, candidate, score = self.cost, point.candidate, point.score
        macs = self.hybrids.macs(candidate.choices)
        line: dict[str, Any] = {"front": self.names.get(point, ""), "number": point.number}
        line |= {f"layer {layer}": name for layer, name in enumerate(candidate.choices)}
        line |= {"macs": macs, "macs_share": round(macs / self.hybrids.own_macs, 4)}
        line["ms"] = round(1e3 * self.time.measure(candidate.choices), 4) if point in self.names else ""
        costs = (round(each / cost.unit, 4) for each in (point.cost, candidate.cost))
        line |= dict(zip(cost.columns, costs, strict=False))
        return line | {
            "predicted_loss": round(candidate.predicted, 5),
            "loss": round(score.loss, 5),
            "rise_error": round(score.error, 5),
            "top1": round(score.top1, 3),
            **columns(self.hybrids.certify(score)),
        }

    def remarks(self, chosen: Point) -> Iterator[str]:
        """Yields a line on the cheapest point that the choice beats by no more than noise, or not in top-1."""
        for point, name in self.names.items():
            rise, error = point.score.loss - chosen.score.loss, math.hypot(point.score.error, chosen.score.error)
            is_noise = rise < NOISE * error
            if point.cost < chosen.cost and (is_noise or point.score.top1 >= chosen.score.top1):
                text = f"{name} is cheaper ({self.cost.text(point.cost)}, top-1 {point.score.top1:.2f} %), with a loss"
                text += f" higher by {rise:.4f} ± {error:.4f} (standard error)"
                yield f"{text}: within noise" if is_noise else f"{text}: beyond noise, though its top-1 is no lower"
                return

    def warnings(self) -> Iterator[str]:
        """Yields lines on what is uncertain, and on slow points."""
        points, cost = self.points, self.cost
        if cost.columns:
            deviation = max(abs(point.candidate.cost / point.cost - 1) for point in points)
            yield f"{cost.name} as predicted from single layers: at most {deviation:.1%} from the measured"
        if lost := sum(not is_score(point.score.loss) for point in points):
            yield f"warning: the loss of {lost} of {len(points)} assignments is not finite; they are not on the front"
        limit = (1 + MAX_ERROR) * self.time.start()
        if slow := [x for point, x in self.names.items() if self.time.measure(point.candidate.choices) > limit]:
            yield f"warning: slower than the model on this device: {', '.join(slow)}"
        if noisy := len({*self.time.noisy, *cost.noisy}):
            remedy = "repeat the search in another directory on an idle machine, or with OMP_NUM_THREADS=1"
            yield f"warning: {noisy} times are noisy; {remedy}"

    def command(self, output: Path, point: Point) -> str:
        """Returns the command that trains a point further."""
        name = self.names[point]
        return shlex.join(["python", "train.py", f"{output / name}.yaml", "--output", f"{output}-{Path(name).name}"])

    def write(self, output: Path) -> None:
        """Writes the configuration and the weights of every point, in the place of those of an earlier search."""
        directory, run = output / "front", self.trained.run
        remove_owned(directory, [path.name for path in owned_files(directory)])
        claim_results(directory, [file for name in self.names.values() for file in files_of(Path(name).name)])
        own = self.cost.text(self.cost.measure(self.hybrids.own))
        for point, name in self.names.items():
            weights, choices = output / f"{name}.safetensors", point.candidate.choices
            self.hybrids.export(weights, choices)
            head = f"# {' | '.join(choices)}\n# {self.cost.text(point.cost)} (the model: {own}), top-1"
            head += f" {point.score.top1:.2f} % after alignment\n# {self.command(output, point)}\n"
            longer = replace(shorter(run, str(weights)), attention=self.hybrids.attention(choices))
            write_file(output / f"{name}.yaml", (head + dump_yaml(dump_run(longer))).encode())


def files_of(name: str) -> list[str]:
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


@in_style
def draw(front: Front, title: str) -> Figure:
    """Draws the loss of all points against their cost, and names those on the front by number and mechanisms."""
    figure = new_figure(f"How much does the loss rise at a lower cost?\n{title}", 3.6)
    axes, unit = figure.subplots(), front.cost.unit
    finite = [point for point in front.points if is_score(point.score.loss)]
    others = [(point.cost / unit, point.score.loss) for point in finite]
    best = [(point.cost / unit, point.score.loss) for point in front.names]
    axes.plot(*zip(*others, strict=True), "o", color=GREY, label="measured")
    axes.plot(*zip(*best, strict=True), "o-", color=BLUE, label="front")
    axes.set(xlabel=f"{front.cost.name}: {BUDGETS[front.cost.name]}", ylabel="loss")
    axes.margins(0.15)
    axes.grid()
    axes.legend()
    names = []
    for point, name in front.names.items():
        layers = Counter(point.candidate.choices)
        names.append(f"{Path(name).name}: {', '.join(f'{count} {mechanism}' for mechanism, count in layers.items())}")
    label_points(axes, best, names, others, axes.lines[1:])
    return figure
