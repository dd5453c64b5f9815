"""ViT^3's test-time training (Han et al. 2025, arXiv:2512.01643): an image's keys and values train a small model.

Each head has an inner model f, whose initial weights W are learned. With the inner loss

    L = - mean_m v_m . f(k_m; W) / 3,   W' = W - dL/dW / (1 + |dL/dW|),   y_n = f(q_n; W'),

queries pass the model after one step of gradient descent on all tokens, at a learning rate of 1. A head's model is the
gated unit f(x) = x W_1 * SiLU(x W_2), * channel by channel. One further head, with projections of its own, has a
depthwise 3 x 3 convolution W_3 of the image, in which prefix tokens have no place: they are refused. Norms are those of
the columns of a gradient, or of its filters.
Cost: 10 N d C + 18 N d multiply-accumulates, 4 N d C of them for the projections of the further head.

The norms, and the factor 1/3 of the losses of all heads (for the nine taps of a filter), are from the released code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..options import Options
from ..parts.features import full_precision
from ..parts.geometry import Grid, merge_heads, split_heads
from ..parts.linear import init_linear
from ..parts.masking import mask_tokens


@full_precision
def vittt(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, w: Tensor, w_3: Tensor, *, grid: Grid, key_mask: Tensor | None = None
) -> Tensor:
    """Outputs (B, h + 1, N, d) of the trained inner models.

    last: query, key and value of every token for the last head, (B, 3, N, d). w: initial W_1 and W_2, side by side,
    (h, d, 2 d). w_3: those of the filters, (9, d).
    """
    count = v.shape[2] if key_mask is None else key_mask.sum(1)[:, None, None, None]
    e, (q_3, k_3, v_3) = mask_tokens(v, key_mask) / (3 * count), mask_tokens(last, key_mask).split(1, 1)  # e = -dL/df
    z_1, z_2 = (k @ w).chunk(2, -1)
    sigma = z_2.sigmoid()
    unit = z_2 * sigma
    slopes = torch.stack([unit, z_1 * (sigma + unit * (1 - sigma))], -2)  # of f by z_1 and z_2: (B, h, N, 2, d)
    trained = w + bounded(k.mT @ (slopes * e[..., None, :]).flatten(3))
    z_1, z_2 = (q @ trained).chunk(2, -1)
    filters = w_3.mT[..., None] + bounded(taps(k_3, grid) @ (v_3 / (3 * count)).movedim(3, 1).mT)  # (B, d, 9, 1)
    return torch.cat([z_1 * F.silu(z_2), (filters.mT @ taps(q_3, grid)).movedim(1, 3)], 1)


def bounded(gradient: Tensor) -> Tensor:
    """A gradient (..., n, m) whose columns are scaled to norms below 1."""
    return gradient / (1 + torch.linalg.vector_norm(gradient, dim=-2, keepdim=True))


def taps(x: Tensor, grid: Grid) -> Tensor:
    """The 3 x 3 neighbours of every token of one head (B, 1, N, d), zeros beyond the grid: (B, d, 9, N)."""
    return F.unfold(x[:, 0].mT.unflatten(2, grid), 3, padding=1).unflatten(1, (-1, 9))


def vittt_reference(q, k, v, last, w, w_3, *, grid):
    """`vittt`, model by model, with the gradient of the inner loss by automatic differentiation."""

    def unit(x, w_1, w_2):
        return (x @ w_1) * F.silu(x @ w_2)

    def convolution(x, w_3):
        filters = w_3.mT.reshape(-1, 1, 3, 3)
        return F.conv2d(x.mT.unflatten(1, grid), filters, padding=1, groups=len(filters)).flatten(1).mT

    models, y = [*((unit, pair.chunk(2, -1)) for pair in w), (convolution, (w_3,))], []
    heads = [torch.cat([x, last[:, i, None]], 1).flatten(0, 1) for i, x in enumerate((q, k, v))]
    for queries, keys, values, (model, weights) in zip(*heads, len(q) * models, strict=True):
        loss = -(values * model(keys, *weights)).sum(-1).mean() / 3
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        y.append(model(queries, *(w - g / (1 + g.norm(dim=0)) for w, g in zip(weights, gradients, strict=True))))
    return torch.stack(y).unflatten(0, (len(q), -1))


class Vittt(Attention):
    has_positions = True  # of the convolution

    class Config(Options):
        pass

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        C, h, d = context.dim, context.num_heads, context.head_dim
        self.qkv_conv = init_linear(nn.Linear(C, 3 * d, bias=context.qkv_bias))
        self.proj_conv = init_linear(nn.Linear(d, C, bias=False))
        weights = (nn.init.trunc_normal_(torch.empty(shape), std=0.02) for shape in ((h, d, 2 * d), (9, d)))
        self.w, self.w_3 = map(nn.Parameter, weights)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, d = context.num_tokens, context.dim, context.head_dim
        return Cost(6 * d * C + (3 * context.qkv_bias + 9) * d, 10 * N * d * C + 18 * N * d)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """(B, N, C) -> queries, keys and values (B, h, N, d), and those of the last head, (B, 3, N, d)."""
        return *super().project(x, grid), *split_heads(self.qkv_conv(x), 1, 3)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, last: Tensor, grid: Grid, key_mask: Tensor | None = None
    ) -> Tensor:
        return vittt(q, k, v, last, self.w, self.w_3, grid=grid, key_mask=key_mask).to(v.dtype)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        units, last = y.split([self.num_heads, 1], 1)
        return self.proj_drop(self.proj(merge_heads(units)) + self.proj_conv(last[:, 0]))
