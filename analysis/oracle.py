"""Oracle approximations of softmax attention matrices at one budget: low rank, sparse, both, and `scatterbrain`.

    python analyze.py oracle RUN

Scatterbrain's section 3 (Chen et al. 2021, arXiv:2110.15343) states that sparse wins for rows of low entropy, low rank
for rows of high entropy, and both together in between. `analysis.decompositions` defines the budget. Each method with
both parts takes the split in `SHARES` that is best for the matrix. "Scatterbrain by entropy" instead takes one split
for a layer, from the entropy of its matrices for the first image (section 5.1).
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from analysis.budgets import split_budget
from analysis.decompositions import keep_largest, robust_pca, truncate
from analysis.matrices import Layer, read_layers
from attention import create_attention
from engine.reporting.plots import encode, in_style, line_style, marker_style, new_figure
from engine.reporting.tables import compact_table, plus_minus, spread
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv, write_file
from engine.runtime.ownership import make_output
from engine.runtime.terminal import progress

SHARES = 1 / 4, 1 / 2, 3 / 4
"""Shares of the budget for low rank, for methods with both parts."""

FLOOR = 1e-3
"""Smallest error that the figure resolves."""

METHODS = "low rank", "sparse", "robust PCA", "Scatterbrain", "Scatterbrain by entropy"


class Row(NamedTuple):
    """Error of a method for one matrix, a line of the CSV file.

    Attributes:
        entropy: mean over the matrix's rows, nats. budget: numbers per row.
        density: share of entries in the sparse part. error: ||A' - A||_F / ||A||_F; for Scatterbrain a mean over draws.
    """

    layer: str
    image: int
    head: int
    entropy: float
    budget: int
    method: str
    rank: int
    density: float
    error: float


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    layers = read_layers(args)
    make_output(args.output, ["oracle.csv", "oracle.png"])
    budgets, rows = sorted(set(args.budgets)), []
    layers = compressible(layers, budgets)
    total = sum(layer.q.shape[0] * layer.q.shape[1] for layer in layers)
    with progress("oracle", total, "matrices") as bar:
        for layer in layers:
            for found in compare(layer, budgets, args.draws):
                rows += found
                bar.update()
    count = len({(row.layer, row.image, row.head) for row in rows})
    title = f"{args.checkpoint}: {count} softmax attention matrices (mean ± std); Scatterbrain untrained"
    print(f"{title}\n\nRelative Frobenius error\n\n{compact_table(errors(rows))}")
    write_file(args.output / "oracle.csv", to_csv(Row._fields, rows))
    write_file(args.output / "oracle.png", encode(draw(title, rows)))


def compressible(layers: Sequence[Layer], budgets: Sequence[int]) -> list[Layer]:
    """Returns the layers whose matrices all budgets, in ascending order, compress. The others are named on stderr.

    Raises:
        UserError: no layer is left.
    """
    left = []
    for layer in layers:
        tokens = layer.q.shape[2]
        # A quarter of 8 is a rank of 1. Prefix tokens, which are exact, cost two more numbers per row each.
        low, high = 8 + 2 * (tokens - math.prod(layer.grid)), tokens - 1
        if low <= budgets[0] and budgets[-1] <= high:
            left.append(layer)
        else:
            able = f"can have budgets of {low} to {high}" if low <= high else "are not longer than any budget"
            print(f"{layer.name}: left out, as its rows of {tokens} {able}", file=sys.stderr)
    if not left:
        raise UserError(f"--budgets {' '.join(map(str, budgets))}: no layer is left; give others, or another run")
    return left


class Fit(NamedTuple):
    """Error of a method for a matrix, with its rank and density as in `Row`."""

    rank: int
    density: float
    error: float


def compare(layer: Layer, budgets: Sequence[int], draws: int) -> Iterator[list[Row]]:
    """Yields the rows of each matrix of a layer."""
    matrices = layer.matrices
    entropies = torch.special.entr(matrices).sum(-1).mean(-1)
    mechanism = {budget: scatterbrain_fits(layer, matrices, budget, draws) for budget in budgets}
    by_entropy = {budget: scatterbrain_fits(layer, matrices, budget, draws, [share_of(layer)]) for budget in budgets}
    for image, head in itertools.product(*map(range, matrices.shape[:2])):
        a = matrices[image, head]
        (low, _), fits = robust_pca(a), []
        for budget in budgets:
            found = decomposition_fits(a, low, budget) | {"Scatterbrain": mechanism[budget][image][head]}
            found["Scatterbrain by entropy"] = by_entropy[budget][image][head]
            fits += [(budget, method, fit) for method, fit in found.items()]
        entropy = entropies[image, head].item()
        yield [Row(layer.name, image, head, entropy, budget, method, *fit) for budget, method, fit in fits]


def frobenius_error(approximation: Tensor, a: Tensor) -> Tensor:
    """Returns ||A' - A||_F / ||A||_F of matrices (..., N, N)."""
    return (approximation - a).norm(dim=(-2, -1)) / a.norm(dim=(-2, -1))


def best(fits: Iterable[Fit]) -> Fit:
    return min(fits, key=lambda fit: fit.error)


