"""Softmax attention matrices of a trained model on its images."""

import argparse
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
        attn, (q, *others) = given.layer.core, given.project()
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
