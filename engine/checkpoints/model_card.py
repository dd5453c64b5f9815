"""Model card of an exported model: README.md, with the front matter that the Hugging Face hub reads.

Its values are those of the checkpoint. Anything that the checkpoint lacks is marked as unknown.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from attention import ATTENTION, __version__
from attention.options import parse_options
from engine.checkpoints.files import Weights, trained_config
from engine.checkpoints.local_dir import PREPROCESSING, preprocessing_of
from engine.checkpoints.progress import Progress
from engine.config.schema import Data, Run
from engine.run.load import parse_run
from engine.runtime.text import one_line
from models import MODELS
from models.assignment import mechanisms_of
from models.hosted import TIMM

CARD = "README.md"

PROJECT = "efficient-attention-vision"

CITED = re.compile(r"(?P<title>[^(:]+) \((?P<authors>[^()]+), arXiv:(?P<number>[\d.]+)\): ")
"""Beginning of the docstring of a mechanism or a network that has a paper."""

NOT_SHOWN = {"root", "classes", "workers", "timeout_minutes", *PREPROCESSING}
"""Options of `Data` that a card shows elsewhere, or that do not choose images; `root` and `classes` are paths."""

TEXT = """\
---
{front}---

# {title}

{what}

{use}

## Training

{training}

## Accuracy

{accuracy}

## Preprocessing

{preprocessing}

## Licence

Unknown: the checkpoint does not hold one. It depends on the licences of the training images and of the weights that
training began with. Set `license` at the top of this file before you publish the model. The code,
efficient-attention-vision, is under Apache-2.0.

## Citation

{citation}
"""

USE = """\
```python
import timm
import models  # of efficient-attention-vision; registers the network with timm

model = timm.create_model("local-dir:DIRECTORY", pretrained=True).eval()  # or hf-hub:NAME
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```"""

MEASURE = "`python validate.py DIRECTORY data.root=...` measures it on your images."


def write_card(model: nn.Module, run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Returns the model card of `model`, which has one kind of weights of `checkpoint`.

    The exported `run` may differ from that of the checkpoint; the card then says that its accuracy is that of the
    other.
    """
    names = list(dict.fromkeys(entry["name"] for entry in mechanisms_of(run.attention)))
    classes = run.model["num_classes"]
    task = "image-classification" if classes else "image-feature-extraction"
    front = {
        "license": "unknown",
        "library_name": "timm",
        "pipeline_tag": task,
        "tags": [task, "timm", PROJECT, run.model["name"], *names],
    }
    images = preprocessing_of(run)
    shape = " x ".join(map(str, images["input_size"]))
    head = f"a classifier of {classes:,} classes" if classes else "features, without a classifier"
    size = f"{sum(x.numel() for x in model.parameters()):,} parameters, for images of {shape}"
    plugins = f" It needs the plugins {', '.join(map(_code, run.plugins))}." if run.plugins else ""
    return TEXT.format(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=f"{run.model['name']} with {', '.join(names)}",
        what=f"The network {_code(run.model['name'])} with the attention {', '.join(map(_code, names))}: {head}; "
        f"{size} (channels, height, width). All its options are in `config.json`. It was exported by {PROJECT} "
        f"{__version__}, with the {'averaged (EMA) weights' if weights == 'ema' else 'weights as trained'}.{plugins}",
        use=USE,
        training=_training(checkpoint),
        accuracy=_accuracy(run, checkpoint, weights),
        preprocessing="\n".join(f"- {key}: {_code(value)}" for key, value in images.items()),
        citation="\n".join(f"- {line}" for line in _citations(run.model["name"], names)),
    )


