"""Statistics of the attention matrices of a model's layers, and their tables."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.distributions import distances, entropy, key_grid, mean_distance
from analysis.implied import LayerInput, NoMatrix, implied_matrix
from attention import Grid
from engine.reporting.tables import compact_table
from engine.runtime.files import to_csv


class LayerMaps(NamedTuple):
    """Statistics of the attention matrix of a layer for every head, see `analysis.distributions`.

    Attributes:
        grid, keys: (H, W) of the layer's tokens and of its keys. num_prefix_tokens: P.
        entropy, distance: (h,); their values for equal weights are `equal_entropy` and `equal_distance`.
        query: index of the chosen query among the P + N. of_query: its weights, (h, P + M).
    """

    grid: Grid
    keys: Grid
    num_prefix_tokens: int
    entropy: Tensor
    distance: Tensor
    equal_entropy: float
    equal_distance: float
    query: int
    of_query: Tensor


class Row(NamedTuple):
    """Layer of a model on an image: statistics of its attention, or the reason why there are none."""

    attention: str
    file: str
    layer: int
    found: LayerMaps | NoMatrix


@torch.no_grad()
def describe_layer(layer: LayerInput, query: int) -> LayerMaps | NoMatrix:
    """Returns the statistics of a layer's attention on one image, or the reason why it has no matrix."""
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
        distance=mean_distance(weights[:, P:, P:], grid, keys),
        equal_entropy=math.log(weights.shape[-1]),
        equal_distance=distances(grid, keys).mean().item(),
        query=query,
        of_query=weights[:, query],
    )


def tabulate(rows: Sequence[Row]) -> str:
    """Formats a table of every layer: means over images for every head, and those of equal weights in brackets."""
    lines = []
    for attention, layer in dict.fromkeys((row.attention, row.layer) for row in rows):
        same = [row.found for row in rows if (row.attention, row.layer) == (attention, layer)]
        found = [each for each in same if isinstance(each, LayerMaps)]
        line = {"attention": attention, "layer": str(layer)}
        for field, unit in (("entropy", "nats"), ("distance", "tokens")):
            means = torch.stack([getattr(each, field) for each in found]).nanmean(0).tolist() if found else []
            equal = f" ({getattr(found[0], f'equal_{field}'):.2f})" if found else ""
            line[f"{field} by head (of equal weights), {unit}"] = " ".join(f"{x:.2f}" for x in means) + equal
        lines.append(line | {"left out": next((str(each) for each in same if isinstance(each, NoMatrix)), "")})
    return compact_table(lines)


def layers_csv(rows: Sequence[Row]) -> bytes:
    """Returns a row for each attention, image, layer and head."""
    fields, lines = ["entropy", "equal_entropy", "distance", "equal_distance"], []
    for attention, file, layer, found in rows:
        if isinstance(found, NoMatrix):
            lines.append([attention, file, layer, *[None] * 5, str(found)])
            continue
        for head in range(len(found.entropy)):
            values = (getattr(found, field) for field in fields)
            numbers = (value[head].item() if isinstance(value, Tensor) else value for value in values)
            lines.append([attention, file, layer, head, *numbers, None])
    return to_csv(["attention", "file", "layer", "head", *fields, "problem"], lines)
