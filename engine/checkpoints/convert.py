"""Exports weights of any program that this project can read.

    python -m engine.checkpoints.convert released.pth eva.safetensors
    python -m engine.checkpoints.convert released.pth eva.safetensors model.num_heads=3 attention.window_size=7
    python -m engine.checkpoints.convert best.pth.tar eva.safetensors --config CONFIG.yaml attention=eva

The export holds all options. Those that a checkpoint of the released code of EVA and LARA lacks are named, and given as
key.path=value. Weights of other programs (timm, DeiT, PVT-v2) come without options: a configuration describes their
model, and nothing is written unless all of them load unchanged. It must agree with what a file of timm's train.py
states: options of the model and its images, and the attention where it has trained a model of this project.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple

from engine.checkpoints.export import check_target, export
from engine.checkpoints.files import WEIGHTS, Weights, choose_weights
from engine.checkpoints.identify import FOREIGN, Found, Kind, identify
from engine.checkpoints.initial_weights import load_initial_weights
from engine.checkpoints.local_dir import preprocessing_of
from engine.checkpoints.origin import is_made_here
from engine.checkpoints.progress import Progress
from engine.checkpoints.weight_sources import read_timm_arguments
from engine.config.schema import Init, Run
from engine.run.described import parse_described
from engine.run.load import dump_run, find_config, flatten, load_run, parse_run, plain
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import World
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.text import one_line
from models import create_model


def main(arguments: Sequence[str] | None = None) -> None:
    text = "Export the weights of a checkpoint.\n\n    eav convert released.pth eva.safetensors"
    parser = ArgumentParser(prog="python -m engine.checkpoints.convert", description=text)
    parser.add_argument("checkpoint", type=Path, help="file of weights, or directory or checkpoint of a run")
    parser.add_argument("output", help="what to write: a file .safetensors, .onnx or .pt2, or DIR/ for timm")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--config", type=find_config, help="YAML file as for train.py, for weights that have none")
    parser.add_argument("--weights", choices=tuple(WEIGHTS), help="kind of weights (ema where kept and no worse)")
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
            path, checkpoint, kind, why = choose_weights(args.checkpoint, weights=args.weights)
            is_own = is_made_here(args.checkpoint)
            if why:
                print(f"{path}: {why}", file=sys.stderr)
            run = parse_described(checkpoint["config"], str(path), args.overrides, is_own=is_own)
        note = export(args.output, run, checkpoint, kind)
    print(f"{args.output}: the {kind} weights of {args.checkpoint}, of the model {run.model['name']}{note}")


def read_with_config(run: Run, path: Path) -> dict[str, Any]:
    """Returns a checkpoint of the weights in `path`, which belong to the model that `run` describes.

    Raises:
        UserError: they cannot be read, do not fit that model exactly, were trained with other options, or have a
            configuration of their own.
    """
    found = identify(path)
    if found.kind not in FOREIGN | {Kind.RELEASED, Kind.GRAPH}:
        raise UserError(f"{path}: has its own configuration; leave --config out; options are key.path=value")
    model = create_model(attention=run.attention, **run.model)
    check_arguments(run, str(model.global_pool), found)
    load_initial_weights(model, replace(run, init=Init(weights=str(path), strict=True)), World(torch.device("cpu")))
    metadata = {"config": dump_run(run), "processes": 1, "images": 0, "progress": asdict(Progress())}
    return {**metadata, "model": model.state_dict()}


def check_arguments(run: Run, global_pool: str, found: Found) -> None:
    """Compares `run` with what a file of timm's train.py states, which its weights need not show.

    The model's `global_pool` is given, which `run` may leave to the model. UserError: something differs.
    """
    options, images = read_timm_arguments(found)
    values, remedies = [], []
    if "attention" in options:
        attention = options.pop("attention")
        trained = parse_run(dump_run(run) | {"attention": attention}, f"{found.path}: the options of timm's train.py")
        there, here = (flatten({"attention": given}) for given in (trained.attention, run.attention))
        keys = [key for key in there | here if there.get(key) != here.get(key) and not key.endswith(".released")]
        values += [f"{key}={there.get(key)} (not {here.get(key)})" for key in keys]
        remedies += [f"'attention={json.dumps(attention)}'"] * bool(keys)
    model = run.model | {"global_pool": global_pool}
    compared = model.keys() - {"name", "init_std"}  # and rates act in training alone
    stated = {f"model.{key}": x for key, x in options.items() if key in compared and not key.endswith("_rate")}
    stated |= {f"data.{key}": x for key, x in images.items()}
    own = {f"model.{key}": x for key, x in model.items()}
    own |= {f"data.{key}": x for key, x in preprocessing_of(run).items()}
    for key, value in stated.items():
        there, here = (to_2tuple(x) if key == "model.img_size" else x for x in (value, own[key]))
        if plain(there) != plain(here):
            values.append(f"{key}={value} (not {own[key]})")
            remedies.append(f"'{key}={json.dumps(value)}'")
    if values:
        remedy = f"add {' '.join(remedies)} to the command"
        raise UserError(one_line(f"{found.path}: timm's train.py had {', '.join(values)}; {remedy}"))


if __name__ == "__main__":
    main()
