"""Softmax attention matrices to look at: a trained model's on its images, and those of a random process."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from analysis.drop_in import load_reference
from analysis.implied import attention_inputs
from attention import Grid
from engine.errors import UserError

MAX_TOKENS = 1024
"""Of a matrix: what takes it apart takes some 100 N^3 operations, and minutes where N is larger."""


class Layer(NamedTuple):
    """Queries and keys of B images or samples, (B, h, P + N, d) float64; a softmax matrix follows from each head's."""

    name: str
    q: Tensor
    k: Tensor
    grid: Grid

    @property
    def matrices(self) -> Tensor:
        """(B, h, P + N, P + N)."""
        return (self.q @ self.k.mT * self.q.shape[-1] ** -0.5).softmax(-1)


def read_layers(path: Path, overrides: Sequence[str], count: int) -> list[Layer]:
    """Queries and keys of every attention layer of a trained model, for `count` of its validation images.

    Layers without a key for every token, or of more than `MAX_TOKENS`, are named on stderr and left out; so is what
    the queries and keys were trained for, where it is not softmax.

    Raises:
        UserError: no such model, too few images, a broken one, or no layer is left.
        OptionError: a wrong option, or data that cannot be used.
    """
    reference = load_reference(path, overrides, count)
    if len(reference.images) < count:
        raise UserError(f"--images {count}: there are {len(reference.images)} validation images; give at most as many")
    layers = capture(reference.model.cpu().double(), reference.images.double())
    if not layers:
        raise UserError(f"{path}: no layer has a key for every one of at most {MAX_TOKENS} tokens; choose another run")
    return layers


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> list[Layer]:
    """The layers of `read_layers`, of a model and images (B, C, H, W) in float64."""
    layers, notes = [], []
    names = {module: name for name, module in model.named_modules()}
    for attn, x, grid in attention_inputs(model, images)[0]:
        q, *others = attn.project(x, grid)
        if not others or q.shape != others[0].shape or q.shape[2] > MAX_TOKENS:
            notes.append(f"{names[attn]}: left out, as it has no key for every one of at most {MAX_TOKENS} tokens")
            continue
        if attn.name() != "softmax" or attn.config.causal:
            trained = "were not trained for softmax over all tokens, whose matrices are shown"
            notes.append(f"attention({attn.name()}): its queries and keys {trained}")
        layers.append(Layer(names[attn], q, others[0], grid))
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    return layers


def process1(
    samples: int, beta: float, tokens: int = 196, dim: int = 256, per_cluster: int = 4, spread: float = 0.3
) -> Layer:
    """Scatterbrain's Process 1: tokens z in clusters about random centres c, and A_nm ~ exp(beta z_n . z_m).

    z = c + r, where ||c|| is about 1 and ||r|| about `spread` (the paper's Delta); its covariances I / sqrt(dim) are
    read as standard deviations, for it places the clusters on the unit sphere. Rows are normalised, as softmax's are.

    Returns:
        The `Layer` of a sequence, one head, clusters one after the other.
    """
    centres = torch.randn(samples, 1, math.ceil(tokens / per_cluster), dim, dtype=torch.float64)
    z = centres.repeat_interleave(per_cluster, 2)[:, :, :tokens]
    z = (z + spread * torch.randn(z.shape, dtype=z.dtype)) * dim**-0.5
    x = z * (beta * dim**0.5) ** 0.5
    return Layer(f"beta {beta:.2f}", x, x, (1, tokens))


def process1_layers(samples: int, tokens: int = 196) -> list[Layer]:
    """`process1` from high temperature to low: inverse temperatures beta = log N times 0.1 to 2."""
    return [process1(samples, times * math.log(tokens), tokens) for times in (0.1, 0.2, 0.35, 0.5, 0.7, 1, 2)]
