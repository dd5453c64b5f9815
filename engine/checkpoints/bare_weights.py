"""Weights alone, from files of other programs, with the configuration that describes their model."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple

from engine.checkpoints.identify import FOREIGN, Found, Kind, identify
from engine.checkpoints.initial_weights import load_initial_weights
from engine.checkpoints.local_dir import preprocessing_of
from engine.checkpoints.progress import Progress, Weights
from engine.checkpoints.weight_sources import is_of_timm, read_timm_arguments
from engine.config.schema import Init, Run
from engine.run.load import dump_run, flatten, parse_run, plain
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import one_line
from models import create_model
from models.hosted import TIMM, is_host


def read_with_config(run: Run, path: Path, weights: Weights | None = None) -> dict[str, Any]:
    """Returns a checkpoint of the weights in `path`, which belong to the model that `run` describes.

    Raises:
        UserError: they cannot be read, are of another kind than `weights`, do not fit that model exactly, were trained
            with other options, or have a configuration of their own.
    """
    found = identify(path)
    if found.kind not in FOREIGN | {Kind.RELEASED, Kind.GRAPH} and not is_of_timm(found):
        raise UserError(f"{path}: has its own configuration; leave --config out; options are key.path=value")
    model = create_model(attention=run.attention, **run.model)
    check_arguments(run, str(getattr(model, "global_pool", None)), found)
    run = replace(run, init=Init(weights=str(path), strict=True))
    load_initial_weights(model, run, World(torch.device("cpu")), weights=weights)
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
    if found.kind is Kind.TIMM and is_host(run.model["name"]):
        others = {key: x for key, x in options.items() if key not in model and not key.endswith("_rate")}
        stated |= {f"model.kwargs.{key}": x for key, x in others.items()}
        own |= {f"model.kwargs.{key}": (run.model.get("kwargs") or {}).get(key) for key in others}
        stated["model.name"] = TIMM + str(found.values()["arch"]).partition(".")[0]
        own["model.name"] = run.model["name"].partition(".")[0]
    for key, value in stated.items():
        there, here = (to_2tuple(x) if key == "model.img_size" else x for x in (value, own[key]))
        if plain(there) != plain(here):
            values.append(f"{key}={value} (not {own[key]})")
            remedies.append(f"'{key}={json.dumps(value)}'")
    if values:
        remedy = f"add {' '.join(remedies)} to the command"
        raise UserError(one_line(f"{found.path}: timm's train.py had {', '.join(values)}; {remedy}"))
