"""Weights alpha of LARA's proposals: eqs. 36 to 38 beside the optimal ones (LARA paper, appendix D), as an oracle.

    python analyze.py weighting runs/softmax --landmarks 4 16

LARA adds estimates of a query's output from samples of c proposals, with weights alpha_c(omega) that sum to one. The
optimal weights minimise the variance of the linearised estimate (eq. 20). With p the query's own density, Q the sum of
the densities q_c, e = f - mu the deviation of one sample's output, and u = e / |e|, they are (eqs. 25 to 27)

    alpha_c = b_c (1 + rho_c - sum_c' b_c' rho_c'),   b_c = q_c / Q,   rho_c = r_c . u Q / (p |e|),

where the vectors r_c = integral alpha_c p e solve the linear system that follows from inserting alpha,

    sum_c' R_cc' r_c' = integral b_c p e,   R_cc' = delta_cc' (I - integral q_c u u^T) + integral b_c q_c' u u^T.

The paper solves it for one channel only, where the first term of R vanishes. Here integrals are means over samples of
all proposals, so that the optimal weights are an estimate, and none have less variance on these samples. Outputs and
variance are measured on other samples, where others may have less. The oracle knows every query's p, f and mu.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis import command_line
from analysis.drop_in import drop_in, layer_inputs
from analysis.trained import load_trained, read_sample
from attention import Attention, Grid
from attention.ops.random_features.proposals import MIN_ALPHA, propose
from attention.parts.features import log_features, scale
from attention.parts.geometry import split_prefix
from attention.parts.groups import group_mean, segments
from engine.reporting.tables import compact_table, plus_minus, spread
from engine.runtime.arguments import Count
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv, write_file
from engine.runtime.ownership import make_output
from models.base import attention_layers

NUM_IMAGES = 2
"""Default number of images."""

BETA = 2.0
"""Coefficient of eq. 38, `attention.mechanisms.lara.Lara.Config.beta`."""

WEIGHTS = {
    "balance": "balance heuristic (eq. 36)",
    "coupled": "coupled (eq. 37)",
    "decoupled": "decoupled (eq. 38)",
    "optimal": "optimal (oracle)",
}
"""Weights -> title."""


VALUES = "error", "variance"
"""Measured values: the normalised error of outputs, and the normalised variance of the linearised estimate.

Only outputs have LARA's floor of weights, `MIN_ALPHA`.
"""


class Samples(NamedTuple):
    """S samples of the proposals' mixture seen by Q queries; integrals are means of w g / Q.

    Attributes:
        balance: b_c of every sample, (S, c). ratio: p / Q, (Q, S). deviation: f - mu, (Q, S, d).
        measure: weights w such that an integral of g is sum_s w_s g(omega_s) / Q(omega_s), (S,).
    """

    balance: Tensor
    ratio: Tensor
    deviation: Tensor
    measure: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_sample(parser, NUM_IMAGES)
    add = parser.add_argument
    add("--landmarks", type=Count(), nargs="+", default=[4, 16], metavar="C", help="numbers of proposals (4 16)")
    add("--queries", type=Count(high=2**16), default=8, help="queries of each image and head, evenly spaced (8)")
    add(
        "--samples",
        type=Count(high=2**16),
        default=256,
        help="samples of each proposal that fit the optimal weights (256)",
    )
    add("--passes", type=Count(2, 2**16), default=64, help="other samples of each proposal, which measure (64)")


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    make_output(args.output, ["weighting.csv"])
    trained = load_trained(args)
    inputs = layer_inputs(trained, read_sample(trained, args.images).images)
    inputs = [(x.cpu().double(), grid) for x, grid in inputs]  # torch solves without full rank on the CPU only
    layers = attention_layers(drop_in(trained, {"name": "softmax"}, 0)[0].cpu().double())
    counts, rows = sorted(set(args.landmarks)), []
    check(layers, inputs, counts, args.samples)
    with command_line.progress("weighting", len(layers) * len(counts), "layers") as bar:
        for number, (layer, (x, grid)) in enumerate(zip(layers, inputs, strict=True)):
            for count in counts:
                found = [measure(layer, x, grid, count, seed, args) for seed in range(args.draws)]
                for name in WEIGHTS:
                    row = {"layer": number + 1, "landmarks": count, "weights": name}
                    spreads = [spread(each[name][place] for each in found) for place in range(len(VALUES))]
                    rows.append(row | dict(zip(VALUES, spreads, strict=True)))
                bar.update()
    title = f"{args.checkpoint}: LARA's weights, {len(inputs[0][0])} images, {args.queries} queries of each head"
    print(f"{title}\n\n{compact_table([readable(row) for row in rows])}")
    print("\nError: of attended values, relative to zeros. Variance: of the linearised estimate (eq. 20), likewise.")
    print("Both are measured on other samples than those that fit the optimal weights.")
    titles = [*list(rows[0])[:3], *(f"{value}{end}" for value in VALUES for end in ("", "_std"))]
    lines = ([*list(row.values())[:3], *(x for value in VALUES for x in row[value][:2])] for row in rows)
    write_file(args.output / "weighting.csv", to_csv(titles, lines))


def check(
    layers: Sequence[Attention],
    inputs: Sequence[tuple[Tensor, Grid]],
    counts: Sequence[int],
    samples: int,
) -> None:
    """Checks numbers of proposals for every layer's grid, and of samples of each proposal, before any work.

    Raises:
        OptionError: a number does not form segments of a grid. UserError: fewer samples than unknowns.
    """
    smallest_first = sorted((grid for _, grid in inputs), key=math.prod)  # what fits a grid also fits larger ones
    for count, grid in itertools.product(counts, smallest_first):
        segments(count, grid, torch.device("cpu"), "--landmarks", pooled=False)
    least = max(layer.project(x[:1], grid)[2].shape[-1] for layer, (x, grid) in zip(layers, inputs, strict=True))
    if samples < least:
        problem = f"the optimal weights have {least} unknowns for each proposal; give at least {least}"
        raise UserError(f"--samples {samples}: {problem}")


def readable(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns title of a column -> its text."""
    shown = {"layer": str(row["layer"]), "proposals": str(row["landmarks"]), "weights": WEIGHTS[row["weights"]]}
    return shown | {value: plus_minus(row[value], ".3g") for value in VALUES}


