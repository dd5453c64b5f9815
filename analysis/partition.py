"""Error of EVA's control variates as the partition of the keys is refined (EVA paper, propositions 1 and 2).

    python analyze.py partition runs/softmax --groups 1 4 16 49 196

For a query with softmax's weights pi over the keys, eq. 9 is the weighted error of coefficients that are shared within
each group P_c, of the optimal ones, which are the values v themselves (eq. 8):

    J(beta) = sum_c sum_{m in P_c} pi_m ||beta_c - v_m||^2

It is least at the means of the values of each group under pi (eq. 10), never rises as groups are divided, and is 0 with
a group for every key. More bins of a grid divide fewer ones only if they keep all of their edges. On 14x14 tokens, 49
bins do not divide 16: their edges are at 2, 4, 6, ..., and those of 16 at 3, 7 and 10.

EVA estimates these coefficients by one sample of random features for each group, about the sum of the group's mean
query and mean key (eq. 28 without learned maps), which all queries share. Errors are relative to beta = 0.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis import command_line
from analysis.drop_in import CHUNK, drop_in, layer_inputs
from analysis.trained import load_trained, read_sample
from attention import Attention, Grid
from attention.ops.group_values.op import group_values
from attention.parts.features import scale
from attention.parts.geometry import split_prefix
from attention.parts.groups import Groups, gather_groups, group_mean, segments
from engine.reporting.plots import encode, in_style, line_style, new_figure
from engine.reporting.tables import compact_table, plus_minus, spread
from engine.runtime.arguments import Count
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output
from models.base import attention_layers

NUM_IMAGES = 16
"""Default number of images."""

COLUMNS = {
    "optimal": "J of the optimal coefficients (eq. 10)",
    "estimated": "J of EVA's estimate from one sample",
    "mean": "J of the means of the groups' values",
    "output": "error of the output with the estimate (eq. 13)",
}
"""Measurement -> title."""


@dataclass(frozen=True)
class Row:
    """Errors at a number of groups in one layer.

    Attributes:
        layer: counted from 1. groups: number of groups C. errors: measurement (`COLUMNS`) -> value of each draw.
    """

    layer: int
    groups: int
    errors: dict[str, Sequence[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_sample(parser, NUM_IMAGES)
    counts = "numbers of groups, rows times columns of bins of the grid (1 4 16 49 196)"
    parser.add_argument("--groups", type=Count(), nargs="+", default=[1, 4, 16, 49, 196], metavar="C", help=counts)


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    make_output(args.output, ["partition.csv", "partition.png"])
    trained = load_trained(args)
    inputs = layer_inputs(trained, read_sample(trained, args.images).images)
    softmax = drop_in(trained, {"name": "softmax"}, 0)[0].double()
    layers, counts = attention_layers(softmax), sorted(set(args.groups))
    partitions, rows = partition_grids(counts, [grid for _, grid in inputs], trained.device), []
    with command_line.progress("partition", len(layers) * len(counts), "partitions") as bar:
        for number, (layer, (x, grid)) in enumerate(zip(layers, inputs, strict=True)):
            for count in counts:
                groups = partitions[grid][count]
                found = [measure(layer, x.double(), grid, groups, seed) for seed in range(args.draws)]
                rows.append(Row(number + 1, count, {name: [each[name] for each in found] for name in COLUMNS}))
                bar.update()
    title = f"{args.checkpoint}: EVA's coefficients by number of groups, {len(inputs[0][0])} images, {args.draws} draws"
    print(f"{title}; relative to coefficients of zero\n\n{compact_table([readable(row) for row in rows])}")
    lines = [
        {"layer": row.layer, "groups": row.groups, "measurement": name, "mean": each.mean, "std": each.std}
        for row in rows
        for name, values in row.errors.items()
        if (each := spread(values))
    ]
    write_file(args.output / "partition.csv", dicts_to_csv(lines))
    write_file(args.output / "partition.png", encode(draw(title, rows)))


def partition_grids(
    counts: Sequence[int], grids: Sequence[Grid], device: torch.device
) -> dict[Grid, dict[int, Groups]]:
    """Returns grid -> number of groups -> groups.

    Raises:
        OptionError: a grid has no such bins. The number that it names is one that every grid has.
    """
    smallest_first = sorted(set(grids), key=math.prod)  # what fits a grid also fits larger ones
    return {
        grid: {count: segments(count, grid, device, "--groups", pooled=False) for count in counts}
        for grid in smallest_first
    }


def measure(layer: Attention, x: Tensor, grid: Grid, groups: Groups, seed: int) -> dict[str, float]:
    """Measures a partition on tokens (B, P + N, C) of a layer with softmax attention; prefix tokens are left out."""
    torch.manual_seed(seed)
    sums: dict[str, list[float]] = {name: [] for name in COLUMNS}
    sizes = []
    for part in x.split(CHUNK):
        q, k, v = (split_prefix(y, grid[0] * grid[1])[1] for y in layer.project(part, grid))
        weights, coefficients = group_weights(q, k, groups), estimate(q, k, v, groups)
        values, optimal = members(v, groups), optimal_coefficients(weights, v, groups)
        means = group_mean(v, groups)[:, :, 0, :, None].expand_as(optimal)
        shared = coefficients[:, :, :, None].expand_as(optimal)
        for name, beta in ("optimal", optimal), ("estimated", shared), ("mean", means):
            sums[name].append(weighted_error(weights, values, beta).sum().item())
        exact, mass = (weights.sum(-1)[..., None] * optimal).sum(2), weights.sum(-1)
        output = torch.einsum("bhcn,bhcd->bhnd", mass, coefficients)
        sums["output"].append((output - exact).square().sum().item())
        of_zero = weighted_error(weights, values, torch.zeros_like(optimal))
        sizes.append([of_zero.sum().item(), exact.square().sum().item()])
    of_values, of_outputs = map(sum, zip(*sizes, strict=True))
    return {name: sum(values) / (of_outputs if name == "output" else of_values) for name, values in sums.items()}


def members(x: Tensor, groups: Groups) -> Tensor:
    """Tokens (B, h, N, d) -> members of c groups that all queries share, (B, h, c, t, d)."""
    return gather_groups(x, groups)[:, :, 0]


def group_weights(q: Tensor, k: Tensor, groups: Groups) -> Tensor:
    """Softmax's weights of q (B, h, N, d) on the t members of each of c groups of k: (B, h, c, N, t); 0 without one."""
    logits = q[:, :, None] @ members(k, groups).mT * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~groups.valid[0, :, None], -torch.inf)
    return (logits - logits.logsumexp(4, keepdim=True).logsumexp(2, keepdim=True)).exp()


