"""Error of mechanisms against softmax attention, on a trained model's queries, keys and values, as LARA's figure 1.

    python analyze.py error runs/softmax --attention ra lara eva --budgets 16 49 196

A temperature divides the logits and makes softmax's matrices sharper or flatter. Mechanisms that sample have two
errors, one with samples as in training and one in evaluation.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import command_line
from analysis.approximation import Row, attend_by_softmax, measure
from analysis.drop_in import CHUNK, layer_inputs
from analysis.trained import load_trained, read_sample
from engine.reporting.plots import encode, line_style
from engine.reporting.tables import compact_table, plus_minus
from engine.runtime.errors import UserError
from engine.runtime.files import make_output, to_csv, write_file

NUM_IMAGES = 16
"""Default number of images: with 14x14 tokens and three heads, 9,408 outputs of a layer."""

LARGEST = 10.0
"""Largest error that the figures resolve; zeros have an error of 1."""

AXES = {
    "macs": "multiply-accumulates (M) of the attention layers for an image\n"
    "(with projections; dashed: softmax attention)",
    "memory": f"peak memory of the first layer for {CHUNK} images (MiB)",
    "entropy": "entropy of softmax's weights (nats), at {temperatures}\nand a budget of {middle}",
    "layer": "layer, at a budget of {middle}",
}
"""Horizontal axis -> label."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_drop_in(parser, NUM_IMAGES, command_line.MODES)
    sizes = "sizes of a mechanism: landmarks, samples, tokens of a window, ..., at temperature 1 (16 49 196)"
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 49, 196], help=sizes)
    divisors = "divisors of the logits, at the middle budget (0.25 1 4)"
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.25, 1.0, 4.0], help=divisors)


