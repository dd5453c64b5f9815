"""timm's `local-dir:` layout: a directory that holds a model's config.json and its weights, model.safetensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models._hub import save_config_for_hf
from torch import nn

from engine.checkpoints.format import check_plain
from engine.checkpoints.identify import CONFIG, Found
from engine.checkpoints.progress import Progress
from engine.config.schema import Run, num_channels, per_channel
from engine.runtime.errors import UserError
from engine.runtime.reading import parse_json, parsing, read_bounded
from engine.runtime.text import names_to_nfc, one_line
from models import MODELS, is_host

WRITTEN_BY_TIMM = "expected the description of a model by timm, as timm.models.save_for_hf writes it"
"""Remedy of a config.json that is damaged."""

PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
"""Options of `Data` that a config.json, and the arguments of timm's train.py, have under the same names."""


def describe_model(model: nn.Module, run: Run, classes: Sequence[str] | None) -> str:
    """Returns the config.json of the `model` of `run`: architecture with attention, preprocessing, labels."""
    args = {key: value for key, value in run.model.items() if value is not None and not key.endswith("_rate")}
    name = args.pop("name")
    args, own = {**args, "attention": run.attention}, {"label_names": classes, "plugins": run.plugins}
    own = {key: values for key, values in own.items() if values}
    if is_host(name):
        return json.dumps({"architecture": name, "model_args": args, "pretrained_cfg": preprocessing_of(run), **own})
    with TemporaryDirectory() as directory:  # timm writes only to a file
        path = Path(directory, CONFIG)
        save_config_for_hf(model, path, own, args, preprocessing_of(run))  # type: ignore[arg-type]  # timm needs a Path
        return path.read_text()


def preprocessing_of(run: Run) -> dict[str, Any]:
    """Returns how evaluation prepares images, under timm's names; `input_size` is (channels, height, width)."""
    channels = num_channels(run)
    return {
        "input_size": (channels, *to_2tuple(run.model["img_size"])),
        "interpolation": run.data.interpolation,
        "crop_mode": run.data.crop_mode,
        "crop_pct": run.data.crop_pct,
        "mean": per_channel(run.data.mean, channels),
        "std": per_channel(run.data.std, channels),
    }


def read_description(directory: Path) -> Any:
    """Reads the config.json in a directory; it need not be trusted.

    Raises:
        UserError: it cannot be read, is too large, is no JSON, or is of the transformers library.
    """
    path = (directory / CONFIG).resolve()  # a link in the cache of the Hugging Face hub
    try:
        content = read_bounded(path, 2**22)  # bytes: the classes of ImageNet-22k with their descriptions take 2 MB
        there = parse_json(content, directory / CONFIG, WRITTEN_BY_TIMM)
    except FileNotFoundError:
        raise UserError(f"{directory}: no {CONFIG} there; {WRITTEN_BY_TIMM}") from None
    with parsing(directory / CONFIG, WRITTEN_BY_TIMM):
        if "architecture" not in there and (kinds := there.get("architectures") or there.get("model_type")):
            kind = one_line(", ".join(kinds) if isinstance(kinds, list) else str(kinds), 60)
            problem = f"it seems to be a folder of the transformers library, of the model {kind}"
            remedy = f"name it hf:{directory}, or take timm's weights, timm:NAME"
            raise UserError(f"{directory / CONFIG}: no description of a model by timm; {problem}; {remedy}")
    return there


def read_local_dir(found: Found) -> dict[str, Any]:
    """Reads a directory that timm has written as a checkpoint without a history; it need not be trusted.

    Raises:
        UserError: it is damaged, or holds a model that is none of `MODELS`.
    """
    directory = found.path.parent
    path, there = directory / CONFIG, read_description(directory)
    with parsing(path, WRITTEN_BY_TIMM):
        name, cfg, args = there["architecture"], there["pretrained_cfg"], dict(there.get("model_args", {}))
        if name not in MODELS:
            remedy = f"timm.create_model('local-dir:{directory}', pretrained=True) loads it, if timm knows it"
            raise UserError(f"{path}: of the model {one_line(repr(name), 60)}, which is none of these; {remedy}")
        attention, (in_chans, *img_size) = args.pop("attention", "softmax"), cfg["input_size"]
        model = {"name": name, "img_size": img_size, "in_chans": in_chans, "num_classes": there["num_classes"], **args}
        options = {key: cfg[key] for key in PREPROCESSING if key in cfg}
        classes = read_label_names({**cfg, **there}, str(path))
        config = {"model": model, "attention": attention, "data": options, "plugins": there.get("plugins", [])}
        config["train"] = {"amp": None}  # as timm evaluates
        check_plain(config)
    labels = {} if classes is None else {"classes": classes}
    weights = dict(found.values())
    if not all(isinstance(key, str) and torch.is_tensor(x) for key, x in weights.items()):
        raise UserError(f"{found.path}: holds more than weights")
    return {"config": config, "processes": 1, "images": 0, "progress": asdict(Progress()), **labels, "model": weights}


def read_label_names(config: Mapping[str, Any], place: str) -> list[str] | None:
    """Returns the `label_names` of a config.json, or of timm's `pretrained_cfg`, in the order of the classifier.

    timm takes a list, or a mapping from the number of a class to its name; JSON makes texts of the numbers. None: there
    are no names. UserError, beginning with `place`: the numbers are not 0, 1, ...
    """
    names = config.get("label_names")
    if isinstance(names, Mapping):
        named, numbers = {str(number): name for number, name in names.items()}, [*map(str, range(len(names)))]
        if named.keys() != {*numbers}:
            keys = one_line(", ".join(sorted(named)), 100)
            remedy = f"number the classes from 0 to {len(names) - 1}, or list their names in the classifier's order"
            raise UserError(f"{place}: label_names has the keys {keys}; {remedy}")
        names = [named[number] for number in numbers]
    return names_to_nfc([*map(str, names)]) if names and isinstance(names, list | tuple) else None
