"""The files that validate.py writes of its records: predictions, accuracy and confusion of classes, worst mistakes."""

import argparse
import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from engine.errors import UserError, one_line
from engine.files import check_output, to_csv, write_file
from engine.images import BrokenImage
from engine.records import Records, top_columns

AllRecords = Mapping[str, Records]
"""Kind of weights -> records."""

NUM_COUNTED = 20
"""With at most so many classes, the picture of a confusion matrix holds its numbers."""

NUM_TICKS = 40
"""About how many class names the picture shows where there are more."""

GRID = 5
"""The worst mistakes are shown in so many columns, and at most as many rows, for each kind of weights."""


class Output(NamedTuple):
    """What a file holds, for the help text; suffix of its name -> its content."""

    title: str
    writers: Mapping[str, Callable[[AllRecords], bytes]]


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each of `OUTPUTS`."""
    for name, (title, writers) in OUTPUTS.items():
        suffixes = " or ".join(writers)
        parser.add_argument(
            f"--{name}", type=Path, action="append", metavar="FILE", help=f"write {title} ({suffixes}; repeatable)"
        )


def chosen_outputs(args: argparse.Namespace) -> dict[Path, Callable[[AllRecords], bytes]]:
    """The files that the command line asks for, and what makes their content.

    Raises:
        UserError: one that could not be written, or that is named twice.
    """
    found = {}
    for name, (_, writers) in OUTPUTS.items():
        for path in getattr(args, name.replace("-", "_")) or []:
            check_output(path, f"--{name}", writers)
            if path in found:
                raise UserError(f"{path}: named twice; choose another --{name}")
            found[path] = writers[path.suffix]
    return found


def write_outputs(outputs: Mapping[Path, Callable[[AllRecords], bytes]], records: AllRecords) -> None:
    """Writes `chosen_outputs`.

    Raises:
        UserError: a file cannot be written; what was there is unchanged.
    """
    for path, make in outputs.items():
        write_file(path, make(records))


def classes_csv(records: AllRecords) -> bytes:
    """A row for each kind of weights and class: its images, and of these top-1 and top-5 in percent."""

    def rows(kind: str, found: Records) -> Iterable[list]:
        hits = found.classes == found.label[:, None]
        counted = (found.label, found.label[hits[:, 0]], found.label[hits.any(1)])
        counts = zip(*(torch.bincount(x, minlength=len(found.names)).tolist() for x in counted), strict=True)
        for name, (images, *correct) in zip(found.names, counts, strict=True):
            yield [kind, name, images, *(100 * n / images if images else None for n in correct)]

    header = ["weights", "class", "images", "top1", "top5"]
    return to_csv(header, (row for kind, found in records.items() for row in rows(kind, found)))


def predictions_csv(records: AllRecords) -> bytes:
    """A row for each kind of weights and image: its file, its class (`label`), the probable classes as predict.py."""

    def rows(kind: str, found: Records) -> Iterable[list]:
        columns = (found.index, found.label, found.classes, found.probability)
        for index, label, *top in zip(*(column.tolist() for column in columns), strict=True):
            pairs = ((found.names[i], probability) for i, probability in zip(*top, strict=True))
            yield [kind, found.images.filename(index), found.names[label], *chain(*pairs)]

    k = next(iter(records.values())).classes.shape[1]
    header = ["weights", "file", "label", *top_columns(k)]
    return to_csv(header, (row for kind, found in records.items() for row in rows(kind, found)))


def confusion_matrix(found: Records) -> np.ndarray:
    """(classes, classes) int64: how many images of the row's class are taken for the column's."""
    from torchmetrics.functional.classification import multiclass_confusion_matrix  # a third of a second

    return multiclass_confusion_matrix(found.predicted, found.label, len(found.names)).numpy()


def confusion_csv(records: AllRecords) -> bytes:
    """A row for each kind of weights and class (`true`), a column for each class that is predicted."""
    names = next(iter(records.values())).names
    return to_csv(
        ["weights", "true", *names],
        (
            [kind, name, *counts]
            for kind, found in records.items()
            for name, counts in zip(names, confusion_matrix(found).tolist(), strict=True)
        ),
    )


def confusion_picture(records: AllRecords, suffix: str = ".png") -> bytes:
    """The confusion matrix of each kind of weights, coloured by the share of the row's images.

    A cell has about 2 pixels at least, so that every one of 1,000,000 can be seen.
    """
    num_classes = len(next(iter(records.values())).names)
    side = max(5.0, 0.45 * min(num_classes, NUM_COUNTED), num_classes / 45)  # inches of 100 pixels
    figure = Figure((len(records) * (side + 2), side + 1.5), layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, (kind, found) in zip(panels, records.items(), strict=True):
        _draw_confusion(axes, confusion_matrix(found), found.names)
        axes.set_title(f"{kind} weights: top-1 {100 * (found.predicted == found.label).double().mean():.2f} %")
    figure.colorbar(axes.images[0], ax=panels, label="share of the class's images", shrink=0.8, aspect=40)
    return encode(figure, suffix)


def _draw_confusion(axes: Axes, counts: np.ndarray, names: list[str]) -> None:
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 1))  # the root shows few images among many
    if len(names) <= NUM_COUNTED:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.3 else "black"
            axes.text(column, row, f"{count}" if count else "", ha="center", va="center", color=color, fontsize=8)
    ticks = range(0, len(names), math.ceil(len(names) / NUM_TICKS))
    labels = [one_line(names[i], 20) for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, parse_math=False)
    axes.set_yticks(ticks, labels, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")


def mistakes_picture(records: AllRecords) -> bytes:
    """The images of each kind of weights that are taken for another class, those of the highest loss first."""
    wrong = {kind: _list_mistakes(found) for kind, found in records.items()}
    worst = {kind: rows[: GRID**2] for kind, rows in wrong.items()}
    titles = {kind: f"the worst {len(worst[kind])} of {len(rows):,} mistakes" for kind, rows in wrong.items()}
    return _images_picture(records, worst, titles)


def samples_picture(records: AllRecords) -> bytes:
    """Images from the whole of the data, evenly spaced, with what each kind of weights takes them for."""
    rows = {}
    for kind, found in records.items():
        count = min(GRID**2, len(found.label))
        rows[kind] = [i * len(found.label) // count for i in range(count)]
    return _images_picture(records, rows, dict.fromkeys(rows, "class → predicted, and its probability"))


def _images_picture(records: AllRecords, rows: Mapping[str, list[int]], titles: Mapping[str, str]) -> bytes:
    """The images in `rows`, at most GRID x GRID of each kind of weights.

    Above each stand its class, what it is taken for, and the probability of that, green where it is right.
    """
    num_rows = max([1, *(math.ceil(len(chosen) / GRID) for chosen in rows.values())])
    figure = Figure((len(records) * GRID * 1.7, num_rows * 1.9 + 0.5), layout="constrained")
    for part, (kind, chosen) in zip(figure.subfigures(1, len(records), squeeze=False)[0], rows.items(), strict=True):
        part.suptitle(f"{kind} weights: {titles[kind]}")
        for number, axes in enumerate(part.subplots(num_rows, GRID, squeeze=False).flat):
            axes.set_axis_off()
            if number < len(chosen):
                _draw_image(axes, records[kind], chosen[number])
    return encode(figure, ".png")


def _list_mistakes(found: Records) -> list[int]:
    """The rows of `found` whose class is not the predicted one, highest loss first."""
    wrong = (found.predicted != found.label).nonzero()[:, 0]
    return wrong[found.loss[wrong].argsort(descending=True, stable=True)].tolist()


def _draw_image(axes: Axes, found: Records, row: int) -> None:
    image = found.images[int(found.index[row])]
    if isinstance(image, BrokenImage):  # it could be read when it was evaluated
        raise image
    pixels, _ = image
    axes.imshow(np.asarray(pixels).transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)  # grey levels have one channel
    label, predicted = (one_line(found.names[x[row]], 14) for x in (found.label, found.predicted))
    title = f"{label} → {predicted}\n{found.probability[row, 0]:.3f}"
    color = "green" if found.predicted[row] == found.label[row] else "black"
    axes.set_title(title, fontsize=8, color=color, parse_math=False)


def encode(figure: Figure, suffix: str = ".png") -> bytes:
    """The content of a figure's file."""
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # about glyphs of class names that the font lacks
        figure.savefig(content, format=suffix[1:], dpi=100)
    return content.getvalue()


OUTPUTS = {
    "per-class": Output("the accuracy of every class", {".csv": classes_csv}),
    "predictions": Output("class and probable classes of every image", {".csv": predictions_csv}),
    "confusion": Output(
        "the confusion matrix",
        {".csv": confusion_csv, **{suffix: partial(confusion_picture, suffix=suffix) for suffix in (".png", ".pdf")}},
    ),
    "mistakes": Output("the worst mistakes as a grid of images", {".png": mistakes_picture}),
}
"""Option -> what its file holds."""
