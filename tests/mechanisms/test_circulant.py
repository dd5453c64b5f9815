"""Circulant attention."""

import math
from functools import partial

import pytest
import torch

from attention.costs import fourier_macs
from attention.mechanisms.circulant import circulant
from tests.support.cases import Case
from tests.support.comparisons import assert_equal, weights_of
from tests.support.growth import Growth
from tests.support.inputs import B, h, one_head, tokens

case = partial(Case, "circulant", (5, 7))

CASES = [case(), case({"by_channel": False, "power": 0.5}), case({"local": True}, mixes_values=False)]
EFFECTS = {"by_channel": ({}, False), "power": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [({"transposed"}, {}), ({"transposed"}, {"by_channel": False}), (set(), {"local": True})]
GROWTH = [Growth(1.1, 1)]
SYMBOLS = {"l": math.log2}
LEARNED = {"gate"}
UNSIZED = True
NO_MATRIX = "weights for each"  # channel


def ours(w):
    state = {"qkv.weight": w["qkv.weight"], "qkv.bias": 0 * w["qkv.weight"][:, 0]}
    return state | {key: w[key] for key in ("gate.0.weight", "gate.0.bias", "proj.weight", "proj.bias")}


VISION = {"circulant_5x5": ({"power": 0.5}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
BY_HEAD = partial(circulant, grid=GRID, by_channel=False, power=1)


def test_by_hand():
    """Means of products 1/3 at an offset of 0, and 2/3 at 1."""
    y = circulant(one_head(1, 0, 2), one_head(1, 1, 0), one_head(0, 3, 6), grid=(1, 3), by_channel=True, power=1)
    zero, one, two = (math.exp(x / 3) for x in (1 * 1 + 2 * 0, 1 * 1 + 2 * 1, 1 * 0 + 2 * 1))
    total = zero + one + two
    values = [(zero * a + one * b + two * c) / total for a, b, c in ((0, 3, 6), (3, 6, 0), (6, 0, 3))]
    assert_equal(y, one_head(*values))


def test_logits_are_the_nearest_of_all_that_depend_on_the_offset_alone():
    """Least squares, with a column for every offset."""
    n = torch.arange(N).view(GRID)
    shifts = [n.roll((-i, -j), (0, 1)).flatten() for i in range(GRID[0]) for j in range(GRID[1])]
    columns = torch.stack([torch.eye(N, dtype=torch.float64)[shift].flatten() for shift in shifts], 1)
    logits = (Q @ K.mT * Q.shape[-1] ** -0.5).flatten(2)
    nearest = torch.linalg.lstsq(columns.expand(B, h, -1, -1), logits[..., None]).solution
    expected = (columns @ nearest).view(B, h, N, N).softmax(-1)
    assert_equal(weights_of(BY_HEAD, Q, K), expected)


def test_it_commutes_with_shifts_of_the_torus():
    moved = BY_HEAD(*(x.unflatten(2, GRID).roll((2, 3), (2, 3)).flatten(2, 3) for x in (Q, K, V)))
    assert_equal(moved, BY_HEAD(Q, K, V).unflatten(2, GRID).roll((2, 3), (2, 3)).flatten(2, 3))


def test_a_channel_is_a_head_of_one_channel():
    parts = zip(*(x.split(1, -1) for x in (Q, K, V)), strict=True)
    expected = torch.cat([BY_HEAD(*part) for part in parts], -1)
    assert_equal(circulant(Q, K, V, grid=GRID, by_channel=True, power=1), expected)


@pytest.mark.parametrize("grid", [(1, 1), (4, 8)])
def test_a_transform_is_counted_as_one_of_radix_two(grid):
    """N / 2 products of complex numbers (six operations), and N sums, at each of log2 N levels; half for reals."""

    def operations(n):
        return 0 if n == 1 else 2 * operations(n // 2) + n // 2 * 6 + n * 2

    assert fourier_macs(grid, 3) == 3 * operations(math.prod(grid)) / 2 / 2
