"""Budgets: one model whose attention layers take several sizes, each a value of its mechanism's `size_option`.

All sizes have the same weights, as the widths of slimmable networks (Yu and Huang 2019, arXiv:1903.05134).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn

from attention import OptionError
from attention.options import to_yaml
from models import create_model
from models.assignment import Budget, entry_sizes, with_budget
from models.base import attention_layers
from models.costs import count_costs


def check_order(options: Mapping[str, Any], attention: Any, sizes: Sequence[Budget]) -> None:
    """Refuses sizes, by an OptionError, with two the same, the first not the cheapest, or the last not the dearest."""
    changed = [with_budget(attention, size) for size in sizes]
    macs = [count_costs(options, each).macs for each in changed]
    with torch.device("meta"):
        models = [create_model(attention=each, **options) for each in changed]
    layers = [[layer.core.config for layer in attention_layers(model)] for model in models]  # after `fit`
    problems = {
        "two are the same": any(here == there for here, there in combinations(layers, 2)),
        "the first is not the cheapest": macs[0] > min(macs),
        "the last is not the dearest": macs[-1] < max(macs),
    }
    if problem := next((text for text, applies in problems.items() if applies), ""):
        costs = ", ".join(f"{x:,}" for x in macs)
        raise OptionError("train.budgets", f" = {to_yaml(sizes)}: {problem} (MACs: {costs}); give each once, in order")


class Budgets:
    """Sizes that the attention layers of a model take in turns, by views of its weights.

    Args:
        model: of the last size, on its device. options, attention: those of the model, of a checked run.
        sizes: from the cheapest to the model's own; None: its own only.
    Attributes:
        number: random number of the present update.
    Raises:
        OptionError: the last is not the model's own size, weights depend on the size, or it cannot be built.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], attention: Any, sizes: Sequence[Budget] | None):
        self.number, self.choices = 0, [list[tuple[nn.Module, dict[str, Any]]]() for _ in sizes or [0]]
        if sizes and with_budget(attention, sizes[-1]) != attention:
            own = [{name: entry.get(name) for name in x} for entry, x in entry_sizes(attention, sizes[-1]) if x]
            text = to_yaml(own if own[1:] else own[0])
            problem = f" = {to_yaml(sizes[-1])}, the last, is not the model's own size; write {text} last"
            raise OptionError("train.budgets", problem)
        for size, choice in zip(sizes or (), self.choices, strict=False):
            twin, changed = model, with_budget(attention, size)
            try:
                if changed != attention:
                    with torch.device("meta"):
                        twin = create_model(attention=changed, **options)
            except OptionError as error:
                raise OptionError("train.budgets", f" = {to_yaml(size)}: {error}") from None
            for layers in zip(attention_layers(model), attention_layers(twin), strict=True):
                here, there = (layer.core for layer in layers)
                there = here if here.config == there.config else there  # it may use weights of other layers
                states = cut_weights(here.state_dict(), there), there.state_dict()
                shapes = [{(name, x.shape) for name, x in state.items()} for state in states]
                if names := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
                    changes = [name for name, x in vars(here.config).items() if x != getattr(there.config, name)]
                    problem = f"weights of attention({here.name()}) depend on {', '.join(changes)}: {', '.join(names)}"
                    raise OptionError(
                        "train.budgets", f" = {to_yaml(size)}: {problem}; choose other options, or another mechanism"
                    )
                pairs = zip(here.modules(), there.modules(), strict=True)
                choice += [(own, _attributes(own, other)) for own, other in pairs]

    def use(self, index: int) -> None:
        """Gives the layers one of the sizes."""
        for module, attributes in self.choices[index]:
            vars(module).update(attributes)

    @contextmanager
    def drawn(self, seed: int, step: int) -> Iterator[None]:
        """Context of the passes of an update, at a size that seed and step draw; after it the last is back."""
        self.number = random.Random(f"{seed} {step}").getrandbits(32)
        self.use(self.number % len(self.choices))
        try:
            yield
        finally:
            self.use(-1)

    def sandwich(self) -> list[int]:
        """Indices of the first size, of the one between that the update draws, and of the last."""
        last = len(self.choices) - 1
        place = 1 + self.number % max(1, last - 1)
        return sorted({0, min(place, last), last})


def _attributes(own: nn.Module, other: nn.Module) -> dict[str, Any]:
    """The attributes that `own` gets from `other`, its twin of another size: all but weights, modules and mode."""
    found = {name: value for name, value in vars(other).items() if name[0] != "_" and name != "training"}
    return {**found, "_buffers": own._buffers if other is own else cut_weights(own._buffers, other)}


def cut_weights(state: Mapping[str, Any], module: nn.Module, with_tables: bool = True) -> dict[str, Any]:
    """`state` with what a smaller `module` takes: the first random features (h, s, d), and tables' `middle`."""
    cut = {name: x for name, x in state.items() if x is not None and x.ndim == 3}
    buffers = {name: x for name, x in module.named_buffers() if name.endswith("omega") and name in cut}
    cut |= {name: cut[name][:, : x.shape[1]] for name, x in buffers.items()}
    tables: dict[str, Any] = {f"{name}.table": bias for name, bias in module.named_modules() if hasattr(bias, "middle")}
    middles = {name: tables[name].middle(cut[name]) for name in cut.keys() & tables if with_tables}
    return {**state, **cut, **middles}
