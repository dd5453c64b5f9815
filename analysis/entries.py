"""Error of the entries of attention matrices against the logit q . k, as Scatterbrain's figure 4.

    python analyze.py entries runs/softmax --attention performer scatterbrain local

Random features estimate large entries with large errors, and windows miss what lies outside them (Chen et al. 2021,
arXiv:2110.15343, section 3.2). The entries of softmax's matrices are sorted by their logit into bins of equal number.
The error of a bin is the root of its entries' mean squared error, in multiples of 1 / N, the mean weight of a row.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis import command_line
from analysis.budgets import options_text
from analysis.drop_in import drop_in, layer_inputs, merge_modes, set_mode
from analysis.implied import NoMatrix, implied_matrix
from analysis.matrices import MAX_TOKENS
from analysis.trained import Trained, load_trained, read_sample
from attention import Attention, Grid, OptionError
from engine.reporting.plots import encode, in_style, line_style, new_figure
from engine.reporting.tables import Spread, compact_table, mean_and_std, over_draws, plus_minus, spread
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output
from models.base import attention_layers

NUM_BINS = 10
"""Number of bins, each with a tenth of a layer's entries."""

FLOOR = 1e-3
"""Smallest error that the figure resolves."""

NUM_IMAGES = 4
"""Default number of images: with 14x14 tokens and three heads, 460,992 entries of a layer."""


@dataclass(frozen=True)
class Row:
    """Errors of a mechanism's entries in one layer.

    Attributes:
        attention: as on the command line. options: of the mechanism. mode: see `merge_modes`. layer: counted from 1.
            logits: mean logit q . k / sqrt(d) of each bin. errors: for each draw the error of each bin. zeros: errors
            of a matrix of zeros. problem: why there are none.
    """

    attention: str
    options: str
    mode: str = ""
    layer: int = 0
    logits: Sequence[float] = ()
    errors: Sequence[Sequence[float]] = ()
    zeros: Sequence[float] = ()
    problem: str = ""

    def spread(self, part: int) -> Spread | None:
        """Returns mean and standard deviation over draws of the error in a bin."""
        return spread(errors[part] for errors in self.errors)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_drop_in(parser, NUM_IMAGES, ("evaluation",))


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    make_output(args.output, ["entries.csv", "entries.png"])
    mechanisms = command_line.read_mechanisms(args.attention)
    trained = load_trained(args)
    inputs = layer_inputs(trained, read_sample(trained, args.images).images)
    most = max(x.shape[1] for x, _ in inputs)
    if most > MAX_TOKENS:
        raise UserError(
            f"{args.checkpoint}: a layer has matrices of {most}^2 entries; give at most {MAX_TOKENS} tokens"
        )
    inputs = [(x.double(), grid) for x, grid in inputs]
    softmax, rows = drop_in(trained, {"name": "softmax"}, 0)[0].double(), []
    layers = [Bins(logits_of(*given)) for given in zip(attention_layers(softmax), inputs, strict=True)]
    with command_line.progress("entries", len(mechanisms), "mechanisms") as bar:
        for attention in mechanisms.items():
            bar.set_postfix_str(attention[0])
            rows += measure(trained, attention, inputs, layers, args)
            bar.update()
    title = f"{args.checkpoint}: entries of attention matrices against softmax's, {len(inputs[0][0])} images"
    title += f"; without training, {over_draws(args.draws)}"
    print(f"{title}\n\nError of each tenth of the entries, from low logits to high, in multiples of 1 / N\n")
    print(compact_table([readable(row) for row in rows]))
    lines = [line for row in rows for line in values(row)]
    write_file(args.output / "entries.csv", dicts_to_csv(lines))
    write_file(args.output / "entries.png", encode(draw(title, rows)))


class Bins:
    """Softmax's matrix P (B, h, N, N) of one layer, its entries in `NUM_BINS` bins of equal number by their logit."""

    def __init__(self, logits: Tensor):
        self.parts = logits.flatten().argsort().tensor_split(NUM_BINS)
        self.logits = [logits.flatten()[part].mean().item() for part in self.parts]
        self.matrix, self.tokens = logits.softmax(-1).flatten(), logits.shape[-1]

    def errors(self, matrix: Tensor) -> list[float]:
        """Returns the root mean squared error of a matrix in each bin, in multiples of 1 / N."""
        squares = (matrix.flatten() - self.matrix).square()
        return [self.tokens * squares[part].mean().sqrt().item() for part in self.parts]