def decomposition_fits(a: Tensor, low: Tensor, budget: int) -> dict[str, Fit]:
    """Returns method -> its fit to `a` (N, N) at the budget. A method with both parts may do without one.

    low: low-rank part of `robust_pca`. It is truncated to rank r; then the entries with the largest error become exact.
    """
    N, splits = len(a), [(rank, budget - 2 * rank) for rank in (int(share * budget / 2) for share in SHARES)]

    def fit(approximation: Tensor, rank: int, entries: int) -> Fit:
        return Fit(rank, entries / N, frobenius_error(approximation, a).item())

    def cut(rank: int, entries: int) -> Tensor:
        part = truncate(low, rank)
        return part + keep_largest(a - part, entries * N)

    alone = {"low rank": fit(truncate(a, budget // 2), budget // 2, 0)}
    alone["sparse"] = fit(keep_largest(a, budget * N), 0, budget)
    return alone | {"robust PCA": best([*alone.values(), *(fit(cut(*split), *split) for split in splits)])}


def share_of(layer: Layer) -> float:
    """Returns the low-rank part's share of a budget for the layer, from its matrices for the first image.

    It is the mean entropy of their rows / log N: 1 for uniform rows. Scatterbrain's section 5.1 gives that part more
    memory if the entropy of observed matrices is high, without a rule. The proportional rule is ours.
    """
    matrices = layer.matrices[0]
    return torch.special.entr(matrices).sum(-1).mean().item() / math.log(matrices.shape[-1])


@torch.no_grad()
def scatterbrain_fits(
    layer: Layer, matrices: Tensor, budget: int, draws: int, shares: Sequence[float] = SHARES
) -> list[list[Fit]]:
    """Fits `scatterbrain`, without training or bias, to `matrices` (B, h, P + N, P + N) and returns fits `[B][h]`.

    Its samples count as rank, and its windows, squares of the grid or blocks of a sequence, as entries. Each matrix
    gets the best of the `shares` of the budget for samples. Prefix tokens, which are exact, cost 2 P of the budget. The
    mechanism's matrix is its output for the identity as values.
    """
    (B, h, tokens, _), grid = matrices.shape, layer.grid
    prefix = tokens - math.prod(grid)
    identity, fits = torch.eye(tokens, dtype=matrices.dtype).expand(B, h, -1, -1), []
    for share in shares:
        options = split_budget(budget - 2 * prefix, share, grid)
        entries = options["window_size"] ** (1 if grid[0] == 1 else 2)
        sizes = {"dim": h * layer.q.shape[-1], "num_heads": h, "grid": grid, "num_prefix_tokens": prefix}
        attn = create_attention("scatterbrain", position_bias="none", **sizes, **options).double()
        # In training mode, every call samples new features.
        errors = [frobenius_error(attn.attend_all((layer.q, layer.k, identity), grid), matrices) for _ in range(draws)]
        rank, density = options["num_samples"], (entries + 2 * prefix) / tokens
        fits.append([[Fit(rank, density, error) for error in row] for row in (sum(errors) / draws).tolist()])
    return [[best(fit[image][head] for fit in fits) for head in range(h)] for image in range(B)]


def errors(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns the errors by layer and budget: title of a column -> its text."""
    lines = []
    for layer, budget in dict.fromkeys((row.layer, row.budget) for row in rows):
        here = [row for row in rows if (row.layer, row.budget) == (layer, budget)]
        entropy = spread(row.entropy for row in here if row.method == here[0].method)
        line = {"layer": layer, "entropy (nats)": plus_minus(entropy, ".2f"), "budget": str(budget)}
        by_method = {name: spread(row.error for row in here if row.method == name) for name in METHODS}
        lines.append(line | {name: plus_minus(found, ".3f") for name, found in by_method.items()})
    return lines


@in_style
def draw(title: str, rows: Sequence[Row]) -> Figure:
    """Draws the error against the budget, mean and standard deviation over matrices.

    A second panel shows the error of every matrix against its entropy, at the middle budget.
    """
    budgets = sorted({row.budget for row in rows})
    middle = budgets[len(budgets) // 2]
    figure = new_figure(f"Are low rank and sparse entries together better than either alone?\n{title}", 3.6)
    by_budget, by_entropy = figure.subplots(1, 2, sharey=True)
    for number, method in enumerate(METHODS):
        here = [[row.error for row in rows if (row.method, row.budget) == (method, budget)] for budget in budgets]
        places = [budget * 1.02 ** (number - 2) for budget in budgets]  # so that bars do not hide each other
        means, deviations, *_ = zip(*map(spread, here), strict=True)
        means, deviations = [max(mean, FLOOR) for mean in means], [deviation or 0 for deviation in deviations]
        below = [min(deviation, mean - FLOOR) for mean, deviation in zip(means, deviations, strict=True)]
        by_budget.errorbar(places, means, [below, deviations], **line_style(number))
        points = [(row.entropy, max(row.error, FLOOR)) for row in rows if (row.method, row.budget) == (method, middle)]
        by_entropy.scatter(
            *zip(*points, strict=True), s=12, alpha=0.7, linewidths=0, label=method, **marker_style(number)
        )
    by_budget.set_xscale("log", base=2)
    by_budget.set_xticks(budgets, budgets)
    by_budget.xaxis.set_minor_locator(NullLocator())
    by_budget.set_xlabel("budget: 2 x rank + entries per row (numbers)")
    by_budget.set_ylabel(f"relative Frobenius error\n(below {FLOOR}: at {FLOOR})")
    by_budget.set_yscale("log")
    by_entropy.set_xlabel(f"mean entropy of the rows (nats), at a budget of {middle}")
    for axes in (by_budget, by_entropy):
        axes.grid()
    figure.legend(*by_entropy.get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    return figure
