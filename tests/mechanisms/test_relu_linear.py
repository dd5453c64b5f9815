"""ReLU linear attention."""

from functools import partial

import torch

from attention.mechanisms.relu_linear import relu_linear
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, h, identity, layer, one_head, tokens
from tests.support.symmetry import ALL

# With rectified features, all weights of a query may be zero, which gives 0; rounding may make one positive.
case = partial(Case, "relu_linear", (5, 7), mixes_values=False, well_conditioned=False)

SCALES = {"scales": (3, 5)}
CASES = [case(), case({"local": True}), case(PREFIX), case({**SCALES, "local": True})]
EFFECTS = {"scales": ({}, (3,)), "local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True}), (set(), {"scales": (3,)})]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: SCALES)]
UNSIZED = True
REFUSED = [
    ({"scales": [3, 4]}, r"attention\(relu_linear\).scales = 4: .* odd; nearest valid: 3"),
    ({"scales": [0]}, r"attention\(relu_linear\).scales = 0 is below"),
]


def ours(w):
    """The module stores queries, keys and values head by head; its batch norm in evaluation is linear."""
    slope = w["proj.norm.weight"] / (w["proj.norm.running_var"] + 1e-5).sqrt()
    first, others = (w["proj.conv.weight"][..., 0, 0] * slope[:, None]).chunk(2, 1)
    released = {
        "qkv.weight": w["qkv.conv.weight"][..., 0, 0],
        "scales.0.depthwise.weight": w["aggreg.0.0.weight"],
        "scales.0.pointwise.weight": w["aggreg.0.1.weight"][..., 0],
    }
    state = {key: x.unflatten(0, (2, 3, 8)).transpose(0, 1).flatten(0, 2) for key, x in released.items()}
    bias = w["proj.norm.bias"] - slope * w["proj.norm.running_mean"]
    projections = {"proj.weight": first, "proj_scales.weight": others, "proj.bias": bias}
    return state | projections | {"qkv.bias": torch.zeros(48, dtype=torch.float64)}


VISION = {"relu_linear_6x9_ms5": ({"scales": [5]}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """Query 1 weighs keys 1 and 3 by 1/4 and 3/4; the key -2 and the query -1 have no weight."""
    y = relu_linear(one_head(1, 7, -1), one_head(1, -2, 3), one_head(8, 100, 16))
    assert_equal(y, one_head(14, 14, 0))


def test_weights_are_not_negative_and_sum_to_one_or_vanish():
    weights = relu_linear(Q, K, identity(N))
    assert_weights_sum_to_one_or_vanish(weights)
    assert (torch.linalg.matrix_rank(weights) <= Q.shape[-1]).all()


def test_length_of_a_query_and_of_all_keys_together_has_no_effect():
    lengths, of_keys = draw(B, h, N, 1, seed=7).exp(), draw(B, h, 1, 1, seed=8).exp()
    assert_equal(relu_linear(lengths * Q, of_keys * K, V), relu_linear(Q, K, V))


def test_a_query_without_positive_channels_gives_zero_and_finite_gradients():
    for dtype in (torch.float64, torch.float32, torch.float16):
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in (-Q.abs(), K, V))
        y = relu_linear(q, k, v)
        assert not y.any()
        y.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_scale_of_one_token_that_is_a_copy_gives_the_same_heads_again():
    attn, x = layer("relu_linear", GRID, scales=(1,)), draw(B, N, h * d)
    scale = attn.scales[0]
    with torch.no_grad():
        scale.depthwise.weight.fill_(1)
        scale.pointwise.weight.copy_(torch.eye(d, dtype=torch.float64).repeat(3 * h, 1)[..., None])
        attn.proj_scales.weight.copy_(-attn.proj.weight)
    assert_equal(attn(x, GRID), attn.proj.bias.expand_as(x))


def test_prefix_tokens_have_no_heads_of_other_scales():
    attn, x = layer("relu_linear", GRID, scales=(3,), num_prefix_tokens=2), draw(B, 2 + N, h * d)
    y = attn(x, GRID)
    with torch.no_grad():
        attn.proj_scales.weight.zero_()
    same = attn(x, GRID)
    assert_equal(y[:, :2], same[:, :2])
    assert (y[:, 2:] - same[:, 2:]).abs().amax(-1).min() > 1e-6
