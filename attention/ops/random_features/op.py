"""Attention by features of a kernel: sums over keys are taken once, so that it is linear in the number of tokens."""

from torch import Tensor

from attention.parts.features import full_precision, log_features
from attention.parts.masking import mask_logits, mask_tokens


@full_precision
def mix_features(log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Ratio of sums sum_sm exp(log_q_ns + log_k_sm) v_m / sum_sm exp(log_q_ns + log_k_sm), as two nested softmaxes.

    It equals LARA paper eq. 2 and 10 exactly, needs no epsilon and cannot overflow.

    Args:
        log_q: (..., N, s), up to a constant per query. log_k: (..., s, M). v: (..., M, d).
        key_mask: which keys count, (B, M) bool.
    Returns:
        (..., N, d).
    """
    log_k = mask_logits(log_k, key_mask)
    return (log_q + log_k.logsumexp(-1)[..., None, :]).softmax(-1) @ (log_k.softmax(-1) @ v)


@full_precision
def random_feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    log_weight: Tensor | float = 0.0,
    *,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Self-normalised estimate of attention from samples that all queries share (LARA paper eq. 2, eq. 10).

    Args:
        q, k: scaled queries (..., N, d) and keys (..., M, d). v: (..., M, d). omega: (..., s, d).
        log_weight: log importance weight of sample s for query n, (..., N, s). key_mask: which keys count, (B, M) bool.
    Returns:
        (..., N, d). Cost: 4 N s d multiply-accumulates at M = N.
    """
    return mix_features(q @ omega.mT + log_weight, log_features(k, omega).mT, v, key_mask)


@full_precision
def linear_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    floor: float = 1e-6,
    signed: bool = True,
    *,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention of the kernel phi_q . phi_k, sums over keys taken once: sum_m (phi_q_n . phi_k_m) v_m over their sum.

    Args:
        phi_q: features (..., N, f) of queries. phi_k: (..., M, f). v: (..., M, d).
        floor: least magnitude of a normaliser. A query without any weight gives 0 above floor 0.
        signed: whether a normaliser keeps its sign; if not, negative ones are raised to the floor (released code).
        key_mask: which keys count, (B, M) bool.
    Returns:
        (..., N, d). Cost: 2 N f d multiply-accumulates at M = N.
    """
    phi_k = mask_tokens(phi_k, key_mask)
    normaliser = phi_q @ phi_k.sum(-2)[..., None]
    raised = normaliser.abs().clamp(min=floor).copysign(normaliser) if signed else normaliser.clamp(min=floor)
    return phi_q @ (phi_k.mT @ v) / raised