def optimal_coefficients(weights: Tensor, v: Tensor, groups: Groups) -> Tensor:
    """The coefficients that minimise J: means of the values of each group under the weights, (B, h, c, N, d)."""
    sums = weights @ members(v, groups)
    return sums / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def estimate(q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
    """Coefficients (B, h, c, d) from one sample of each group's features, omega_c ~ N(q_bar_c + k_bar_c, I)."""
    mean = group_mean(scale(q), groups) + group_mean(scale(k), groups)  # (B, h, 1, c, d)
    omega = mean + torch.randn_like(mean)
    return group_values(k, v, omega[..., None, :], groups)[0][:, :, 0]


def weighted_error(weights: Tensor, values: Tensor, beta: Tensor) -> Tensor:
    """J of every query, eq. 9: weights (B, h, c, N, t), values (B, h, c, t, d), beta (B, h, c, N, d) -> (B, h, N)."""
    squares = values.square().sum(-1)[:, :, :, None] - 2 * beta @ values.mT + beta.square().sum(-1, keepdim=True)
    return (weights * squares.clamp(min=0)).sum((2, 4))


def readable(row: Row) -> dict[str, str]:
    """Returns title of a column -> its text."""
    found = {COLUMNS[name]: plus_minus(spread(values), ".3g") for name, values in row.errors.items()}
    return {"layer": str(row.layer), "groups": str(row.groups)} | found


@in_style
def draw(title: str, rows: Sequence[Row]) -> Figure:
    """Draws the errors against the number of groups: a panel for each layer, a line for each measurement."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    figure = new_figure(f"What does a finer partition gain?\n{title}", 3.6)
    for axes, layer in zip(figure.subplots(1, len(layers), sharey=True, squeeze=False)[0], layers, strict=True):
        here = [row for row in rows if row.layer == layer]
        for number, (name, label) in enumerate(COLUMNS.items()):
            means = [sum(row.errors[name]) / len(row.errors[name]) for row in here]
            axes.plot([row.groups for row in here], means, label=label, **line_style(number))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid()
        axes.set_title(f"layer {layer}")
        axes.set_xlabel("groups C")
    figure.axes[0].set_ylabel("relative error")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
