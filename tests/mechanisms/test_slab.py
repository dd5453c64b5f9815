"""SLAB's linear attention."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.focused_linear import focused_linear
from attention.mechanisms.relu_linear import relu_linear
from tests.mechanisms.test_focused_linear import VISION as FOCUSED
from tests.support.cases import HEAD_DIM, HEADS, PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, layer, tokens

# Rectified features; the function is that of relu_linear.
case = partial(Case, "slab", (5, 7), op="relu_linear", mixes_values=False, well_conditioned=False)

CASES = [case(), case({"local": False}), case(PREFIX)]
EFFECTS = {"local": ({}, False)}
SYMMETRIES = [(set(), {}), (set(), {"local": False})]
LEARNED = {"key_positions", "local_term"}
UNSIZED = True


def ours(w):
    """Uses focused_linear's names without the scale, which slab does not have."""
    ((_, rename),) = FOCUSED.values()
    state = rename({**w, "scale": torch.zeros(1)})
    return {key: x for key, x in state.items() if key != "feature_scale"}


VISION = {"slab_8x8": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


@pytest.mark.parametrize("local", [False, True])
def test_it_is_relu_linear_with_positions_of_keys_and_a_local_term(local):
    attn, x = layer("slab", GRID, local=local), draw(B, N, h * d)
    q, k, v = attn.project(x, GRID)
    k = k + attn.key_positions.table.unflatten(0, (h, d)).mT
    y = relu_linear(q, k, v, eps=1e-6)
    if local:
        filters, biases = (weight.repeat(h, *[1] * (weight.dim() - 1)) for weight in attn.local_term.parameters())
        term = F.conv2d(v.mT.flatten(1, 2).unflatten(2, GRID), filters, biases, padding=2, groups=h * d)
        y = y + term.flatten(2).unflatten(1, (h, d)).mT
    assert_equal(attn(x, GRID), attn.proj(y.transpose(1, 2).flatten(2)))


def test_focused_linear_of_power_one_is_relu_linear():
    """They differ only by focused_linear's floor of 1e-6 under its channels."""
    one = torch.full((h, d), math.log(math.e - 1), dtype=torch.float64)
    focused = focused_linear(Q, K, V, one, power=1.0)
    torch.testing.assert_close(focused, relu_linear(Q, K, V, eps=1e-6), rtol=2e-5, atol=2e-5)


def test_where_no_query_has_weights_the_local_term_is_left():
    attn = case().build().eval()
    v = draw(B, HEADS, 35, HEAD_DIM)
    y = attn.attend_all((-v.abs(), v, v), (5, 7))
    assert_equal(y, attn.local_term.convolve(v, (5, 7)))
    assert y.abs().max() > 0.1
