"""What attends to what: the attention matrices of every layer and head on images, and what they say in numbers.

    python analyze.py maps runs/softmax photo.jpg --output maps
    python analyze.py maps runs/softmax photos/ --attention eva '{name: local, window_size: 4}'

Matrices are those that layers multiply their values by (`analysis.implied`), in evaluation, in float64. With
--attention the run's weights serve other mechanisms, without training.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from analysis.distributions import as_distribution, distances, entropy, key_grid, mean_distance, rollout
from analysis.drop_in import read_mechanisms
from analysis.implied import LayerInput, NoMatrix, attention_inputs, attention_layers, implied_matrix
from attention import Grid
from engine.bar import progress_bar
from engine.errors import UserError, one_line
from engine.files import open_regular, to_csv, write_file
from engine.images import BrokenImage, decode
from engine.inference import Trained, load
from engine.outputs import encode
from engine.readers import list_files

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers tell apart."""

MARKERS = "osD^vX"


class LayerMaps(NamedTuple):
    """What the attention matrix of a layer says, of every head: see `analysis.distributions`.

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
    """A layer of a model on an image: what its attention says, or why that is not known."""

    attention: str
    file: str
    layer: int
    found: LayerMaps | NoMatrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="RUN", help="directory of a run, or a checkpoint file")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image, folder of images, or - for a list on stdin")
    parser.add_argument(
        "--attention",
        nargs="+",
        metavar="NAME",
        help="mechanisms in place of the run's, with its weights: eva, or '{name: eva, window_size: 7}'",
    )
    parser.add_argument(
        "--query",
        metavar="ROW,COLUMN",
        help="the patch, from 0,0, whose weights are shown (the class token where there is one, else the centre)",
    )
    parser.add_argument("--output", type=Path, default=Path("maps"), metavar="DIR", help="directory to write to (maps)")


def main(args: argparse.Namespace) -> None:
    place = parse_query(args.query)
    mechanisms = read_mechanisms(args.attention) if args.attention else {"": None}
    pictures = [(file, read_image(file)) for file in list_files(args.images)]
    make_directory(args.output)
    rows = []
    with progress_bar("maps", len(pictures) * len(mechanisms), leave=False) as bar:
        for text, options in mechanisms.items():
            torch.manual_seed(0)  # what the weights hold nothing for is drawn
            trained = load(args.checkpoint, attention=options)
            trained.model.double()
            name = text or ", ".join(dict.fromkeys(layer.name() for layer in attention_layers(trained.model)))
            model = f"attention {name}" + (" in place of the run's, without training" if text else "")
            directory = args.output / re.sub(r"[^\w.=]+", "-", name).strip("-")
            for number, (file, picture) in enumerate(pictures, start=1):
                layers, figures = examine(trained, picture, place, f"{one_line(Path(file).name, 40)}, {model}")
                make_directory(directory)
                rows += [Row(name, file, index, found) for index, found in enumerate(layers, start=1)]
                for shows, figure in figures.items():
                    write_file(directory / f"{number}_{Path(file).stem}_{shows}.png", encode(figure))
                bar.update()
    print(tabulate(rows))
    for problem in list_problems(rows):
        print(f"left out: {problem}", file=sys.stderr)
    write_file(args.output / "layers.csv", layers_csv(rows))
    write_file(args.output / "layers.png", encode(draw_layers(rows)))
    print(f"{args.output}: layers.csv, layers.png, and of every image its maps (query, mean) and their rollout")


def examine(
    trained: Trained, picture: Image.Image, place: Grid | None, title: str
) -> tuple[list[LayerMaps | NoMatrix], dict[str, Figure]]:
    """What the layers of a model in float64 attend to in a picture, and its figures.

    Args:
        place: see `choose_queries`.
    """
    image = trained.transform(picture)[None].double()
    inputs, logits = attention_inputs(trained.model, image)
    queries, query = choose_queries(inputs, place, getattr(trained.model, "cls_token", None) is not None)
    layers = [describe_layer(*pair) for pair in zip(inputs, queries, strict=True)]
    probability, index = logits[0].softmax(-1).max(-1)
    title += f"\npredicted: {one_line(trained.classes[index], 40)} ({100 * probability:.1f} %)"
    return layers, {
        "query": draw_maps(layers, "of_query", f"{title}; weights of {query}"),
        "mean": draw_maps(layers, "of_all", f"{title}; weights of all queries, mean"),
        "rollout": draw_rollout(layers, image[0], query, title),
    }


def parse_query(text: str | None) -> Grid | None:
    """``"3,4"`` -> (3, 4).

    Raises:
        UserError: anything else.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5}),(\d{1,5})", text)
    if not found:
        raise UserError(f"--query {text}: expected ROW,COLUMN of a patch, such as 3,4")
    return int(found[1]), int(found[2])


