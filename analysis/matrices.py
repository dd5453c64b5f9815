"""Softmax attention matrices to look at: a trained model's on its images, and those of a random process."""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention import Attention, Grid
from engine.checkpoint import find_weights
from engine.config import parse_run
from engine.data import create_val_loader
from engine.distributed import World
from engine.errors import UserError
from engine.fit import build_models
from engine.images import BrokenImage

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
    found, checkpoint, kinds = find_weights(path, "best", None)[-1]
    run = parse_run(checkpoint["config"], str(found), ["data.workers=0", *overrides])
    models, _ = build_models(run, checkpoint, kinds[-1:])
    (model,) = models.values()
    world, size = World(torch.device("cpu")), run.model["img_size"]
    images = create_val_loader(run, world, img_size=size, num_classes=None).dataset
    if count > len(images):
        raise UserError(f"--images {count}: there are {len(images)} validation images; give at most as many")
    samples = [images[i * len(images) // count] for i in range(count)]  # spread over the classes of sorted files
    for sample in samples:
        if isinstance(sample, BrokenImage):
            raise sample
    layers = capture(model.double().eval(), torch.stack([image for image, _ in samples]).double())
    if not layers:
        raise UserError(f"{found}: no layer has a key for every one of at most {MAX_TOKENS} tokens; choose another run")
    return layers


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> list[Layer]:
    """The layers of `read_layers`, of a model and images (B, C, H, W) in float64."""
    layers, hooks, notes = [], [], []

    def keep(name: str, attn: Attention, inputs: tuple[Tensor, Grid]) -> None:
        x, grid = inputs
        q, *others = attn.project(x, grid)
        if not others or q.shape != others[0].shape or q.shape[2] > MAX_TOKENS:
            notes.append(f"{name}: left out, as it has no key for every one of at most {MAX_TOKENS} tokens")
            return
        if attn.name() != "softmax" or attn.config.causal:
            trained = "were not trained for softmax over all tokens, whose matrices are shown"
            notes.append(f"attention({attn.name()}): its queries and keys {trained}")
        layers.append(Layer(name, q, others[0], grid))

    for name, module in model.named_modules():
        if isinstance(module, Attention):
            hooks.append(module.register_forward_pre_hook(partial(keep, name)))
    model(images)
    for hook in hooks:
        hook.remove()
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
