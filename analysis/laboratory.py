"""Measurements of a trained model with other attention: replaced, and aligned with its own."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.align import RECIPE, align_by_seed, open_training_images
from analysis.certificate import count_changed
from analysis.draws import Draw, Score, Stage, to_draw
from analysis.drop_in import Given, attended, drop_in, layer_errors, layer_inputs, outputs
from analysis.measurements import Measurements
from analysis.trained import Sample, Trained
from engine.checkpoints.export import to_safetensors
from engine.checkpoints.progress import Progress, is_score
from engine.config.schema import Init
from engine.data.identity import identify_split
from engine.data.loaders import choose_batch_size
from engine.evaluation.label_matching import ClassSubset
from engine.objectives.classification import rank_classes
from engine.objectives.distillation import digest_weights
from engine.run.load import dump_run
from engine.runtime.errors import UserError
from engine.runtime.files import check_directory, write_file
from engine.runtime.ownership import claim_results
from engine.runtime.provenance import digest_code, provenance
from engine.runtime.reading import parsing
from models.base import attention_layers, is_same_attention

NUM_COMPARED = 32
"""Number of images on which errors of attention layers are measured."""

MEASUREMENTS_FILE = "measurements.jsonl"
"""File of the directory that keeps the measurements."""


class Own(NamedTuple):
    """Trained model with its own attention: its score, and tokens, grid, attended values and outputs of every layer.

    predicted, losses: class of every image of the sample, and its cross-entropy. Layers are measured for `NUM_COMPARED`
    of them, evenly spaced.
    """

    score: Score
    predicted: Tensor
    losses: Tensor
    inputs: Sequence[Given]
    attended: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Laboratory:
    """A trained model, images, and a directory that keeps measurements of the model with other attention.

    Args:
        steps: number of alignment steps; None: no alignment.
    Attributes:
        own: the trained model with its own attention. kept: measurements in the directory. aligned: directory in it, of
            the aligned models.
    """

    def __init__(self, trained: Trained, sample: Sample, directory: Path, steps: int | None):
        self.trained, self.sample, self.aligned, self.steps = trained, sample, directory / "aligned", steps
        self.training = None
        if steps is not None:
            self.training = open_training_images(trained, sample)
            check_directory(self.aligned)
        self.own = measure_own(trained, sample)
        if not sample.is_labelled:
            self.sample = replace(sample, classes=self.own.predicted)
        about, options = provenance(trained.device), dump_run(trained.run)
        basis: dict[str, Any] = {name: x for name, x in about.items() if name not in ("command", "device", "git")}
        basis["code"] = digest_code()
        basis |= {"weights": digest_weights(trained.source.state)}
        basis |= {section: options[section] for section in ("model", "attention", "data")}
        basis |= {"sample": digest_weights({"images": sample.images, "classes": sample.classes})}
        if self.training is not None:
            basis |= identify_split("train", self.training[0])
            basis |= {"align": RECIPE, "steps": steps, "indices": len(self.training[1])}
        self.kept = Measurements(directory / MEASUREMENTS_FILE, basis)

    def measure(self, name: str, attention: Any, layers: Sequence[int], seed: int) -> Draw:
        """Measures a mechanism in the place of `layers`, or returns the kept measurement.

        Args:
            name: name of the file of the aligned model. attention: attention of the whole model.
        Raises:
            OptionError: the mechanism cannot be built. FloatingPointError: the alignment diverges.
        """
        key = self.kept.key(attention=attention, layers=list(layers), seed=seed)
        values = self.kept.find(key)
        weights = self.aligned / f"{to_file_name(name)[:100]}-seed{seed}-{key}.safetensors"
        if values is None or not (self.training is None or weights.exists()):
            values = self._measure(attention, layers, seed, weights)
            self.kept.add(key, values)
        start = self.trained.path if self.training is None else weights
        with parsing(self.kept.path, f"delete the line of {key}, to measure again"):
            return to_draw(values, start.resolve())

    def _measure(self, attention: Any, layers: Sequence[int], seed: int, weights: Path) -> dict[str, Any]:
        trained = self.trained
        model, untrained = drop_in(trained, attention, seed)
        pairs = list(zip(attention_layers(model), attention_layers(trained.model), strict=True))
        layers = [n for n in layers if not is_same_attention(*pairs[n])] or layers
        replaced, aligned, seconds = self._test(model, layers), None, None
        if self.training is not None and self.steps is not None:
            claim_results(self.aligned, [weights.name])
            clock = time.process_time if trained.device.type == "cpu" else time.perf_counter
            began = clock()
            align_by_seed(trained, model, self.training, self.steps, seed)
            seconds, aligned = clock() - began, self._test(model, layers)
            export_model(weights, trained, model, attention, self.steps)
        return Draw(replaced, aligned, seconds, untrained)._asdict()

    def _test(self, model: nn.Module, layers: Sequence[int]) -> Stage:
        parts = (attended, self.own.attended), (outputs, self.own.outputs)
        errors = [layer_errors(model, self.own.inputs, expected, compute) for compute, expected in parts]
        means = [mean(by_layer[layer] for layer in layers) for by_layer in errors]
        scored = self.score(model)
        return Stage(scored.top1, scored.loss, *means, scored.changed)

    def score(self, model: nn.Module) -> Score:
        return score(classify(model, self.trained, self.sample), self.sample.classes, *self.own[1:3])


def measure_own(trained: Trained, sample: Sample) -> Own:
    """Measures the trained model; a UserError says that its loss, which others are compared with, is not finite."""
    count = min(NUM_COMPARED, len(sample.images))
    images = sample.images[torch.arange(count) * len(sample.images) // count].to(trained.device)
    inputs = layer_inputs(trained, images)
    layers = [(layer, *given) for layer, given in zip(attention_layers(trained.model), inputs, strict=True)]
    found = [[compute(*layer) for layer in layers] for compute in (attended, outputs)]
    logits = classify(trained.model, trained, sample)
    predicted = rank_classes(logits, 1)[:, 0]
    classes = sample.classes if sample.is_labelled else predicted.clamp(min=0)
    losses = F.cross_entropy(logits.double(), classes, reduction="none")
    own = score(logits, classes, predicted, losses)
    if not is_score(own.loss):
        raise UserError(f"{trained.path}: its own loss is not finite; choose another checkpoint, or other weights")
    return Own(own, predicted, losses, inputs, *found)


@torch.no_grad()
def classify(model: nn.Module, trained: Trained, sample: Sample) -> Tensor:
    """Returns the logits (n, classes) of the sample for its classes, on the CPU."""
    model = ClassSubset(model, sample.columns).to(trained.device)
    parts = sample.images.split(choose_batch_size(tuple(sample.images.shape[2:])))
    return torch.cat([model(part.to(trained.device)).float().cpu() for part in parts])


def score(logits: Tensor, classes: Tensor, own: Tensor, own_losses: Tensor | float = 0.0) -> Score:
    """Scores logits (n, classes) by the classes and the trained model's predictions and losses of the images (n,).

    An image whose logits are not all finite is wrong and changed, and the mean loss with it is infinite.
    """
    predicted = rank_classes(logits, 1)[:, 0]
    losses = F.cross_entropy(logits.double(), classes, reduction="none")
    loss, error = losses.mean().item(), (losses - own_losses).std(correction=0).item() / len(losses) ** 0.5
    top1 = 100 * (predicted == classes).double().mean().item()
    changed = count_changed(own, predicted)
    return Score(top1, loss, changed, error) if is_score(loss) else Score(top1, math.inf, changed)


def export_model(path: Path, trained: Trained, model: nn.Module, attention: Any, steps: int) -> None:
    """Writes a model with another attention as an export, which validate.py and `init.weights` read."""
    run = replace(trained.run, attention=attention, init=Init(weights=str(trained.path)))
    progress = vars(Progress(epoch=1, step=steps))
    metadata = {"config": dump_run(run), "processes": 1, "images": steps * RECIPE["batch_size"], "progress": progress}
    classes = {} if trained.classes is None else {"classes": trained.classes}
    write_file(path, to_safetensors({**metadata, **classes, "model": model.state_dict()}, "plain"))


def to_file_name(text: str) -> str:
    """Returns `text` as a part of a file's name."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-")
