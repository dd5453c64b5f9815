"""Replacement of a trained model's attention by another mechanism, without training, and the error of its outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from analysis.implied import attention_inputs
from analysis.trained import Trained
from attention import Attention, OptionError
from engine.checkpoints.adapt import fit_weights
from engine.objectives.alignment import relative_error, tokens_of
from models import create_model
from models.base import Layer, attention_layers

CHUNK = 8
"""Number of images whose attended values are computed at one time."""

Given = tuple[Tensor, dict[str, Any]]
"""Tokens (B, P + N, C) of an attention layer, and its other arguments by name, of which one is their grid."""

Compute = Callable[[Layer, Tensor, dict[str, Any]], Tensor]
"""Function of a layer and what it is given: `attended` or `outputs`."""


def drop_in(
    trained: Trained, attention: Any, seed: int, state: Mapping[str, Tensor] | None = None
) -> tuple[nn.Module, int]:
    """Returns the trained model, in evaluation mode, with another mechanism, and its number of untrained parameters.

    Untrained parameters, and random numbers kept for evaluation, follow from `seed`. All others are the trained ones.

    Args:
        attention: as in the configuration of a run. state: weights to use instead of the trained ones.
    Raises:
        OptionError: the mechanism cannot be built on this grid, or needs projections that the run does not have.
    """
    torch.manual_seed(seed)
    model = create_model(**trained.run.model | {"attention": attention})
    for layer, own in zip(attention_layers(model), attention_layers(trained.model), strict=True):
        if isinstance(layer, Attention) and isinstance(own, Attention):  # other models keep their projections
            check_projections(layer, own)
    source = trained.source if state is None else trained.source._replace(state=dict(state))
    taken, outcome = fit_weights(model, source, "the trained model")
    model.load_state_dict(taken, strict=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return model.to(trained.device).eval(), sum(sizes[name] for name in outcome["fresh"])


def check_projections(layer: Attention, own: Attention) -> None:
    """Raises the OptionError if the weights of `own` do not hold the projections of tokens that `layer` makes.

    Queries, keys and values serve every layer, whose projections may be fewer.
    """
    name, own_name = f"attention({layer.name()})", own.name()
    if own.num_projections not in (3, layer.num_projections):
        problem = f" needs {layer.num_projections} projections of tokens, but {own_name} of the run makes"
        raise OptionError(name, f"{problem} {own.num_projections}; give another run")


def set_mode(model: nn.Module, mode: str, seed: int) -> None:
    """Sets only the attention layers to one of `MODES`; their samples follow from `seed`.

    The sampled mode is that of training without dropout, which is not a part of an estimate.
    """
    torch.manual_seed(seed)
    for layer in attention_layers(model):
        layer.train(mode == "sampled")  # and its parts: EVA's landmarks sample, not the layer itself
        if mode == "sampled":
            leave_out_dropout(layer.core)


def leave_out_dropout(layer: Attention) -> None:
    """Turns dropout of outputs and of attention weights off, until the mode of the layer is set again."""
    for part in layer.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    config = layer.config
    if not config.attn_drop:
        return

    def train(mode: bool = True) -> nn.Module:
        """Restores the rate, so that an alignment after this has it."""
        layer.config = config
        del layer.train
        return layer.train(mode)

    layer.config, layer.train = dataclasses.replace(config, attn_drop=0.0), train


def merge_modes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mode -> result; merges equal results of several modes, where nothing is sampled, into ``"any"``."""
    first, *others = found.values()
    return {"any": first} if others and all(other == first for other in others) else dict(found)


@torch.no_grad()
def layer_inputs(trained: Trained, images: Tensor) -> list[Given]:
    """Returns the input of every attention layer of the trained model."""
    found, _ = attention_inputs(trained.model, images.to(trained.device))
    return [(x, others) for _, x, others in found]


@torch.no_grad()
def attended(layer: Layer, x: Tensor, others: dict[str, Any]) -> Tensor:
    """Returns the attended values (B, h, N, d) of a layer for tokens (B, N, C), before its output projection.

    Heads beyond h, of further scales, are left out.
    """
    projected = (layer.project(part, **others) for part in x.split(CHUNK))
    parts = [layer.core.attend_all(part, others["grid"]) for part in projected]
    return torch.cat(parts)[:, : layer.core.num_heads]


@torch.no_grad()
def outputs(layer: Layer, x: Tensor, others: dict[str, Any]) -> Tensor:
    """Returns the outputs (B, N, C) of a layer for tokens (B, N, C)."""
    return torch.cat([tokens_of(layer(part, **others)) for part in x.split(CHUNK)])


def layer_errors(
    model: nn.Module, inputs: Sequence[Given], expected: Sequence[Tensor], compute: Compute
) -> list[float]:
    """Returns the `relative_error` of the result of `compute` (`attended`, `outputs`) for each attention layer."""
    layers = zip(attention_layers(model), inputs, expected, strict=True)
    return [relative_error(compute(layer, *given).double(), y.double()).item() for layer, given, y in layers]
