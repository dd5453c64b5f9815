"""How near low rank, sparse, and both come to softmax attention matrices at one budget, and `scatterbrain` beside them.

    python analyze.py oracle RUN
    python analyze.py oracle process1        # matrices of a generative process, without a model

The question of Scatterbrain's section 3 (Chen et al. 2021, arXiv:2110.15343): sparse wins where rows have little
entropy, low rank where they have much, both together in between. The budget is that of `analysis.decompositions`, and
each method that has both parts takes the split of it, of `SHARES`, that suits the matrix.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analysis.decompositions import godec, keep_largest, robust_pca, truncate
from analysis.matrices import Layer, process1_layers, read_layers
from attention import create_attention
from engine.errors import UserError
from engine.files import check_output, to_csv, write_file
from engine.outputs import encode

SHARES = 1 / 4, 1 / 2, 3 / 4
"""Of the budget, for low rank, where a method has both parts."""

LOWEST_BUDGET = 8
"""A quarter of it is a rank of 1."""

FLOOR = 1e-3
"""The least error that the figure tells apart."""

METHODS = {  # name -> colour (Okabe and Ito's) and marker
    "low rank": ("#0072B2", "o"),
    "sparse": ("#D55E00", "s"),
    "robust PCA": ("#009E73", "^"),
    "GoDec": ("#000000", "v"),
    "Scatterbrain": ("#CC79A7", "D"),
}


class Row(NamedTuple):
    """How near a method comes to one matrix. It is a line of the CSV file.

    Attributes:
        entropy: mean of the matrix's rows, nats. budget: numbers per row; None: as many as robust PCA takes.
        density: share of entries in the sparse part. error: ||A' - A||_F / ||A||_F; Scatterbrain's: mean of its draws.
    """

    layer: str
    image: int
    head: int
    entropy: float
    budget: int | None
    method: str
    rank: int
    density: float
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory or checkpoint; process1: no model, a random process")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--images", type=int, default=4, help="validation images, or samples of process1 (4)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64], help="numbers per row (8 16 32 64)")
    parser.add_argument("--draws", type=int, default=3, help="of Scatterbrain's random features (3)")
    parser.add_argument("--seed", type=int, default=0, help="of these and of process1 (0)")
    parser.add_argument("--output", type=Path, default=Path(), help="directory of table and figure (the present one)")


def main(args: argparse.Namespace) -> None:
    """Prints the tables, and writes the figure and the CSV file.

    Raises:
        UserError, OptionError: what cannot be honoured.
    """
    for name in ("images", "draws"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: give 1 or more")
    csv, png = (args.output / f"oracle.{suffix}" for suffix in ("csv", "png"))
    for path in (csv, png):
        check_output(path, "--output", [path.suffix])
    torch.manual_seed(args.seed)
    if args.run == "process1" and args.overrides:
        raise UserError(f"process1 {args.overrides[0]}: a random process has no such options; leave them out")
    if args.run == "process1":
        layers = process1_layers(args.images)
    else:
        layers = read_layers(Path(args.run), args.overrides, args.images)
    budgets = sorted(set(args.budgets))
    for layer in layers:
        check_budgets(budgets, layer)
    total = sum(layer.q.shape[0] * layer.q.shape[1] for layer in layers)
    rows = []
    with tqdm(desc="oracle", total=total, unit=" matrices", dynamic_ncols=True, disable=None, leave=False) as bar:
        for layer in layers:
            for found in compare(layer, budgets, args.draws):
                rows += found
                bar.update()
    print(table(rows))
    write_file(csv, to_csv(Row._fields, rows))
    write_file(png, picture(rows, args.run))


def check_budgets(budgets: Sequence[int], layer: Layer) -> None:
    """Raises the UserError for a budget that is no compression of the layer's matrices, or too low to be split."""
    tokens = layer.q.shape[2]
    prefix = tokens - math.prod(layer.grid)
    low = LOWEST_BUDGET + 2 * prefix
    for budget in budgets:
        if not low <= budget < tokens:
            raise UserError(f"--budgets {budget}: {layer.name} has rows of {tokens}; give {low} to {tokens - 1}")


