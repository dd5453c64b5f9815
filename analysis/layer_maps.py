"""Entropy of the attention matrices of a model's layers, and its tables."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.distributions import entropy, key_grid
from analysis.implied import LayerInput, NoMatrix, implied_matrix
from attention import Grid
from engine.reporting.tables import compact_table
from engine.runtime.files import to_csv


class LayerMaps(NamedTuple):
    """Attention matrix of a layer, in every head.

    Attributes:
        grid, keys: (H, W) of the layer's tokens and of its keys. num_prefix_tokens: P.
        entropy: (h,), see `analysis.distributions`; for equal weights it is `equal_entropy`.
        query: index of the chosen query among the P + N. of_query: its weights, (h, P + M).
    """

    grid: Grid
    keys: Grid
    num_prefix_tokens: int
    entropy: Tensor
    equal_entropy: float
    query: int
    of_query: Tensor


class Row(NamedTuple):
    """Layer of a model on an image: its attention matrix, or the reason why there are none."""

    attention: str
    file: str
    layer: int
    found: LayerMaps | NoMatrix


@torch.no_grad()
def describe_layer(layer: LayerInput, query: int) -> LayerMaps | NoMatrix:
    """Describes the matrix of a layer on one image, or gives the reason why it has none."""
    attn, grid = layer.attn, layer.grid
    try:
        weights = implied_matrix(attn, layer.project(), grid)[0].cpu()
    except NoMatrix as problem:
        return problem
    P = attn.num_prefix_tokens
    keys = key_grid(weights.shape[-1] - P, grid)
    return LayerMaps(
        grid=grid,
        keys=keys,
        num_prefix_tokens=P,
        entropy=entropy(weights),
        equal_entropy=math.log(weights.shape[-1]),
        query=query,
        of_query=weights[:, query],
    )


def tabulate(rows: Sequence[Row]) -> str:
    """Formats a table of every layer: means over images for every head, and those of equal weights in brackets."""
    lines = []
    for attention, layer in dict.fromkeys((row.attention, row.layer) for row in rows):
        same = [row.found for row in rows if (row.attention, row.layer) == (attention, layer)]
        found = [each for each in same if isinstance(each, LayerMaps)]
        means = torch.stack([each.entropy for each in found]).nanmean(0).tolist() if found else []
        equal = f" ({found[0].equal_entropy:.2f})" if found else ""
        line = {"attention": attention, "layer": str(layer)}
        line["entropy by head (of equal weights), nats"] = " ".join(f"{x:.2f}" for x in means) + equal
        lines.append(line | {"left out": next((str(each) for each in same if isinstance(each, NoMatrix)), "")})
    return compact_table(lines)


def layers_csv(rows: Sequence[Row]) -> bytes:
    """Returns a row for each attention, image, layer and head."""
    lines: list[list[Any]] = []
    for attention, file, layer, found in rows:
        if isinstance(found, NoMatrix):
            lines.append([attention, file, layer, *[None] * 3, str(found)])
        else:
            entropies = enumerate(found.entropy.tolist())
            lines += [[attention, file, layer, head, nats, found.equal_entropy, None] for head, nats in entropies]
    return to_csv(["attention", "file", "layer", "head", "entropy", "equal_entropy", "problem"], lines)
