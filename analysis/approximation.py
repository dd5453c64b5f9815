"""Approximation error of mechanisms against softmax attention of the same queries, keys and values."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from analysis.budgets import options_text, size_option, with_budget
from analysis.drop_in import CHUNK, Compute, Given, attended, drop_in, merge_modes, set_mode
from analysis.trained import Trained
from attention import OptionError
from engine.reporting.tables import Spread, spread
from engine.runtime.errors import UserError
from engine.runtime.memory import is_out_of_memory
from models import create_model, depths_of
from models.assignment import single_layers
from models.base import Layer, attention_layers
from models.costs import costs_of


@dataclass(frozen=True)
class Row:
    """Measurements of a mechanism at a budget and temperature.

    Attributes:
        name: the mechanism on the command line. options: its options, including the budget's. budget: None for
            mechanisms without an option of size. temperature: divisor of the logits. entropies: entropy of softmax's
            weights in each layer, nats. layers: numbers of the layers with the mechanism, over which means are taken
            (None: all); the last stage of a pyramid keeps softmax. mode: see `merge_modes`. errors: `relative_error`
            for each draw and layer, mean over the passes. variances: their variance over the passes; the rest is
            squared bias. untrained: number of untrained parameters. macs: see `layer_macs`. steps: number of alignment
            steps. problem: reason for a missing result.
    """

    name: str
    options: str
    budget: int | None
    temperature: float
    entropies: Sequence[float]
    mode: str = ""
    errors: Sequence[Sequence[float]] = ()
    variances: Sequence[Sequence[float]] = ()
    untrained: int = 0
    macs: int = 0
    steps: int = 0
    problem: str = ""
    layers: Sequence[int] | None = None

    @property
    def entropy(self) -> float:
        """Mean of the entropies over the layers that have the mechanism."""
        return mean(self.entropies if self.layers is None else [self.entropies[layer] for layer in self.layers])

    @property
    def label(self) -> str:
        return f"{self.name}, aligned" if self.steps else self.name

    def spread(self, layer: int | None = None) -> Spread | None:
        """Returns mean and standard deviation over draws, for one layer or for the mean over `layers`."""
        return spread_of_layers(self.errors, self.layers if layer is None else [layer])

    def spread_of_squared_bias(self, layer: int | None = None) -> Spread | None:
        """Returns mean and standard deviation of error - variance, an unbiased estimate of the squared bias."""
        pairs = zip(self.errors, self.variances, strict=False)  # without samples there are no variances
        biases = [[e - v for e, v in zip(errors, variances, strict=True)] for errors, variances in pairs]
        return spread_of_layers(biases, self.layers if layer is None else [layer])


def spread_of_layers(found: Sequence[Sequence[float]], layers: Sequence[int] | None) -> Spread | None:
    """Returns mean and standard deviation over draws of the mean over layers; None: over all."""
    return spread(mean(of_draw if layers is None else [of_draw[layer] for layer in layers]) for of_draw in found)


@dataclass(frozen=True)
class Softmax:
    """Softmax attention of a trained model's queries, keys and values, the reference of the comparison.

    Attributes:
        temperature: divisor of the logits. state: weights whose queries and keys are divided by its root, both alike,
            because the error of features of queries and keys depends on the size of each. inputs: tokens (B, P + N, C)
            and other arguments of every attention layer of the trained model. compute: tensor to compare, `attended`
            or `outputs`.
            expected: that tensor for every layer of the trained model. entropies: entropy of the weights of each
            layer, nats, mean over queries and heads. macs: see `layer_macs`.
    """

    temperature: float
    state: Mapping[str, Tensor]
    inputs: Sequence[Given]
    compute: Compute
    expected: Sequence[Tensor]
    entropies: Sequence[float]
    macs: int


@torch.no_grad()
def attend_by_softmax(
    trained: Trained, inputs: Sequence[Given], temperature: float, compute: Compute = attended
) -> Softmax:
    """Computes softmax attention with the weights of a trained model; see `Softmax`.

    Raises:
        OptionError: the model's projections are not queries, keys and values.
        UserError: a temperature other than 1 of another model, whose queries and keys may be normalised afterwards.
    """
    state = dict(trained.source.state)
    if temperature != 1 and any(layer.core is not layer for layer in attention_layers(trained.model)):
        problem = "divides queries and keys of this project's own models alone"
        raise UserError(f"--temperatures {temperature:g}: {problem}; give --temperatures 1")
    for name, x in state.items():
        if name.endswith((".attn.qkv.weight", ".attn.qkv.bias")):
            q, k, *others = x.chunk(3)
            state[name] = torch.cat([q / temperature**0.5, k / temperature**0.5, *others])
    model, _ = drop_in(trained, {"name": "softmax"}, 0, state)
    layers = attention_layers(model)
    expected = [compute(layer, *given) for layer, given in zip(layers, inputs, strict=True)]
    entropies = [softmax_entropy(layer, *given) for layer, given in zip(layers, inputs, strict=True)]
    macs = layer_macs(trained, "softmax", inputs)
    return Softmax(temperature, state, inputs, compute, expected, entropies, macs)


def layer_macs(trained: Trained, attention: str | Mapping[str, Any], inputs: Sequence[Given]) -> int:
    """Counts the multiply-accumulates of all attention layers, projections included, for one image in evaluation."""
    with torch.device("meta"):
        network = create_model(**trained.run.model | {"attention": attention}).eval()
    given = zip(attention_layers(network), tree_map_only(Tensor, lambda x: x.to("meta"), [*inputs]), strict=True)
    return sum(costs_of(layer, x[:1], **others).macs for layer, (x, others) in given)


@torch.no_grad()
def softmax_entropy(layer: Layer, x: Tensor, others: dict[str, Any]) -> float:
    """Returns the entropy of softmax's weights in nats, mean over queries and heads; log N for equal weights."""
    found = []
    for part in x.split(CHUNK):
        q, k, _ = layer.project(part, **others)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        found.append(torch.special.entr(weights).sum(-1))
    return torch.cat(found).mean().item()