def measure(
    layer: Attention, x: Tensor, grid: Grid, count: int, seed: int, args: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Returns weights -> normalised error of outputs, and normalised variance of eq. 20, of a layer's heads and images.

    Proposals are LARA's without learned maps (eq. 35), of `count` segments; samples have unit noise.
    """
    torch.manual_seed(seed)
    q, k, v = layer.project(x, grid)
    q = split_prefix(q, grid[0] * grid[1])[1]
    bins = segments(count, grid, x.device, "--landmarks", pooled=False)
    q_bar = scale(group_mean(q, bins)[:, :, 0])
    k_bar = scale(group_mean(split_prefix(k, grid[0] * grid[1])[1], bins)[:, :, 0])
    centre = propose(q_bar, q_bar, k_bar, None, "pool_mixed").mean[:, :, :, 0]
    chosen = torch.arange(args.queries, device=x.device) * q.shape[2] // args.queries
    of_queries = (scale(q) @ q_bar.mT).softmax(2)[:, :, chosen]  # r'_nc
    sums = {name: x.new_zeros(2) for name in WEIGHTS}
    size = 0.0
    for image in range(len(x)):
        for head in range(q.shape[1]):
            place = image, head
            own = scale(q[place][chosen]), scale(k[place]), v[place], centre[place]
            mu = (own[0] @ own[1].mT).softmax(-1) @ own[2]
            rows = fit_optimal(sample_proposals(*own, mu, args.samples))
            size += mu.square().sum().item()
            tested = sample_proposals(*own, mu, args.passes)
            for name in WEIGHTS:
                alpha = weights(name, tested, of_queries[place], rows)
                sums[name] += torch.stack([outputs_error(alpha, tested, count), sampled_variance(alpha, tested).sum()])
    return {name: (found[0].item() / size, found[1].item() / size) for name, found in sums.items()}


def sample_proposals(q: Tensor, k: Tensor, v: Tensor, centre: Tensor, mu: Tensor, samples: int) -> Samples:
    """Draws `samples` of each unit Gaussian about `centre` (c, d), for scaled queries (Q, d) and keys (M, d).

    Samples stand proposal by proposal, those of the first one first.
    """
    omega = centre.repeat_interleave(samples, 0)
    omega = omega + torch.randn_like(omega)
    return evaluate_at(omega, q, k, v, centre, mu, torch.full_like(omega[:, 0], 1 / samples))


def evaluate_at(omega: Tensor, q: Tensor, k: Tensor, v: Tensor, centre: Tensor, mu: Tensor, measure: Tensor) -> Samples:
    """Returns the densities and outputs of queries at samples omega (S, d).

    The other arguments are those of `sample_proposals`, and the measure of `Samples`.
    """
    log_q = log_features(centre, omega).mT  # log q_c(omega) / N(omega; 0, I), (S, c)
    log_k = log_features(k, omega).mT  # (S, M)
    log_p = log_features(q, omega) + log_k.logsumexp(-1) - (q @ k.mT).logsumexp(-1, keepdim=True)
    outputs = log_k.softmax(-1) @ v  # f, the same for every query
    return Samples(log_q.softmax(-1), (log_p - log_q.logsumexp(-1)).exp(), outputs - mu[:, None], measure)


def fit_optimal(samples: Samples) -> Tensor:
    """Solves for the vectors r_c of every query, (Q, c, d)."""
    balance, ratio, deviation, measure = samples
    c, d = balance.shape[1], deviation.shape[2]
    unit = deviation / deviation.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(deviation.dtype).tiny)
    found = []
    for t, e, u in zip(ratio, deviation, unit, strict=True):
        right = torch.einsum("s,sc,sd->cd", measure * t, balance, e)
        weighted = (measure[:, None, None] * balance[:, :, None] * u[:, None]).flatten(1)  # (S, c d)
        system = weighted.mT @ (balance[:, :, None] * u[:, None]).flatten(1)
        blocks = torch.einsum("s,sc,sd,se->cde", measure, balance, u, u)
        system += torch.block_diag(*(torch.eye(d, dtype=u.dtype, device=u.device) - block for block in blocks))
        found.append(torch.linalg.lstsq(system, right.flatten()[:, None], driver="gelsd").solution.view(c, d))
    return torch.stack(found)


def weights(name: str, samples: Samples, of_queries: Tensor, rows: Tensor) -> Tensor:
    """Weights alpha of every query at every sample, (Q, S, c); all c at once, of which a sample uses its proposal's.

    of_queries: r'_nc of eqs. 37 and 38, (Q, c). rows: of `fit_optimal`.
    """
    balance, ratio, deviation, _ = samples
    if name == "balance":
        return balance.expand(len(ratio), -1, -1)
    if name == "optimal":
        size = ratio[..., None] * deviation.square().sum(-1, keepdim=True)  # p |e|^2 / Q
        rho = deviation @ rows.mT / size.clamp(min=torch.finfo(size.dtype).tiny)
        return balance * (1 + rho - (balance * rho).sum(-1, keepdim=True))
    r = of_queries[:, None]
    if name == "coupled":
        return balance * (1 + r - (balance * r).sum(-1, keepdim=True))
    return balance + BETA * (r - r.mean(-1, keepdim=True))


def variance(alpha: Tensor, samples: Samples) -> Tensor:
    """Trace of the covariance of the linearised estimate of every query, eq. 20: (Q,)."""
    balance, ratio, deviation, measure = samples
    square = measure * ratio**2 * deviation.square().sum(-1)  # (Q, S)
    first = torch.einsum("qs,qsc,sc->q", square, alpha**2, 1 / balance.clamp(min=torch.finfo(balance.dtype).tiny))
    second = torch.einsum("qs,qsc,qsd->qcd", measure * ratio, alpha, deviation)
    return first - second.square().sum((1, 2))


def sampled_variance(alpha: Tensor, samples: Samples) -> Tensor:
    """`variance` by samples of `sample_proposals`, two or more of each proposal, without their bias: (Q,).

    The squares of estimated integrals exceed those of the integrals by the estimates' own variance.
    """
    balance, ratio, deviation, _ = samples
    count = balance.shape[1]
    passes = len(balance) // count
    terms = alpha * ratio[..., None]  # times the deviation: what is integrated
    squares = (terms.square().sum(-1) * deviation.square().sum(-1)).sum(-1)
    each = terms.unflatten(1, (count, passes)), deviation.unflatten(1, (count, passes))
    means = torch.einsum("qjsc,qjsd->qjcd", *each) / passes  # over the samples of proposal j
    return variance(alpha, samples) + (squares / passes - means.square().sum((1, 2, 3))) / (passes - 1)


def outputs_error(alpha: Tensor, samples: Samples, count: int) -> Tensor:
    """Summed squared error of self-normalised outputs, eq. 10, mean over passes with a sample of each proposal.

    Weights have LARA's floor `MIN_ALPHA`: with negative ones the normaliser could vanish.
    """
    balance, ratio, deviation, _ = samples
    passes = len(balance) // count
    own = torch.arange(count, device=alpha.device).repeat_interleave(passes)
    index = torch.arange(len(own), device=alpha.device)
    weight = (
        ratio * alpha[:, index, own].clamp(min=MIN_ALPHA) / balance[index, own]
    )  # alpha_c p / q_c at the proposals' own samples
    weight = weight.unflatten(1, (count, passes))
    y = (weight[..., None] * deviation.unflatten(1, (count, passes))).sum(1) / weight.sum(1)[..., None]
    return y.square().sum(-1).mean(1).sum()
