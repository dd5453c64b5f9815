"""Attention by random features that all queries share, in two softmaxes with gradients by hand.

    y_n = sum_s a_ns u_s,   a_n = softmax_s[q'_n . omega_s + LSE_m g(k'_m, omega_s) + prior_s + log alpha_ns]
    u_s = sum_m softmax_m[g(k'_m, omega_s)] v_m,   g(k', omega) = k' . omega - |k'|^2 / 2

The scale of queries and keys, x' = d^-1/4 x, is folded into samples and landmarks. The backward pass keeps q, k, v and
the weights.
"""

import torch
from torch import Tensor

from ...parts.features import autocast_off, compute_dtype, full_precision, log_features, scale, upcast
from .. import memory
from ..kernels import first_order, with_gradients
from ..memory import like_tokens
from ..products import factor_dtype, full_product, scaled
from .proposals import MIN_ALPHA, POOLED, Proposal, Weighting, own_ratio, propose

TRITON = f"{__package__}.triton_features"
"""Module with Triton's kernels of `performer` and `lara`."""


def covers_performer(q, k, v, omega, *, features="positive", causal=False):
    """True if the logarithms of the features are linear in queries and the sums run over all keys."""
    return features == "positive" and not causal


def performer(q, k, v, omega, *, features="positive", causal=False):
    """`attention.mechanisms.performer.performer`."""
    return _attend(q, k, v, upcast(omega).expand(q.shape[0], -1, -1, -1).contiguous())


def covers_lara(
    q, k, v, q_bar, k_bar, noise, uniform=None, *, proposal="pool_mixed", weighting="decoupled", beta=2.0, features=None
):
    """True unless proposals are mixtures, whose densities need the keys, weights are coupled, a proposal has several
    samples, or features are hyperbolic.
    """
    one_sample = noise.dim() < 4 or noise.shape[-2] == 1
    is_balanced = weighting == "balance" or (weighting == "decoupled" and one_sample)
    return features in (None, "positive") and proposal in POOLED and is_balanced


def lara(q, k, v, q_bar, k_bar, noise, uniform=None, *, features="positive", **options):
    """`attention.mechanisms.lara.lara`."""
    return _attend(q, k, v, *lara_samples(q_bar, k_bar, noise, **options))


@full_precision
def lara_samples(
    q_bar: Tensor,
    k_bar: Tensor,
    noise: Tensor,
    proposal: Proposal = "pool_mixed",
    weighting: Weighting = "decoupled",
    beta: float = 2.0,
) -> tuple:
    """Samples (B, h, c s, d) and their prior (B, h, c s); with the weighting "decoupled", one sample per proposal, also
    the scaled q_bar, the balance heuristic b (B, h, c) and beta.
    """
    q_bar = scale(q_bar)
    mean = propose(q_bar, q_bar, scale(k_bar), None, proposal).mean
    if weighting == "balance":
        omega = (mean + noise).flatten(2, 3)
        return omega, -log_features(mean.squeeze(3), omega).mT.logsumexp(-1)
    omega, prior, balance, _ = densities(mean, noise)
    return omega, prior, q_bar, balance, beta


def _of_densities(domega, dprior, dbalance, _, omega, mean, noise, weights):
    dbalance = dbalance * weights.diagonal(dim1=-2, dim2=-1)
    dlog = weights * dbalance[..., None]  # its negative
    dlog.diagonal(dim1=-2, dim2=-1).sub_(dbalance - dprior)
    flat, centres = dlog.flatten(0, 1), mean.squeeze(3)
    domega = torch.baddbmm(domega.flatten(0, 1), flat, centres.flatten(0, 1), alpha=-1).view_as(omega)
    dmean = torch.baddbmm(domega.flatten(0, 1), flat.mT, omega.flatten(0, 1), alpha=-1).view_as(omega)
    dmean = dmean.addcmul_(centres, dlog.sum(-2)[..., None])[:, :, :, None]
    return dmean, domega[:, :, :, None].sum_to_size(noise.shape) if noise.requires_grad else None