def _training(checkpoint: Mapping[str, Any]) -> str:
    """Describes the data, the initial weights and the recipe that the checkpoint records."""
    progress = parse_options(Progress, checkpoint["progress"])
    if not progress.step:
        return "Unknown: these weights came without a record of their training."
    trained = parse_run(trained_config(checkpoint), "the checkpoint's configuration")
    defaults, optim = asdict(Data()), trained.optim
    changed = {k: v for k, v in asdict(trained.data).items() if k not in NOT_SHOWN and v != defaults[k]}
    options = {"dataset": trained.data.dataset, **changed}
    where = f" from {_code(Path(trained.data.root).name)}" if trained.data.root else ""
    digests = {name: checkpoint.get(f"{name}_content") for name in ("train", "val")}
    weights = trained.init.weights
    lines = [
        f"Data: {checkpoint['images']:,} training images{where}; "
        + ", ".join(_code(f"data.{key}={value}") for key, value in options.items()),
        *(
            f"Identity of the {name} images, `{name}_content` of the checkpoint: {_code(digest)}"
            for name, digest in digests.items()
            if digest
        ),
        f"Initial weights: {_code(_without_folders(weights)) if weights else 'random'}",
        f"Optimiser: {_code(optim.opt)}, learning rate {optim.lr:g} at {optim.lr_base_size} images, "
        f"weight decay {optim.weight_decay:g}",
        f"Length: {progress.epoch} of {trained.schedule.epochs} epochs, {progress.step:,} updates with "
        f"{trained.train.total_batch_size:,} images each",
    ]
    if trained.distill.teacher:
        lines.insert(-2, f"Teacher: {_code(_without_folders(trained.distill.teacher))}, {_code(trained.distill.type)}")
    return "\n".join(f"- {line}" for line in lines)


def _accuracy(run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Describes what the run's own evaluation of these weights found, and how it was counted."""
    progress = parse_options(Progress, checkpoint["progress"])
    metrics, prefix = progress.metrics, "ema_" if weights == "ema" else ""
    if not progress.step or progress.images or not {f"{prefix}top1", "images"} <= metrics.keys():
        return f"Unknown: the checkpoint holds no evaluation of these weights. {MEASURE}"
    trained = parse_run(trained_config(checkpoint), "the checkpoint's configuration")
    if progress.epoch % trained.train.eval_every and progress.epoch != trained.schedule.epochs:
        return f"Unknown: epoch {progress.epoch} of the run was not evaluated. {MEASURE}"
    top5 = metrics.get(f"{prefix}top5") if run.model["num_classes"] > 5 else None
    found = f"top-1 {metrics[f'{prefix}top1']:.2f} %" + ("" if top5 is None else f", top-5 {top5:.2f} %")
    broken = f"; {metrics['broken']:,.0f} broken ones were left out" if metrics.get("broken") else ""
    there, here = ((x.model, x.attention, preprocessing_of(x)) for x in (trained, run))
    other = "" if there == here else " It had other options of the model or of its images than this export."
    return (
        f"**{found}** of {metrics['images']:,.0f} validation images, after epoch {progress.epoch}{broken}.\n\n"
        "Every image counts once, in one view. Top-1 is the share of images whose label has the highest logit. The run "
        f"counted it in its own evaluation, in {trained.train.amp or 'fp32'}.{other} {MEASURE}"
    )


def _citations(network: str, mechanisms: Sequence[str]) -> list[str]:
    """Returns a line for the paper of every mechanism and of the network, from their docstrings."""
    family = sys.modules[MODELS[network][0].__module__].__doc__
    described = {name: ATTENTION[name].__doc__ for name in mechanisms} | {network: family}
    found = {name: CITED.match(" ".join((text or "").split())) for name, text in described.items()}
    return [
        f"{cited['title']}: {cited['authors']}, https://arxiv.org/abs/{cited['number']}"
        if cited
        else f"{_code(name)}: no paper is known."
        for name, cited in found.items()
    ]


def _code(value: Any) -> str:
    """Returns a value as code in Markdown, in one line: a checkpoint may come from a stranger."""
    return f"`{one_line(str(value).replace('`', ' '), 200)}`"


def _without_folders(source: str) -> str:
    """Returns a name of timm's hub, or the last part of a path, whose folders may be private."""
    return source if source.startswith(TIMM) else Path(source).name
