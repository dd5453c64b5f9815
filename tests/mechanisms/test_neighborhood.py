"""Neighborhood attention."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import Grid
from attention.mechanisms.local import local
from attention.mechanisms.neighborhood import neighborhood
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, under_mask
from tests.support.growth import Growth
from tests.support.inputs import draw, h, identity, one_head, tokens

case = partial(Case, "neighborhood")
SMALL, FREE = {"kernel_size": 3}, {"position_bias": "none"}

CASES = [
    case((5, 7), SMALL),
    case((5, 7), {"kernel_size": (1, 5)}),
    case((6, 9), {"kernel_size": 3, "dilation": (1, 3)}),
    case((7, 8), {"kernel_size": (3, 1), "dilation": 2, **FREE}),
    case((5, 7), {**SMALL, **PREFIX}),
]
EFFECTS = effects(SMALL, kernel_size=(3, 5), dilation=(1, 2), position_bias="none", attn_drop=0.5, local=True)
SYMMETRIES = [({"transposed"}, {**SMALL, **FREE}), (set(), SMALL)]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"kernel_size": 3, "dilation": 7})]
REFUSED = [
    ({"kernel_size": 4}, r"attention\(neighborhood\).kernel_size = 4: .* odd; nearest valid: 3"),
    ({"kernel_size": 15}, r"attention\(neighborhood\).kernel_size = 15: beyond the 14x14 grid; at most \(13, 13\)"),
    ({"kernel_size": 5, "dilation": (1, 3)}, r"dilation = \(1, 3\): times the kernel size 5, .*; at most \(1, 2\)"),
]
EVERYTHING = [{"kernel_size": 7, "grid": (7, 9), **FREE}]  # built for more tokens
SYMBOLS = {"e": 100}
LEARNED = {"position_bias"}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of NATTEN's module under our names; its bias is by key minus query, (h, 2 k - 1, 2 k - 1)."""
    ours = {key: weights[key] for key in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")}
    return ours | {"position_bias.table": weights["rpb"].flip(1, 2).flatten(1).mT[None]}


VISION = {f"neighborhood_{grid}_k{k}": ({"kernel_size": k}, renamed) for grid, k in (("8x8", 3), ("7x10", 5))}


def run(q, k, v, table=None, *, grid: Grid, size: Grid, dilation: Grid = (1, 1)) -> Tensor:
    return neighborhood(q, k, v, table, grid=grid, size=size, dilation=dilation)


def attended(grid: Grid, size: Grid, dilation: Grid = (1, 1)) -> Tensor:
    """Mask of the keys with a weight, (N, N) bool."""
    q, k, _ = tokens(grid)
    return run(q, k, identity(grid[0] * grid[1]), grid=grid, size=size, dilation=dilation)[0, 0] > 0


def test_by_hand():
    """Three neighbours of five tokens in a row: tokens at the ends share the neighbours of the token beside them."""
    q, k = one_head(1, 1, 0, 1, 2), one_head(0, math.log(2), math.log(3), 0, 0)
    v = one_head(6, 12, 18, 30, 60)
    # weights 1 2 3 of the first three; 1 1 1; 3 1 1 and 9 1 1 of the last three
    expected = one_head(84 / 6, 84 / 6, 60 / 3, 144 / 5, 252 / 11)
    assert_equal(run(q, k, v, grid=(1, 5), size=(1, 3)), expected)
    # every other token: 6, 18, 60 with 1 3 1 for the first and 1 9 1 for the last; 12, 30 are all there are
    pairs = one_head(120 / 5, (24 + 30) / 3, 84 / 3, (24 + 30) / 3, 228 / 11)
    assert_equal(run(q, k, v, grid=(1, 5), size=(1, 3), dilation=(1, 2)), pairs)
    # rows of the table are query minus key, from -2 to 2: log 4 for the token after the query
    table = torch.tensor([0, math.log(4), 0, 0, 0], dtype=torch.float64).view(1, 5, 1)
    y = run(0 * q, k, v, table, grid=(1, 5), size=(1, 3))
    assert_equal(y, one_head((6 + 48 + 18) / 6, (6 + 12 + 72) / 6, (12 + 18 + 120) / 6, (18 + 30 + 240) / 6, 108 / 3))


def test_neighbours_over_the_whole_grid_are_softmax_with_its_bias():
    (H, W), (q, k, v), table = (3, 7), tokens((3, 7)), draw(5, 13, h)
    row, column = torch.cartesian_prod(torch.arange(H), torch.arange(W)).unbind(-1)
    bias = table[row[:, None] - row + H - 1, column[:, None] - column + W - 1].permute(2, 0, 1)
    y = run(q, k, v, table.flatten(0, 1)[None], grid=(H, W), size=(H, W))
    assert_equal(y, (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v)


@pytest.mark.parametrize(("size", "dilation"), [((3, 5), (1, 1)), ((3, 3), (2, 1)), ((5, 3), (1, 3))])
def test_every_query_has_as_many_keys(size, dilation):
    grid = (7, 9)
    assert (attended(grid, size, dilation).sum(-1) == size[0] * size[1]).all()


def test_queries_within_are_centred_and_those_of_corners_have_the_corner():
    """Padding with zeros would leave a corner four keys of nine."""
    keys = attended((6, 8), (3, 5)).view(6, 8, 6, 8)
    centre, corner = torch.zeros(2, 6, 8, dtype=torch.bool)
    centre[1:4, 1:6] = corner[3:, 3:] = True
    assert torch.equal(keys[2, 3], centre)
    assert torch.equal(keys[5, 7], corner)
    assert torch.equal(keys[4, 6], corner)


def test_dilated_attention_is_that_of_interleaved_grids():
    grid, size, dilation = (7, 10), (3, 3), (2, 3)
    images = [x.unflatten(2, grid) for x in tokens(grid)]
    y = run(*tokens(grid), grid=grid, size=size, dilation=dilation).unflatten(2, grid)
    for a, b in ((a, b) for a in range(2) for b in range(3)):
        parts = [x[:, :, a::2, b::3] for x in images]
        part = tuple(parts[0].shape[2:4])
        alone = run(*(x.flatten(2, 3) for x in parts), grid=part, size=size)
        assert_equal(y[:, :, a::2, b::3], alone.unflatten(2, part))


@pytest.mark.parametrize(
    ("size", "dilation"), [((3, 5), (1, 1)), ((3, 5), (2, 1)), ((1, 1), (1, 1)), ((5, 7), (1, 1)), ((7, 9), (1, 1))]
)
def test_it_is_softmax_under_the_mask_of_clamped_distances(size, dilation):
    """The mask by which FlexAttention computes it: within k // 2 of the query moved off the border."""
    grid = H, W = (7, 9)
    rows, columns = size
    q, k, v = tokens(grid)

    def near(i: int, j: int, length: int, side: int, step: int) -> bool:
        members = -(-(length - i % step) // step)
        centre = min(max(i // step, side // 2), members - 1 - side // 2)
        return i % step == j % step and abs(centre - j // step) <= side // 2

    places = [divmod(n, W) for n in range(H * W)]
    mask = [
        [near(a, c, H, rows, dilation[0]) and near(b, d, W, columns, dilation[1]) for c, d in places] for a, b in places
    ]
    assert_equal(run(q, k, v, grid=grid, size=size, dilation=dilation), under_mask(q, k, v, torch.tensor(mask)))


def test_mirrored_images_have_mirrored_outputs_with_a_mirrored_bias():
    grid = (5, 8)
    q, k, v = tokens(grid)
    table = draw(1, 5, 5, h)
    mirrored = [x.unflatten(2, grid).flip(3).flatten(2, 3) for x in (q, k, v)]
    y = run(q, k, v, table.flatten(1, 2), grid=grid, size=(3, 3)).unflatten(2, grid)
    assert_equal(run(*mirrored, table.flip(2).flatten(1, 2), grid=grid, size=(3, 3)).unflatten(2, grid), y.flip(3))


def test_one_column_of_windows_is_local_attention_of_a_row():
    """k covers the whole row, and each row attends to itself alone."""
    q, k, v = tokens((4, 5))
    y = local(q, k, v, windows=Windows((4, 5), (1, 5)))
    assert_equal(run(q, k, v, grid=(4, 5), size=(1, 5)), y)