class Fit(NamedTuple):
    """How near a method comes to a matrix, and with what; as in `Row`."""

    rank: int
    density: float
    error: float


def compare(layer: Layer, budgets: Sequence[int], draws: int) -> Iterator[list[Row]]:
    """The rows of each matrix of a layer, matrix after matrix."""
    matrices = layer.matrices
    entropies = torch.special.entr(matrices).sum(-1).mean(-1)
    mechanism = {budget: scatterbrain_fits(layer, matrices, budget, draws) for budget in budgets}
    for image, head in itertools.product(*map(range, matrices.shape[:2])):
        a = matrices[image, head]
        low, sparse = robust_pca(a)
        rank, density = int(torch.linalg.matrix_rank(low)), (sparse != 0).double().mean().item()
        fits = [(None, "robust PCA", Fit(rank, density, relative_error(low + sparse, a).item()))]
        for budget in budgets:
            found = decomposition_fits(a, low, budget) | {"Scatterbrain": mechanism[budget][image][head]}
            fits += [(budget, method, fit) for method, fit in found.items()]
        entropy = entropies[image, head].item()
        yield [Row(layer.name, image, head, entropy, budget, method, *fit) for budget, method, fit in fits]


def relative_error(approximation: Tensor, a: Tensor) -> Tensor:
    """||A' - A||_F / ||A||_F of matrices (..., N, N)."""
    return (approximation - a).norm(dim=(-2, -1)) / a.norm(dim=(-2, -1))


def best(fits: Iterable[Fit]) -> Fit:
    return min(fits, key=lambda fit: fit.error)


