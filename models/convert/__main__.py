"""Writes weights that the project can read, whatever code they are of, as an export.

    python -m models.convert released.pth eva.safetensors
    python -m models.convert released.pth eva.safetensors model.num_heads=3 attention.window_size=7
    python -m models.convert model_best.pth.tar eva.safetensors --config configs/deit_tiny_p16/eva.yaml

The export holds all options. Those that a checkpoint of the released code of EVA and LARA does not say, which are
named, follow as key.path=value. Weights of other codes (timm, DeiT, PVT-v2) say none: a configuration of their model
does, and unless all of them load as they are, nothing is written.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import Weights, find_weights, parse_weights
from engine.config import dump_run, find_config, load_run, parse_run, refuse_bad_input
from engine.distributed import World
from engine.export import check_target, export
from engine.init import load_initial_weights
from engine.progress import Progress
from engine.schema import Init, Run
from models import create_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.convert", description="Export the weights of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="file of weights, or directory or checkpoint of a run")
    parser.add_argument("output", help="what to write: a file .safetensors, .onnx or .pt2, or DIR/ for timm")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--config", type=find_config, help="YAML file as for train.py, for weights that have none")
    parser.add_argument("--weights", type=parse_weights, help="plain or ema: the kind of weights (ema where kept)")
    args = parser.parse_intermixed_args(arguments)
    if args.config and args.weights:
        parser.error("--weights chooses from a checkpoint that has its own configuration; leave it or --config out")
    kind: Weights = "plain"
    with refuse_bad_input():
        check_target(args.output)
        if args.config:
            run = load_run(args.config, args.overrides)
            checkpoint = read_with_config(run, args.checkpoint)
        else:
            path, checkpoint, kinds = find_weights(args.checkpoint, "best", args.weights)[-1]  # averaged ones come last
            run, kind = parse_run(checkpoint["config"], str(path), args.overrides), kinds[-1]
        note = export(args.output, run, checkpoint, kind)
    print(f"{args.output}: the {kind} weights of {args.checkpoint}, of the model {run.model['name']}{note}")


def read_with_config(run: Run, path: Path) -> dict[str, Any]:
    """The checkpoint for the weights in `path`, which are of the model that `run` describes.

    Raises:
        UserError: they cannot be read, or are not exactly of that model.
    """
    model = create_model(attention=run.attention, **run.model)
    load_initial_weights(model, replace(run, init=Init(weights=str(path), strict=True)), World(torch.device("cpu")))
    metadata = {"config": dump_run(run), "processes": 1, "images": 0, "progress": asdict(Progress())}
    return {**metadata, "model": model.state_dict()}


if __name__ == "__main__":
    main()
