"""Sizes for a wanted cost: `solve_size` finds, of all valid values of a mechanism's `size_option`, the nearest."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from attention import ATTENTION, Attention, AttentionFactory, LayerContext, OptionError
from attention.base import Cost
from attention.options import Options, option
from attention.sizes import solve_size
from tests.support.outside import OUTSIDE
from tests.support.partition import chosen

SIZED = [name for name, mechanism in ATTENTION.items() if mechanism.size_option]
NO_MACS = {"pooling": "its means are no matrix product", "ra": "its samples of training are not those of evaluation"}
"""Mechanism -> why its size does not change the multiply-accumulates of an evaluation."""

SOLVED = "eva", "lara", "ra", "neighborhood", "hilo"
"""Mechanisms whose sizes the default suite tries one by one."""

COSTED = [name for name in SIZED if name not in NO_MACS]
GRID = (6, 8)
MOST = 200
"""Largest value that is tried one by one, beyond the 48 tokens of the grid."""


def layers(grid: tuple[int, int] = GRID) -> list[LayerContext]:
    """The first and the last of two layers, which differ in some mechanisms."""
    return [LayerContext(dim=24, num_heads=3, grid=grid, layer=layer, depth=2) for layer in (0, 1)]


def config_of(name: str) -> Any:
    """Default options, with sizes beside the size option that fit the grid."""
    fields, options = ATTENTION[name].Config.__dataclass_fields__, {}
    for field, value in {"window_size": 3, "cluster_size": 7, "num_regions": 4, "num_bits": 5}.items():
        if field in fields and field != ATTENTION[name].size_option:
            options[field] = value
    return AttentionFactory.from_options({"name": name, **options}).config


@functools.cache
def every_size(name: str) -> dict[int, float]:
    """Every valid value up to `MOST` -> mean cost of a layer: each is built, one by one."""
    found, mechanism = {}, ATTENTION[name]
    high = mechanism.Config.__dataclass_fields__[mechanism.size_option].metadata.get("high") or MOST
    for value in range(1, min(high, MOST) + 1):
        config = dataclasses.replace(config_of(name), **{mechanism.size_option: value})
        try:
            with torch.device("meta"):
                for context in layers():
                    mechanism(context, config)
        except OptionError:
            continue
        found[value] = sum(mechanism.layer_cost(context, config).macs for context in layers()) / 2
    return found


@pytest.mark.parametrize("name", SIZED)
def test_a_declared_size_is_an_integer_option(name):
    mechanism = ATTENTION[name]
    assert mechanism.size_option in mechanism.Config.__dataclass_fields__
    dataclasses.replace(config_of(name), **{mechanism.size_option: 3})
    AttentionFactory.from_options({"name": name, mechanism.size_option: 3})
    with pytest.raises(OptionError, match="expected"):
        AttentionFactory.from_options({"name": name, mechanism.size_option: 3.5})


@pytest.mark.parametrize("name", chosen(SIZED, SOLVED.__contains__))
def test_a_size_changes_the_cost(name):
    assert (len(set(every_size(name).values())) > 1) == (name not in NO_MACS) or name in OUTSIDE
    if name in NO_MACS:
        with pytest.raises(OptionError, match=rf"attention\({name}\)\.\w+: does not change the multiply-accumulates"):
            solve_size(ATTENTION[name], layers(), config_of(name), 1e6)


@pytest.mark.parametrize("name", chosen(COSTED, SOLVED.__contains__))
def test_the_solved_size_is_the_nearest_of_all(name):
    """Targets lie at and between costs of valid sizes."""
    costs = sorted(set(every_size(name).values()))
    lowest, highest = costs[0], costs[-1]
    for share in (0.0, 0.07, 0.31, 0.5, 0.83):
        target = lowest + share * (highest - lowest)
        found = solve_size(ATTENTION[name], layers(), config_of(name), target)
        assert found.macs == every_size(name)[found.value]
        assert found.is_in_range
        assert abs(found.macs - target) == min(abs(cost - target) for cost in costs)


@pytest.mark.parametrize("name", chosen(COSTED, SOLVED.__contains__))
def test_a_target_out_of_reach_gives_the_nearest_end(name):
    """Below every cost; above every cost where the grid, and not `MOST`, limits the sizes."""
    costs = every_size(name)
    found = solve_size(ATTENTION[name], layers(), config_of(name), min(costs.values()) - 1e9)
    assert (found.macs, found.is_in_range) == (min(costs.values()), False)
    if max(costs) < MOST - 1:
        found = solve_size(ATTENTION[name], layers(), config_of(name), 1e12)
        assert (found.macs, found.is_in_range) == (max(costs.values()), False)


def test_a_mechanism_without_a_size_is_refused():
    with pytest.raises(OptionError, match=r"attention\(softmax\): declares no option that sets its size"):
        solve_size(ATTENTION["softmax"], layers(), config_of("softmax"), 1e6)


def test_options_with_which_no_size_is_valid_are_refused():
    config = dataclasses.replace(config_of("eva"), window_size=14)
    with pytest.raises(OptionError, match=r"attention\(eva\)\.window_size = 14: larger than the 6x8 grid"):
        solve_size(ATTENTION["eva"], layers(), config, 1e6)


class Counted(Attention):
    size_option = "count"

    class Config(Options):
        count: int = option(1, "products of a token", low=1)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, config.count * context.num_tokens)


def test_a_size_without_an_upper_limit_by_hand():
    """48 tokens, N products each per unit: 4,800,000 are 100,000 units, and 30 more products a unit more."""
    assert solve_size(Counted, layers(), Counted.Config(), 4_800_000)[:2] == (100_000, 4_800_000)
    assert solve_size(Counted, layers(), Counted.Config(), 4_800_030)[:2] == (100_001, 4_800_048)
    assert solve_size(Counted, layers(), Counted.Config(), 4_800_024).value == 100_000  # of two as near the smaller
    assert solve_size(Counted, layers(), Counted.Config(), 1e12).value == 2**20  # the largest that is tried


def test_the_published_cost_of_eva_is_solved():
    """49 groups of 784 tokens in DeiT-Tiny."""
    context = LayerContext(dim=192, num_heads=3, grid=(28, 28))
    config = AttentionFactory.from_options("eva").config
    target = ATTENTION["eva"].layer_cost(context, config).macs
    assert solve_size(ATTENTION["eva"], [context], config, target)[:2] == (49, target)
