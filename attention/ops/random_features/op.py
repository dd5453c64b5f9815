"""Attention by features of a kernel: all queries share the sums over keys, so that cost is linear in N."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.features import Normaliser, full_precision
from ...parts.masking import mask_logits, mask_tokens
from ..kernels import with_fast_path
from . import sums
from .causal import causal_sums, running_mass, running_mix


@full_precision
def mix_features(
    log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Ratio of sums sum_sm exp(log_q_ns + log_k_sm) v_m / sum_sm exp(log_q_ns + log_k_sm), as two nested softmaxes.

    It equals LARA paper eq. 2 and 10 exactly, needs no epsilon and cannot overflow.

    log_q: (..., N, s), up to a constant per query. log_k: (..., s, M). v: (..., M, d). Causal: (B, h, ...).
    """
    log_k = mask_logits(log_k, key_mask)
    if causal:
        log_k = log_k.mT
        mass = running_mass(log_k)
        return running_mix((log_q + mass[:, :, 1:]).softmax(-1), log_k, mass, v)
    return (log_q + log_k.logsumexp(-1)[..., None, :]).softmax(-1) @ (log_k.softmax(-1) @ v)


@with_fast_path(sums.linear_attention, sums.covers)
@full_precision
def linear_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    normaliser: Normaliser = "floor",
    eps: float = 1e-6,
    *,
    rotate: Callable[[Tensor], Tensor] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention with weights phi_q_n . phi_k_m, sum_m (phi_q_n . phi_k_m) v_m over the sum of weights, in linear time.

    Args:
        phi_q: features (..., N, f) of queries. phi_k: (..., M, f). v: (..., M, d).
        normaliser: divisor made from the sum of a query's weights.
            floor: magnitude raised to at least `eps`, sign kept; a query without any weight gives 0 if eps > 0.
            clamp: raised to at least `eps`, negative sums included (released code).
            sum: `eps` is added. mean: M `eps` is added, which adds `eps` to the mean over keys.
            none: weights are not normalised.
        rotate: function that rotates features by their positions in the weights of values; normalisers are unrotated.
        causal: shapes are (B, h, ...).
    Returns:
        (..., N, d). Cost: 2 N f d multiply-accumulates at M = N, and N f for the normalisers; causal: `causal_sums`.
    """
    phi_k = mask_tokens(phi_k, key_mask)
    if causal:
        assert normaliser != "mean"  # its count of keys would have to run along
        assert rotate is None
        if normaliser == "none":
            return causal_sums(phi_q, phi_k, v)
        y, total = causal_sums(phi_q, phi_k, F.pad(v, (0, 1), value=1)).split([v.shape[-1], 1], -1)
    else:
        turned_q, turned_k = (phi_q, phi_k) if rotate is None else (rotate(phi_q), rotate(phi_k))
        y = turned_q @ (turned_k.mT @ v)
        if normaliser == "none":
            return y
        total = phi_q @ phi_k.sum(-2)[..., None]
    if normaliser == "floor":
        return y / total.abs().clamp(min=eps).copysign(total)
    if normaliser == "clamp":
        return y / total.clamp(min=eps)
    count = v.shape[-2] if key_mask is None else key_mask.sum(1)[:, None, None, None].to(v.dtype)
    return y / (total + eps * (count if normaliser == "mean" else 1))


def linear_attention_reference(phi_q, phi_k, v, normaliser="floor", eps=1e-6, *, causal=False):
    """`linear_attention` as a dense matrix of weights."""
    return weighted_values_reference(phi_q @ phi_k.mT, v, normaliser, eps, causal)


def mix_features_reference(log_q, log_k, v, *, causal=False):
    """`mix_features` as a dense matrix of weights."""
    return weighted_values_reference(log_q.exp() @ log_k.exp(), v, "sum", 0.0, causal)


def weighted_values_reference(kernel, v, normaliser="floor", eps=1e-6, causal=False):
    """Values under weights (..., N, M) with the normaliser of `linear_attention`."""
    kernel = kernel.tril() if causal else kernel
    total = kernel.sum(-1, keepdim=True)
    if normaliser in ("sum", "mean"):
        return kernel @ v / (total + eps * (v.shape[-2] if normaliser == "mean" else 1))
    floor = torch.ones_like(total) * eps
    if normaliser == "clamp":
        return kernel @ v / torch.where(total < eps, floor, total)
    if normaliser == "floor":
        return kernel @ v / torch.where(total.abs() < eps, torch.copysign(floor, total), total)
    return kernel @ v
