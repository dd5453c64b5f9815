"""Softmax attention matrices of a trained model on its images, and of a random process."""

import argparse
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

from analysis.implied import attention_inputs
from analysis.trained import load_trained, read_sample
from attention import Grid
from engine.runtime.errors import UserError

MAX_TOKENS = 1024
"""Most tokens of a matrix. Decompositions take some 100 N^3 operations, minutes for larger N."""

NUM_TOKENS, DIM, PER_CLUSTER, DELTA = 196, 256, 4, 0.3
"""Process 1 of Scatterbrain (Chen et al. 2021, arXiv:2110.15343): tokens n, channels d, tokens of a cluster, Delta.

The paper gives orders of magnitude and no numbers; these are ours.
"""


class Layer(NamedTuple):
    """Queries and keys of B images or samples, (B, h, P + N, d) float64; each head has a softmax matrix."""

    name: str
    q: Tensor
    k: Tensor
    grid: Grid

    @property
    def matrices(self) -> Tensor:
        """(B, h, P + N, P + N)."""
        return (self.q @ self.k.mT * self.q.shape[-1] ** -0.5).softmax(-1)


def read_layers(args: argparse.Namespace) -> list[Layer]:
    """Reads queries and keys of every attention layer of the trained model for `args.images` validation images.

    Layers without a key for every token, or with more than `MAX_TOKENS` tokens, are named on stderr and left out. A
    note on stderr reports queries and keys that were not trained for softmax attention.

    Raises:
        UserError: there is no such model, there are too few images, one is broken, or no layer is left.
        OptionError: a wrong option, or data that cannot be used.
    """
    trained = load_trained(args)
    images = read_sample(trained, args.images).images
    if len(images) < args.images:
        raise UserError(f"--images {args.images}: there are {len(images)} validation images; give at most as many")
    layers = capture(trained.model.cpu().double(), images.double())
    if not layers:
        problem = f"no layer has a key for every one of at most {MAX_TOKENS} tokens"
        raise UserError(f"{args.checkpoint}: {problem}; choose another run")
    return layers


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> list[Layer]:
    """Returns the layers of `read_layers` for a model and images (B, C, H, W) in float64."""
    layers, notes = [], []
    for number, given in enumerate(attention_inputs(model, images)[0]):
        attn, (q, *others) = given.attn, given.project()
        if not others or q.shape != others[0].shape or q.shape[2] > MAX_TOKENS:
            notes.append(f"layer {number}: left out, as it has no key for every one of at most {MAX_TOKENS} tokens")
            continue
        if attn.name() != "softmax" or attn.config.causal:
            trained = "were not trained for softmax over all tokens, whose matrices are shown"
            notes.append(f"attention({attn.name()}): its queries and keys {trained}")
        layers.append(Layer(f"layer {number}", q, others[0], given.grid))
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    return layers


def process1(samples: int, beta: float, tokens: int) -> Layer:
    """Samples Scatterbrain's Process 1: tokens z in clusters about random centres c, and A_nm ~ exp(beta z_n . z_m).

    z = c + r, where ||c|| is about 1 and ||r|| about `DELTA`. The paper's covariances I / sqrt(d) are read as standard
    deviations, which place the clusters on the unit sphere as the paper states.
    Rows are normalised as softmax's.

    Returns:
        The `Layer` of a sequence, one head, clusters one after the other.
    """
    centres = torch.randn(samples, 1, math.ceil(tokens / PER_CLUSTER), DIM, dtype=torch.float64)
    z = centres.repeat_interleave(PER_CLUSTER, 2)[:, :, :tokens]
    z = (z + DELTA * torch.randn(z.shape, dtype=z.dtype)) * DIM**-0.5
    x = z * (beta * DIM**0.5) ** 0.5
    return Layer(f"beta {beta:.2f}", x, x, (1, tokens))


def process1_layers(samples: int) -> list[Layer]:
    """Samples `process1` from high temperature to low: inverse temperatures beta = log N times 0.1 to 2."""
    return [process1(samples, times * math.log(NUM_TOKENS), NUM_TOKENS) for times in (0.1, 0.2, 0.35, 0.5, 0.7, 1, 2)]
