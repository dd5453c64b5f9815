"""Command lines of `validate.py` and `predict.py`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoints.progress import WEIGHTS
from engine.runtime.arguments import ArgumentParser, Count

OUTPUTS = {
    "per-class": ("precision, recall, F1, top-5 and support of every class", ".csv"),
    "predictions": ("class and probable classes of every image", ".csv"),
    "confusion": ("the confusion matrix", ".png"),
    "calibration": ("confidence beside accuracy", ".png"),
    "mistakes": ("the worst mistakes as a grid of images", ".png"),
}
"""Option of validate.py -> title of a file for the help text, and its suffix."""


def parse_validate(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `validate.py`, by default those of this process."""
    example = "python validate.py runs/eva --per-class classes.csv"
    parser = ArgumentParser(description=f"Evaluate a checkpoint.\n\n    {example}")
    add = parser.add_argument
    add_checkpoint(parser, default="each that is kept")
    add("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    add("--batch-size", type=Count(), help="images per step and process (128, fewer if they are large)")
    add("--flip", action="store_true", help="mean logits of each image and its mirror image")
    add("--budgets", choices=("all",), help="results at every size of train.budgets")
    for name, (title, suffix) in OUTPUTS.items():
        add(f"--{name}", type=Path, metavar="FILE", help=f"write {title} ({suffix})")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_intermixed_args(arguments)
    if args.budgets and any(vars(args)[name.replace("-", "_")] for name in OUTPUTS):
        parser.error("--budgets: a file has the predictions of one size; give that as attention.OPTION=SIZE instead")
    return args


def parse_predict(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `predict.py`, by default those of this process."""
    example = "python predict.py runs/eva photo.jpg FOLDER"
    parser = ArgumentParser(description=f"Predict the classes of images.\n\n    {example}")
    add = parser.add_argument
    add_checkpoint(parser)
    add("images", nargs="+", metavar="IMAGE", help="image, folder of images, or - for a list on stdin")
    add("--set", action="append", default=[], metavar="key.path=value", help="option in place of the checkpoint's")
    add("--top", type=Count(), default=5, help="classes to name for each image (5)")
    add("--output", type=Path, metavar="FILE", help="write FILE (.csv) instead of printing")
    add("--batch-size", type=Count(), help="images per step and process (128, fewer if they are large)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is a GPU")
    return parser.parse_args(arguments)


def add_checkpoint(
    parser: argparse.ArgumentParser,
    name: str | None = None,
    text: str = "directory of a run, or a checkpoint file",
    default: str = "ema if kept and no worse",
) -> None:
    """Adds the checkpoint and the choice of its weights. name, text: of the first; default: kind of weights."""
    parser.add_argument("checkpoint", type=Path, metavar=name, help=text)
    parser.add_argument("--weights", choices=tuple(WEIGHTS), help=f"kind of weights ({default})")
    parser.add_argument("--select", choices=("best", "last"), default="best", help="checkpoint of a run (best)")
