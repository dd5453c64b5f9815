"""Error of mechanisms against softmax attention, on a trained model's queries, keys and values, as LARA's figure 1.

    python analyze.py error runs/softmax --attention ra lara eva --budgets 16 49 196

A temperature divides the logits and makes softmax's matrices sharper or flatter. Mechanisms that sample have two
errors, one with samples as in training and one in evaluation. `--decompose 32` divides the first one into squared bias
and variance, over 32 passes with other samples: the bias is what more training steps with fresh samples cannot average
away. `--align 150` measures layers' outputs, as they are and after 150 steps that fit them to the model's own.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import nn

from analysis.align import align_by_seed, open_training_images
from analysis.approximation import Row, attend_by_softmax, measure
from analysis.command_line import read_mechanisms
from analysis.drop_in import attended, layer_inputs, outputs
from analysis.trained import Sample, Trained, load_trained, read_sample
from engine.reporting.plots import encode, in_style, label_points, line_style, name_lines, new_figure
from engine.reporting.tables import compact_table, mean_and_std, over_draws, plus_minus
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.memory import limit_memory
from engine.runtime.ownership import make_output
from engine.runtime.terminal import progress
from models.assignment import mechanisms_of

LARGEST = 10.0
"""Largest error that the figures resolve; zeros have an error of 1."""

AXES = {
    "macs": "cost: multiply-accumulates of the attention layers for an image, with projections (M)",
    "entropy": "entropy of softmax's weights (nats), at {temperatures} and a budget of {middle}",
}
"""Horizontal axis -> label."""

QUESTIONS = {
    "macs": "How near does each mechanism come to softmax attention, and at which cost?",
    "entropy": "Is softmax attention harder to imitate where it is sharp?",
}
"""Horizontal axis -> question that the figure answers."""


def main(args: argparse.Namespace) -> None:
    if args.decompose is not None and "sampled" not in args.modes:
        raise UserError(
            f"--decompose {args.decompose}: there is no variance over them; leave --modes out, or add sampled"
        )
    if args.temperatures is None:
        args.temperatures = [0.25, 1.0, 4.0] if args.align is None else [1.0]
    if args.align is not None and args.temperatures != [1.0]:
        raise UserError("--align fits to the run's own attention, which has temperature 1; leave --temperatures out")
    if not all(0 < value < math.inf for value in args.temperatures):
        raise UserError(f"--temperatures {' '.join(f'{x:g}' for x in args.temperatures)}: give numbers above 0")
    budgets, temperatures = sorted(set(args.budgets)), sorted({1.0, *args.temperatures})
    figures = [against for against in AXES if against != "entropy" or len(temperatures) > 1]
    mechanisms = read_mechanisms(args.attention)
    middle = budgets[len(budgets) // 2]
    trained = load_trained(args)
    sample = read_sample(trained, args.images)
    make_output(args.output, ["error.csv", *(f"error_{against}.png" for against in figures)])
    fit = None if args.align is None else aligner(trained, sample, args.align)
    inputs, rows = layer_inputs(trained, sample.images), []
    total = len(temperatures) * len(mechanisms)
    with limit_memory(trained.device), progress("error", total, "mechanisms") as bar:
        for temperature in temperatures:
            softmax = attend_by_softmax(trained, inputs, temperature, attended if fit is None else outputs)
            for name, attention in mechanisms.items():
                bar.set_postfix_str(f"{name}, temperature {temperature:g}")
                sizes = budgets if temperature == 1 else [middle]
                rows += measure(trained, softmax, name, attention, sizes, args, fit)
                bar.update()
    count = len(inputs[0][0])
    of = "softmax of the same queries, keys and values" if fit is None else "softmax, of the outputs of layers"
    stages = "without training" if fit is None else f"as they are and aligned in {args.align} steps"
    title = f"{args.checkpoint}: error against {of}; {count} images; {stages}, {over_draws(args.draws)}"
    print(f"{title}\n\n{compact_table([readable(row) for row in rows])}")
    tokens = [math.prod(others["grid"]) for _, others in inputs]
    lines = [line for row in rows for line in values(row, tokens, count, args.draws)]
    write_file(args.output / "error.csv", dicts_to_csv(lines))
    for against in figures if any(row.errors for row in rows) else []:
        figure = draw(title, rows, against, budgets, softmax.macs)
        write_file(args.output / f"error_{against}.png", encode(figure))


def aligner(trained: Trained, sample: Sample, steps: int) -> Callable[[nn.Module, int], None]:
    """Returns a function that aligns a model by a seed, see `align`.

    Raises:
        UserError: the run's own attention is not softmax. OptionError: there are no training images.
    """
    others = {options["name"] for options in mechanisms_of(trained.run.attention)} - {"softmax"}
    if others:
        raise UserError(f"--align fits to the run's own attention, which is {', '.join(others)}; give a run of softmax")
    training = open_training_images(trained, sample)
    return lambda model, seed: align_by_seed(trained, model, training, steps, seed)


def readable(row: Row) -> dict[str, str]:
    """Returns title of a column -> its text."""
    layers = {f"layer {i}": plus_minus(row.spread(i), ".3g") for i in range(len(row.entropies))}
    return {
        "attention": row.name,
        "options": row.options,
        "mode": row.mode,
        "aligned: steps": str(row.steps or ""),
        "budget": "" if row.budget is None else str(row.budget),
        "temperature": f"{row.temperature:g}",
        "entropy (nats)": f"{row.entropy:.2f}",
        "error": plus_minus(row.spread(), ".3g"),
        "squared bias": plus_minus(row.spread_of_squared_bias(), ".3g"),
        **layers,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "MACs (M)": f"{row.macs / 1e6:.2f}" if row.macs else "",
        "cannot be built": row.problem,
    }


def values(row: Row, tokens: Sequence[int], images: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of the CSV file, column -> value: one for each layer, counted from 0, which has `tokens`."""
    for layer, nats in enumerate(row.entropies):
        error, std = mean_and_std(row.spread(layer))
        line = {"attention": row.name, "options": row.options, "mode": row.mode, "aligned_steps": row.steps}
        line |= {"images": images, "draws": draws, "budget": row.budget, "temperature": row.temperature}
        line |= {"layer": layer, "tokens": tokens[layer], "entropy": nats}
        bias = (row.spread_of_squared_bias(layer) or [None])[0]
        line |= {"error": error, "error_std": std, "squared_bias": bias, "untrained_parameters": row.untrained}
        yield line | {"macs": row.macs or None, "problem": row.problem}


