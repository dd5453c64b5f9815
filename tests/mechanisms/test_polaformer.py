"""PolaFormer's attention."""

import math
from functools import partial

import pytest
import torch

from attention.mechanisms.polaformer import polaformer
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, identity, one_head, tokens

# All weights of a query for one kind of sign may be zero; rounding may make one positive.
case = partial(Case, "polaformer", (5, 7), mixes_values=False, well_conditioned=False)

CASES = [case(), case({"local": False, "alpha": 1.5}), case(PREFIX)]
EFFECTS = {"local": ({}, False), "alpha": ({}, 2.0)}
SYMMETRIES = [(set(), {}), (set(), {"local": False})]
LEARNED = {"key_positions", "feature_scale", "feature_power", "gate", "local_term"}
UNSIZED = True
NO_MATRIX = "weights for each"  # half of the channels have the weights of opposite signs
REFUSED = [({"alpha": 0.0}, r"attention\(polaformer\).alpha = 0.0 must be greater than 0")]


def ours(w):
    """In the module, one projection makes queries and gates."""
    state = {"key_positions.table": w["positional_encoding"][0].mT}
    for part in ("weight", "bias"):
        q, gate = w[f"qg.{part}"].chunk(2)
        state |= {f"qkv.{part}": torch.cat([q, w[f"kv.{part}"]]), f"gate.{part}": gate}
        state |= {f"proj.{part}": w[f"proj.{part}"], f"local_term.{part}": w[f"dwc.{part}"]}
    return state | {"feature_scale": w["scale"].flatten(), "feature_power": w["power"].flatten()}


VISION = {"polaformer_6x9": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
ONE = torch.full((h, d), math.log(math.e - 1), dtype=torch.float64)  # softplus 1
POWER = draw(h, d, seed=7)


def both_kinds(q, k, power, alpha):
    """The weights (B, h, N, N) of equal and of opposite signs, as outputs for values (e_m, e_m)."""
    ones = identity(q.shape[2])
    y = polaformer(q, k, torch.cat([ones, ones], -1), ONE, power, alpha=alpha)
    return y.chunk(2, -1)


def test_by_hand():
    """Cubes: keys 1 and -2 weigh 8 * 1 for a query 2 in the first channel, and 8 * 8 in the second."""
    q, k, v = one_head((2, 0)), one_head((1, 0), (-2, 0)), one_head((10, 20), (30, 40))
    third = torch.zeros(1, 2, dtype=torch.float64)  # 1 + 4 / 2
    y = polaformer(q, k, v, ONE[:1, :2], third, alpha=4.0)
    torch.testing.assert_close(y, one_head((10, 40)), rtol=1e-6, atol=0)


def test_kernels_of_power_one_sum_to_products_of_magnitudes_and_differ_by_products():
    same = (Q.abs() @ K.abs().mT + Q @ K.mT) / 2
    opposite = (Q.abs() @ K.abs().mT - Q @ K.mT) / 2
    for weights, kernel in zip(both_kinds(Q, K, POWER, 0.0), (same, opposite), strict=True):
        assert_equal(weights, kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * N))


def test_weights_of_both_kinds_are_not_negative_and_sum_to_almost_one():
    for weights in both_kinds(Q, K, POWER, 4.0):
        assert (weights >= 0).all()
        total = weights.sum(-1)
        assert (total <= 1 + 1e-12).all()
        assert total.median() > 1 - 1e-4


def test_the_other_sign_of_a_query_swaps_the_kinds():
    same, opposite = both_kinds(Q, K, POWER, 4.0)
    assert_equal(torch.cat(both_kinds(-Q, K, POWER, 4.0), -1), torch.cat([opposite, same], -1))


@pytest.mark.parametrize("q", [0 * Q, Q.abs()], ids=["no sign", "equal signs"])
def test_a_query_without_weights_of_a_kind_gets_none_of_its_values(q):
    """The gradients are finite, even those of powers of zero."""
    leaves = [x.clone().requires_grad_() for x in (q, K.abs(), V, ONE, POWER)]
    y = polaformer(*leaves, alpha=4.0)
    assert not y[..., d // 2 :].any()
    assert bool(y[..., : d // 2].any()) == bool(q.any())
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_heads_of_an_odd_number_of_channels():
    q, k, v = (draw(B, h, N, 7, seed=seed) for seed in range(3))
    y = polaformer(q, k, v, ONE[:, :7], POWER[:, :7], alpha=4.0)
    other = polaformer(q, k, v.roll(1, -1), ONE[:, :7], POWER[:, :7], alpha=4.0)
    assert_equal(other[..., 1:4], y[..., :3])  # four channels are of equal signs
    assert_equal(other[..., 5:], y[..., 4:6])
