"""The contract of every mechanism with networks: shapes, gradients, grids, batches, compilation, projections."""

import copy
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention, Grid, create_attention, kernels
from tests.support.calls import capture_op, value_and_gradients
from tests.support.cases import HEAD_DIM, HEADS, B, Case
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.facts import CASES, ORDINARY
from tests.support.partition import ONE_OF_A_KIND, chosen

every_case = pytest.mark.parametrize("case", CASES, ids=str)
POSITIONS = (*(f"{of}_positions.table" for of in ("image", "row", "column")), "position_bias.table", "prefix_bias")
"""Parameters of which every entry is in use."""
UNUSED_OFFSETS = {"position_bias", "overlap", "reduction"}
"""Options that may leave offsets without a pair of tokens."""


@every_case
def test_shape_dtype_and_gradient_of_every_parameter(case):
    attn, x = case.build(torch.float32), case.tokens(torch.float32).requires_grad_()
    y = attn(x, case.grid)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in [("x", x), *attn.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
        if name.endswith(POSITIONS) and UNUSED_OFFSETS.isdisjoint(case.options):
            assert parameter.grad.ne(0).all(), name


@every_case
def test_a_pickled_and_a_copied_layer_are_the_layer(case):
    """Started processes get models by pickle."""
    attn, x = case.build().eval(), case.tokens()
    y = attn(x, case.grid)
    for again in (pickle.loads(pickle.dumps(attn)), copy.deepcopy(attn)):
        assert torch.equal(again(x, case.grid), y)


@every_case
def test_other_grid_than_at_construction(case):
    attn, grid = case.build().eval(), (case.grid[0] + 3, *case.grid[1:-1], case.grid[-1] - 1)
    x = torch.randn(B, case.num_tokens(grid), HEADS * HEAD_DIM, dtype=torch.float64)
    assert attn(x, grid).isfinite().all()


@every_case
def test_batch_independence(case):
    attn, x = case.build().eval(), case.tokens()
    torch.testing.assert_close(attn(x, case.grid)[1:], attn(x[1:], case.grid), rtol=FP64, atol=FP64)


def compiled() -> Iterator[Any]:
    """Cases in training, and in evaluation too if that differs; otherwise both modes are one computation, see
    test_determinism.py. Most cases of causal attention by features, which shares Performer's code, run in the stress
    suite only.
    """
    by_features = "linear", "rfa", "t2r", "cosformer", "transnormer", "abc"
    for case in CASES:
        alike = case.options.get("causal") and case.name in by_features
        for training in (True, False):
            if training or case.two_modes:
                yield pytest.param(case, training, id=f"{case}-{training}", marks=[pytest.mark.stress] * bool(alike))


def is_compiled_by_default(case: Case, training: bool) -> bool:
    return case in ORDINARY and case.name in ONE_OF_A_KIND[::2] and training != case.stochastic


@pytest.mark.parametrize(("case", "training"), chosen(compiled(), is_compiled_by_default))
def test_compiles_into_one_graph(case, training):
    torch.compiler.reset()
    attn, x = case.build(torch.float32).train(training), case.tokens(torch.float32)
    compiled = torch.compile(attn, fullgraph=True, dynamic=False, backend="eager")
    with torch.set_grad_enabled(training):  # as networks are used in the two modes
        torch.manual_seed(4)
        expected = attn(x, case.grid)
        torch.manual_seed(4)
        torch.testing.assert_close(compiled(x, case.grid), expected)


@pytest.mark.parametrize(
    "case", chosen(ORDINARY, lambda case: case.name in ("eva", "lara")), ids=lambda case: case.name
)
def test_compiled_gradients_are_those_of_eager_mode(case):
    torch.compiler.reset()
    attn, x = case.build(), case.tokens()
    compiled = torch.compile(attn, fullgraph=True, dynamic=False, backend="aot_eager")
    results, expected = (value_and_gradients(layer, x, case.grid) for layer in (compiled, attn))
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


def test_compiled_layers_do_not_depend_on_the_cache_of_regular_expressions():
    """Torch 2.11 guards a graph by the cache if its code uses one, and fails once a full cache has lost an entry."""
    torch.compiler.reset()
    for number in range(300):
        re.match(f"a{number}", "")
    attn, x = create_attention("identity", dim=12, num_heads=3, grid=(4, 4)), torch.randn(2, 16, 12)
    compiled = torch.compile(attn, backend="eager")
    expected = compiled(x, (4, 4))
    re.purge()
    assert torch.equal(compiled(x, (4, 4)), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.mixes_values], ids=str)
def test_constant_values_stay_constant(case):
    op, args, options = capture_op(case, case.build(), case.tokens())
    place = min(2, len(args) - 1)  # after q and k, if there are any
    constant = torch.randn_like(args[place][:, :, :1]).expand_as(args[place])
    y = op(*args[:place], constant, *args[place + 1 :], **options)
    torch.testing.assert_close(y, constant[:, :, :1].expand_as(y), rtol=FP64, atol=FP64)


@pytest.mark.parametrize("name", ATTENTION)
def test_stock_projections(name):
    """Projections have timm's names, so that published softmax weights load into every layer with all three. No other
    weight starts large."""
    attn = create_attention(name, dim=192, num_heads=3, grid=(14, 14))
    state, rows = attn.state_dict(), 192 * attn.num_projections
    shapes = {"qkv.weight": (rows, 192), "qkv.bias": (rows,), "proj.weight": (192, 192), "proj.bias": (192,)}
    assert {key: tuple(state[key].shape) for key in shapes} == shapes
    assert max(parameter.abs().max() for parameter in attn.parameters()) <= 1
    assert "qkv.bias" not in create_attention(name, dim=192, num_heads=3, grid=(14, 14), qkv_bias=False).state_dict()


@pytest.mark.parametrize("name", ATTENTION)
def test_defaults_suit_the_grids_of_deit_and_pvt(name):
    for side in (14, 28, 56):
        attn = create_attention(name, dim=8, num_heads=2, grid=(side, side))
        assert attn(torch.randn(1, side * side, 8), (side, side)).shape == (1, side * side, 8)


@pytest.mark.parametrize("path", chosen(["auto", "plain"], "auto".__eq__))
@every_case
def test_an_empty_batch_goes_through(case, path):
    attn, x = case.build(), case.tokens(batch=0).requires_grad_()
    for training in (True, False):
        with kernels.use(path):
            y = attn.train(training)(x, case.grid)
            y.sum().backward()
        assert y.shape == x.grad.shape == x.shape
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in attn.parameters())


def assert_refused(attn: Attention, x: Tensor, grid: Grid, expected: int):
    """Asserts that `attn` refuses x with an error that names its number of tokens and the number `expected`."""
    with pytest.raises(ValueError, match=r"tokens") as error:
        attn(x, grid)
    assert {x.shape[1], expected} <= set(map(int, re.findall(r"\d+", str(error.value))))


@every_case
def test_tokens_that_do_not_fit_the_grid_are_refused(case):
    """One more row; one more token; and the tokens of the grid without the prefix tokens that the layer expects."""
    attn, x, grid = case.build(), case.tokens(), case.grid
    larger = (grid[0] + 1, *grid[1:])
    assert_refused(attn, x, larger, case.num_tokens(larger))
    assert_refused(attn, torch.cat([x[:, :1], x], 1), grid, x.shape[1])
    if case.options.get("num_prefix_tokens"):
        assert_refused(attn, x[:, -math.prod(grid) :], grid, x.shape[1])