def decomposition_fits(a: Tensor, low: Tensor, budget: int) -> dict[str, Fit]:
    """Method -> its fit to `a` (N, N) at the budget; a method with both parts may do without one.

    low: of `robust_pca`. It is cut to rank r, and the entries that are then farthest from those of `a` are made exact.
    """
    N, ranks = len(a), [int(share * budget / 2) for share in SHARES]

    def fit(approximation: Tensor, rank: int, entries: int) -> Fit:
        return Fit(rank, entries / N, relative_error(approximation, a).item())

    def cut(rank: int, entries: int) -> Tensor:
        part = truncate(low, rank)
        return part + keep_largest(a - part, entries * N)

    splits = [(rank, budget - 2 * rank) for rank in ranks]
    alone = {
        "low rank": fit(truncate(a, budget // 2), budget // 2, 0),
        "sparse": fit(keep_largest(a, budget * N), 0, budget),
    }
    return alone | {
        "robust PCA": best([*alone.values(), *(fit(cut(*split), *split) for split in splits)]),
        "GoDec": best([*alone.values(), *(fit(sum(godec(a, r, s * N)), r, s) for r, s in splits)]),
    }


@torch.no_grad()
def scatterbrain_fits(layer: Layer, matrices: Tensor, budget: int, draws: int) -> list[list[Fit]]:
    """The fit of the mechanism `scatterbrain`, without training or bias, to `matrices` (B, h, P + N, P + N): [B][h].

    Its samples are its rank, its windows its entries: squares of the grid, blocks of a sequence. Prefix tokens, which
    are exact, cost 2 P of the budget. The matrix is what it makes of the identity's columns as values.
    """
    (B, h, tokens, _), grid = matrices.shape, layer.grid
    prefix, is_sequence = tokens - math.prod(grid), grid[0] == 1
    identity, fits = torch.eye(tokens, dtype=matrices.dtype).expand(B, h, -1, -1), []
    for share in SHARES:
        free = budget - 2 * prefix
        room = free - 2 * int(share * free / 2)
        side = room if is_sequence else min(math.isqrt(room), *grid)
        entries = side if is_sequence else side**2
        num_samples = (free - entries) // 2
        attn = create_attention(
            "scatterbrain",
            dim=h * layer.q.shape[-1],
            num_heads=h,
            grid=grid,
            num_prefix_tokens=prefix,
            window_size=side,
            num_samples=num_samples,
            layout="1d" if is_sequence else "2d",
            position_bias="none",
        ).double()  # in training mode, in which it draws new features every time
        errors = [relative_error(attn.attend_all((layer.q, layer.k, identity), grid), matrices) for _ in range(draws)]
        density = (entries + 2 * prefix) / tokens
        fits.append([[Fit(num_samples, density, error) for error in row] for row in (sum(errors) / draws).tolist()])
    return [[best(fit[image][head] for fit in fits) for head in range(h)] for image in range(B)]


def table(rows: Sequence[Row]) -> str:
    """Markdown: the error by layer and budget, then rank and density by budget; mean +- standard deviation over
    matrices."""
    lines = [f"Relative Frobenius error, mean ± standard deviation over {count_matrices(rows)} matrices"]
    lines += ["", *markdown(["layer", "entropy (nats)", "budget", *METHODS])]
    at_budget = [row for row in rows if row.budget is not None]
    for layer, budget in dict.fromkeys((row.layer, row.budget) for row in at_budget):
        here = [row for row in at_budget if (row.layer, row.budget) == (layer, budget)]
        errors = [spread([row.error for row in here if row.method == method]) for method in METHODS]
        lines += markdown([layer, spread([row.entropy for row in here], 2), str(budget), *errors], head=False)
    lines += ["", "Rank and density (% of the entries)", "", *markdown(["budget", *METHODS])]
    for budget in dict.fromkeys(row.budget for row in rows):
        cells = [describe([row for row in rows if (row.budget, row.method) == (budget, method)]) for method in METHODS]
        lines += markdown(["any" if budget is None else str(budget), *cells], head=False)
    return "\n".join(lines)


def count_matrices(rows: Sequence[Row]) -> int:
    return len({(row.layer, row.image, row.head) for row in rows})


def markdown(cells: Sequence[str], head: bool = True) -> list[str]:
    lines = [cells, ["---"] * len(cells)] if head else [cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{fmean(values):.{digits}f} ± {pstdev(values):.{digits}f}"


def describe(rows: Sequence[Row]) -> str:
    """Mean rank and density; empty without rows."""
    return f"{fmean(row.rank for row in rows):.1f}, {fmean(100 * row.density for row in rows):.1f} %" if rows else ""


def picture(rows: Sequence[Row], title: str) -> bytes:
    """PNG: the error against the budget, mean and standard deviation over matrices; and of every matrix against its
    entropy, at the middle budget."""
    rows = [row for row in rows if row.budget is not None]
    budgets = sorted({row.budget for row in rows})
    middle = budgets[len(budgets) // 2]
    figure = Figure((11, 4.8), layout="constrained")
    figure.suptitle(f"{title}: {count_matrices(rows)} softmax attention matrices", parse_math=False)
    by_budget, by_entropy = figure.subplots(1, 2, sharey=True)
    for number, (method, (color, marker)) in enumerate(METHODS.items()):
        errors = [[row.error for row in rows if (row.method, row.budget) == (method, budget)] for budget in budgets]
        places = [budget * 1.02 ** (number - 2) for budget in budgets]  # so that bars do not hide each other
        style = {"color": color, "marker": marker, "markersize": 5, "label": method}
        means, deviations = [max(fmean(here), FLOOR) for here in errors], [pstdev(here) for here in errors]
        below = [min(deviation, mean - FLOOR) for mean, deviation in zip(means, deviations, strict=True)]
        by_budget.errorbar(places, means, [below, deviations], capsize=2, **style)
        here = [row for row in rows if (row.method, row.budget) == (method, middle)]
        heights = [max(row.error, FLOOR) for row in here]
        by_entropy.plot([row.entropy for row in here], heights, linestyle="", alpha=0.6, **style)
    by_budget.set_xscale("log", base=2)
    by_budget.set_xticks(budgets, budgets)
    by_budget.set_xlabel("budget: 2 x rank + entries per row (numbers)")
    by_budget.set_ylabel(f"relative Frobenius error (those below {FLOOR} at {FLOOR})")
    by_budget.set_yscale("log")
    by_entropy.set_xlabel(f"mean entropy of the rows (nats), at a budget of {middle}")
    for axes in (by_budget, by_entropy):
        axes.grid(alpha=0.3)
    figure.legend(*by_entropy.get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    return encode(figure)
