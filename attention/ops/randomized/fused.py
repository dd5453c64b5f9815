"""Randomized attention by PyTorch's fused attention from samples, after a draw of keys that needs no gradient.

    y_n = mean_s sum_m softmax_m[d^-1/2 (omega_ns . k_m - |k_m|^2 / 2)] v_m,   omega_ns = q_n + key_ns + d^1/4 noise_ns

Samples are stored divided by d^-1/4, the scale of queries and keys, which the logits apply. The term that depends on
the key alone is one more channel, [omega, 1] . [k, -|k|^2 / 2]. No N x N weights are kept for the backward pass; the
weights of the draw are computed for a few heads at a time, so that they stay in a CPU's cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.geometry import gather_tokens
from ...parts.sampling import sample_indices
from ..kernels import first_order
from ..memory import cache_chunks


def covers(q, k, v, noise, uniform=None, *, proposal="unbiased", features="positive"):
    """True if features are positive and the device is not meta, on which the definition's costs are counted."""
    return features == "positive" and not q.is_meta


def ra(q, k, v, noise, uniform=None, *, proposal="unbiased", features="positive"):
    """`attention.mechanisms.ra.ra`."""
    d = q.shape[-1]
    if proposal == "mean_key":
        key = k.mean(-2)[:, :, None, None]
    elif proposal == "biased":
        key = F.scaled_dot_product_attention(q, k, k)[:, :, :, None]
    else:
        key = gather_tokens(k, draw(q, k, uniform))
    omega = torch.add(q[:, :, :, None] + key, noise, alpha=d**0.25)  # (B, h, N, s, d)
    samples = _widen(omega.flatten(2, 3), q.new_ones(1))
    keys = _widen(k, k.square().sum(-1, keepdim=True) / -2)
    values = _widen(v, v.new_zeros(1))  # a CPU's fused attention needs equal widths
    y = F.scaled_dot_product_attention(samples, keys, values, scale=d**-0.5)[..., :d]
    return FirstOrder.apply(y.unflatten(2, omega.shape[2:4]).mean(3))


class FirstOrder(torch.autograd.Function):
    """The identity; refuses second derivatives, which fused attention does not have."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy


def _widen(x: Tensor, channel: Tensor) -> Tensor:
    """[x, channel, zeros] of d + 1 channels, padded to the next multiple of 8 for GPUs; `channel` is broadcast."""
    tail = F.pad(channel, (0, -(x.shape[-1] + 1) % 8))
    return torch.cat([x, tail.expand(*x.shape[:-1], -1)], -1)


@torch.no_grad()
def draw(q: Tensor, k: Tensor, uniform: Tensor) -> Tensor:
    """Indices (B, h, N, s) of keys drawn from softmax_m(q_n . k_m / sqrt(d)) at `uniform`, (..., N, s)."""
    uniform, q = uniform.expand(*q.shape[:3], -1), q * q.shape[-1] ** -0.5
    index = torch.empty(uniform.shape, dtype=torch.long, device=q.device)
    for chunk in cache_chunks(q, q.shape[2] * k.shape[2] * q.element_size()):  # new memory costs as much as the sums
        weights = q[chunk] @ k[chunk].mT
        index[chunk] = sample_indices(torch.softmax(weights, -1, out=weights), uniform[chunk], out=weights)
    return index