def measure(
    trained: Trained,
    softmax: Softmax,
    name: str,
    attention: Mapping[str, Any],
    budgets: Sequence[int],
    args: Namespace,
    fit: Callable[[nn.Module, int], None] | None = None,
) -> Iterator[Row]:
    """Yields the rows of a mechanism: one for each budget, or for each budget and mode if the modes differ.

    The rows of the aligned model follow.

    Args:
        fit: aligns a model by a seed; None: no alignment.
    """
    layers = single_layers(depths_of(trained.run.model))
    num_tokens = {math.prod(softmax.inputs[layer][1]["grid"]) for layer in layers}
    for budget in budgets if size_option(attention) else [None]:
        row = partial(Row, name, budget=budget, temperature=softmax.temperature, entropies=softmax.entropies)
        stages = (0,) if fit is None else (0, args.align)
        options, found = attention, {steps: {mode: [] for mode in args.modes} for steps in stages}
        try:
            if budget is not None:
                options = with_budget(attention, budget, num_tokens)
            for seed in range(args.draws):
                model, untrained = drop_in(trained, options, seed, softmax.state)
                for steps in stages:
                    if steps and fit is not None:
                        fit(model, seed)
                    for mode, errors in found[steps].items():
                        set_mode(model, mode, seed)
                        samples = args.decompose if mode == "sampled" and args.decompose else 1
                        errors.append(decompose_errors(model, softmax, samples))
                    model.eval()
        except (OptionError, FloatingPointError) as error:
            yield row(options_text(options), problem=str(error))
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            yield row(options_text(options), problem="exceeds the memory")
            continue
        macs = layer_macs(trained, options, softmax.inputs)
        row = partial(row, options_text(options), untrained=untrained, macs=macs, layers=layers)
        for steps, by_mode in found.items():
            for mode, draws in merge_modes(by_mode).items():  # (error, variance) of every layer, by draw
                errors, variances = [[[pair[i] for pair in draw] for draw in draws] for i in (0, 1)]
                sampled = {"variances": variances} if args.decompose and mode != "evaluation" else {}
                yield row(mode=mode, errors=errors, steps=steps, **sampled)


@torch.no_grad()
def decompose_errors(model: nn.Module, softmax: Softmax, samples: int) -> list[tuple[float, float]]:
    """Returns the mean `relative_error` of every attention layer over `samples` passes, and its part that is variance.

    The error of a random y against a fixed t is E (y - t)^2 = (E y - t)^2 + Var y. The variance is estimated over the
    passes, divided by samples - 1; a single pass has none.
    """
    found = []
    for layer, given, expected in zip(attention_layers(model), softmax.inputs, softmax.expected, strict=True):
        size, errors, scatter, centre = expected.double().square().mean().item(), [], 0.0, 0.0
        for count in range(1, samples + 1):
            y = softmax.compute(layer, *given).double()
            errors.append((y - expected).square().mean().item() / size)
            step = y - centre
            centre = centre + step / count  # Welford: the mean and the sum of squares about it, in one turn
            scatter += (step * (y - centre)).mean().item() if count > 1 else 0.0
        found.append((mean(errors), scatter / max(1, samples - 1) / size))
    return found
