"""Hybrids of a trained model: another mechanism in some layers, which is aligned once for all of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analysis.certificate import Certificate
from analysis.draws import Score
from analysis.drop_in import drop_in
from analysis.laboratory import Laboratory, export_model
from attention import Attention, OptionError
from engine.checkpoints.files import load_checkpoint
from engine.checkpoints.weights import build_model
from models import create_model, depths_of
from models.assignment import assign, text_of
from models.assignment import replace as replace_entry
from models.base import attention_layers, is_same_attention
from models.costs import count_costs

OWN = "own"
"""Choice of the trained model's own attention in a layer."""

Choices = tuple[str, ...]
"""Mechanism of every layer, as on the command line, or `OWN`."""


class Hybrids:
    """Hybrids of the trained model of a laboratory.

    A mechanism is aligned in one run, in all layers that can have it. Each layer is fitted on the trained model's own
    inputs, independently of the others, so that a fitted layer serves every hybrid.

    Args:
        mechanisms: text of the command line -> options. seed: seed of their untrained parameters and of alignment.
    Attributes:
        layers: mechanism -> numbers of the layers that can have it. own_macs: those of the trained model.
    Raises:
        OptionError: no layer can have one of the mechanisms, or a layer has other sizes in another hybrid.
    """

    def __init__(self, laboratory: Laboratory, mechanisms: Mapping[str, Mapping[str, Any]], seed: int):
        self.laboratory, self.mechanisms, self.seed = laboratory, mechanisms, seed
        self.depths: Sequence[int] = depths_of(laboratory.trained.run.model)
        self.own: Choices = (OWN,) * sum(self.depths)
        self._macs: dict[Choices, int] = {}
        self._aligned: dict[str, nn.Module] = {}
        self.own_macs = self.macs(self.own)
        self.layers = {name: self._find_layers(name) for name in mechanisms}

    def _find_layers(self, name: str) -> list[int]:
        found, problem = [], None
        for layer in range(len(self.own)):
            try:
                self.macs(self.single(layer, name))
                found.append(layer)
            except OptionError as error:
                problem = problem or error
        if not found and problem is not None:
            raise problem
        together = self._layers_of(self.uniform(name, found))
        for layer in found:
            alone = self._layers_of(self.single(layer, name))[layer]
            weights, of_all = alone.state_dict().keys(), together[layer].state_dict().keys()
            if not is_same_attention(alone, together[layer]) or weights != of_all:
                problem = f"layer {layer} depends on the other layers with it, so that no fit serves all hybrids"
                remedy = "leave it out, or give it options of single layers (shift: false, sharing: heads)"
                raise OptionError(f"--attention {name}", f"{problem}; {remedy}")
        return found

    def _layers_of(self, choices: Choices) -> list[Attention]:
        with torch.device("meta"):
            model = create_model(**self.laboratory.trained.run.model | {"attention": self.attention(choices)})
        return attention_layers(model)

    @property
    def pairs(self) -> list[tuple[int, str]]:
        """Every layer with each mechanism that it can have."""
        return [(layer, name) for name, layers in self.layers.items() for layer in layers]

    @property
    def number(self) -> int:
        """Number of all hybrids."""
        return math.prod(1 + sum(layer == own for layer, _ in self.pairs) for own in range(len(self.own)))

    def single(self, layer: int, name: str) -> Choices:
        """Returns the hybrid with a mechanism in one layer alone."""
        return self.uniform(name, [layer])

    def attention(self, choices: Choices) -> Any:
        """Returns the option `attention` of a hybrid, as in the configuration of a run."""
        run = self.laboratory.trained.run
        if choices == self.own:
            return run.attention
        entries = assign(run.model["name"], run.attention, self.depths)
        for name in dict.fromkeys(choices):
            start = 0
            for stage, depth in enumerate(self.depths):
                blocks = [block for block in range(depth) if choices[start + block] == name != OWN]
                start += depth
                if blocks:
                    place = {"stage": stage} if len(self.depths) > 1 else {}
                    place |= {"blocks": text_of(blocks)}
                    entries = replace_entry(entries, self.depths, place, self.mechanisms[name], "--attention ")
        return [entry.options for entry in sorted(entries, key=lambda entry: entry.layers)]

    def macs(self, choices: Choices) -> int:
        """Returns the multiply-accumulates of a hybrid for one image; an OptionError refuses a layer its mechanism."""
        if choices not in self._macs:
            self._macs[choices] = count_costs(self.laboratory.trained.run.model, self.attention(choices)).macs
        return self._macs[choices]

    def aligned(self, name: str) -> nn.Module:
        """Returns the model whose layers have the mechanism where they can, aligned, or raises a FloatingPointError."""
        if name not in self._aligned:
            trained = self.laboratory.trained
            attention = self.attention(self.uniform(name, self.layers[name]))
            try:
                weights = self.laboratory.measure(name, attention, self.layers[name], self.seed).weights
            except FloatingPointError as error:
                raise FloatingPointError(f"{name}: {error}") from error
            run, state = replace(trained.run, attention=attention), load_checkpoint(weights)["model"]
            self._aligned[name] = build_model(run, state, str(weights)).to(trained.device).eval()
        return self._aligned[name]

    def uniform(self, name: str, layers: Sequence[int]) -> Choices:
        """Returns the hybrid with a mechanism in several layers."""
        return tuple(name if layer in layers else OWN for layer in range(len(self.own)))

    def score(self, choices: Choices) -> Score:
        """Scores a hybrid of aligned layers; kept in the directory."""
        score = self.laboratory.score
        return Score(**self.once(choices, lambda: score(self.build(choices, is_aligned=True))._asdict(), of="score"))

    def certify(self, score: Score) -> Certificate:
        """Returns the certificate of a hybrid that the same images may have chosen among all hybrids."""
        return Certificate(len(self.laboratory.sample.images), score.changed, self.number)

    def once(self, choices: Choices, compute: Callable[[], dict[str, Any]], **question: Any) -> dict[str, Any]:
        """Returns the values of a measurement of a hybrid, which the directory keeps; computes them if it has none."""
        kept = self.laboratory.kept
        key = kept.key(attention=self.attention(choices), hybrid=choices, seed=self.seed, **question)
        values = kept.find(key)
        if values is None:
            kept.add(key, values := compute())
        return values

    def export(self, path: Path, choices: Choices) -> None:
        """Writes a hybrid of aligned layers as an export, which validate.py and `init.weights` read."""
        laboratory = self.laboratory
        model = self.build(choices, is_aligned=True)
        export_model(path, laboratory.trained, model, self.attention(choices), laboratory.steps or 0)

    def build(self, choices: Choices, is_aligned: bool) -> nn.Module:
        """Builds a hybrid, with aligned layers or with untrained ones."""
        model, _ = drop_in(self.laboratory.trained, self.attention(choices), self.seed)
        for number, (name, layer) in enumerate(zip(choices, attention_layers(model), strict=True)):
            if is_aligned and name != OWN:
                layer.load_state_dict(attention_layers(self.aligned(name))[number].state_dict())
        return model
