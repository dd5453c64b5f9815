"""Command line of `engine.checkpoints.export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoints.progress import WEIGHTS
from engine.runtime.arguments import ArgumentParser, find_config


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `engine.checkpoints.export`, by default those of this process."""
    text = "Export the model of a checkpoint.\n\n    eav export runs/eva eva.onnx"
    parser = ArgumentParser(description=text)
    add = parser.add_argument
    add("checkpoint", type=Path, help="directory or checkpoint of a run, or another file of weights")
    add("output", help="what to write: a file .safetensors or .onnx, or DIR/ for timm")
    add("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    add("--config", type=find_config, help="YAML file as for train.py, for weights that have none")
    add("--weights", choices=tuple(WEIGHTS), help="kind of weights (ema where kept and no worse)")
    return parser.parse_intermixed_args(arguments)
