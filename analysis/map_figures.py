"""Figures of attention maps: layers and heads, rollout over an image, and statistics by layer."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from analysis.distributions import rollout
from analysis.implied import NoMatrix
from analysis.layer_maps import LayerMaps, Row, list_problems, mean_over_images
from attention import Grid
from engine.reporting.plots import in_style, marker_style, new_figure


@in_style
def draw_maps(layers: Sequence[LayerMaps | NoMatrix], field: str, title: str) -> Figure:
    """Draws the weights in `field` of every layer (row) and head (column) on the token grid."""
    found = [layer for layer in layers if isinstance(layer, LayerMaps)]
    num_heads = max([len(layer.entropy) for layer in found], default=1)
    height = 1.0 + (1.45 if found else 0.6) * len(layers)
    figure = new_figure(title, height, max(4.5, 1.4 + 1.3 * num_heads))
    panels = figure.subplots(len(layers), num_heads, squeeze=False)
    for number, (row, layer) in enumerate(zip(panels, layers, strict=True), start=1):
        for axes in row:
            axes.set_axis_off()
        if isinstance(layer, NoMatrix):
            row[0].text(0, 0.5, f"layer {number}: {wrap(str(layer))}", transform=row[0].transAxes, va="center")
            continue
        P = layer.num_prefix_tokens
        for head, (axes, weights) in enumerate(zip(row, getattr(layer, field), strict=False), start=1):
            text = f"head {head}: {100 * weights[P:].max():.2g} %"
            if P:
                text += f"\nprefix {100 * weights[:P].sum():.2g} %"
            axes.set_axis_on()
            draw_weights(axes, weights[P:], layer.keys)
            axes.set_title(text)
            if field == "of_query" and layer.query >= P:
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


def draw_weights(axes: Axes, weights: Tensor, grid: Grid, **options: Any) -> None:
    """Draws weights (N,) of a token grid relative to the largest; negative weights are white."""
    values = (weights / weights.max().clamp(min=1e-300)).view(grid).numpy()
    axes.imshow(values, cmap=colormaps["viridis"].with_extremes(under="white"), vmin=0, vmax=1, **options)


def mark(axes: Axes, index: int, grid: Grid, size: tuple[int, int]) -> None:
    """Frames token `index` of a grid in a picture of `size` (height, width)."""
    (row, column), height, width = divmod(index, grid[1]), size[0] / grid[0], size[1] / grid[1]
    for color, line in (("black", 2), ("white", 0.8)):
        corner = column * width - 0.5, row * height - 0.5
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))


@in_style
def draw_rollout(layers: Sequence[LayerMaps | NoMatrix], image: Tensor, query: str, title: str) -> Figure:
    """Draws the rollout of the chosen query, and its mean over all queries, over the image (C, H, W) in grey."""
    figure = new_figure(title, 3.0)
    panels, grey = figure.subplots(1, 3), image.mean(0).numpy()
    problem = why_no_rollout(layers)
    for axes in panels[: 1 if problem else 3]:
        axes.imshow(grey, cmap="gray")
        axes.set_xlabel("x (pixels)")
    panels[0].set_ylabel("y (pixels)")
    panels[0].set_title("the image as the model gets it")
    if problem:
        for axes in panels[1:]:
            axes.set_axis_off()
        panels[1].text(0, 0.5, f"no rollout: {wrap(problem)}", transform=panels[1].transAxes, va="center")
        return figure
    rolled, first, (height, width) = rollout([layer.of_heads for layer in layers]), layers[0], grey.shape
    P, extent = first.num_prefix_tokens, (-0.5, width - 0.5, height - 0.5, -0.5)
    weights = rolled[first.query].clone()
    own, weights[first.query] = weights[first.query].item(), 0  # mostly from the identity
    text = f"{100 * weights[P:].max():.2g} %, beside its own {100 * own:.2g} %"
    draw_weights(panels[1], weights[P:], first.grid, alpha=0.65, extent=extent)
    panels[1].set_title(f"rollout of {query.removesuffix(' (framed)')}:\n{text}")
    if first.query >= P:
        mark(panels[1], first.query - P, first.grid, (height, width))
    mean = rolled.mean(0)[P:]
    draw_weights(panels[2], mean, first.grid, alpha=0.65, extent=extent)
    panels[2].set_title(f"rollout of all queries,\nmean: {100 * mean.max():.2g} %")
    label = "weight / the map's largest,\nwhich is above it"
    figure.colorbar(panels[2].images[1], ax=panels, label=label, shrink=0.8)
    return figure


def why_no_rollout(layers: Sequence[LayerMaps | NoMatrix]) -> str:
    """Returns why matrices of the layers cannot be multiplied; empty if they can."""
    for layer in layers:
        if isinstance(layer, NoMatrix):
            return str(layer)
        if layer.grid != layer.keys or layer.grid != layers[0].grid:
            return "the layers' tokens, or their keys, are not the same tokens"
    return ""


@in_style
def draw_layers(rows: Sequence[Row]) -> Figure:
    """Draws entropy and mean distance of every head by layer, averaged over images, with values for equal weights."""
    images = len({row.file for row in rows})
    notes = ["How far, and how evenly, do the heads of each layer look?"]
    notes += [f"mean over {images} image{'s' * (images > 1)}, evaluation mode"]
    notes += [f"left out: {problem}" for problem in list_problems(rows)]
    figure = new_figure("\n".join(notes), 3.4 + 0.12 * len(notes))
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.attention for row in rows if isinstance(row.found, LayerMaps)))
    distance = "mean attention distance (tokens)"
    labels = {"entropy": "entropy of the weights (nats)", "distance": distance}
    for axes, (field, label) in zip(panels, labels.items(), strict=True):
        for index, name in enumerate(names):
            means = [(layer, found) for attention, layer, found in mean_over_images(rows, field) if attention == name]
            shift = 0.12 * (index - (len(names) - 1) / 2)
            points = [(layer + shift, value) for layer, found in means for value in found.tolist()]
            if points:
                style = marker_style(index)
                axes.scatter(
                    *zip(*points, strict=True), alpha=0.8, s=14, linewidths=0, **style, label=f"{name}: a head"
                )
                layers, values = zip(*means, strict=True)
                axes.plot(layers, [value.nanmean() for value in values], color=style["color"])
        equal = {row.layer: getattr(row.found, f"equal_{field}") for row in rows if isinstance(row.found, LayerMaps)}
        if equal:
            axes.plot(*zip(*sorted(equal.items()), strict=True), "k--", label="equal weights")
            axes.legend()
        axes.set_xticks(range(1, 1 + max(row.layer for row in rows)))
        axes.set(xlabel="layer (lines: mean over heads)", ylabel=label)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid()
    return figure


def wrap(text: str) -> str:
    """Breaks a refusal into two lines: the subject and the reason."""
    return text.replace(": ", ":\n", 1)
