"""The size of a mechanism, by its `size_option`, with which its layers have a wanted cost."""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .base import Attention, LayerContext
from .options import OptionError
from .parts.geometry import each_axis

LIMIT = 2**20
"""Largest size that is tried of an option without an upper limit."""

REACH = 32
"""Number of sizes compared on each side of the one where the cost passes the target. Costs rise in steps, and padding
makes them fall in places."""


class NoSize(OptionError):
    """A mechanism has no size, or none that changes its cost."""


class Size(NamedTuple):
    """A valid size of a mechanism.

    Attributes:
        value: value of the option. macs: multiply-accumulates of a layer beyond its four C x C projections, the mean
            over the layers. is_in_range: whether the wanted cost is between those of two sizes; otherwise all sizes
            cost more, or all less.
    """

    value: int
    macs: float
    is_in_range: bool


def solve_size(mechanism: type[Attention], contexts: Sequence[LayerContext], config: Any, macs: float) -> Size:
    """The valid size whose cost is nearest to `macs`; of two equally near ones, the smaller.

    Costs are those of `Attention.cost`. A size is valid if it is at least 1 and all layers can be built with it. At 0
    a mechanism leaves out the part with that size. Draws no random numbers.

    Args:
        contexts: contexts of the layers. config: the mechanism's other options. macs: see `Size`.
    Raises:
        NoSize: the mechanism has no `size_option`, or the option does not change the cost.
        OptionError: no size is valid.
    """
    option = mechanism.size_option
    if option is None:
        raise NoSize(f"attention({mechanism.name()})", "declares no option that sets its size")
    limits = {field.name: field.metadata for field in dataclasses.fields(mechanism.Config)}[option]
    low, high = max(1, limits.get("low") or 1), limits.get("high") or LIMIT

    @functools.cache
    def attempt(value: int) -> float | OptionError:
        """The mean cost of a layer, or the error that refuses the size."""
        total, asked = 0, dataclasses.replace(config, **{option: value})
        try:
            for context in contexts:
                by_itself = dataclasses.replace(context, shared={})
                found = mechanism.fitted(by_itself, asked)
                if getattr(found, option) != value:  # the option `fit` has lowered it
                    raise OptionError(option, f" = {value} does not fit")
                with torch.device("meta"):
                    mechanism(by_itself, found)
                total += mechanism.layer_cost(context, found).macs
        except OptionError as error:
            return error
        return total / len(contexts)

    def at_most(value: int) -> int:
        """The largest valid size up to `value`, which is at least `first`."""
        while isinstance(attempt(value), OptionError):
            asked = dataclasses.replace(config, **{option: value})
            allowed = (mechanism.too_large(context, asked).get(option, (value,))[0] for context in contexts)
            value = max(first, min(value - 1, *(min(each_axis(most)) for most in allowed)))
        return value

    def cost(value: int) -> float:
        found = attempt(at_most(value))
        assert not isinstance(found, OptionError)
        return found

    trials = range(low, min(low + 2 * REACH, high + 1))
    first = next((value for value in trials if not isinstance(attempt(value), OptionError)), 0)
    if isinstance(error := attempt(first or low), OptionError):
        raise error

    sizes, num_tokens = [first], max(context.num_tokens for context in contexts)
    while (larger := at_most(min(2 * sizes[-1], high))) > sizes[-1]:
        sizes.append(larger)
        if larger >= num_tokens and len({cost(value) <= macs for value in sizes}) > 1:
            break
    if sizes[-1] > first:  # the largest size of all may be cheaper than the one before it
        sizes.insert(-1, at_most(sizes[-1] - 1))
    if len({cost(value) for value in sizes}) == 1 < len(sizes):
        raise NoSize(f"attention({mechanism.name()}).{option}", "does not change the multiply-accumulates")
    near = {at_most(value) for value in _around(min(sizes, key=lambda value: abs(cost(value) - macs)), first, high)}
    for below, above in pairwise(sizes):
        if (is_cheap := cost(below) <= macs) == (cost(above) <= macs):
            continue
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if (cost(middle) <= macs) == is_cheap else (below, middle)
        near |= {at_most(value) for value in _around(above, first, high)}
    best = min(sorted(near), key=lambda value: abs(cost(value) - macs))
    costs = [cost(value) for value in (*sizes, *near)]
    return Size(best, cost(best), min(costs) <= macs <= max(costs))


def _around(value: int, first: int, high: int) -> range:
    """Sizes within `REACH` of `value`, from `first` to `high`."""
    return range(max(first, value - REACH), min(value + REACH, high) + 1)
