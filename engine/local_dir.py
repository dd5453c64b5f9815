"""timm's `local-dir:` layout: a directory that holds a model's config.json and its weights, model.safetensors."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from timm.layers import to_2tuple
from timm.models._hub import save_config_for_hf
from torch import nn

from engine.augment import num_channels, per_channel
from engine.checkpoint_format import check_plain, read_archive
from engine.errors import UserError, one_line
from engine.files import read_regular
from engine.progress import Progress
from engine.schema import Run
from models import MODELS

CONFIG, WEIGHTS_FILES = "config.json", ("model.safetensors", "pytorch_model.bin")
"""Files of the layout; of those with weights timm takes the first there is."""

MAX_CONFIG = 2**24
"""Bytes of a config.json; the classes of ImageNet-22k with their descriptions make 2 MB."""

PREPROCESSING = ("interpolation", "crop_pct", "mean", "std")
"""Options of `Data` that a config.json has under the same names."""


def describe_model(model: nn.Module, run: Run, classes: Sequence[str] | None) -> str:
    """The config.json of `model`, which `run` describes: architecture with attention, preprocessing, labels."""
    args = {key: value for key, value in run.model.items() if value is not None and not key.endswith("_rate")}
    del args["name"]
    channels = num_channels(run)
    preprocessing = {
        "input_size": (channels, *to_2tuple(run.model["img_size"])),
        "interpolation": run.data.interpolation,
        "crop_pct": run.data.crop_pct,
        "mean": per_channel(run.data.mean, channels),
        "std": per_channel(run.data.std, channels),
    }
    with TemporaryDirectory() as directory:  # timm writes to a file alone
        path = Path(directory, CONFIG)
        labels = {"label_names": classes} if classes else {}
        options = {**args, "attention": run.attention}
        save_config_for_hf(model, path, labels, options, preprocessing)  # type: ignore[arg-type]  # timm needs a Path
        return path.read_text()


def is_local_dir(path: Path) -> bool:
    """Whether `path` is a directory of this layout."""
    return (path / CONFIG).is_file()


def find_weights_file(directory: Path) -> Path:
    """The file of `directory` that holds the weights.

    Raises:
        UserError: there is none.
    """
    found = next((directory / name for name in WEIGHTS_FILES if (directory / name).is_file()), None)
    if found is None:
        raise UserError(f"{directory}: has a {CONFIG}, but neither {' nor '.join(WEIGHTS_FILES)}")
    return found


def read_local_dir(directory: Path) -> dict[str, Any]:
    """What timm wrote to `directory`, which need not be trusted, as a checkpoint without a history.

    Raises:
        UserError: it is damaged, or holds a model that is none of `MODELS`.
    """
    path = directory / CONFIG
    text = read_regular(path, MAX_CONFIG)
    try:
        there = json.loads(text)
        name, cfg, args = there["architecture"], there["pretrained_cfg"], dict(there.get("model_args", {}))
        if name not in MODELS:
            remedy = f"timm.create_model('local-dir:{directory}', pretrained=True) loads it, if timm knows it"
            raise UserError(f"{path}: of the model {one_line(repr(name), 60)}, which is none of these; {remedy}")
        attention, (in_chans, *img_size) = args.pop("attention", "softmax"), cfg["input_size"]
        model = {"name": name, "img_size": img_size, "in_chans": in_chans, "num_classes": there["num_classes"], **args}
        options = {key: cfg[key] for key in PREPROCESSING if key in cfg}
        classes = there.get("label_names", cfg.get("label_names"))
        config = {"model": model, "attention": attention, "data": options}
        check_plain(config)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise UserError(f"{path}: damaged, or no description of a model by timm ({reason})") from None
    labels = {"classes": [*map(str, classes)]} if isinstance(classes, list) else {}
    weights = _read_weights(find_weights_file(directory))
    return {"config": config, "processes": 1, "images": 0, "progress": asdict(Progress()), **labels, "model": weights}


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    content = read_regular(path)
    try:
        weights = safetensors.torch.load(content) if content[8:9] == b"{" else read_archive(content, foreign=True)
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise UserError(f"{path}: cannot be loaded safely ({reason})") from None
    if not all(isinstance(key, str) and torch.is_tensor(x) for key, x in weights.items()):
        raise UserError(f"{path}: holds more than weights")
    return weights
