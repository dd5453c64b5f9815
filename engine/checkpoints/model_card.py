"""Model card of an exported model: README.md, in timm's form, with the front matter that the Hugging Face hub reads.

Its values are those of the checkpoint. Anything that the checkpoint lacks is marked as unknown.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from timm.models._hub import generate_readme
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

NOT_SHOWN = {"root", "classes", "workers", *PREPROCESSING}
"""Options of `Data` that a card shows elsewhere, or that do not choose images; `root` and `classes` are paths."""

USE = """\
```python
import timm
import models  # of efficient-attention-vision; registers the network with timm

model = timm.create_model("local-dir:DIRECTORY", pretrained=True).eval()  # or hf-hub:NAME
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```"""


def write_card(model: nn.Module, run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Returns the model card of `model`, which has one kind of weights of `checkpoint`.

    The exported `run` may differ from that of the checkpoint; the card then says that its accuracy is that of the
    other.
    """
    names = list(dict.fromkeys(entry["name"] for entry in mechanisms_of(run.attention)))
    network, classes = run.model["name"], run.model["num_classes"]
    task = "image-classification" if classes else "image-feature-extraction"
    head = f"a classifier of {classes:,} classes" if classes else "features, without a classifier"
    described = [ATTENTION[name].__doc__ for name in names] + [sys.modules[MODELS[network][0].__module__].__doc__]
    cited = [re.match(r"[^(:]+ \([^()]+, arXiv:([\d.]+)\): ", " ".join((text or "").split())) for text in described]
    details = {
        "Parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "Weights": "averaged (EMA)" if weights == "ema" else "as trained",
        **({"Plugins that it needs": [*map(_code, run.plugins)]} if run.plugins else {}),
        "Training": _training(checkpoint),
        "Accuracy": _accuracy(run, checkpoint, weights),
        "Preprocessing": {key: _code(value) for key, value in preprocessing_of(run).items()},
        "Papers": [f"https://arxiv.org/abs/{paper[1]}" for paper in cited if paper],
        "Licence": "Unknown: it depends on the training images and on the weights that training began with. Set"
        " `license` at the top of this file before you publish the model. The code is under Apache-2.0.",
    }
    card = {
        "tags": [task, "timm", PROJECT, network, *names],
        "license": "unknown",
        "description": f"The network {_code(network)} with the attention {', '.join(map(_code, names))}: {head}. All"
        f" its options are in `config.json`. It was exported by {PROJECT} {__version__}.",
        "details": details,
        "usage": USE,
    }
    return generate_readme(card, f"{network} with {', '.join(names)}", task)


def _training(checkpoint: Mapping[str, Any]) -> list[str]:
    """Describes the data, the initial weights and the recipe that the checkpoint records."""
    progress = parse_options(Progress, checkpoint["progress"])
    if not progress.step:
        return ["Unknown: these weights came without a record of their training."]
    trained = parse_run(trained_config(checkpoint), "the checkpoint's configuration")
    defaults, optim = asdict(Data()), trained.optim
    changed = {k: v for k, v in asdict(trained.data).items() if k not in NOT_SHOWN and v != defaults[k]}
    options = {"dataset": trained.data.dataset, **changed}
    where = f" from {_code(Path(trained.data.root).name)}" if trained.data.root else ""
    teacher, initial = trained.distill.teacher, trained.init.weights
    return [
        f"Data: {checkpoint['images']:,} training images{where}; "
        + ", ".join(_code(f"data.{key}={value}") for key, value in options.items()),
        f"Initial weights: {_code(_without_folders(initial)) if initial else 'random'}",
        *([f"Teacher: {_code(_without_folders(teacher))}, {_code(trained.distill.type)}"] if teacher else []),
        f"Optimiser: {_code(optim.opt)}, learning rate {optim.lr:g} at {optim.lr_base_size} images, "
        f"weight decay {optim.weight_decay:g}",
        f"Length: {progress.epoch} of {trained.schedule.epochs} epochs, {progress.step:,} updates with "
        f"{trained.train.total_batch_size:,} images each",
    ]


def _accuracy(run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Describes what the run's own evaluation of these weights found."""
    progress = parse_options(Progress, checkpoint["progress"])
    metrics, top1 = progress.metrics, "ema_top1" if weights == "ema" else "top1"
    trained = parse_run(trained_config(checkpoint), "the checkpoint's configuration")
    is_evaluated = progress.epoch % trained.train.eval_every == 0 or progress.epoch == trained.schedule.epochs
    if not progress.step or progress.images or not {top1, "images"} <= metrics.keys() or not is_evaluated:
        return "Unknown: the checkpoint holds no evaluation of these weights; `validate.py` measures it."
    broken = f"; {metrics['broken']:,.0f} broken ones were left out" if metrics.get("broken") else ""
    there, here = ((x.model, x.attention, preprocessing_of(x)) for x in (trained, run))
    other = "" if there == here else " It had other options of the model or of its images than this export."
    found = f"top-1 {metrics[top1]:.2f} % of {metrics['images']:,.0f} validation images, after epoch {progress.epoch}"
    amp = trained.train.amp or "fp32"
    precision = "bf16, or fp32 on a CPU without instructions for it" if amp == "auto" else amp
    return f"{found}{broken}, by the run's own evaluation in {precision}.{other}"


def _code(value: Any) -> str:
    """Returns a value as code in Markdown, in one line: a checkpoint may come from a stranger."""
    return f"`{one_line(str(value).replace('`', ' '), 200)}`"


def _without_folders(source: str) -> str:
    """Returns a name of timm's hub, or the last part of a path, whose folders may be private."""
    return source if source.startswith(TIMM) else Path(source).name
