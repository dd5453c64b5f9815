"""Weights alone, from files of other programs, with the configuration that describes their model."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.identify import FOREIGN, Found, Kind, identify
from engine.checkpoints.initial_weights import load_initial_weights
from engine.checkpoints.progress import Progress
from engine.checkpoints.weight_sources import read_timm_arguments
from engine.config.schema import Init, Run
from engine.run.load import dump_run, flatten, parse_run
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import one_line
from models import create_model


def read_with_config(run: Run, path: Path) -> tuple[Run, dict[str, Any]]:
    """Returns the run of the weights in `path`, whose model `run` describes, and a checkpoint of them.

    Raises:
        UserError: they cannot be read, do not fit that model exactly, or have a configuration of their own.
        ConfigError: the model does not have what a file of timm's train.py states.
    """
    found = identify(path)
    if found.kind not in FOREIGN | {Kind.RELEASED, Kind.GRAPH}:
        raise UserError(f"{path}: has its own configuration; leave --config out; options are key.path=value")
    run = take_arguments(run, found)
    model = create_model(attention=run.attention, **run.model)
    load_initial_weights(model, replace(run, init=Init(weights=str(path), strict=True)), World(torch.device("cpu")))
    metadata = {"config": dump_run(run), "processes": 1, "images": 0, "progress": asdict(Progress())}
    return run, {**metadata, "model": model.state_dict()}


def take_arguments(run: Run, found: Found) -> Run:
    """Returns `run` with the options that a file of timm's train.py states, which its weights need not show.

    They are those of the model and its images, and the attention where timm has trained a model of this project. A line
    on stderr names those that differ from the options of `run`.
    """
    options, images = read_timm_arguments(found)
    here = dump_run(run)
    attention = {"attention": options.pop("attention")} if "attention" in options else {}
    kept = {key: x for key, x in options.items() if key in run.model and not key.endswith("_rate")}  # act in training
    sections = {"model": here["model"] | kept, "data": here["data"] | images}
    taken = parse_run(here | sections | attention, f"{found.path}: the options of timm's train.py")
    before, now = (flatten(options) for options in (here, dump_run(taken)))
    if changed := [f"{key}={json.dumps(x)}" for key, x in now.items() if key not in before or before[key] != x]:
        print(one_line(f"{found.path}: timm's train.py had, and these are taken: {' '.join(changed)}"), file=sys.stderr)
    return taken
