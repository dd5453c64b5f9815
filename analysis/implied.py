"""The matrix that an attention layer multiplies its values by, whether or not the layer ever makes one.

Where outputs are linear in the values v, and every channel of a head is treated alike, they are P v, and the columns of
P are the outputs for values that are the columns of the identity.
"""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Attention, Grid
from engine.errors import UserError

TOLERANCE = 1e-9
"""Of the float64 outputs by which a layer is known to have a matrix, over their largest magnitude."""


class NoMatrix(UserError):
    """A layer whose outputs are no matrix times its values. The message is one line: the mechanism and the reason."""


class LayerInput(NamedTuple):
    """What an attention layer gets: the layer, tokens (B, P + N, C) and their grid."""

    attn: Attention
    x: Tensor
    grid: Grid


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention layers of a model, in their order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@torch.no_grad()
def attention_inputs(model: nn.Module, images: Tensor) -> tuple[list[LayerInput], Tensor]:
    """Runs `model` on images (B, C, H, W) -> what each attention layer gets, in their order, and the model's output."""
    found = []

    def keep(attn: Attention, inputs: tuple[Tensor, Grid]) -> None:
        found.append(LayerInput(attn, *inputs))

    hooks = [layer.register_forward_pre_hook(keep) for layer in attention_layers(model)]
    try:
        return found, model(images)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def implied_matrix(attn: Attention, projected: tuple[Tensor, ...], grid: Grid) -> Tensor:
    """The P (B, h, P + N, M) with P v = the layer's outputs for its M values v, whatever these are; without a local
    term, which is no attention.

    Noise of training is the same for all columns, and the generator is left as it was.

    Args:
        attn: a layer in float64. projected: what its `project` gives for tokens of the `grid`.
    Raises:
        NoMatrix: there is none, as a comparison on values drawn at random shows.
    """
    place = list(inspect.signature(attn.attend).parameters).index("v")
    v = projected[place]
    assert v.dtype == torch.float64, "a float32 sum over values cannot tell a matrix from what is nearly one"

    def attended(values: Tensor) -> Tensor:
        with torch.random.fork_rng():  # every call begins with the same noise
            return attn.attend_with_prefix((*projected[:place], values, *projected[place + 1 :]), grid, None)

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