def main(args: argparse.Namespace) -> None:
    command_line.check_positive(args, "draws", "images")
    for name in ("budgets", "temperatures"):
        if not all(0 < value < math.inf for value in getattr(args, name)):
            raise UserError(f"--{name} {' '.join(f'{x:g}' for x in getattr(args, name))}: give numbers above 0")
    make_output(args.output, ["error.csv", *(f"error_{against}.png" for against in AXES)])
    mechanisms = command_line.read_mechanisms(args.attention)
    budgets, temperatures = sorted(set(args.budgets)), sorted({1.0, *args.temperatures})
    middle = budgets[len(budgets) // 2]
    trained = load_trained(args)
    inputs, rows = layer_inputs(trained, read_sample(trained, args.images).images), []
    with command_line.progress("error", len(temperatures) * len(mechanisms), "mechanisms") as bar:
        for temperature in temperatures:
            softmax = attend_by_softmax(trained, inputs, temperature)
            for name, attention in mechanisms.items():
                bar.set_postfix_str(f"{name}, temperature {temperature:g}")
                sizes = budgets if temperature == 1 else [middle]
                rows += measure(trained, softmax, name, attention, sizes, args)
                bar.update()
    count = len(inputs[0][0])
    title = f"{args.checkpoint}: error against softmax of the same queries, keys and values; {count} images"
    title += f"; without training, mean ± standard deviation over draws: {args.draws}"
    print(f"{title}\n\n{compact_table([readable(row) for row in rows])}")
    lines = [line for row in rows for line in values(row, count, args.draws)]
    write_file(args.output / "error.csv", to_csv(list(lines[0]), (line.values() for line in lines)))
    for against in AXES:
        figure = draw(title, rows, against, args.modes, budgets, softmax.macs)
        write_file(args.output / f"error_{against}.png", encode(figure))


def readable(row: Row) -> dict[str, str]:
    """Returns title of a column -> its text."""
    layers = {f"layer {i + 1}": plus_minus(row.spread(i), ".3g") for i in range(len(row.entropies))}
    return {
        "attention": row.name,
        "options": row.options,
        "mode": row.mode,
        "budget": "" if row.budget is None else str(row.budget),
        "temperature": f"{row.temperature:g}",
        "entropy (nats)": f"{mean(row.entropies):.2f}",
        "error": plus_minus(row.spread(), ".3g"),
        **layers,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "MACs (M)": f"{row.macs / 1e6:.2f}" if row.macs else "",
        "peak (MiB)": "" if row.peak is None else f"{row.peak / 2**20:.1f}",
        "cannot be built": row.problem,
    }


def values(row: Row, images: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of the CSV file, column -> value: one for each layer, counted from 1."""
    for layer, nats in enumerate(row.entropies):
        error, std = (row.spread(layer) or (None, None))[:2]
        line = {"attention": row.name, "options": row.options, "mode": row.mode, "images": images, "draws": draws}
        line |= {"budget": row.budget, "temperature": row.temperature, "layer": layer + 1, "entropy": nats}
        line |= {"error": error, "error_std": std, "untrained_parameters": row.untrained, "macs": row.macs or None}
        yield line | {"peak_bytes": row.peak, "problem": row.problem}


def points_on(against: str, rows: Sequence[Row], middle: int) -> list[tuple[float, float, float | None]]:
    """Returns the points of a mechanism: place on one of `AXES`, mean and standard deviation of the error.

    They are of temperature 1, or of the `middle` budget, or of both. The middle budget is measured at every
    temperature. Rows without a budget count as of any.
    """
    at_middle = [row for row in rows if row.budget in (None, middle)]
    if against == "entropy":
        return [(mean(row.entropies), *row.spread()[:2]) for row in at_middle]
    if against == "layer":
        at_middle = [row for row in at_middle if row.temperature == 1]
        return [(layer + 1, *row.spread(layer)[:2]) for row in at_middle for layer in range(len(row.entropies))]
    at_one = [row for row in rows if row.temperature == 1]
    return sorted((row.macs / 1e6 if against == "macs" else row.peak / 2**20, *row.spread()[:2]) for row in at_one)


def draw(
    title: str, rows: Sequence[Row], against: str, modes: Sequence[str], budgets: Sequence[int], softmax_macs: int
) -> Figure:
    """Draws the error against one of `AXES`: a panel for each mode, a line for each mechanism."""
    names, middle = list(dict.fromkeys(row.name for row in rows if row.errors)), budgets[len(budgets) // 2]
    temperatures = ", ".join(f"{row:g}" for row in dict.fromkeys(row.temperature for row in rows))
    label = AXES[against].format(temperatures=f"temperatures {temperatures}", middle=middle)
    figure = Figure(figsize=(1.5 + 5.5 * len(modes), 5.5 + 0.07 * len(names)), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True, parse_math=False)
    panels = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
    shown = {}
    for axes, mode in zip(panels, modes, strict=True):
        for number, name in enumerate(names):
            here = [row for row in rows if row.name == name and row.errors and row.mode in (mode, "any")]
            if points := points_on(against, here, middle):
                x, means, deviations = zip(*points, strict=True)
                y = [min(value, LARGEST) for value in means]
                bars = [0 if value > LARGEST else d or 0 for value, d in zip(means, deviations, strict=True)]
                below = [min(bar, value) for bar, value in zip(bars, y, strict=True)]
                shown[name] = axes.errorbar(x, y, [below, bars], capsize=2, markersize=5, **line_style(number))
        axes.set_yscale("symlog", linthresh=1e-3)  # an error may be zero
        axes.set_ylim(-2e-4, 1.5 * LARGEST)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{mode} mode", fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if against == "macs":
            axes.axvline(softmax_macs / 1e6, color="black", linewidth=0.8, linestyle="--")
    if against in ("macs", "memory"):
        panels[0].set_xscale("log", base=2)
        panels[0].xaxis.set_major_formatter("{x:g}")
    if against == "layer":
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    note = f"(those above {LARGEST:g} at {LARGEST:g}; dotted: of zeros)"
    panels[0].set_ylabel(f"normalised mean squared error of attended values\n{note}")
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=min(6, 3 * len(modes)))
    return figure
