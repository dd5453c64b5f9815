"""Equal budgets: the size of every setting's mechanism is solved for multiply-accumulates that are the same for all."""

import dataclasses
from dataclasses import dataclass

from attention import ATTENTION, AttentionFactory
from attention.options import OptionError, option
from attention.sizes import NoSize, solve_size
from engine.config.schema import Run
from engine.runtime.errors import ConfigError
from models import layer_contexts, split_name

TOLERANCE = 0.02
"""Largest relative deviation from a target that is beyond all sizes."""


@dataclass(frozen=True)
class Matched:
    """The solved size of a setting.

    Attributes:
        target: see `solve`. option, value: the mechanism's option, and the valid value with the nearest cost.
        reached: that cost. override: the option of train.py that sets it.
    """

    target: float
    option: str
    value: int
    reached: float
    override: str

    @property
    def deviation(self) -> float:
        """Deviation from the target, relative to the target."""
        return self.reached / self.target - 1


@dataclass(frozen=True, kw_only=True)
class Match:
    """The option `match`: multiply-accumulates that all settings have in common."""

    token_macs: float = option(dataclasses.MISSING, "see `solve`", above=0)


class OutOfReach(ConfigError):
    """A setting that has no size with the wanted cost, or none near it."""


def solve(target: float, run: Run) -> Matched:
    """Solves the size of the mechanism of `run`, which `load_unbuilt` has read.

    Args:
        target: multiply-accumulates of attention beyond its four C x C projections, for a token: the mean over layers,
            without prefix tokens.
    Raises:
        OutOfReach: the mechanism has no size, or all its costs are above the target, or all below it, by more than
            `TOLERANCE`.
        OptionError: attention is a list, or an option cannot be honoured.
    """
    if isinstance(run.attention, list):
        problem = "match sets the size of one mechanism, and this is a list; write match: false beside it to keep it"
        raise OptionError("attention", f"{problem}, or give one mechanism")
    factory, contexts = AttentionFactory.from_options(run.attention), layer_contexts(*split_name(run.model))
    of_token = len(contexts) / sum(context.num_tokens for context in contexts)  # costs of layers -> of a token
    mechanism = ATTENTION[factory.name]
    try:
        size = solve_size(mechanism, contexts, factory.config, target / of_token)
    except NoSize as error:
        raise OutOfReach(str(error)) from None
    name = mechanism.size_option
    assert name is not None
    override = f"attention.{name}={size.value}"
    if isinstance(run.attention, str):  # no mapping, whose options could be set
        override = f"attention={{name: {run.attention}, {name}: {size.value}}}"
    found = Matched(target, name, size.value, of_token * size.macs, override)
    if not size.is_in_range and abs(found.deviation) > TOLERANCE:
        side = "above" if found.deviation > 0 else "below"
        problem = f"every size is {side} the target; the nearest, {name} = {size.value}, has token_macs"
        raise OutOfReach(f"attention({factory.name}): {problem} = {found.reached:.4g}, {found.deviation:+.1%}")
    return found
