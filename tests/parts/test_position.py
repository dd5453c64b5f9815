"""Position biases of windows."""

import pytest
import torch

from attention import create_attention
from attention.mechanisms.local import local, local_reference
from attention.parts.geometry import Windows
from attention.parts.position import PositionBias, t5_bucket
from attention.window_options import windows_on
from tests.support.comparisons import assert_equal
from tests.support.inputs import d, draw, h, tokens


@pytest.mark.parametrize("kind", ["table", "t5", "table_released", "t5_released"])
@pytest.mark.parametrize("layout", ["1d", "2d"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_every_bias_row_in_use_receives_a_gradient(kind, layout, overlap):
    attn = create_attention(
        "local", dim=8, num_heads=2, grid=(9, 9), window_size=3, overlap=overlap, layout=layout, position_bias=kind
    )
    y = attn(draw(2, 81, 8).float(), (9, 9))
    (y * torch.randn_like(y)).sum().backward()
    bias = attn.position_bias
    for table_gradient, index in zip(bias.table.grad, bias.index(), strict=True):
        used = torch.zeros(len(table_gradient), dtype=torch.bool)
        used[index.unique()] = True
        assert torch.equal((table_gradient != 0).all(-1), used)
        assert used.all() or kind != "table"  # the alias-free table has no dead rows


@pytest.mark.parametrize(
    ("kind", "window", "overlap", "rows"),
    [
        ("table", (7, 7), (0, 0), 169),
        ("table", (7, 7), (3, 3), 19**2),
        ("table", (1, 16), (0, 8), 2 * 16 + 2 * 8 - 1),
        ("table_released", (7, 7), (0, 0), 97),
        ("table_released", (7, 7), (3, 3), 253),
        ("table_released", (1, 16), (0, 8), 16 * 32),
        ("t5", (7, 7), (0, 0), 16),
        ("t5_released", (7, 7), (0, 0), 16),
    ],
)
def test_bias_table_sizes(kind, window, overlap, rows):
    assert PositionBias(kind, 3, 64, Windows((28, 28), window, overlap)).table.shape[1:] == (rows, 3)


def test_table_bias_is_a_function_of_the_offset_alone_and_tells_all_offsets_apart():
    index = PositionBias("table", 1, 8, Windows((6, 6), (3, 3), (1, 1))).index()[0]
    offsets = {}
    for query in range(9):
        for key in range(25):
            offset = (query // 3 - (key // 5 - 1), query % 3 - (key % 5 - 1))
            offsets.setdefault(offset, set()).add(index[query, key].item())
    assert all(len(rows) == 1 for rows in offsets.values())
    assert len(set.union(*offsets.values())) == len(offsets) == 49


def test_released_table_confuses_offsets():
    """w = 7, e = 0: 169 offsets share 97 rows, e.g. (0, +1) and (+1, -6)."""
    index = PositionBias("table_released", 1, 8, Windows((7, 7), (7, 7))).index()[0]
    assert len(index.unique()) == 97
    assert index[1, 0] == index[7, 6]


@pytest.mark.parametrize("kind", ["table", "t5", "table_released", "t5_released"])
@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_windows_of_one_token_with_an_overlap(kind, layout):
    """Such a window has one axis in 1-D alone: its keys form a row of 3 tokens, or a square of 3 x 3."""
    options = {"window_size": 1, "overlap": 1, "layout": layout, "position_bias": kind}
    attn = create_attention("local", dim=8, num_heads=2, grid=(4, 5), **options).double()
    bias, (q, k, v) = attn.position_bias, tokens((4, 5))
    keys = 3 if layout == "1d" else 9
    assert bias.index().shape == (1 + (kind == "t5" and layout == "2d"), 1, keys)
    if kind != "t5_released":  # it confuses axes, and so rows
        assert len(bias.index()[:, 0].unique(dim=1).T) == keys
    windows = windows_on(attn.config, (4, 5))
    assert_equal(local(q, k, v, bias(), windows=windows), local_reference(q, k, v, bias(), windows=windows))


def test_t5_buckets():
    """16 buckets, distance 7: 0..3 exact, then 4 + floor(4 ln(a/4) / ln(7/4)), at most 7; a later key adds 8."""
    offset = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 40, -1, -4, -5, -40])
    assert t5_bucket(offset, 16, 7).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 12, 13, 15]


def test_table_bias_at_zero_leaves_local_unchanged_and_t5_is_a_sum_over_axes():
    (q, k, v), windows = tokens((6, 6)), Windows((6, 6), (3, 3))
    bias = PositionBias("t5", h, d, windows).double()
    y, x = torch.cartesian_prod(torch.arange(3), torch.arange(3)).mT
    by, bx = (bias.table[axis][t5_bucket(c[:, None] - c, 16, 3)] for axis, c in enumerate((y, x)))
    assert_equal(bias(), (by + bx).permute(2, 0, 1))
    zero = torch.zeros(h, 9, 9, dtype=torch.float64)
    assert_equal(local(q, k, v, zero, windows=windows), local(q, k, v, windows=windows))
