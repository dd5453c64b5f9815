"""The transformer block, the initial weights of its linear layers, and its compilation."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm
from timm.models import checkpoint
from timm.models.vision_transformer import init_weights_vit_timm
from torch import Tensor, nn

from attention import Attention, Grid

INIT_STD = 0.02
"""Std of the initial weights of linear layers in timm's models, and in attention layers."""


def init_linears(module: nn.Module, std: float) -> None:
    """Draws the weights of the linear layers of `module` from timm's truncated normal; biases are 0, others stay."""
    module.apply(partial(init_weights_vit_timm, needs_reset=False))
    scale_linears(module, std)


@torch.no_grad()
def scale_linears(module: nn.Module, std: float) -> None:
    """Makes `std` of the `INIT_STD` with which the weights of the linear layers of `module` were drawn."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight *= std / INIT_STD


def has_hooks(module: nn.Module) -> bool:
    """True if hooks watch or change the passes of the module."""
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    return bool(forward or backward or module._backward_pre_hooks)


class StochasticDepth(DropPath):
    """timm's DropPath with a rate that may be a tensor in compiled graphs, so that blocks of any rate share one graph.

    Attributes:
        rate: scalar tensor, see `Backbone.compile_blocks`; None if the rate is a constant.
    """

    rate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rate is None or not torch.compiler.is_compiling():
            return super().forward(x)
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` for one graph of static shapes, whose backward pass runs without autocast, as in eager mode.

    torch would run it under the autocast of the forward pass, which would compute in half types those gradients that
    need full precision.

    Args:
        options: options of `torch.compile`, such as its backend.
    """
    without_autocast = torch._functorch.config.patch(backward_pass_autocast="off")
    return without_autocast(torch.compile(function, dynamic=False, fullgraph=True, **options))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        dim: channels C. drop_path: rate of stochastic depth, for both branches.
        init_std: std of the initial weights of linear layers.
        attn, mlp: new modules (B, N, C), grid, key_mask -> (B, N, C); N includes prefix tokens.
    Attributes:
        compiled_layers, compiled_shifted: compiled `layers` and `shifted_layers`, for batches of `compiled_sizes` only.
            See `Backbone.compile_blocks`.
    """

    compiled_layers: Callable[..., Tensor]
    compiled_shifted: Callable[..., tuple[Tensor, Tensor]]
    compiled_sizes: Collection[int] = ()

    def __init__(self, dim: int, attn: Attention, mlp: nn.Module, drop_path: float, init_std: float = INIT_STD):
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attn = attn
        scale_linears(attn, init_std)  # it draws its own
        self.drop_path1 = StochasticDepth(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = mlp
        init_linears(mlp, init_std)
        self.drop_path2 = StochasticDepth(drop_path)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C) of an (H, W) grid -> tokens; key_mask (B, H W): true for tokens of the grid that count."""
        layers = self.compiled_layers if self.is_compiled(x, key_mask) else Block.layers
        given = (self, x, grid) if key_mask is None else (self, x, grid, key_mask)
        return checkpoint(layers, *given) if self.grad_checkpointing else layers(*given)

    def is_compiled(self, x: Tensor, key_mask: Tensor | None) -> bool:
        """True if there are compiled layers for the batch of x."""
        return x.shape[0] in self.compiled_sizes and key_mask is None

    def layers(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        x, branch = self.shifted_layers(x, grid, key_mask)
        return x + self.drop_path2(branch)

    def shifted_layers(
        self, x: Tensor, grid: Grid, key_mask: Tensor | None = None, last: tuple[nn.Module, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """All layers but the last addition, after that of the block before: its `drop_path2` and its second result.

        Returns the two terms of the last addition: tokens, and what `drop_path2` takes.
        """
        if last is not None:
            drop_path, branch = last
            x = x + drop_path(branch)
        x = x + self.drop_path1(self.attn(self.norm1(x), grid, key_mask))
        return x, self.mlp(self.norm2(x), grid, key_mask)


def run_blocks(blocks: nn.ModuleList, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
    """Tokens (B, N, C) of an (H, W) grid -> tokens, through one block after another; see `Block.forward`.

    In training, a compiled block begins with the last addition of the block before, which then is one kernel with its
    LayerNorm, and their backward passes are one; but not where a block has hooks.
    """
    layers: list[Any] = [*blocks]
    in_parts = (not block.training or block.grad_checkpointing or has_hooks(block) for block in layers)
    if not all(block.is_compiled(x, key_mask) for block in layers) or any(in_parts):
        for block in layers:
            x = block(x, grid, key_mask)
        return x
    last = None
    for block in layers:
        x, branch = block.compiled_shifted(block, x, grid, None, last)
        last = block.drop_path2, branch
    return x if last is None else x + last[0](last[1])
