"""The option `fit`: sizes that a grid is too small for become the largest that it allows, and nothing else changes."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention, Grid, LayerContext, OptionError, options_of
from attention.base import at_most
from attention.options import Options, fit_option, option
from attention.parts.groups import up_to_bins
from tests.support.cases import HEAD_DIM, HEADS, B, Case, with_options
from tests.support.facts import CASES, FACTS, light
from tests.support.outside import OUTSIDE
from tests.support.partition import chosen

SMALL: list[Grid] = [(1, 1), (2, 1), (1, 9), (2, 2), (3, 5), (6, 6), (7, 5), (8, 9)]
"""Grids from 1x1 to 9x9: a row, a column, squares, and sides that are prime."""

WITH_FIT = [name for name in ATTENTION if "fit" in options_of(name)]
FITTED = [*(Case(name, (28, 28)) for name in WITH_FIT), *(case for case in CASES if case.name in WITH_FIT)]
every_case = pytest.mark.parametrize("case", light(FITTED, "partition", "mu", "num_summary", "num_global", "reduction"))

every_grid = pytest.mark.parametrize(
    "grid", chosen(map(pytest.param, SMALL), lambda grid: grid in ((1, 1), (3, 5), (7, 5))), ids=str
)


def on_grid(case: Case, grid: Grid) -> Case:
    return dataclasses.replace(case, grid=grid)


def tokens(case: Case, grid: Grid) -> Tensor:
    return on_grid(case, grid).tokens()


def outputs(attn: Attention, x: Tensor, grid: Grid) -> list[Tensor]:
    """Outputs of a training pass and of an evaluation from a fixed seed."""
    torch.manual_seed(1)
    return [attn.train()(x, grid), attn.eval()(x, grid)]


def assert_alike(given: Attention, expected: Attention, x: Tensor, grid: Grid):
    state = given.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
    results = zip(outputs(given, x, grid), outputs(expected, x, grid), strict=True)
    assert all(torch.equal(a, b) for a, b in results)


def build(case: Case) -> Attention | OptionError:
    """The layer, or the error that refuses it."""
    try:
        return case.build()
    except OptionError as error:
        return error


@pytest.mark.parametrize("name", ATTENTION)
def test_mechanisms_have_the_option_if_a_grid_can_be_too_small(name):
    cases = [on_grid(case, grid) for case in (Case(name, (28, 28)), *FACTS[name].CASES) for grid in SMALL]
    refused = [case for case in cases if isinstance(build(case), OptionError)]
    assert bool(refused) == (name in WITH_FIT) or name in OUTSIDE, "give it the option, fit_option()"


@every_grid
@every_case
def test_the_largest_sizes_are_taken_that_the_grid_allows(case, grid):
    """The layer is the one that is built with these sizes; with any that is larger, up to the given ones, none is."""
    given, strict = with_options(on_grid(case, grid), fit=True), on_grid(case, grid)
    asked, attn = case.build().config, build(given)
    if isinstance(attn, OptionError):
        reasons = {"complement": "a window leaves only 0 tokens outside", "pool_size": "a token less itself is zero"}
        assert any(word in str(given) + attn.key and why in str(attn) for word, why in reasons.items())
        assert max(grid) <= 4
        return
    config = {name: value for name, value in dataclasses.asdict(attn.config).items() if name != "fit"}
    lowered = {name: value for name, value in config.items() if value != getattr(asked, name)}
    assert bool(lowered) == isinstance(build(strict), OptionError)
    fitting = with_options(strict, **config)
    assert_alike(attn, fitting.build(), strict.tokens(), grid)
    assert outputs(attn, strict.tokens(), grid)[1].isfinite().all()
    for name, value in lowered.items():
        if isinstance(value, int):
            larger = range(value + 1, getattr(asked, name))
            assert value > 0
            assert all(isinstance(build(with_options(fitting, **{name: n})), OptionError) for n in larger)


@every_case
def test_a_grid_that_allows_all_sizes_changes_nothing(case):
    strict, attn = case.build(), with_options(case, fit=True).build()
    assert attn.config == dataclasses.replace(strict.config, fit=True)
    assert_alike(attn, strict, case.tokens(), case.grid)


def test_sizes_are_found_without_random_numbers_and_beside_the_network():
    states = []
    for fit in (False, True):
        torch.manual_seed(0)
        Case("scatterbrain", (8, 9), {"fit": fit}).build(seed=3)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    shared: dict[Any, Any] = {}
    Case("local", (2, 2), {"fit": True, "shared": shared}).build()
    assert shared == {}


def learns_its_groups(case: Case) -> bool:
    """True if parameters belong to each of the groups, so that their number cannot change."""
    return case.name == "agent" or case.options.get("mu") == "trainable"


@every_grid
@every_case
def test_counts_fit_other_grids_than_at_construction(case, grid):
    """Windows and filters stay as they are, and are padded; numbers of groups become the largest that fit."""
    grid = (*case.grid[:-2], *grid)  # as many frames
    strict, attn, x = case.build(), with_options(case, fit=True).build(), tokens(case, grid)
    try:
        strict(x, grid)
    except OptionError as error:
        name = error.key.rpartition(".")[2]
        context = LayerContext(dim=4, num_heads=1, grid=grid, num_prefix_tokens=strict.num_prefix_tokens)
        fitting = type(strict).too_large(context, strict.config).get(name)
        if learns_its_groups(case) or fitting is None:
            with pytest.raises(OptionError, match=f"^{error.key.replace('(', '.').replace(')', '.')} = "):
                attn(x, grid)
            return
        strict = copy.deepcopy(strict)
        strict.config = dataclasses.replace(strict.config, **{name: fitting[0]})
    assert_alike(attn, strict, x, grid)
    assert attn.config == with_options(case, fit=True).build().config


@pytest.mark.parametrize("name", chosen(["eva", "lara", "nystrom", "orthoformer"], lambda name: name == "eva"))
def test_other_grids_compile_into_one_graph(name):
    torch.compiler.reset()
    attn, grid = Case(name, (8, 9), {"fit": True}).build(torch.float32).eval(), (4, 3)
    compiled = torch.compile(attn, fullgraph=True, dynamic=False, backend="eager")
    x = torch.randn(B, 12, HEADS * HEAD_DIM)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, grid), attn(x, grid))


@pytest.mark.parametrize(
    ("name", "options", "grid", "sizes"),
    [
        ("eva", {}, (6, 6), {"window_size": 6, "num_landmarks": 36}),
        ("eva", {}, (7, 5), {"window_size": 7, "num_landmarks": 35}),
        ("eva", {}, (4, 4), {"window_size": 4, "num_landmarks": 16}),
        ("eva", {}, (8, 9), {"window_size": 7, "num_landmarks": 49}),
        ("eva", {}, (6, 8), {"window_size": 7, "num_landmarks": 48}),
        ("eva", {"num_landmarks": 11}, (6, 6), {"window_size": 6, "num_landmarks": 10}),  # 11 is prime, 10 = 5 x 2
        ("eva", {"overlap": 3}, (2, 2), {"window_size": 2, "overlap": 2, "num_landmarks": 4}),
        ("neighborhood", {}, (4, 9), {"kernel_size": (3, 7)}),
        ("neighborhood", {"dilation": 4}, (14, 28), {"kernel_size": 7, "dilation": (2, 4)}),
        ("sra", {"reduction": 8}, (4, 6), {"reduction": 6}),
    ],
)
def test_sizes_by_hand(name, options, grid, sizes):
    config = dataclasses.asdict(Case(name, grid, {**options, "fit": True}).build().config)
    assert {key: config[key] for key in sizes} == sizes


class Rows(Attention):
    class Config(Options):
        window_size: int = option(7, "tokens of a window", low=1)
        num_landmarks: int = option(16, "groups", low=1)
        fit: bool = fit_option(
            window_size=at_most(lambda layer, config: layer.grid[1], "longer than a row of the {H}x{W} grid"),
            num_landmarks=lambda count, layer, config: up_to_bins(count, layer.grid),
        )


def test_a_mechanism_from_outside_has_the_option_by_one_line():
    context = LayerContext(dim=4, num_heads=1, grid=(3, 5))
    assert Rows.fitted(context, Rows.Config(fit=True)) == Rows.Config(window_size=5, num_landmarks=15, fit=True)
    with pytest.raises(OptionError, match=r"rows.*window_size = 7: longer than a row of the 3x5 grid; at most 5"):
        Rows(context, Rows.Config(num_landmarks=15))


def test_options_that_no_size_makes_valid_are_refused():
    with pytest.raises(OptionError, match=r"attention\(eva\).partition = mask: needs window_size"):
        Case("eva", (2, 2), {"fit": True, "partition": "mask", "window_size": 0}).build()
