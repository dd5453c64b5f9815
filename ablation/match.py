"""Equal budgets: the size of every setting's mechanism is solved for multiply-accumulates that are the same for all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from attention import ATTENTION, AttentionFactory, LayerContext
from attention.options import OptionError, nearest, to_yaml
from attention.sizes import NoSize, solve_size
from engine.config.schema import Run
from engine.runtime.errors import ConfigError
from models import layer_contexts, parse_model, split_name
from models.costs import count_costs

TOLERANCE = 0.02
"""Largest relative deviation from the target that counts as equal."""

KINDS = {
    "layer_macs": "multiply-accumulates of an attention layer beyond its four C x C projections, for one image",
    "token_macs": "layer_macs divided by the number of tokens",
    "model_macs": "multiply-accumulates of the whole model, for one image",
}
"""Kind of a target -> its meaning."""


@dataclass(frozen=True)
class Match:
    """A target: its kind, see `KINDS`, and its value."""

    kind: str
    target: float


@dataclass(frozen=True)
class Matched:
    """The solved size of a setting.

    Attributes:
        option, value: the mechanism's option, and the valid value with the nearest cost. reached: that cost.
        override: the option of train.py that sets it.
    """

    match: Match
    option: str
    value: int
    reached: float
    override: str

    @property
    def deviation(self) -> float:
        """Deviation from the target, relative to the target."""
        return self.reached / self.match.target - 1

    @property
    def is_equal(self) -> bool:
        """Whether the deviation is at most `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE


class OutOfReach(ConfigError):
    """A setting that has no size with the wanted cost, or none near it."""


def parse_match(given: Mapping[str, Any]) -> Match:
    """Returns the target of the option `match`, kind -> value.

    Raises:
        OptionError: it is not one known kind with a positive number.
    """
    for kind in given:
        if kind not in KINDS:
            raise OptionError(f"match.{kind}", f"unknown option{nearest(kind, KINDS)}")
    if len(given) != 1:
        raise OptionError("match", f"expected one of {', '.join(KINDS)}, got {to_yaml(given)}")
    ((kind, target),) = given.items()
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
        raise OptionError(f"match.{kind}", f"expected a number above 0, got {target!r}")
    return Match(kind, float(target))


def solve(match: Match, run: Run) -> Matched:
    """Solves the size of the mechanism of `run`, which `load_unbuilt` has read, for the target of `match`.

    Raises:
        OutOfReach: the mechanism has no size, or all its costs are above the target, or all below it, by more than
            `TOLERANCE`.
        OptionError: attention is a list, or an option cannot be honoured.
    """
    if isinstance(run.attention, list):
        problem = "match sets the size of one mechanism, and this is a list; write match: false beside it to keep it"
        raise OptionError("attention", f"{problem}, or give one mechanism")
    factory, (name, options) = AttentionFactory.from_options(run.attention), split_name(run.model)
    contexts, model = layer_contexts(name, options), {"name": name, **vars(parse_model(name, options))}
    per_layer, others = 1.0, 0.0  # target quantity = per_layer * cost of a layer + others
    if match.kind == "token_macs":
        per_layer = len(contexts) / sum(context.num_tokens for context in contexts)
    elif match.kind == "model_macs":
        per_layer, others = len(contexts), count_costs(model, "softmax").macs - len(contexts) * softmax_macs(contexts)
    mechanism = ATTENTION[factory.name]
    try:
        size = solve_size(mechanism, contexts, factory.config, (match.target - others) / per_layer)
    except NoSize as error:
        raise OutOfReach(str(error)) from None
    option = mechanism.size_option
    assert option is not None
    reached = per_layer * size.macs
    if match.kind == "model_macs":  # counted, as costs of layers leave out prefix tokens
        given = {"name": run.attention} if isinstance(run.attention, str) else run.attention
        reached = count_costs(model, {**given, option: size.value}).macs
    found = Matched(match, option, size.value, reached, to_override(run.attention, option, size.value))
    if not size.is_in_range and not found.is_equal:
        side = "above" if found.deviation > 0 else "below"
        problem = f"every size is {side} the target; the nearest, {option} = {size.value}, has {match.kind}"
        raise OutOfReach(f"attention({factory.name}): {problem} = {reached:.4g}, {found.deviation:+.1%}")
    return found


def softmax_macs(contexts: Sequence[LayerContext]) -> float:
    """Returns the multiply-accumulates of a layer of softmax attention beyond its projections: the mean over layers."""
    config = AttentionFactory.from_options("softmax").config
    return fmean(ATTENTION["softmax"].layer_cost(context, config).macs for context in contexts)


def to_override(attention: Any, name: str, value: int) -> str:
    """Returns the override that sets the size `name` of the mechanism that the option `attention` gives."""
    if isinstance(attention, str):  # no mapping, whose options could be set
        return f"attention={{name: {attention}, {name}: {value}}}"
    return f"attention.{name}={value}"
