"""Random feature attention, the limit of several mechanisms."""

from torch import Tensor

from attention.ops.random_features.op import mix_features
from attention.parts.features import log_features


def random_feature_attention(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, log_weight: Tensor | float = 0.0
) -> Tensor:
    """Self-normalised estimate of attention from samples that all queries share (LARA paper eq. 2, eq. 10).

    Args:
        q, k: scaled queries (..., N, d) and keys (..., M, d). v: (..., M, d). omega: (..., s, d).
        log_weight: log importance weight of sample s for query n, (..., N, s).
    """
    return mix_features(log_features(q, omega) + log_weight, log_features(k, omega).mT, v)