@with_gradients(_of_densities, keep=lambda results, *inputs: (results[0], *inputs, results[3]))
def densities(mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws a sample of each proposal, mean + noise (B, h, c, 1, d), and its densities under all proposals.

    Returns the samples (B, h, c, d); their prior (B, h, c), minus the log density under their own proposals; the
    balance heuristic, and without gradient the shares of all densities at every sample, (B, h, c, c).
    """
    omega, centres = (mean + noise).squeeze(3), mean.squeeze(3).flatten(0, 1)
    lengths = centres.square().sum(-1)[:, None]
    log_ratio = torch.baddbmm(lengths, omega.flatten(0, 1), centres.mT, beta=-0.5).unflatten(0, omega.shape[:2])
    shares = log_ratio.softmax(-1)
    return omega, -own_ratio(log_ratio), own_ratio(shares).clone(), shares.detach()


def _attend(q, k, v, omega, prior=None, q_bar=None, balance=None, beta=0.0):
    with autocast_off(q):
        return RandomFeatures.apply(q, k, v, omega, prior, q_bar, balance, beta, torch.is_grad_enabled())


class RandomFeatures(torch.autograd.Function):
    """Attention of q, k, v (B, h, N, d) by samples omega (B, h, s, d) with a prior (B, h, s), or None for 0.

    The result has the type of q. With q_bar (B, h, s, d) and balance (B, h, s), alpha is LARA's: `query_weights` with
    the weighting "decoupled". Products of queries or keys with samples or q_bar are scaled by d^(-1/4).
    """

    @staticmethod
    def forward(ctx, q, k, v, omega, prior, q_bar, balance, beta, keep):
        if keep and (memory.on_cpu(q) or factor_dtype(q) == q.dtype):  # one copy for both passes; else one at a time
            q, k, v = map(_contiguous, (q, k, v))
        of_keys, mass = _key_weights(k, omega)
        mass = mass if prior is None else mass + prior.flatten(0, 1)
        of_queries, r = _query_weights(q, omega, mass, q_bar, balance, beta)
        u = full_product(of_keys, _factors(v))
        y = of_queries.mT @ u.to(of_queries.dtype)
        ctx.save_for_backward(q, k, v, omega, q_bar, balance, u, of_keys, of_queries, r)
        ctx.beta = beta
        return _as_tokens(y, q)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        q, k, v, omega, q_bar, balance, u, of_keys, of_queries, r = ctx.saved_tensors
        needs, beta, full, kind = ctx.needs_input_grad, ctx.beta, u.dtype, of_keys.dtype
        softmax_backward = torch.ops.aten._softmax_backward_data
        dq = dk = dv = domega = dprior = dq_bar = dbalance = None
        with autocast_off(q):
            samples, dy, scale = omega.to(kind).flatten(0, 1), _factors(dy), omega.shape[-1] ** -0.25
            du = full_product(of_queries, dy)
            if needs[2]:
                dv = _as_tokens(of_keys.mT @ du.to(kind), v)
            if memory.on_cpu(q):  # gradient of logits, (B h, s, N)
                on_queries = softmax_backward(u @ dy.mT, of_queries, -2, kind)
            else:
                on_queries = softmax_backward(dy @ u.to(kind).mT, of_queries.mT, -1, kind).mT
            dmass = on_queries.sum(-1, dtype=full)
            if needs[4]:
                dprior = dmass.view(omega.shape[:3])
            queries, dqueries = _factors(q), scaled(on_queries.mT, samples, scale)
            if q_bar is not None:
                alpha = _alpha(r, balance, beta)
                dalpha = torch.div(on_queries, alpha, out=torch.empty_like(alpha))  # in the layout of alpha and r
                dalpha = torch.ops.aten.threshold_backward(dalpha, alpha, MIN_ALPHA)  # 0 at the floor
                dbalance = dalpha.sum(-1).view_as(balance)
                dr = softmax_backward(dalpha.sub_(dalpha.mean(-2, keepdim=True)), r, -1, full).to(kind)
                dq_bar = full_product(dr, queries, alpha=beta * scale).view_as(q_bar)
                dqueries.baddbmm_(dr.mT, q_bar.to(kind).flatten(0, 1), alpha=beta * scale)
            if needs[0]:
                dq = _as_tokens(dqueries, q)
            if needs[3]:
                domega = full_product(on_queries, queries, alpha=scale)
            del queries, dqueries, on_queries
            dmass = dmass - (du * u).sum(-1)  # the softmax over keys contributes to the gradient of their mass
            on_keys = full_product(du.to(kind), _factors(v).mT, dmass[..., None])
            on_keys = torch.mul(on_keys, of_keys, out=on_keys if kind == full else torch.empty_like(of_keys))
            keys, total = _factors(k), on_keys.sum(1, dtype=full)[..., None]
            if needs[3]:
                domega = full_product(on_keys, keys, domega, alpha=scale).view_as(omega)
            if needs[1]:
                keys = keys * total.to(kind)
                dk = _as_tokens(keys.baddbmm_(on_keys.mT, samples, beta=-(scale**2), alpha=scale), k)
        return dq, dk, dv, domega, dprior, dq_bar, dbalance, None, None


def _key_weights(k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """softmax_m g(k'_m, omega_s), (B h, s, M), and LSE_m g, (B h, s)."""
    keys, scale = _factors(k), k.shape[-1] ** -0.25
    lengths = torch.linalg.vector_norm(keys, dim=-1, dtype=compute_dtype(k)).square_()[:, None]
    log_xi = full_product(omega.to(keys.dtype).flatten(0, 1), keys.mT, lengths, beta=-(scale**2) / 2, alpha=scale)
    largest = log_xi.amax(-1)
    weights = torch.softmax(log_xi, -1, out=log_xi)
    return weights.to(keys.dtype), largest - weights.amax(-1).log()


def _query_weights(q, omega, mass, q_bar, balance, beta):
    """Weights a_ns and, with q_bar, softmax_n[q'_n . q_bar_s]: (B h, s, N).

    On a GPU the samples of a query lie side by side, because a softmax over another dimension than the last takes four
    times as long there (docs/speed.md).
    """
    queries, scale, log_weight, r = _factors(q), q.shape[-1] ** -0.25, mass[..., None], None
    if q_bar is not None:
        r = full_product((q_bar * scale).to(queries.dtype).flatten(0, 1), queries.mT)
        r = torch.softmax(r, -1, out=r)
        log_weight = _alpha(r, balance, beta).clamp_(min=MIN_ALPHA).log_().add_(log_weight)
    samples = omega.to(queries.dtype).flatten(0, 1)
    if memory.on_cpu(q):
        logits = full_product(samples, queries.mT, log_weight, alpha=scale)
        return torch.softmax(logits, -2, out=logits), r
    logits = full_product(queries, samples.mT, log_weight.mT, alpha=scale)
    return torch.softmax(logits, -1, out=logits).to(queries.dtype).mT, r


def _alpha(r: Tensor, balance: Tensor, beta: float) -> Tensor:
    """The weights alpha = b_s + beta (r_ns - mean_s r_ns), before their floor MIN_ALPHA."""
    alpha = torch.add(balance.flatten(0, 1)[..., None], r, alpha=beta)
    return alpha.sub_(r.mean(-2, keepdim=True), alpha=beta)


def _factors(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B h, N, d), contiguous, in `factor_dtype`."""
    dtype = factor_dtype(x)
    x = _contiguous(x) if memory.on_cpu(x) or dtype == x.dtype else x  # on a CPU, one step for both is slower
    return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def _contiguous(x: Tensor) -> Tensor:
    if memory.on_cpu(x) or torch.compiler.is_compiling():  # gradients in compiled graphs have no known layout yet
        return x.contiguous()
    return x if x.is_contiguous() else memory.contiguous(x, x.dtype)


def _as_tokens(x: Tensor, like: Tensor) -> Tensor:
    """(B h, N, d) -> (B, h, N, d) with the heads of a token adjacent in memory, in the type of `like`."""
    x = x if memory.on_cpu(x) else x.to(like.dtype)  # so that words can be copied
    y = memory.copy(like_tokens(like), x.view(like.shape))
    return y.view_as(y)  # torch 2.11 compiles no gradient of a result that an operator overwrote
