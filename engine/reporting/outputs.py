"""Files that validate.py writes: predictions, quality and confusion of classes, calibration, and the worst mistakes."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm

from engine.data.images import BrokenImage
from engine.evaluation.command_lines import OUTPUTS
from engine.evaluation.predictions import PredictionTable, top_columns
from engine.reporting.plots import COLORS, GREY, PAGE, encode, in_style, line_style, new_figure, write_cell
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv, write_file
from engine.runtime.ownership import check_file
from engine.runtime.text import one_line

NUM_COUNTED = 20
"""Most classes for which the picture of a confusion matrix shows its numbers."""

NUM_NAMED = 50
"""Most classes for which it shows their names."""

NUM_BINS = 15
"""Bins of a calibration, as in the paper."""

GRID = 5
"""Most columns, and rows, of the mistakes."""

Writer = Callable[[PredictionTable], bytes]


def chosen_outputs(args: argparse.Namespace) -> dict[Path, Writer]:
    """Returns the files that the command line asks for -> functions that make their content.

    Raises:
        UserError: a file cannot be written, or is named twice.
    """
    found: dict[Path, Writer] = {}
    for (name, (_, suffix)), write in zip(OUTPUTS.items(), WRITERS, strict=True):
        if path := getattr(args, name.replace("-", "_")):
            check_file(path, f"--{name}", [suffix])
            if path in found:
                raise UserError(f"{path}: named twice; choose another --{name}")
            found[path] = write
    return found


def write_outputs(outputs: Mapping[Path, Writer], found: PredictionTable, weights: str) -> None:
    """Writes `chosen_outputs`, and names them on stderr, and the kind of weights whose predictions these are.

    Raises:
        UserError: a file cannot be written; what was there is unchanged.
    """
    for path, make in outputs.items():
        write_file(path, make(found))
        print(f"{path}: written, of the {weights} weights", file=sys.stderr)


def classes_csv(found: PredictionTable) -> bytes:
    """Returns a row for each class: precision, recall, F1 and top-5 in percent, and the number of its images.

    The recall of a class is its top-1. A ratio over no image is empty.
    """
    hits = found.classes == found.label[:, None]
    counted = (found.label, found.predicted[found.predicted >= 0], found.label[hits[:, 0]], found.label[hits.any(1)])
    counts = zip(*(torch.bincount(x, minlength=len(found.names)).tolist() for x in counted), strict=True)

    def rows() -> Iterable[list]:
        for name, (images, predicted, first, among) in zip(found.names, counts, strict=True):
            ratios = (first, predicted), (first, images), (2 * first, predicted + images), (among, images)
            yield [name, *(100 * n / whole if whole else None for n, whole in ratios), images]

    return to_csv(["class", "precision", "recall", "f1", "top5", "support"], rows())


def predictions_csv(found: PredictionTable) -> bytes:
    """Returns a row for each image: file, class (`label`), 1 if the most probable class is right (`correct`), probable
    classes as in predict.py.

    Logits that are not finite have no class, and `nan` as probabilities.
    """

    def rows() -> Iterable[list]:
        columns = (found.indices, found.label, found.classes, found.probability)
        for index, label, *top in zip(*(column.tolist() for column in columns), strict=True):
            pairs = ((found.name(i), probability) for i, probability in zip(*top, strict=True))
            yield [found.images.filename(index), found.names[label], int(top[0][0] == label), *chain(*pairs)]

    return to_csv(["file", "label", "correct", *top_columns(found.classes.shape[1])], rows())


def confusion_matrix(found: PredictionTable) -> np.ndarray:
    """Returns the number of images of the row's class that are predicted as the column's: (classes, classes + 1) int64.

    The last column counts those of no class, whose logits are not finite.
    """
    n = len(found.names)
    predicted = found.predicted.where(found.predicted >= 0, n)
    return torch.bincount((n + 1) * found.label + predicted, minlength=n * (n + 1)).view(n, n + 1).numpy()


@in_style
def confusion_picture(found: PredictionTable) -> bytes:
    """Draws the confusion matrix, coloured by the share of the row's images.

    Up to `NUM_NAMED` classes have their names, and up to `NUM_COUNTED` their counts.
    """
    names = found.names
    side = min(8, max(2.8, 0.3 * min(len(names), NUM_COUNTED), 0.12 * len(names)))  # inches
    figure = new_figure("Which classes are taken for which?", side + 1.8, side + 2.2)
    axes, matrix = figure.subplots(), confusion_matrix(found)
    counts, unknown = matrix[:, :-1], matrix[:, -1]
    share = counts / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 1))  # the root shows few images among many
    for (row, column), count in np.ndenumerate(counts) if len(names) <= NUM_COUNTED else ():
        write_cell(image, column, row, share[row, column], f"{count}" if count else "")
    labels = [one_line(name, 20) for name in names] if len(names) <= NUM_NAMED else []
    axes.set_xticks(range(len(labels)), labels, rotation=90, parse_math=False)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.spines[:].set_visible(True)
    title = f"top-1 {100 * (found.predicted == found.label).double().mean():.2f} %"
    if unknown.any():
        title += f"\nwithout {unknown.sum():,} images of no class, as their logits are not finite"
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="share of the class's images", shrink=0.8, aspect=40)
    return encode(figure)


class Calibration(NamedTuple):
    """Confidence beside accuracy in `NUM_BINS` bins of equal width (Guo et al., 2017, arXiv:1706.04599, section 2).

    Attributes:
        counts: (bins,), images whose largest probability is in the bin, (m / M, (m + 1) / M]. confidence, accuracy:
            (bins,), mean of that probability, and share of right predictions; NaN for an empty bin.
        error: expected calibration error, the mean over images of |accuracy - confidence| of their bins (equation 3).
    """

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    error: float


def calibrate(found: PredictionTable) -> Calibration:
    """Computes the calibration of predictions; images without one are left out."""
    known = found.predicted >= 0
    confidence = found.probability[known, 0].numpy()
    correct = (found.predicted == found.label)[known].double().numpy()
    place = np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    counts, *sums = (np.bincount(place, weights, NUM_BINS) for weights in (None, confidence, correct))
    confident, right = (np.divide(x, counts, out=np.full(NUM_BINS, np.nan), where=counts > 0) for x in sums)
    return Calibration(counts, confident, right, float(np.abs(sums[0] - sums[1]).sum() / max(1, counts.sum())))


@in_style
def calibration_picture(found: PredictionTable) -> bytes:
    """Draws a reliability diagram: accuracy against confidence in each bin, and the share of images in the bins."""
    figure = new_figure("Are predictions as often right as they are confident?", 3.9, PAGE / 2)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    axes.plot((0, 1), (0, 1), color=GREY, linewidth=0.8)
    bins, style = calibrate(found), dict[str, Any](line_style(0))
    name = f"expected calibration error {100 * bins.error:.2f} %"
    axes.plot(bins.confidence, bins.accuracy, label=name, clip_on=False, **style)
    axes.set(ylabel="share that is right", ylim=(0, 1), xlim=(0, 1))
    edges = np.linspace(0, 1, NUM_BINS + 1)
    below.stairs(bins.counts / max(1, bins.counts.sum()), edges, color=COLORS[0], linewidth=1)
    figure.legend(loc="outside lower left")
    below.set(xlabel="probability of the predicted class", ylabel="share of images")
    return encode(figure)


@in_style
def mistakes_picture(found: PredictionTable) -> bytes:
    """Draws the images that are predicted wrongly, highest loss first.

    The title of each has its file, its class, and the predicted class with its probability.
    """
    order = found.loss.argsort(descending=True, stable=True)  # losses that are no numbers come first
    wrong = order[(found.predicted != found.label)[order]].tolist()
    most = min(GRID**2, max(1, len(wrong)))
    height, columns = math.ceil(most / GRID), min(GRID, most)
    title = f"Which images are taken for another class? The worst {min(most, len(wrong))} of {len(wrong):,} mistakes"
    figure = new_figure(title, 2.4 * height + 0.6, max(3, 2 * columns))  # inches
    tiles = figure.subplots(height, columns, squeeze=False).ravel().tolist()
    for axes, row in zip_longest(tiles, wrong[: len(tiles)]):
        axes.set_axis_off()
        if row is not None:
            _draw_image(axes, found, row)
    return encode(figure)


def _draw_image(axes: Axes, found: PredictionTable, row: int) -> None:
    index = int(found.indices[row])
    image = found.images[index]
    if isinstance(image, BrokenImage):  # it could be read when it was evaluated
        raise image
    axes.imshow(np.asarray(image[0]).transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)  # grey has one channel
    file = one_line(Path(found.images.filename(index)).name, 29)
    label, predicted = (one_line(found.name(int(x[row])), 20) for x in (found.label, found.predicted))
    title = f"{file}\n{label}\n→ {predicted or 'not finite'} {found.probability[row, 0]:.3f}"
    axes.set_title(title, parse_math=False)


WRITERS: tuple[Writer, ...] = classes_csv, predictions_csv, confusion_picture, calibration_picture, mistakes_picture
"""Functions that make the content of the files of `OUTPUTS`, in their order."""
