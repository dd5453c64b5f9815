"""Exports weights of any program that this project can read.

    python -m engine.checkpoints.convert released.pth eva.safetensors
    python -m engine.checkpoints.convert released.pth eva.safetensors model.num_heads=3 attention.window_size=7
    python -m engine.checkpoints.convert best.pth.tar eva.safetensors --config CONFIG.yaml attention=eva

The export holds all options. If a checkpoint of the released code of EVA and LARA lacks options, the command names
them, and they are given as key.path=value. Weights of other programs (timm, DeiT, PVT-v2) come without options: a
configuration describes their model, and nothing is written unless all of them load unchanged. Where timm's train.py
has trained a model of this project, its file says the attention, which the configuration must have.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.export import check_target, export
from engine.checkpoints.files import Weights, find_weights, parse_weights
from engine.checkpoints.format import check_plain
from engine.checkpoints.identify import Kind, damaged, identify
from engine.checkpoints.initial_weights import load_initial_weights
from engine.checkpoints.progress import Progress
from engine.checkpoints.released import Arguments
from engine.config.load import dump_run, find_config, flatten, load_run, parse_run
from engine.config.schema import Init, Run
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import World
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.text import one_line
from models import MODELS, create_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m engine.checkpoints.convert", description="Export the weights of a checkpoint."
    )
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
    """Returns a checkpoint of the weights in `path`, which belong to the model that `run` describes.

    Raises:
        UserError: they cannot be read, do not fit that model exactly, or were trained with other options of attention.
    """
    check_attention(run, path)
    model = create_model(attention=run.attention, **run.model)
    load_initial_weights(model, replace(run, init=Init(weights=str(path), strict=True)), World(torch.device("cpu")))
    metadata = {"config": dump_run(run), "processes": 1, "images": 0, "progress": asdict(Progress())}
    return {**metadata, "model": model.state_dict()}


def check_attention(run: Run, path: Path) -> None:
    """Compares the attention of `run` with that of a file of timm's train.py, which its weights need not show.

    Raises:
        UserError: it is another one.
    """
    found = identify(path)
    if found.kind is not Kind.TIMM:
        return
    content = found.values()
    options = Arguments(content.get("args")).values.get("model_kwargs")
    if str(content["arch"]) not in MODELS or not isinstance(options, Mapping):
        return
    attention = options.get("attention", "softmax")
    try:
        check_plain(attention)
    except ValueError as error:
        raise damaged(path, error) from None
    trained = parse_run(dump_run(run) | {"attention": attention}, f"{path}: the options that timm's train.py had")
    there, here = (flatten({"attention": given}) for given in (trained.attention, run.attention))
    changed = [key for key in there | here if there.get(key) != here.get(key) and not key.endswith(".released")]
    if changed:
        values = ", ".join(f"{key}={there.get(key)} (not {here.get(key)})" for key in changed)
        remedy = f"add 'attention={json.dumps(attention)}' to the command"
        raise UserError(one_line(f"{path}: timm's train.py had {values}; {remedy}"))


if __name__ == "__main__":
    main()
