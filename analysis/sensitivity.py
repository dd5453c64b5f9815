"""Sensitivity of layers: loss and top-1 of a trained model when one layer alone takes another mechanism.

python analyze.py sensitivity runs/softmax --attention lara eva linear                # untrained
python analyze.py sensitivity runs/softmax --attention lara eva linear --align 150    # and fitted to the model's own
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis import command_line
from analysis.align import BATCH_SIZE
from analysis.budgets import options_text
from analysis.hybrids import Hybrids
from analysis.laboratory import MEASUREMENTS_FILE, Laboratory, Score
from analysis.trained import load_trained, read_sample
from attention import OptionError
from engine.reporting.plots import PAGE, encode, in_style, new_figure
from engine.reporting.tables import Spread, compact_table, mean_and_std, over_draws, plus_minus, spread
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output

NUM_IMAGES = 1000
"""Default number of classified images."""

FILES = ("sensitivity.csv", "sensitivity.png")


@dataclass(frozen=True, eq=False)
class Row:
    """Measurements of a mechanism in one layer.

    Attributes:
        name: as on the command line. layer: its number. macs: of the model, for one image. scores: stage, replaced or
            aligned -> scores by seed. problem: why there are none.
    """

    name: str
    options: str
    layer: int | None = None
    macs: int | None = None
    scores: dict[str, list[Score]] = field(default_factory=dict)
    problem: str = ""

    def spread(self, stage: str, name: str) -> Spread | None:
        """Returns the mean and the standard deviation over seeds; None if there are none."""
        return spread(getattr(score, name) for score in self.scores.get(stage, ()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_mechanisms(parser, "all of that file")
    command_line.add_sample(parser, NUM_IMAGES)
    command_line.add_align(parser, BATCH_SIZE)


def main(args: argparse.Namespace) -> None:
    make_output(args.output, [*FILES, MEASUREMENTS_FILE])
    mechanisms = command_line.read_mechanisms(args.attention)
    trained = load_trained(args)
    sample = read_sample(trained, args.images)
    laboratory = Laboratory(trained, sample, args.output, ["evaluation"], args.align)
    rows = []
    with command_line.progress("sensitivity", len(mechanisms) * args.draws, "draws") as bar:
        for name, mechanism in mechanisms.items():
            bar.set_postfix_str(name)
            rows += measure(laboratory, name, mechanism, args.draws, bar.update)
    own, macs = laboratory.own.score, Hybrids(laboratory, {}, 0).own_macs
    title = f"{args.checkpoint}: top-1 {own.top1:.2f} %, loss {own.loss:.4f} with its own attention,"
    title += f" {len(sample.images)} images; one layer alone has another"
    title += f"{'' if args.align is None else f', as it is and aligned in {args.align} steps'}"
    title += f"; {over_draws(args.draws)}"
    print(f"{title}\n\n{compact_table([readable(row, macs) for row in rows])}")
    lines = [values(row, own, macs) for row in rows]
    write_file(args.output / FILES[0], dicts_to_csv(lines))
    if any(row.scores for row in rows):
        write_file(args.output / FILES[1], encode(draw(title, rows, own, macs)))


def measure(
    laboratory: Laboratory, name: str, mechanism: Mapping[str, Any], draws: int, done: Callable[[], Any]
) -> list[Row]:
    """Returns a row for every layer that can have the mechanism, or one with the reason why there is none.

    Args:
        done: is called after every draw.
    """
    options, rows = options_text(mechanism), {}
    stages = ("replaced",) if laboratory.steps is None else ("replaced", "aligned")
    try:
        for seed in range(draws):
            hybrids = Hybrids(laboratory, {name: mechanism}, seed)
            for layer in hybrids.layers[name]:
                choices = hybrids.single(layer, name)
                row = rows.setdefault(layer, Row(name, options, layer, hybrids.macs(choices)))
                for stage in stages:
                    row.scores.setdefault(stage, []).append(hybrids.score(choices, stage == "aligned"))
            done()
    except (OptionError, FloatingPointError) as error:
        return [Row(name, options, problem=str(error))]
    return list(rows.values())


def readable(row: Row, own_macs: int) -> dict[str, str]:
    """Returns title of a column -> its text."""
    return {
        "attention": row.name,
        "options": row.options,
        "layer": "" if row.layer is None else str(row.layer),
        "top-1 (%)": plus_minus(row.spread("replaced", "top1"), ".2f"),
        "loss": plus_minus(row.spread("replaced", "loss"), ".4f"),
        "aligned: top-1 (%)": plus_minus(row.spread("aligned", "top1"), ".2f"),
        "aligned: loss": plus_minus(row.spread("aligned", "loss"), ".4f"),
        "MACs saved": "" if row.macs is None else f"{1 - row.macs / own_macs:.1%}",
        "cannot be measured": row.problem,
    }


def values(row: Row, own: Score, own_macs: int) -> dict[str, Any]:
    """Returns the row of the CSV file, column -> value; `macs` counts the whole model."""
    line: dict[str, Any] = {"attention": row.name, "options": row.options, "layer": row.layer}
    for prefix, stage in (("", "replaced"), ("aligned_", "aligned")):
        for name in Score._fields:
            mean, std = mean_and_std(row.spread(stage, name))
            line |= {f"{prefix}{name}": mean, f"{prefix}{name}_std": std}
    line |= {"own_top1": own.top1, "own_loss": own.loss, "macs": row.macs, "own_macs": own_macs}
    return line | {"problem": row.problem}


@in_style
def draw(title: str, rows: Sequence[Row], own: Score, own_macs: int) -> Figure:
    """Draws the rise of the loss as a heat map of mechanisms and layers, with top-1 and the share of MACs saved.

    Scores are those after alignment, if there are any.
    """
    rows = [row for row in rows if row.scores]
    names, layers = list(dict.fromkeys(row.name for row in rows)), 1 + max((row.layer for row in rows), default=0)
    width = max(PAGE, 3 + 0.6 * layers)
    figure = new_figure(f"Which layers need their own attention?\n{title}", 1.6 + 0.4 * len(names), width)
    axes = figure.subplots()
    rises = [[math.nan] * layers for _ in names]
    for row in rows:
        stage = list(row.scores)[-1]
        top1, loss = row.spread(stage, "top1"), row.spread(stage, "loss")
        rises[names.index(row.name)][row.layer] = max(loss.mean - own.loss, 1e-4)
        text = f"{top1.mean:.1f}\n{row.macs / own_macs - 1:+.0%}"
        axes.text(row.layer, names.index(row.name), text, ha="center", va="center", color="black")
    image = axes.imshow(rises, cmap="YlOrRd", norm=LogNorm(1e-3, 3), alpha=0.8, aspect="auto")
    figure.colorbar(image, label="rise of the loss (nats)")
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xticks(range(layers))
    axes.set_xlabel("layer; top-1 (%), and change of the model's multiply-accumulates")
    return figure
