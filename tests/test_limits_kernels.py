"""Limits and identities of linear attention, its relatives and cross-covariance attention (float64, 1e-10).

Attention matrices are made by giving the identity for values.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from attention import OptionError
from attention.mechanisms.cosformer import cosformer, reweight
from attention.mechanisms.dpfp import dpfp, projection
from attention.mechanisms.linear import linear, linear_reference
from attention.mechanisms.performer import performer
from attention.mechanisms.rfa import rfa
from attention.mechanisms.softmax import softmax
from attention.mechanisms.t2r import t2r
from attention.mechanisms.transnormer import rela, transnormer
from attention.mechanisms.xca import xca
from attention.parts.features import elu_plus_one
from tests.support.identities import B, assert_equal, assert_mean, d, draw, h, layer, tokens

GRID = (6, 4)
N = GRID[0] * GRID[1]
Q, K, V = tokens(GRID)
IDENTITY = torch.eye(N, dtype=torch.float64).expand(B, h, N, N)
WEIGHT, BIAS, OMEGA = draw(h, 8, d, seed=4), draw(h, 8, seed=5), draw(h, 40, d, seed=6)
SIGMA = torch.tensor([0.8, 1.3], dtype=torch.float64)

OPS = {
    "linear": linear,
    "cosformer 1d": lambda q, k, v: cosformer(q, k, v, grid=(1, N)),
    "cosformer 2d": lambda q, k, v: cosformer(q, k, v, grid=GRID),
    "t2r": lambda q, k, v: t2r(q, k, v, WEIGHT, BIAS),
    "dpfp": lambda q, k, v: dpfp(q, k, v, nu=2),
    "rfa": lambda q, k, v: rfa(q, k, v, OMEGA, SIGMA),
    "xca": lambda q, k, v: xca(q, k, v, SIGMA),
}


# What several share


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("xca", "rfa")])
def test_weights_are_not_negative_and_sum_to_one_or_vanish(name):
    weights = OPS[name](Q, K, IDENTITY)
    total = weights.sum(-1)
    assert (weights >= -1e-15).all()
    assert_equal(total, (total > 0.5).double())
    assert total.mean() > 0.9


@pytest.mark.parametrize("name", ["cosformer 1d", "cosformer 2d", "dpfp", "rfa", "xca"])
def test_length_of_queries_and_keys_is_ignored(name):
    assert_equal(OPS[name](3 * Q, 0.7 * K, V), OPS[name](Q, K, V))


# Linear attention


def test_linear_attention_of_one_negative_channel_is_softmax_of_the_keys():
    """elu + 1 is exp below zero, and q falls out of exp(q) exp(k)."""
    q, k = -Q[..., :1].abs(), -K[..., :1].abs()
    assert_equal(linear(q, k, V), (k.mT.softmax(-1) @ V).expand_as(V))


def test_features_of_linear_attention_do_not_cancel_in_bfloat16():
    x = torch.tensor([-20.0, -3.0, 0.0, 2.0], dtype=torch.bfloat16)
    torch.testing.assert_close(elu_plus_one(x).double(), F.elu(x.double()) + 1, rtol=2**-8, atol=0)
    assert F.elu(x)[0] + 1 == 0


def test_sums_of_linear_attention_leave_the_range_of_half_precision():
    q, k, v = (30 * draw(1, 1, 4000, 4, seed=seed).half().abs() for seed in range(3))
    assert elu_plus_one(k.double()).sum(-2).max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(linear(q, k, v), linear(q.float(), k.float(), v.float()))


def test_linear_attention_of_a_query_whose_weights_vanish_is_zero():
    for function in (linear, linear_reference):
        assert_equal(function(Q - 60, K, V), torch.zeros_like(V))


def test_linear_attention_has_no_options():
    with pytest.raises(OptionError, match=r"attention\(linear\).eps: unknown option; known: none"):
        layer("linear", GRID, eps=1e-6)


# cosFormer


@pytest.mark.parametrize("grid", [(1, N), GRID], ids=str)
def test_cosformer_is_the_explicitly_reweighted_kernel(grid):
    """Offsets within one axis never reach its length, so that no cosine is negative."""
    kernel = torch.zeros(N, N, dtype=torch.float64)
    for n, m in torch.cartesian_prod(torch.arange(N), torch.arange(N)).tolist():
        offsets = ((n // grid[1] - m // grid[1]) / grid[0], (n % grid[1] - m % grid[1]) / grid[1])
        kernel[n, m] = math.prod(math.cos(math.pi / 2 * offset) for offset in offsets)
    assert (kernel > 0).all()
    kernel = Q.relu() @ K.relu().mT * kernel
    assert_equal(cosformer(Q, K, IDENTITY, grid=grid), kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-6))


def test_cosformer_does_not_know_where_counting_starts():
    q, k = draw(12, d), draw(12, d, seed=1)
    shifted = [torch.cat([x[9:], x[:9]]) for x in (q, k)]  # token n at place n + 3
    a, b = (reweight(q, (1, 12)) @ reweight(k, (1, 12)).mT for q, k in ((q, k), shifted))
    assert_equal(b[3:, 3:], a[:9, :9])


def test_cosformer_on_a_grid_of_one_row_is_that_of_the_raster():
    attn = layer("cosformer", GRID, layout="2d")
    raster = layer("cosformer", GRID)
    raster.load_state_dict(attn.state_dict())
    x = draw(B, N, h * d)
    assert_equal(attn(x, (1, N)), raster(x, (1, N)))
    assert (attn(x, GRID) - raster(x, GRID)).abs().max() > 1e-3


def test_cosformer_commutes_with_mirroring_the_grid():
    attn, x = layer("cosformer", GRID, layout="2d"), draw(B, N, h * d)
    for axis in (1, 2):
        mirrored = x.unflatten(1, GRID).flip(axis).flatten(1, 2)
        assert_equal(attn(mirrored, GRID).unflatten(1, GRID).flip(axis).flatten(1, 2), attn(x, GRID))


def test_a_query_without_positive_coordinates_gives_zero():
    q = torch.cat([-Q[:, :, :1].abs(), Q[:, :, 1:].abs()], 2)
    y = cosformer(q, K, V, grid=GRID)
    assert (y[:, :, 0] == 0).all()
    assert (y[:, :, 1:].abs().sum(-1) > 0).all()


# TransNormer


@pytest.mark.parametrize("norm", ["merged", "heads"])
@pytest.mark.parametrize("variant", ["t1", "t2"])
def test_norm_attention_ignores_the_length_of_values_and_has_unit_mean_square(variant, norm):
    gain = torch.ones(h, d, dtype=torch.float64)
    y, short, long = (transnormer(Q, K, a * V, gain, variant=variant, norm=norm) for a in (1, 0.01, 700))
    assert_equal(short, y)
    assert_equal(long, y)
    mean_square = y.square().mean((1, 3) if norm == "merged" else 3)
    assert_equal(mean_square, torch.ones_like(mean_square))


def test_both_norms_of_a_single_head_are_one():
    gain = draw(1, d, seed=7)
    a, b = (transnormer(Q[:, :1], K[:, :1], V[:, :1], gain, variant="t2", norm=norm) for norm in ("merged", "heads"))
    assert_equal(a, b)


def test_norm_attention_points_where_linear_attention_does():
    """The normaliser of one query is a positive number, which RMSNorm divides out."""
    gain = torch.ones(h, d, dtype=torch.float64)
    y = transnormer(Q, K, V, gain, variant="t2", norm="heads")
    assert_equal(F.normalize(y, dim=-1), F.normalize(linear(Q, K, V), dim=-1))


def test_diag_attention_with_the_grid_as_window_is_softmax():
    attn = layer("transnormer", GRID, layer=0, depth=2, window_size=max(GRID))
    reference = layer("softmax", GRID)
    reference.load_state_dict(attn.state_dict(), strict=True)
    x = draw(B, N, h * d)
    assert_equal(attn(x, GRID), reference(x, GRID))


def test_diag_attention_of_t1_with_the_grid_as_window_is_dense_relu_attention():
    gain = draw(h, d, seed=7)
    dense = (Q @ K.mT / d**0.5).relu() @ V
    expected = dense * dense.square().mean((1, 3), keepdim=True).rsqrt() * gain[:, None]
    assert_equal(rela(Q, K, V, gain, grid=GRID, window=GRID, norm="merged"), expected)


@pytest.mark.parametrize("depth", [1, 2, 3, 12])
def test_diag_attention_stands_in_the_first_half_of_the_layers(depth):
    layers = [layer("transnormer", GRID, layer=i, depth=depth, window_size=3) for i in range(depth)]
    assert [attn.in_windows for attn in layers] == [i + 1 <= depth / 2 for i in range(depth)]
    assert [hasattr(attn, "gain") for attn in layers] == [not attn.in_windows for attn in layers]


def test_window_of_diag_attention_beyond_the_grid_is_refused():
    with pytest.raises(OptionError, match=r"attention\(transnormer\).window_size = 7: larger than the 6x4 grid; at m"):
        layer("transnormer", GRID, depth=2, window_size=7)


# T2R, RFA, DPFP


def test_t2r_without_weights_averages_values():
    assert_equal(t2r(Q, K, V, 0 * WEIGHT, BIAS.abs()), V.mean(2, keepdim=True).expand_as(V))


def test_t2r_with_the_identity_is_cosformer_without_distances():
    eye = torch.eye(d, dtype=torch.float64).expand(h, d, d)
    kernel = Q.relu() @ K.relu().mT
    y = t2r(Q, K, V, eye, torch.zeros(h, d, dtype=torch.float64))
    assert_equal(y, kernel @ V / kernel.sum(-1, keepdim=True).clamp(min=1e-6))


def test_rfa_is_performer_of_unit_queries_and_keys():
    q, k = (F.normalize(x, dim=-1) * d**0.25 / SIGMA[:, None, None] for x in (Q, K))
    assert_equal(rfa(Q, K, V, OMEGA, SIGMA), performer(q, k, V, OMEGA, features="trigonometric"))


def test_rfa_of_a_wide_kernel_averages_values():
    assert_equal(rfa(Q, K, V, OMEGA, 1e7 * SIGMA), V.mean(2, keepdim=True).expand_as(V))


def test_rfa_of_many_samples_is_softmax_of_cosines():
    """100 estimates from 4,000 samples each: their bias, O(1/S), lies far below the standard error of their mean."""
    cosines = F.normalize(Q[0], dim=-1) @ F.normalize(K[0], dim=-1).mT
    expected = (cosines / SIGMA[:, None, None] ** 2).softmax(-1) @ V[0]
    omega = draw(100, h, 4000, d, seed=8)
    assert_mean(torch.stack([rfa(Q[0], K[0], V[0], sample, SIGMA) for sample in omega]), expected)


def test_dpfp_of_opposite_vectors_is_orthogonal_and_the_last_roll_completes_all_pairs():
    phi, opposite = (projection(x, 2 * d - 1) for x in (Q, -Q))
    assert phi.shape[-1] == 2 * d * (2 * d - 1)
    assert ((phi * opposite).sum(-1) == 0).all()
    r = torch.cat([Q, -Q], -1).relu()
    assert_equal(phi.sum(-1), r.sum(-1) ** 2 - r.square().sum(-1))
    with pytest.raises(OptionError, match=r"attention\(dpfp\).nu = 16: .*; at most 15"):
        layer("dpfp", GRID, nu=16)


# XCA


def test_xca_is_softmax_attention_between_channels():
    q, k = (F.normalize(x, dim=2).mT for x in (Q, K))  # (B, h, d, N): channels as tokens
    assert_equal(xca(Q, K, V, SIGMA), softmax(q * SIGMA[:, None, None] * N**0.5, k, V.mT).mT)


def test_xca_ignores_the_length_of_every_channel():
    a, b = draw(d, seed=7).exp(), draw(d, seed=8).exp()
    assert_equal(xca(Q * a, K * b, V, SIGMA), xca(Q, K, V, SIGMA))


def test_xca_averages_channels_when_cold_and_picks_them_when_hot():
    assert_equal(xca(Q, K, V, 0 * SIGMA), V.mean(-1, keepdim=True).expand_as(V))
    orthogonal = torch.linalg.qr(Q).Q
    assert_equal(xca(orthogonal, orthogonal, V, 1e3 * SIGMA), V)
