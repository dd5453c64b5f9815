"""Limits and identities of the low-rank mechanisms: where theory says "equal", it is (float64, 1e-10)."""

import copy
import itertools

import pytest
import timm
import torch
from torch import Tensor, nn

from attention import create_attention
from attention.mechanisms.abc import abc
from attention.mechanisms.linear_sra import linear_sra
from attention.mechanisms.linformer import linformer
from attention.mechanisms.nystrom import nystrom, pseudo_inverse
from attention.mechanisms.orthoformer import orthoformer, orthogonal_tokens
from attention.mechanisms.softmax import softmax
from attention.mechanisms.sra import sra
from attention.mechanisms.synthesizer import synthesizer
from attention.parts.geometry import resample
from attention.parts.groups import Groups, bins, group_mean
from models import create_model
from models.convert import from_timm_pvt
from tests.support.identities import CPU, B, assert_equal, d, draw, every_grid, h, layer, tokens


def averaging(grid) -> tuple[Groups, Tensor]:
    """2 x 2 bins, and the matrix (1, 1, 4, N) that averages over each."""
    groups = bins(grid, (2, 2), CPU)
    matrix = torch.zeros(4, grid[0] * grid[1], dtype=torch.float64)
    for row, index, valid in zip(matrix, groups.index[0], groups.valid[0], strict=True):
        row[index[valid]] = 1 / valid.sum().double()
    return groups, matrix[None, None]


# Nystromformer


@every_grid
def test_nystrom_with_every_token_a_landmark_is_softmax(grid):
    """Where the inverse has converged: not after the usual 6 iterations."""
    q, k, v = tokens(grid)
    converged, usual = (nystrom(q, k, v, groups=bins(grid, grid, CPU), grid=grid, iterations=n) for n in (25, 6))
    assert_equal(converged, softmax(q, k, v))
    assert (usual - softmax(q, k, v)).abs().max() > 1e-3


@every_grid
def test_iterations_approach_the_inverse_ever_faster(grid):
    q, k, _ = tokens(grid)
    a = (q @ k.mT * d**-0.5).softmax(-1)
    identity = torch.eye(a.shape[-1], dtype=torch.float64).expand_as(a)
    errors = [(a @ pseudo_inverse(a, n) - identity).norm().item() for n in (2, 6, 12, 20)]
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert_equal(a @ pseudo_inverse(a, 25), identity)


def test_every_matrix_is_inverted_by_norms_of_its_own():
    a, b = (draw(3, 5, 5, seed=seed).softmax(-1) for seed in (0, 1))
    together = pseudo_inverse(torch.stack([a, b * 1e3]), 6)
    assert_equal(together[0], pseudo_inverse(a, 6))
    assert_equal(together[1] * 1e3, pseudo_inverse(b, 6))


@every_grid
def test_nystrom_is_a_product_of_three_softmaxes_and_a_convolution(grid):
    q, k, v = tokens(grid)
    groups, _ = averaging(grid)
    q_bar, k_bar = (group_mean(x, groups)[:, :, 0] for x in (q, k))
    a_1, a_2, a_3 = ((x @ y.mT * d**-0.5).softmax(-1) for x, y in ((q, k_bar), (q_bar, k_bar), (q_bar, k)))
    y = nystrom(q, k, v, groups=groups, grid=grid, iterations=20)
    assert_equal(y, a_1 @ torch.linalg.pinv(a_2) @ a_3 @ v)
    centre = torch.zeros(h, 3, 5, dtype=torch.float64)
    centre[:, 1, 2] = 1
    assert_equal(nystrom(q, k, v, centre, groups=groups, grid=grid, iterations=20), y + v)
    shifted = torch.zeros(h, 1, 3, dtype=torch.float64)
    shifted[:, 0, 0] = 1  # the token before, in raster order; zero before the first
    before = torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, :-1]], 2)
    line = (1, grid[0] * grid[1])
    assert_equal(nystrom(q, k, v, shifted, groups=groups, grid=line, iterations=20), y + before)


# Linformer


@every_grid
def test_linformer_limits(grid):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    assert_equal(linformer(q, k, v, torch.eye(N, dtype=torch.float64)[None, None]), softmax(q, k, v))
    groups, matrix = averaging(grid)
    assert_equal(linformer(q, k, v, matrix), softmax(q, *(group_mean(x, groups)[:, :, 0] for x in (k, v))))


def test_linformer_parameters_by_sharing():
    N, p = 24, 5
    count = {"heads": 2 * N * p, "kv": N * p, "none": 2 * h * N * p, "layers": N * p}
    for sharing, expected in count.items():
        assert layer("linformer", (6, 4), num_landmarks=p, sharing=sharing).projection.numel() == expected


def test_layers_share_one_projection():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_classes": 2}
    model = create_model("deit", {"name": "linformer", "num_landmarks": 5, "sharing": "layers"}, **options)
    model = copy.deepcopy(model)  # as a weight average does
    names = [name for name in model.state_dict() if "projection" in name]
    assert names == ["blocks.0.attn.projection"]
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    with torch.no_grad():
        model.blocks[0].attn.projection.zero_()
    attention = [block.attn for block in model.blocks]
    assert all(attn.owner[0] is attention[0] for attn in attention)
    assert not torch.allclose(model(images), before)
    assert attention[2](torch.randn(2, 16, 24), (4, 4)).std(1).max() < 1e-6  # all keys and values are zero
    other = create_model("deit", {"name": "linformer", "num_landmarks": 5, "sharing": "layers"}, **options)
    assert other.blocks[0].attn.projection is not attention[0].projection
    stages = create_model("pvtv2_b0", {"name": "linformer", "sharing": "layers"}, img_size=64).stages
    assert [sum("projection" in name for name in stage.state_dict()) for stage in stages] == [1, 1, 1, 0]


@every_grid
def test_resampling_keeps_averages_and_smooth_images(grid):
    """A mean over all tokens stays one on any grid, and a linear ramp a ramp (inside, where nothing is cut off)."""
    q, k, v = tokens((7, 5))
    attn = layer("linformer", grid, num_landmarks=1, sharing="kv")
    with torch.no_grad():
        attn.projection.fill_(1 / (grid[0] * grid[1]))
    assert_equal(attn.attend(q, k, v, (7, 5)), v.mean(2, keepdim=True).expand_as(v))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    ramp = (2 * y + 3 * x + 1).flatten()[None]
    fine = resample(ramp, grid, (2 * grid[0], 2 * grid[1])).view(2 * grid[0], 2 * grid[1])
    y, x = torch.meshgrid(*(torch.arange(2 * n, dtype=torch.float64) / 2 - 0.25 for n in grid), indexing="ij")
    assert_equal(fine[1:-1, 1:-1], (2 * y + 3 * x + 1)[1:-1, 1:-1])
    assert resample(ramp, grid, grid) is ramp


# ABC


@every_grid
def test_abc_limits(grid):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    each = torch.zeros(N, N, dtype=torch.float64).fill_diagonal_(1e3).expand(B, h, N, N)
    assert_equal(abc(q, k, v, each), softmax(q, k, v))  # every token has a slot of its own
    constant = draw(B, h, 1, 5).expand(B, h, N, 5)  # every slot holds the mean
    assert_equal(abc(q, k, v, constant), v.mean(2, keepdim=True).expand_as(v))


# SRA and linear SRA


@every_grid
def test_sra_without_a_reduction_is_softmax(grid):
    attn, expected, x = layer("sra", grid, reduction=1), layer("softmax", grid), draw(B, grid[0] * grid[1], h * d)
    expected.load_state_dict(attn.state_dict())
    assert_equal(attn(x, grid), expected(x, grid))


@every_grid
def test_sra_by_averaging_is_softmax_over_averages(grid):
    attn, expected, x = layer("sra", grid, reduction=2), layer("softmax", grid), draw(B, grid[0] * grid[1], h * d)
    attn.norm = nn.Identity()
    with torch.no_grad():
        attn.sr.weight.copy_(torch.eye(h * d)[:, :, None, None] / 4)
        attn.sr.bias.zero_()
    expected.qkv.load_state_dict(attn.qkv.state_dict())
    q, *keys_and_values = expected.project(x, grid)
    groups = bins(grid, (grid[0] // 2, grid[1] // 2), CPU)
    averages = (group_mean(y, groups)[:, :, 0] for y in keys_and_values)
    assert_equal(attn.attend(*attn.project(x, grid), grid), softmax(q, *averages))


def test_linear_sra_pools_to_one_size_and_agrees_with_a_convolution_that_averages():
    x, C = draw(B, 14 * 28, 6), 6
    weight, bias = draw(C, C, 1, 1, seed=1), draw(C, seed=2)
    y = linear_sra(x, weight, bias, grid=(14, 28), pool_size=7)
    assert y.shape == (B, 49, C)
    bins_ = bins((14, 28), (7, 7), CPU)
    mean = group_mean(x[:, None], bins_)[:, 0, 0]
    assert_equal(y, mean @ weight[:, :, 0, 0].mT + bias)
    square = draw(B, 14 * 14, C)
    averaged = sra(square, weight.expand(C, C, 2, 2) / 4, bias, grid=(14, 14))
    assert_equal(linear_sra(square, weight, bias, grid=(14, 14), pool_size=7), averaged)


def test_pvt_v2_li_loads_stock_weights_and_gives_their_logits():
    torch.manual_seed(0)
    stock = timm.create_model("pvt_v2_b2_li").eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    model = create_model("pvtv2_b2", attention=["linear_sra"] * 4, mlp_relu=True).eval()
    model.load_state_dict(from_timm_pvt(stock.state_dict()), strict=True)
    images = torch.randn(1, 3, 224, 160)
    with torch.no_grad():
        expected = stock(images)
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1  # so that 1e-5 means something


# Synthesizer


@every_grid
def test_synthesizer_limits(grid):
    (v,) = tokens(grid, 1)
    N = grid[0] * grid[1]
    r = torch.zeros(h, N, 3, dtype=torch.float64)
    assert_equal(synthesizer(r, draw(h, N, 3), v), v.mean(2, keepdim=True).expand_as(v))
    logits = draw(h, N, N, seed=3)
    assert_equal(synthesizer(logits, torch.eye(N).double().expand(h, N, N), v), logits.softmax(-1) @ v)


def test_synthesizer_has_values_alone():
    """2 h N p parameters, less those of queries and keys; weights that no image changes."""
    attn, stock = (create_attention(name, dim=192, num_heads=3, grid=(28, 28)) for name in ("synthesizer", "softmax"))
    fewer = sum(p.numel() for p in attn.parameters()) - sum(p.numel() for p in stock.parameters())
    assert fewer == 2 * 3 * 784 * 8 - 2 * (192**2 + 192)
    attn, (x, y) = layer("synthesizer", (6, 4)), (draw(1, 24, h * d, seed=seed) for seed in (0, 1))
    assert_equal(attn(x + y, (6, 4)) + attn(0 * x, (6, 4)), attn(x, (6, 4)) + attn(y, (6, 4)))


# Orthoformer


@every_grid
def test_landmarks_are_chosen_greedily(grid):
    (q,) = tokens(grid, 1)
    index = orthogonal_tokens(q, 6)
    unit = nn.functional.normalize(q, dim=-1)
    cosine = (unit @ unit.mT).abs()
    for b in range(B):
        for head in range(h):
            chosen = index[b, head].tolist()
            assert len(set(chosen)) == 6
            assert chosen[0] == q[b, head].norm(dim=-1).argmax()
            for i in range(1, 6):
                largest = cosine[b, head][:, chosen[:i]].amax(-1)
                rest = [n for n in range(grid[0] * grid[1]) if n not in chosen[:i]]
                assert largest[chosen[i]] == pytest.approx(largest[rest].min().item(), abs=1e-12)


def test_orthogonal_queries_are_found_among_copies():
    basis = torch.linalg.qr(draw(d, d))[0]
    kind = torch.randint(d, (40,), generator=torch.Generator().manual_seed(1))
    kind[:d] = torch.arange(d)
    q = (basis[kind] * (1 + draw(40, 1).abs())).expand(B, h, 40, d)
    assert all(sorted(kind[index].tolist()) == list(range(d)) for index in orthogonal_tokens(q, d).flatten(0, 1))


@every_grid
def test_orthoformer_with_one_query_for_all_is_softmax(grid):
    q, k, v = tokens(grid)
    same = q[:, :, :1].expand_as(q)
    assert_equal(orthoformer(same, k, v, num_landmarks=4), softmax(same, k, v))
    assert_equal(orthoformer(q, k[:, :, :1].expand_as(k), v, num_landmarks=4), v.mean(2, keepdim=True).expand_as(v))
