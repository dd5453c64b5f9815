"""Randomized attention by PyTorch's fused attention of samples, after a draw of keys that needs no gradient.

    y_n = mean_s sum_m softmax_m[d^-1/2 (omega_ns . k_m - |k_m|^2 / 2)] v_m,   omega_ns = q_n + key_ns + d^1/4 noise_ns

Samples are kept divided by d^-1/4, the scale of queries and keys, which is left to the logits. What depends on the key
alone is one more channel, [omega, 1] . [k, -|k|^2 / 2]. No N x N weights are kept for the backward pass; those of the
draw are made for a few heads at a time, so that they stay in a CPU's cache.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.draws import sample_indices
from attention.kernels import first_order
from attention.landmarks import gather_tokens


def covers(q, k, v, noise, uniform=None, *, proposal="unbiased", hyperbolic=False):
    """Not: hyperbolic features, and the meta device, where the definition's costs are counted."""
    return not (hyperbolic or q.is_meta)


def ra(q, k, v, noise, uniform=None, *, proposal="unbiased", hyperbolic=False):
    """`attention.ra.ra`."""
    d = q.shape[-1]
    if proposal == "mean_key":
        key = k.mean(-2)[:, :, None, None]
    elif proposal == "biased":
        key = F.scaled_dot_product_attention(q, k, k)[:, :, :, None]
    else:
        key = gather_tokens(k, draw(q, k, uniform))
    omega = torch.add(q[:, :, :, None] + key, noise, alpha=d**0.25)  # (B, h, N, s, d)
    half = k.square().sum(-1, keepdim=True) / 2
    samples, keys = _widen(omega.flatten(2, 3), torch.ones_like(half[:1, :1, :1])), _widen(k, -half)
    values = _widen(v, torch.zeros_like(half[:1, :1, :1]))  # a CPU's fused attention takes equal widths
    y = F.scaled_dot_product_attention(samples, keys, values, scale=d**-0.5)[..., :d]
    return FirstOrder.apply(y.unflatten(2, omega.shape[2:4]).mean(3))


class FirstOrder(torch.autograd.Function):
    """The identity, but for second derivatives, which fused attention has none of."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy


def _widen(x: Tensor, channel: Tensor) -> Tensor:
    """[x, channel, zeros] (..., d + 1 and on to the next multiple of 8, which GPUs need); `channel` is broadcast."""
    tail = F.pad(channel, (0, -(x.shape[-1] + 1) % 8))
    return torch.cat([x, tail.expand(*x.shape[:-1], -1)], -1)


@torch.no_grad()
def draw(q: Tensor, k: Tensor, uniform: Tensor) -> Tensor:
    """Indices (B, h, N, s) of keys drawn from softmax_m(q_n . k_m / sqrt(d)) at `uniform`, (..., N, s)."""
    uniform = uniform.expand(*q.shape[:3], -1).flatten(0, 1)
    queries, keys = (q * q.shape[-1] ** -0.5).flatten(0, 1), k.flatten(0, 1)
    indices = []
    for heads in image_slices(len(keys), queries.shape[1] * keys.shape[1] * q.element_size(), q.device):
        weights = queries[heads] @ keys[heads].mT
        indices.append(sample_indices(torch.softmax(weights, -1, out=weights), uniform[heads]))
    return torch.cat(indices).unflatten(0, q.shape[:2])


def image_slices(batch: int, bytes_per_image: int, device: torch.device) -> Iterator[slice]:
    """Slices of images, or of their heads, whose workspace stays in a CPU's cache, or within 1 GiB elsewhere."""
    step = max(1, (2**22 if device.type == "cpu" else 2**30) // bytes_per_image)
    if torch.compiler.is_compiling():  # a graph would hold every turn of the loop
        step = batch
    for start in range(0, batch, step):
        yield slice(start, start + step)