def logits_of(layer: Attention, given: tuple[Tensor, Grid]) -> Tensor:
    """Returns q . k / sqrt(d), (B, h, N, N), of tokens (B, N, C) and their grid."""
    q, k, _ = layer.project(*given)
    return q @ k.mT * q.shape[-1] ** -0.5


def measure(
    trained: Trained,
    attention: tuple[str, Mapping[str, Any]],
    inputs: Sequence[tuple[Tensor, Grid]],
    layers: Sequence[Bins],
    args: argparse.Namespace,
) -> Iterator[Row]:
    """Yields the rows of a mechanism, one for each layer and mode, or one that says why it has none."""
    name, options = attention
    found: dict[str, list[list[list[float]]]] = {mode: [] for mode in args.modes}  # by draw, layer and bin
    try:
        for seed in range(args.draws):
            model, _ = drop_in(trained, options, seed)
            for mode, errors in found.items():
                set_mode(model.double(), mode, seed)
                matrices = map(matrix_of, attention_layers(model), inputs)
                errors.append([bins.errors(matrix) for bins, matrix in zip(layers, matrices, strict=True)])
    except (OptionError, NoMatrix) as error:
        yield Row(name, options_text(options), problem=str(error))
        return
    for mode, draws in merge_modes(found).items():
        for number, bins in enumerate(layers):
            errors = [draw[number] for draw in draws]
            zeros = bins.errors(torch.zeros_like(bins.matrix))
            yield Row(name, options_text(options), mode, number + 1, bins.logits, errors, zeros)


def matrix_of(layer: Attention, given: tuple[Tensor, Grid]) -> Tensor:
    """Returns the `implied_matrix` of a layer for its input, (B, h, N, N).

    Raises:
        NoMatrix: there is none, or its columns are not the tokens.
    """
    x, grid = given
    matrix = implied_matrix(layer, layer.project(x, grid), grid)
    if matrix.shape[-1] != matrix.shape[-2]:
        problem = "has no weight for every pair of tokens: it has fewer keys than tokens"
        raise NoMatrix(f"attention({layer.name()}) {problem}")
    return matrix


def readable(row: Row) -> dict[str, str]:
    """Returns title of a column -> its text."""
    start = {"attention": row.attention, "options": row.options, "mode": row.mode, "layer": str(row.layer or "")}
    bins = {f"{part + 1}": plus_minus(row.spread(part), ".3g") for part in range(NUM_BINS)}
    return start | bins | {"left out": row.problem}


def values(row: Row) -> Iterator[dict[str, Any]]:
    """Yields the rows of the CSV file, column -> value: one for each bin."""
    line = {"attention": row.attention, "options": row.options, "mode": row.mode, "layer": row.layer or None}
    for part, logit in enumerate(row.logits or [None]):
        error, std = mean_and_std(row.spread(part))
        yield line | {"logit": logit, "error": error, "error_std": std, "problem": row.problem}


@in_style
def draw(title: str, rows: Sequence[Row]) -> Figure:
    """Draws the error against the logit: a panel for each layer, a line for each mechanism and mode."""
    measured = [row for row in rows if row.errors]
    layers = list(dict.fromkeys(row.layer for row in measured)) or [1]
    figure = new_figure(f"Which entries of softmax's matrices are hard to estimate?\n{title}", 3.6)
    names = list(dict.fromkeys(row.attention for row in measured))
    for axes, layer in zip(figure.subplots(1, len(layers), sharey=True, squeeze=False)[0], layers, strict=True):
        here = [row for row in measured if row.layer == layer]
        for row in here:
            y = [max(spread.mean, FLOOR) for spread in map(row.spread, range(NUM_BINS)) if spread]
            style = line_style(names.index(row.attention)) | ({"mfc": "white"} if row.mode == "sampled" else {})
            axes.plot(row.logits, y, label=row.attention + (" (sampled)" if row.mode == "sampled" else ""), **style)
        if here:
            axes.plot(here[0].logits, here[0].zeros, color="black", linewidth=0.8, linestyle=":", label="zeros")
        axes.set_yscale("log")
        axes.grid()
        axes.set_title(f"layer {layer}")
        axes.set_xlabel("logit q . k / sqrt(d)")
    figure.axes[0].set_ylabel(f"error of entries x N\n(below {FLOOR}: at {FLOOR})")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure
