"""Attention matrices of every layer and head on images.

    python analyze.py maps runs/softmax photo.jpg --output maps
    python analyze.py maps runs/softmax photos/ --attention eva '{name: local, window_size: 4}'

Each matrix is the one by which a layer multiplies its values (`analysis.implied`), in evaluation mode in float64.
With --attention, other mechanisms use the run's weights, without training.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from analysis.command_line import read_mechanisms
from analysis.drop_in import drop_in
from analysis.implied import LayerInput, NoMatrix, attention_inputs, implied_matrix
from analysis.laboratory import to_file_name
from analysis.trained import Trained, load_trained, read_images
from attention import Grid, OptionError
from engine.data.folders import list_files, open_files
from engine.data.splits import Images
from engine.reporting.plots import encode, in_style, new_figure
from engine.runtime.errors import UserError
from engine.runtime.files import write_file
from engine.runtime.ownership import make_output
from engine.runtime.terminal import progress
from engine.runtime.text import one_line
from models.base import attention_layers


class LayerMaps(NamedTuple):
    """Weights of a query in the heads of a layer.

    Attributes:
        grid, keys: (H, W) of the layer's tokens and of its keys. num_prefix_tokens: P.
        query: index of the query among the P + N. weights: (h, P + M).
    """

    grid: Grid
    keys: Grid
    num_prefix_tokens: int
    query: int
    weights: Tensor


def main(args: argparse.Namespace) -> None:
    place, files = parse_query(args.query), list_files(args.images)
    mechanisms = read_mechanisms(args.attention) if args.attention else {"": None}
    trained = load_trained(args, reads_images=False)
    images, _ = read_images(Images(open_files(files)), range(len(files)), trained.run)
    make_output(args.output, [])
    lines = []
    with progress("maps", len(files) * len(mechanisms), "images") as bar:
        for text, options in mechanisms.items():
            name = text or ", ".join(dict.fromkeys(layer.core.name() for layer in attention_layers(trained.model)))
            bar.set_postfix_str(name)
            try:
                model = drop_in(trained, options, 0)[0] if text else trained.model
            except OptionError as error:
                print(f"left out: {error}", file=sys.stderr)
                bar.update(len(files))
                continue
            title = f"attention {name}" + (" in place of the run's, without training" if text else "")
            directory = args.output / to_file_name(name)
            for number, (file, image) in enumerate(zip(files, images, strict=True), start=1):
                start = f"{one_line(Path(file).name, 40)}, {title}"
                layers, figure = examine(model.double(), trained, image, place, start)
                path = directory / f"{number}_{Path(file).stem}.png"
                make_output(directory, [path.name])
                write_file(path, encode(figure))
                lines += [str(path), *(str(layer) for layer in layers if isinstance(layer, NoMatrix))]
                bar.update()
    print(*dict.fromkeys(lines), sep="\n")


def examine(
    model: nn.Module, trained: Trained, image: Tensor, place: Grid | None, title: str
) -> tuple[list[LayerMaps | NoMatrix], Figure]:
    """Returns the weights of a query in every layer of a model in float64 on an image (C, H, W), and their figure.

    Args:
        trained: the model with its own attention. place: see `choose_queries`.
    """
    inputs, logits = attention_inputs(model, image[None].to(trained.device).double())
    queries, query = choose_queries(inputs, place, getattr(model, "cls_token", None) is not None)
    layers = [describe_layer(*pair) for pair in zip(inputs, queries, strict=True)]
    probability, index = logits[0].softmax(-1).max(-1)
    predicted = trained.classes[index] if trained.classes else f"class {index}"
    title += f"\npredicted: {one_line(predicted, 40)} ({100 * probability:.1f} %)"
    return layers, draw(layers, f"What does {query} attend to?\n{title}")


@torch.no_grad()
def describe_layer(layer: LayerInput, query: int) -> LayerMaps | NoMatrix:
    """Returns the weights of a query in a layer on one image, or the reason why it has no matrix."""
    try:
        weights = implied_matrix(layer.layer.core, layer.project(), layer.grid)[0].cpu()
    except NoMatrix as problem:
        return problem
    P = layer.layer.core.num_prefix_tokens
    grid = drawn(layer.grid)
    return LayerMaps(grid, key_grid(weights.shape[-1] - P, grid), P, query, weights[:, query])


def drawn(grid: Grid) -> Grid:
    """The rows and columns of a drawing: frames of a clip are one below the other."""
    return math.prod(grid[:-1]), grid[-1]


def key_grid(num_keys: int, grid: Grid) -> Grid:
    """Returns the grid of `num_keys` keys: the queries' grid or, for fewer keys, the grid of the most similar shape."""
    H, W = grid
    if num_keys == H * W:
        return grid
    grids = [(rows, num_keys // rows) for rows in range(1, num_keys + 1) if num_keys % rows == 0]
    return min(grids, key=lambda found: abs(math.log(found[0] * W / (found[1] * H))))


@in_style
def draw(layers: Sequence[LayerMaps | NoMatrix], title: str) -> Figure:
    """Draws the weights of the chosen query in every layer (row) and head (column) on the token grid."""
    found = [layer for layer in layers if isinstance(layer, LayerMaps)]
    num_heads = max([len(layer.weights) for layer in found], default=1)
    height = 1.0 + (1.45 if found else 0.6) * len(layers)
    figure = new_figure(title, height, max(4.5, 1.4 + 1.3 * num_heads))
    panels = figure.subplots(len(layers), num_heads, squeeze=False)
    for number, (row, layer) in enumerate(zip(panels, layers, strict=True)):
        for axes in row:
            axes.set_axis_off()
        if isinstance(layer, NoMatrix):
            text = str(layer).replace(": ", ":\n", 1)  # the subject, and the reason
            row[0].text(0, 0.5, f"layer {number}: {text}", transform=row[0].transAxes, va="center")
            continue
        P = layer.num_prefix_tokens
        for head, (axes, weights) in enumerate(zip(row, layer.weights, strict=False)):
            text = f"head {head}: {100 * weights[P:].max():.2g} %"
            if P:
                text += f"\nprefix {100 * weights[:P].sum():.2g} %"
            axes.set_axis_on()
            values = (weights[P:] / weights[P:].max().clamp(min=1e-300)).view(layer.keys).numpy()
            shape = layer.keys[1] / layer.keys[0]
            aspect = min(max(1.0, shape / 2), 2 * shape)  # a panel is at most twice as high as it is wide, or as wide
            colors = colormaps["viridis"].with_extremes(under="white")
            axes.imshow(values, cmap=colors, vmin=0, vmax=1, aspect=aspect)
            axes.set_title(text)
            if layer.query >= P:
                mark(axes, layer.query - P, layer.grid, layer.keys)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(4, integer=True))
        row[0].set_ylabel(f"layer {number}\nrow of keys")
    for axes in panels[-1]:
        axes.set_xlabel("column of keys")
    if found:
        images = next(axes.images[0] for axes in panels.flat if axes.images)
        label = "weight / the map's largest, which is above it\n(white: negative)"
        figure.colorbar(images, ax=panels, label=label, shrink=min(1, 2.5 / len(layers)), aspect=30, extend="min")
    return figure


def mark(axes: Axes, index: int, grid: Grid, size: tuple[int, int]) -> None:
    """Frames token `index` of a grid in a picture of `size` (height, width)."""
    (row, column), height, width = divmod(index, grid[1]), size[0] / grid[0], size[1] / grid[1]
    for color, line in (("black", 2), ("white", 0.8)):
        corner = column * width - 0.5, row * height - 0.5
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))


