"""Implied matrix of an attention layer: the matrix that multiplies its values, even if the layer never builds it.

If outputs are linear in the values v, and equal for every channel of a head, they are P v. The columns of P are then
the outputs for the columns of the identity as values.
"""

import inspect
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Attention, Grid
from engine.runtime.errors import UserError
from models.base import Layer, attention_layers

TOLERANCE = 1e-9
"""Largest relative difference of float64 outputs in the test whether a layer has a matrix."""


class NoMatrix(UserError):
    """A layer's outputs are not a matrix times its values. The message names mechanism and reason on one line."""


class LayerInput(NamedTuple):
    """Attention layer, its tokens (B, P + N, C), and its other arguments by name, of which one is their grid."""

    layer: Layer
    x: Tensor
    others: dict[str, Any]

    @property
    def grid(self) -> Grid:
        return cast(Grid, self.others["grid"])

    def project(self) -> tuple[Any, ...]:
        """Queries, keys and values, or whatever else the layer projects its tokens to."""
        return self.layer.project(self.x, **self.others)


@torch.no_grad()
def attention_inputs(model: nn.Module, images: Tensor) -> tuple[list[LayerInput], Tensor]:
    """Runs `model` on images (B, C, H, W) and returns the input of each attention layer, and the model's output."""
    found: list[LayerInput] = []

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(LayerInput(layer, *layer.arguments(args, kwargs)))

    with ExitStack() as hooks:
        for layer in attention_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        return found, model(images)


@torch.no_grad()
def implied_matrix(attn: Attention, projected: tuple[Tensor, ...], grid: Grid) -> Tensor:
    """Returns P (B, h, P + N, M) such that P v equals the layer's outputs for any M values v, without a local term.

    Noise of training is the same for all columns, and the state of the generator is restored.

    Args:
        attn: a layer in float64. projected: result of its `project` for tokens of the `grid`.
    Raises:
        NoMatrix: a comparison on random values shows that there is no such matrix.
    """
    place = list(inspect.signature(attn.attend).parameters).index("v")
    v = projected[place]
    assert v.dtype == torch.float64, "a float32 sum over values cannot tell a matrix from what is nearly one"

    def attended(values: Tensor) -> Tensor:
        local_term, attn.local_term = attn.local_term, None
        try:
            with torch.random.fork_rng():  # every call begins with the same noise
                # the base's method attends without further scales
                return Attention.attend_all(attn, (*projected[:place], values, *projected[place + 1 :]), grid)
        finally:
            attn.local_term = local_term

    def differ(a: Tensor, b: Tensor) -> bool:
        return not bool((a - b).abs().max() <= TOLERANCE * max(a.abs().max(), b.abs().max()))

    other = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=v.dtype).to(v.device)
    y, y_other = attended(v), attended(other)
    if differ(attended(2 * v - 3 * other), 2 * y - 3 * y_other):
        raise NoMatrix(f"attention({attn.name()}) has no attention matrix: its outputs are not linear in its values")
    columns = []
    for identity in torch.eye(v.shape[2], dtype=v.dtype, device=v.device).split(v.shape[3], 1):
        width = identity.shape[1]
        padded = F.pad(identity, (0, v.shape[3] - width))  # attend takes values of d channels
        columns.append(attended(padded.expand_as(v).contiguous())[..., :width])
    matrix = torch.cat(columns, -1)
    if differ(matrix @ v, y) or differ(matrix @ other, y_other):
        problem = "it mixes the channels of its values, or has weights for each"
        raise NoMatrix(f"attention({attn.name()}) has no attention matrix: {problem}")
    return matrix