def read_image(file: str) -> Image.Image:
    """The picture in a file.

    Raises:
        BrokenImage: it is none, or cannot be read.
    """
    try:
        with open_regular(file) as content:
            return decode(content)
    except BrokenImage as error:
        raise BrokenImage(f"{file}: {error}") from None
    except OSError as error:
        raise BrokenImage(f"{file}: {error.strerror or error}") from None


def make_directory(path: Path) -> Path:
    """`path`, a directory from now on.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {path}: cannot be made: {error.strerror}") from None
    return path


def choose_queries(layers: Sequence[LayerInput], place: Grid | None, class_token: bool) -> tuple[list[int], str]:
    """The index of a query among each layer's P + N tokens, and which one it is.

    Args:
        place: row and column of a patch of the first layer, for which later layers with fewer tokens take the one
            there; None: the class token, or the centre patch.
    Raises:
        UserError: the patch is outside the grid.
    """
    if place is None and class_token:
        return [0] * len(layers), "the class token"
    H, W = layers[0].grid
    row, column = place or (H // 2, W // 2)
    if not (row < H and column < W):
        raise UserError(f"--query {row},{column}: outside the {H}x{W} grid; at most {H - 1},{W - 1}")
    found = [attn.num_prefix_tokens + (row * h // H) * w + column * w // W for attn, _, (h, w) in layers]
    return found, f"the patch in row {row}, column {column} (framed)"


@torch.no_grad()
def describe_layer(layer: LayerInput, query: int) -> LayerMaps | NoMatrix:
    """What a layer's attention to the tokens of one image says, or why it has no matrix."""
    attn, x, grid = layer
    try:
        weights = implied_matrix(attn, attn.project(x, grid), grid)[0]
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


def draw_maps(layers: Sequence[LayerMaps | NoMatrix], field: str, title: str) -> Figure:
    """The weights in `field` of every layer (row) and head (column) as pictures of the token grid."""
    found = [layer for layer in layers if isinstance(layer, LayerMaps)]
    num_heads = max([len(layer.entropy) for layer in found], default=1)
    height = 1.6 + (1.8 if found else 0.6) * len(layers)
    figure = Figure((max(7.5, 1.6 + 1.7 * num_heads), height), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels = figure.subplots(len(layers), num_heads, squeeze=False)
    for number, (row, layer) in enumerate(zip(panels, layers, strict=True), start=1):
        for axes in row:
            axes.set_axis_off()
        if isinstance(layer, NoMatrix):
            row[0].text(0, 0.5, f"layer {number}: {wrap(str(layer))}", transform=row[0].transAxes, va="center")
            continue
        P = layer.num_prefix_tokens
        for head, (axes, weights) in enumerate(zip(row, getattr(layer, field), strict=False), start=1):
            text = f"head {head}: {percent(weights[P:].max())}"
            if P:
                text += f"\nprefix {percent(weights[:P].sum())}"
            axes.set_axis_on()
            draw_weights(axes, weights[P:], layer.keys)
            axes.set_title(text, fontsize=8)
            if field == "of_query" and layer.query >= P:
                mark(axes, layer.query - P, layer.grid, layer.keys)
            axes.tick_params(labelsize=7)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
        row[0].set_ylabel(f"layer {number}\nrow of keys", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("column of keys", fontsize=8)
    if found:
        images = next(axes.images[0] for axes in panels.flat if axes.images)
        label = "weight / the map's largest, which is above it (white: negative)"
        figure.colorbar(images, ax=panels, label=label, shrink=min(1, 3.5 / len(layers)), extend="min")
    return figure


def draw_weights(axes: Axes, weights: Tensor, grid: Grid, **style: Any) -> None:
    """Draws weights (N,) of a token grid, in multiples of the largest; negative ones are white."""
    values = (weights / weights.max().clamp(min=1e-300)).view(grid).numpy()
    axes.imshow(values, cmap=colormaps["viridis"].with_extremes(under="white"), vmin=0, vmax=1, **style)


def mark(axes: Axes, index: int, grid: Grid, size: tuple[int, int]) -> None:
    """Frames token `index` of a grid in a picture of `size` (height, width)."""
    (row, column), height, width = divmod(index, grid[1]), size[0] / grid[0], size[1] / grid[1]
    for color, line in (("black", 3), ("white", 1.2)):
        corner = column * width - 0.5, row * height - 0.5
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))