def parse_query(text: str | None) -> Grid | None:
    """Parses ``"3,4"`` as (3, 4); a UserError refuses another form."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5}),(\d{1,5})", text)
    if not found:
        raise UserError(f"--query {text}: expected ROW,COLUMN of a patch, such as 3,4")
    return int(found[1]), int(found[2])


def choose_queries(layers: Sequence[LayerInput], place: Grid | None, class_token: bool) -> tuple[list[int], str]:
    """Returns the index of a query among each layer's P + N tokens, and its description.

    Args:
        place: row and column of a patch of the first layer; later layers with fewer tokens take the token at the same
            place. None: the class token, or the centre patch.
    Raises:
        UserError: the patch is outside the grid.
    """
    if place is None and class_token:
        return [0] * len(layers), "the class token"
    H, W = drawn(layers[0].grid)
    row, column = place or (H // 2, W // 2)
    if not (row < H and column < W):
        raise UserError(f"--query {row},{column}: outside the {H}x{W} grid; at most {H - 1},{W - 1}")
    grids = [(layer.layer.core.num_prefix_tokens, *drawn(layer.grid)) for layer in layers]
    found = [P + (row * h // H) * w + column * w // W for P, h, w in grids]
    return found, f"the patch in row {row}, column {column} (framed)"
