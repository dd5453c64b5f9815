"""Limits, identities and symmetries of Combiner, Transformer-LS, SMYRF and Scatterbrain (float64, 1e-10)."""

import math

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.combiner import combiner
from attention.softmax import softmax
from monte_carlo import draw

B, h, d = 2, 2, 8
CPU = torch.device("cpu")
every_grid = pytest.mark.parametrize("grid", [(4, 4), (6, 4), (8, 8)], ids=str)


def tokens(grid) -> list[Tensor]:
    return [draw(B, h, grid[0] * grid[1], d, seed=seed) for seed in range(3)]


def layer(name: str, grid, **options):
    torch.manual_seed(0)
    attn = create_attention(name, dim=h * d, num_heads=h, grid=grid, **options).double().eval()
    with torch.no_grad():
        for linear in (attn.qkv, attn.proj):
            linear.weight.normal_(std=0.3)
    return attn


def assert_equal(y: Tensor, expected: Tensor):
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def transposed(x: Tensor, grid) -> Tensor:
    """Tokens (B, N, C) of an (H, W) grid in the raster order of its transpose."""
    return x.unflatten(1, grid).transpose(1, 2).flatten(1, 2)


# Combiner (spec 4.3)


@every_grid
def test_combiner_with_one_span_is_softmax(grid):
    q, k, v = tokens(grid)
    q_bar, k_bar = draw(B, h, 1, d, seed=3), draw(B, h, 1, d, seed=4)
    assert_equal(combiner(q, k, v, q_bar, k_bar, grid=grid, window=grid), softmax(q, k, v))


@every_grid
def test_combiner_with_spans_of_one_token_is_softmax(grid):
    """The own span's summary would count its token twice, were it not excluded."""
    q, k, v = tokens(grid)
    assert_equal(combiner(q, k, v, q, k, grid=grid, window=(1, 1)), softmax(q, k, v))
    attn = layer("combiner", grid, window_size=1, summary="identity", position_bias="none")
    x = draw(B, grid[0] * grid[1], h * d)
    assert_equal(attn(x, grid), layer("softmax", grid)(x, grid))


@every_grid
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_with_equal_tokens_in_a_span_counts_a_span_once(grid, pool):
    """Equal tokens: a summary is the token, and each other span weighs as one."""
    rows, columns = grid[0] // 2, grid[1] // 2
    q, k, v = (
        draw(B, h, rows, columns, d, seed=seed).repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(2, 3)
        for seed in range(3)
    )
    attn = layer("combiner", grid, window_size=2, summary="identity", pool=pool, position_bias="none")
    span = (torch.arange(grid[0])[:, None] // 2 * columns + torch.arange(grid[1]) // 2).flatten()
    own = span[:, None] == span
    logits = q @ k.mT * d**-0.5 - (~own).double() * math.log(4)
    assert_equal(attn.attend(q, k, v, grid), logits.softmax(-1) @ v)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_pools_the_tokens_of_the_grid_alone(pool):
    """Spans that reach beyond the grid: the same as those of the tokens they hold."""
    attn, x = layer("combiner", (5, 7), window_size=3, pool=pool), -draw(B, h, 35, d).abs()
    image = x.unflatten(2, (5, 7))
    spans = [image[:, :, i : i + 3, j : j + 3].flatten(2, 3) for i in (0, 3) for j in (0, 3, 6)]
    expected = torch.stack([span.amax(2) if pool == "max" else span.mean(2) for span in spans], 2)
    assert_equal(attn.pool(x, (5, 7)), expected)


# Symmetries (spec 10)


@every_grid
@pytest.mark.parametrize(("name", "options"), [("combiner", {"window_size": 2}), ("combiner", {"window_size": 3})])
def test_transposing_the_grid_commutes(name, options, grid):
    x, options = draw(B, grid[0] * grid[1], h * d), {**options, "position_bias": "none"}
    y = layer(name, grid, **options)(transposed(x, grid), grid[::-1])
    assert_equal(y, transposed(layer(name, grid, **options)(x, grid), grid))


@pytest.mark.parametrize(("name", "options"), [("combiner", {})])
def test_permutations_within_and_of_windows_commute(name, options):
    grid, x = (6, 4), draw(B, 24, h * d)
    within, between = torch.arange(24), torch.arange(24).view(3, 2, 2, 2)
    within[[0, 1, 4, 5]] = torch.tensor([5, 0, 1, 4])
    between = between[[1, 0, 2]][:, :, [1, 0]].flatten()
    attn = layer(name, grid, window_size=2, position_bias="none", **options)
    for order in (within, between):
        assert_equal(attn(x[:, order], grid), attn(x, grid)[:, order])
    across = torch.arange(24)
    across[[0, 23]] = torch.tensor([23, 0])
    assert (attn(x[:, across], grid) - attn(x, grid)[:, across]).abs().max() > 1e-3
