"""BigBird."""

from functools import partial

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.mechanisms.bigbird import choose_blocks, global_blocks
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.inputs import h

case = partial(Case, "bigbird", (5, 7))
SMALL = {"block_size": 3}

CASES = [
    case({"block_size": 3, "num_random": 2}),
    case({"block_size": 2, "layout": "2d", "num_window": 1, "num_global": 1}),
    case({"block_size": 3, "num_random": 2, **PREFIX}),
]
EFFECTS = effects(SMALL, block_size=4, layout="2d", num_window=1, num_global=1, num_random=1, attn_drop=0.5, local=True)
SYMMETRIES = [({"within"}, {"block_size": 2, "layout": "2d", "num_random": 0}), (set(), {"block_size": 2})]
REFUSED = [
    ({"block_size": 197}, r"block_size = 197: larger than the 14x14 grid; at most 196"),
    ({"block_size": 15, "layout": "2d"}, r"block_size = 15: larger than the 14x14 grid; at most 14"),
    ({"num_window": 4}, r"num_window = 4: .* odd; nearest valid: 3"),
]
FULL = {"num_window": 1, "num_global": 0, "num_random": 0}
EVERYTHING = [
    {"block_size": 4, "num_random": 6},
    {**FULL, "block_size": 5, "num_window": 9},
    *({**FULL, "block_size": 2, "layout": "2d", of: 6} for of in ("num_global", "num_random")),
]
SYMBOLS = {"w": 3, "g": 2, "r": 3, "b": 16}


def pattern(n: int, w: int, g: int, r: int, heads: int = h, seed: int = 0) -> Tensor:
    return choose_blocks(w, g, torch.rand(heads, n, r, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("n", "w", "g", "r"), [(12, 3, 2, 3), (5, 3, 2, 3), (1, 3, 2, 3), (9, 1, 3, 8), (7, 5, 0, 2)])
def test_bigbird_blocks_are_window_global_and_distinct_others(n, w, g, r):
    chosen = pattern(n, w, g, r, heads=50)
    for head in range(50):
        for i in range(n):
            fixed = {j for j in range(n) if abs(i - j) <= w // 2} | set(
                global_blocks(n, g, torch.device("cpu")).tolist()
            )
            blocks = [b for b in chosen[head, i].tolist() if b != n]
            assert len(blocks) == len(set(blocks)) == min(n, len(fixed) + r)
            assert fixed <= set(blocks) <= set(range(n))


def test_bigbird_draws_every_other_block_alike():
    heads, n, r = 4000, 8, 2
    chosen = pattern(n, 3, 2, r, heads=heads)
    counts = torch.stack([(chosen[:, 4] == b).any(-1).sum() for b in range(n)]) / heads
    others = [1, 2, 6]  # neither 3, 4, 5 nor the global 0 and 7
    assert counts[[0, 3, 4, 5, 7]].eq(1).all()
    p = r / len(others)
    assert ((counts[others] - p).abs() < 4 * (p * (1 - p) / heads) ** 0.5).all()


def test_heads_have_patterns_of_their_own():
    attn = create_attention("bigbird", dim=16, num_heads=h, grid=(14, 14))
    blocks = attn.blocks(Windows((1, 196), (1, 16)))
    assert not torch.equal(blocks[0], blocks[1])
