"""Statistics of the attention matrices of a model's layers, and their tables."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.distributions import as_distribution, distances, entropy, key_grid, mean_distance
from analysis.implied import LayerInput, NoMatrix, implied_matrix
from attention import Grid
from engine.reporting.tables import compact_table
from engine.runtime.files import to_csv

COLUMNS = (
    *("attention", "layer", "entropy by head (of equal weights), nats", "distance by head (of equal weights), tokens"),
    *("row sums", "negative weights (%)", "left out"),
)


class LayerMaps(NamedTuple):
    """Statistics of the attention matrix of a layer for every head, see `analysis.distributions`.

    Attributes:
        grid, keys: (H, W) of the layer's tokens and of its keys. num_prefix_tokens: P.
        entropy, distance: (h,); their values for equal weights are `equal_entropy` and `equal_distance`.
        row_sum: mean over queries, (h,). negative: share of the weights' magnitude that is negative, (h,).
        query: index of the chosen query among the P + N. of_query, of_all: its weights, and their mean over all
            queries, (h, P + M). of_heads: mean over heads of the distributions, (P + N, P + M).
    """

    grid: Grid
    keys: Grid
    num_prefix_tokens: int
    entropy: Tensor
    distance: Tensor
    equal_entropy: float
    equal_distance: float
    row_sum: Tensor
    negative: Tensor
    query: int
    of_query: Tensor
    of_all: Tensor
    of_heads: Tensor


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
    P, magnitude = attn.num_prefix_tokens, weights.abs().sum((-2, -1))
    keys = key_grid(weights.shape[-1] - P, grid)
    return LayerMaps(
        grid=grid,
        keys=keys,
        num_prefix_tokens=P,
        entropy=entropy(weights),
        distance=mean_distance(weights[:, P:, P:], grid, keys),
        equal_entropy=math.log(weights.shape[-1]),
        equal_distance=distances(grid, keys).mean().item(),
        row_sum=weights.sum(-1).mean(-1),
        negative=-weights.clamp(max=0).sum((-2, -1)) / magnitude,
        query=query,
        of_query=weights[:, query],
        of_all=weights.mean(1),
        of_heads=as_distribution(weights).nanmean(0),
    )


def mean_over_images(rows: Sequence[Row], field: str) -> Iterator[tuple[str, int, Tensor]]:
    """Yields attention, layer and the mean over images of `field` (h,), for layers with a matrix."""
    key = attrgetter("attention", "layer")
    for (attention, layer), same in groupby(sorted(rows, key=key), key):
        found = [getattr(row.found, field) for row in same if isinstance(row.found, LayerMaps)]
        if found:
            yield attention, layer, torch.stack(found).nanmean(0)


def tabulate(rows: Sequence[Row]) -> str:
    """Formats a table of every layer: means over images for every head."""
    fields = ("entropy", "distance", "row_sum", "negative")
    means = {field: {(name, layer): x for name, layer, x in mean_over_images(rows, field)} for field in fields}
    lines = {}
    for row in rows:
        key, found = (row.attention, row.layer), row.found
        texts = ["", "", "", "", str(found)]
        if isinstance(found, LayerMaps):
            of_entropy, of_distance, sums, negative = (means[field][key] for field in fields)
            texts = [f"{numbers(of_entropy, '.2f')} ({found.equal_entropy:.2f})"]
            texts += [f"{numbers(of_distance, '.2f')} ({found.equal_distance:.2f})"]
            texts += [numbers(sums, ".3g"), numbers(100 * negative, ".2g"), ""]
        lines[key] = dict(zip(COLUMNS, [row.attention, str(row.layer), *texts], strict=True))
    return compact_table(list(lines.values()))


def layers_csv(rows: Sequence[Row]) -> bytes:
    """Returns a row for each attention, image, layer and head."""
    fields, lines = ["entropy", "equal_entropy", "distance", "equal_distance", "row_sum", "negative"], []
    for attention, file, layer, found in rows:
        if isinstance(found, NoMatrix):
            lines.append([attention, file, layer, *[None] * 7, str(found)])
            continue
        for head in range(len(found.entropy)):
            values = (getattr(found, field) for field in fields)
            numbers = (value[head].item() if isinstance(value, Tensor) else value for value in values)
            lines.append([attention, file, layer, head + 1, *numbers, None])
    return to_csv(["attention", "file", "layer", "head", *fields, "problem"], lines)


def list_problems(rows: Sequence[Row]) -> list[str]:
    """Returns the reasons why layers are left out, each once."""
    return list(dict.fromkeys(str(row.found) for row in rows if isinstance(row.found, NoMatrix)))


def numbers(values: Tensor, form: str) -> str:
    """Formats the numbers of heads, separated by spaces."""
    return " ".join(f"{value:{form}}" for value in values.tolist())