def draw_rollout(layers: Sequence[LayerMaps | NoMatrix], image: Tensor, query: str, title: str) -> Figure:
    """The image (C, H, W) in grey, and over it the rollout of the chosen query and its mean over all queries."""
    figure = Figure((10.5, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels, grey = figure.subplots(1, 3), image.mean(0).numpy()
    problem = why_no_rollout(layers)
    for axes in panels[: 1 if problem else 3]:
        axes.imshow(grey, cmap="gray")
        axes.set_xlabel("x (pixels)")
    panels[0].set_ylabel("y (pixels)")
    panels[0].set_title("the image as the model gets it", fontsize=9)
    if problem:
        for axes in panels[1:]:
            axes.set_axis_off()
        panels[1].text(0, 0.5, f"no rollout: {wrap(problem)}", transform=panels[1].transAxes, va="center")
        return figure
    rolled, first, (height, width) = rollout([layer.of_heads for layer in layers]), layers[0], grey.shape
    P, extent = first.num_prefix_tokens, (-0.5, width - 0.5, height - 0.5, -0.5)
    weights = rolled[first.query].clone()
    own, weights[first.query] = weights[first.query].item(), 0  # most of it comes from the identity
    text = f"{percent(weights[P:].max())}\nbeside its own {100 * own:.2g} %"
    draw_weights(panels[1], weights[P:], first.grid, alpha=0.65, extent=extent)
    panels[1].set_title(f"rollout of {query}: {text}", fontsize=9)
    if first.query >= P:
        mark(panels[1], first.query - P, first.grid, (height, width))
    mean = rolled.mean(0)[P:]
    draw_weights(panels[2], mean, first.grid, alpha=0.65, extent=extent)
    panels[2].set_title(f"rollout of all queries, mean: {percent(mean.max())}", fontsize=9)
    label = "weight / the map's largest,\nwhich is above it"
    figure.colorbar(panels[2].images[1], ax=panels, label=label, shrink=0.8)
    return figure


def why_no_rollout(layers: Sequence[LayerMaps | NoMatrix]) -> str:
    """Why matrices of the layers cannot be multiplied; empty where they can."""
    for layer in layers:
        if isinstance(layer, NoMatrix):
            return str(layer)
        if layer.grid != layer.keys or layer.grid != layers[0].grid:
            return "the layers' tokens, or their keys, are not the same tokens"
    return ""


def draw_layers(rows: Sequence[Row]) -> Figure:
    """Entropy and mean distance of every head against the layer, means over images, and those of equal weights."""
    figure = Figure((11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.attention for row in rows if isinstance(row.found, LayerMaps)))
    for axes, field, label in zip(
        panels,
        ("entropy", "distance"),
        ("entropy of the weights (nats)", "mean attention distance (tokens of the layer's grid)"),
        strict=True,
    ):
        for index, name in enumerate(names):
            style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
            means = [(layer, found) for attention, layer, found in mean_over_images(rows, field) if attention == name]
            shift = 0.12 * (index - (len(names) - 1) / 2)
            points = [(layer + shift, value) for layer, found in means for value in found.tolist()]
            if points:
                axes.scatter(*zip(*points, strict=True), alpha=0.8, s=26, **style, label=f"{name}: a head")
                axes.plot([layer for layer, _ in means], [found.nanmean() for _, found in means], color=style["color"])
        equal = {row.layer: getattr(row.found, f"equal_{field}") for row in rows if isinstance(row.found, LayerMaps)}
        if equal:
            axes.plot(*zip(*sorted(equal.items()), strict=True), "k--", label="equal weights")
            axes.legend(fontsize=8)
        axes.set_xticks(range(1, 1 + max(row.layer for row in rows)))
        axes.set(xlabel="layer (lines: mean over heads)", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    images = len({row.file for row in rows})
    notes = [f"mean over {images} image{'s' * (images > 1)}, evaluation mode"]
    notes += [f"left out: {problem}" for problem in list_problems(rows)]
    figure.suptitle("\n".join(notes), fontsize=9, parse_math=False)
    return figure


def mean_over_images(rows: Sequence[Row], field: str) -> Iterator[tuple[str, int, Tensor]]:
    """Attention, layer and the mean over images of `field` (h,), of the layers that have it."""

    def key(row: Row) -> tuple[str, int]:
        return row.attention, row.layer

    for (attention, layer), same in groupby(sorted(rows, key=key), key):
        found = [getattr(row.found, field) for row in same if isinstance(row.found, LayerMaps)]
        if found:
            yield attention, layer, torch.stack(found).nanmean(0)


def tabulate(rows: Sequence[Row]) -> str:
    """A Markdown table of every layer: means over images, of every head."""
    fields = ("entropy", "distance", "row_sum", "negative")
    means = {field: {(name, layer): x for name, layer, x in mean_over_images(rows, field)} for field in fields}
    lines = {}
    for row in rows:
        key, found = (row.attention, row.layer), row.found
        if isinstance(found, NoMatrix):
            lines[key] = [*key, str(found), "", "", ""]
            continue
        heads = {field: means[field][key] for field in fields}
        lines[key] = [
            *key,
            f"{numbers(heads['entropy'], '.2f')} ({found.equal_entropy:.2f})",
            f"{numbers(heads['distance'], '.2f')} ({found.equal_distance:.2f})",
            numbers(heads["row_sum"], ".3g"),
            numbers(100 * heads["negative"], ".2g"),
        ]
    header = ["attention", "layer", "entropy by head (of equal weights), nats"]
    header += ["distance by head (of equal weights), tokens", "row sums", "negative weights (%)"]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (header, ["---"] * len(header), *lines.values()))


def layers_csv(rows: Sequence[Row]) -> bytes:
    """A row for each attention, image, layer and head."""
    fields = ["entropy", "equal_entropy", "distance", "equal_distance", "row_sum", "negative"]

    def lines() -> Iterator[list[Any]]:
        for attention, file, layer, found in rows:
            if isinstance(found, NoMatrix):
                yield [attention, file, layer, *[None] * 7, str(found)]
                continue
            for head in range(len(found.entropy)):
                values = (getattr(found, field) for field in fields)
                numbers = (value[head].item() if isinstance(value, Tensor) else value for value in values)
                yield [attention, file, layer, head + 1, *numbers, None]

    return to_csv(["attention", "file", "layer", "head", *fields, "problem"], lines())


def list_problems(rows: Sequence[Row]) -> list[str]:
    """Why layers are left out, every reason once."""
    return list(dict.fromkeys(str(row.found) for row in rows if isinstance(row.found, NoMatrix)))


def numbers(values: Tensor, form: str) -> str:
    """The numbers of heads, with spaces between them."""
    return " ".join(f"{value:{form}}" for value in values.tolist())


def percent(weight: Tensor) -> str:
    return f"{100 * weight:.2g} %"


def wrap(text: str) -> str:
    """A refusal on two lines: what, and why."""
    return text.replace(": ", ":\n", 1)