@in_style
def draw(title: str, rows: Sequence[Row], against: str, budgets: Sequence[int], softmax_macs: int) -> Figure:
    """Draws the error against one of `AXES`: a line for each mechanism and mode, hollow markers for sampled mode.

    Costs are those at temperature 1, and entropies those at the middle budget, or without one.
    """
    middle = budgets[len(budgets) // 2]
    temperatures = ", ".join(f"{row:g}" for row in dict.fromkeys(row.temperature for row in rows))
    label = AXES[against].format(temperatures=f"temperatures {temperatures}", middle=middle)
    measured = [row for row in rows if row.errors]
    series = dict.fromkeys((row.label, row.mode) for row in measured)
    names, mechanisms = ([*dict.fromkeys(found)] for found in ((x for x, _ in series), (row.name for row in measured)))
    apart = {name for name, mode in series if mode != "any"}  # their rows of any mode are on the lines of each mode
    figure = new_figure(f"{QUESTIONS[against]}\n{title}", max(3.6, 1.2 + 0.16 * len(names)))
    axes = figure.subplots()
    drawn: list[Line2D] = []
    lines: dict[str, Line2D] = {}  # the first of each mechanism, which is named
    for name, mode in series:
        if mode == "any" and name in apart:
            continue
        here = [row for row in measured if row.label == name and row.mode in (mode, "any")]
        if against == "entropy":
            points = [(row.entropy, *row.spread()[:2]) for row in here if row.budget in (None, middle)]
        else:
            points = sorted((row.macs / 1e6, *row.spread()[:2]) for row in here if row.temperature == 1)
        if points:
            x, means, deviations = zip(*points, strict=True)
            y = [min(value, LARGEST) for value in means]
            bars = [0 if value > LARGEST else d or 0 for value, d in zip(means, deviations, strict=True)]
            below = [min(bar, value) for bar, value in zip(bars, y, strict=True)]
            style = line_style(mechanisms.index(here[0].name)) | ({"mfc": "white"} if mode == "sampled" else {})
            style |= {"linestyle": ":"} if here[0].steps else {}
            drawn.append(axes.errorbar(x, y, [below, bars], **style).lines[0])
            lines.setdefault(name, drawn[-1])
    axes.set_yscale("symlog", linthresh=1e-3)  # an error may be zero
    axes.set_ylim(-2e-4, 1.5 * LARGEST)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.grid()
    notes = [f"dotted: error of zeros; errors above {LARGEST:g} are drawn at {LARGEST:g}"]
    if any(mode == "sampled" for _, mode in series):
        notes.append("hollow: sampled mode")
    if against == "macs":
        notes.append("dashed: softmax attention")
    axes.set_xlabel(f"{label}\n{'; '.join(notes)}")
    of = "outputs of layers" if any(row.steps for row in rows) else "attended values"
    axes.set_ylabel(f"normalised mean squared error\nof {of}")
    if against == "macs":
        axes.axvline(softmax_macs / 1e6, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.12)
        ends = [tuple(line.get_xydata()[-1]) for line in lines.values()]
        points = [tuple(point) for line in drawn for point in line.get_xydata()]
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        if high < 2 * low:  # hardly a power of two lies between
            axes.xaxis.set_major_locator(MaxNLocator(5))
        label_points(axes, ends, list(lines), points, drawn)
    else:
        name_lines(axes, lines)
    return figure
