"""Equal budgets: the size of every setting's mechanism is solved for a cost that is the same for all."""

from dataclasses import dataclass

from attention import ATTENTION, AttentionFactory
from attention.options import OptionError, option, to_yaml
from attention.sizes import NoSize, solve_size
from engine.config.schema import Run
from engine.runtime.errors import ConfigError
from models import layer_contexts, parse_model
from models.costs import count_costs

TOLERANCE = 0.02
"""Largest deviation from the target, a share of it, with which a setting counts as equal."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The target, one of these."""

    layer_macs: float | None = option(
        None, "multiply-accumulates of an attention layer beyond its four C x C projections, for one image", above=0
    )
    token_macs: float | None = option(None, "layer_macs divided by the number of tokens", above=0)
    model_macs: float | None = option(None, "multiply-accumulates of the whole model, for one image", above=0)

    @property
    def given(self) -> dict[str, float]:
        """The options that are not null: one, after `check`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def kind(self) -> str:
        """The option that is given."""
        return next(iter(self.given))

    @property
    def target(self) -> float:
        return self.given[self.kind]

    def check(self) -> None:
        """Raises an OptionError unless one target is given."""
        if len(self.given) != 1:
            raise OptionError("match", f"expected one of {', '.join(vars(self))}, got {to_yaml(self.given)}")


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
        """Deviation from the target, a share of it."""
        return self.reached / self.match.target - 1

    @property
    def is_equal(self) -> bool:
        """Whether the deviation is at most `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE


class OutOfReach(ConfigError):
    """A setting that has no size with the wanted cost, or none near it."""


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
    options, factory = dict(run.model), AttentionFactory.from_options(run.attention)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise OptionError("model.name", f"expected the name of a model, got {name!r}")
    model = {"name": name, **vars(parse_model(name, options))}
    contexts, mechanism = layer_contexts(name, options), ATTENTION[factory.name]
    per_layer, others = 1.0, 0.0  # what the target is of = per_layer * cost of a layer + others
    if match.kind == "token_macs":
        per_layer = len(contexts) / sum(context.num_tokens for context in contexts)
    elif match.kind == "model_macs":
        softmax, per_layer = AttentionFactory.from_options("softmax").config, len(contexts)
        of_layers = sum(ATTENTION["softmax"].cost(context, softmax).macs for context in contexts)
        others = count_costs(model, "softmax").macs - of_layers
    try:
        size = solve_size(mechanism, contexts, factory.config, (match.target - others) / per_layer)
    except NoSize as error:
        raise OutOfReach(str(error)) from None
    assert mechanism.size_option is not None
    reached = per_layer * size.macs
    if match.kind == "model_macs":  # counted, as costs of layers leave out prefix tokens
        given = {"name": run.attention} if isinstance(run.attention, str) else run.attention
        reached = count_costs(model, {**given, mechanism.size_option: size.value}).macs
    override = f"attention.{mechanism.size_option}={size.value}"
    if isinstance(run.attention, str):  # no mapping, whose options could be set
        override = f"attention={{name: {run.attention}, {mechanism.size_option}: {size.value}}}"
    found = Matched(match, mechanism.size_option, size.value, reached, override)
    if not size.is_in_range and not found.is_equal:
        side = "above" if found.deviation > 0 else "below"
        problem = f"every size is {side} the target; the nearest, {found.option} = {found.value}, has {match.kind}"
        raise OutOfReach(f"attention({factory.name}): {problem} = {found.reached:.4g}, {found.deviation:+.1%}")
    return found
