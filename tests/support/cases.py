"""Cases of the uniform suites: mechanisms with options on a grid.

Sizes are all different and no grid is square, so that a transposed axis cannot pass.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from attention import Attention, create_attention
from attention.parts.geometry import Grid

B, HEADS, HEAD_DIM = 2, 3, 4
CLIP: Grid = (5, 2, 6)
PREFIX = {"num_prefix_tokens": 2}


def perturbed(model: nn.Module, scale: float) -> Any:
    """`model` with noise of this standard deviation on every parameter, so that none keeps a trivial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


@dataclass(frozen=True)
class Case:
    """A mechanism with options on a grid.

    Attributes:
        op: the pure function that the mechanism calls, if it is not named after the mechanism.
        stochastic: True if training draws noise.
        two_modes: True if training computes something else than evaluation, with or without noise.
        mixes_values: True if the output is a weighted mean of values (weights sum to one).
        well_conditioned: True if rounding of queries and keys changes little; False if a key is drawn or chosen, which
            may flip, if a normaliser can vanish, or if a matrix is inverted.
        gradients_are_slopes: True if gradients are the slopes of the output; False if a part is held constant.
        stock_keys: True if keys and values come from `qkv` alone, so that prefix tokens get the output of softmax.
        positive_weights: True if no attended token has a weight of zero.
        bounded: True if weights are bounded; the weights of an unbiased estimate with signs grow exponentially with
            queries and keys.
        far_keys_vanish: True if distant keys have weights of zero; with elu + 1 every key has some weight.
    """

    name: str
    grid: Grid
    options: dict[str, Any] = field(default_factory=dict)
    op: str | None = None
    stochastic: bool = False
    two_modes: bool = False
    mixes_values: bool = True
    well_conditioned: bool = True
    gradients_are_slopes: bool = True
    stock_keys: bool = True
    positive_weights: bool = True
    bounded: bool = True
    far_keys_vanish: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "two_modes", self.two_modes or self.stochastic)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items()), "x".join(map(str, self.grid))])

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0, **context: Any) -> Attention:
        """The layer with weights from `seed`; position biases and norms are moved off their trivial initial values."""
        torch.manual_seed(seed)
        context = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "grid": self.grid, **self.options, **context}
        return perturbed(create_attention(self.name, **context).to(dtype), 0.25)

    def num_tokens(self, grid: Grid) -> int:
        """Number of prefix tokens and tokens of a grid."""
        return self.options.get("num_prefix_tokens", 0) + math.prod(grid)

    def tokens(self, dtype: torch.dtype = torch.float64, seed: int = 1, batch: int = B) -> torch.Tensor:
        """Random tokens (B, N, C)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.num_tokens(self.grid), HEADS * HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def effects(context: dict[str, Any], **values: Any) -> dict[str, tuple[dict[str, Any], Any]]:
    """Rows of EFFECTS, see facts.py, whose options have one context: option -> (context, value)."""
    return {name: (context, value) for name, value in values.items()}


def with_options(case: Case, **options: Any) -> Case:
    """The case with further options."""
    return replace(case, options={**case.options, **options})
