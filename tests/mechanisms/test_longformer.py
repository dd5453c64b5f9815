"""Longformer."""

from functools import partial

import pytest
import torch

from attention import create_attention
from attention.mechanisms.longformer import longformer
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, under_mask, weights_of
from tests.support.inputs import CPU, every_grid, h, tokens

case = partial(Case, "longformer", (5, 7))
SMALL = {"radius": 3}

CASES = [
    case({"radius": 4, "num_global": 2}),
    case({"radius": 2, "num_global": 0, "layout": "2d"}),
    case({"radius": 1, "layout": "2d"}),
    case({"radius": 4, "num_global": 2, **PREFIX}),
]
EFFECTS = effects(SMALL, radius=2, layout="2d", num_global=2, attn_drop=0.5, local=True)
SYMMETRIES = [({"transposed"}, {"radius": 1, "layout": "2d"}), (set(), {"radius": 2})]
REFUSED = [({"num_global": 47}, r"attention\(longformer\).num_global = 47 .* nearest valid: 48")]
EVERYTHING = [{"radius": 24}, {"radius": 5, "layout": "2d"}, {"radius": 0, "num_global": 24}]
SYMBOLS = {"w": 3 * 24, "g": 1}  # tiles of rho = 24 queries


@every_grid
@pytest.mark.parametrize("layout", ["1d", "2d"])
@pytest.mark.parametrize("global_tokens", [[], [0, 5]], ids=str)
def test_longformer_is_softmax_under_a_dense_mask(grid, layout, global_tokens):
    q, k, v = tokens(grid)
    (H, W), n = grid, torch.arange(q.shape[2])
    global_tokens = torch.tensor(global_tokens, dtype=torch.int64)
    is_global = torch.isin(n, global_tokens)
    for radius in (0, 1, 2, 3):
        if layout == "1d":
            near = (n[:, None] - n).abs() <= radius
        else:
            near = ((n[:, None] // W - n // W).abs() <= radius) & ((n[:, None] % W - n % W).abs() <= radius)
        y = longformer(q, k, v, global_tokens=global_tokens, grid=grid if layout == "2d" else (1, H * W), radius=radius)
        assert_equal(y, under_mask(q, k, v, near | is_global | is_global[:, None]))


def test_longformer_attends_to_2_rho_plus_1_keys():
    q, k, _ = tokens((8, 8))
    attended = weights_of(longformer, q, k, global_tokens=torch.empty(0, dtype=torch.int64), grid=(1, 64), radius=3) > 0
    assert (attended[:, :, 3:-3].sum(-1) == 7).all()


@pytest.mark.parametrize(
    ("grid", "count", "expected"), [((5, 7), 1, [17]), ((4, 6), 6, [7, 9, 11, 19, 21, 23]), ((3, 2), 6, range(6))]
)
def test_longformer_global_tokens_are_the_centres_of_equal_bins(grid, count, expected):
    attn = create_attention("longformer", dim=16, num_heads=h, grid=grid, num_global=count)
    assert attn.global_tokens(grid, CPU).tolist() == list(expected)
