"""Which permutations of tokens commute with each mechanism, its noise fixed (float64, 1e-10; spec 10).

A row of the table tells of permutations inside the 2 x 2 blocks of the grid, of whole blocks, and across them.
"""

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention
from attention.landmarks import bins
from cases import Case
from identities import CPU, assert_equal

GRID = (6, 4)
WINDOW = {"window_size": 2, "position_bias": "none"}
LANDMARKS = {"num_landmarks": 6}

KINDS = {
    "all": (True, True, True),
    "blocks": (True, True, False),
    "whole blocks": (False, True, False),
    "none": (False, False, False),
}
"""Whether permutations inside blocks, of whole blocks, and across them commute."""

SYMMETRY: list[tuple[str, str, dict]] = [
    ("softmax", "all", {}),
    ("performer", "all", {}),
    ("ra", "all", {"proposal": "biased"}),  # drawn keys: in law, see test_ra.py
    ("linear", "all", {}),
    ("transnormer", "all", {}),
    ("t2r", "all", {}),
    ("rfa", "all", {}),
    ("dpfp", "all", {}),
    ("xca", "all", {}),
    ("abc", "all", LANDMARKS),
    ("smyrf", "all", {"cluster_size": 4}),
    ("scatterbrain", "all", {**WINDOW, "support": "lsh"}),
    ("transformer_ls", "all", {"window_size": 0}),
    ("orthoformer", "all", LANDMARKS),
    ("local", "blocks", WINDOW),
    ("eva", "blocks", {**WINDOW, **LANDMARKS}),
    ("eva", "blocks", {**WINDOW, **LANDMARKS, "partition": "mask"}),
    ("lara", "blocks", LANDMARKS),
    ("lara", "blocks", {**LANDMARKS, "proposal": "mixture", "weighting": "coupled"}),
    ("nystrom", "blocks", {**LANDMARKS, "conv": "none"}),
    ("combiner", "blocks", WINDOW),
    ("transformer_ls", "blocks", WINDOW),
    ("scatterbrain", "blocks", WINDOW),
    ("transnormer", "blocks", {"window_size": 2, "depth": 2}),
    ("transnormer", "blocks", {"window_size": 2, "depth": 2, "variant": "t1"}),
    ("local", "whole blocks", {"window_size": 2}),
    ("eva", "whole blocks", {"window_size": 2, **LANDMARKS}),
    ("sra", "whole blocks", {"reduction": 2}),
    ("eva", "none", {**WINDOW, **LANDMARKS, "partition": "complement"}),
    ("linformer", "none", LANDMARKS),
    ("synthesizer", "none", {}),
    ("cosformer", "none", {}),
    ("cosformer", "none", {"layout": "2d"}),
    ("linear_sra", "none", {"pool_size": 2}),  # its bins are larger than the blocks
    ("longformer", "none", {"radius": 2}),
    ("bigbird", "none", {"block_size": 3, "num_random": 1}),
    ("sparse_transformer", "none", {}),
    ("reformer", "none", {"chunk_size": 4}),
]
GIVEN_THE_ASSIGNMENT = {"clustered"}  # see test_limits_patterns.py


def build(name: str, options: dict) -> tuple[Attention, Tensor]:
    """The layer in evaluation, its biases and norms off their start, and tokens for it."""
    case = Case(name, GRID, options)
    return case.build().eval(), case.tokens()


def block_permutation(blocks: list[int], places: list[int]) -> list[int]:
    """The permutation of raster places that puts cell `places[t]` of block `blocks[g]` at cell t of block g."""
    cells = bins(GRID, (3, 2), CPU).index[0]  # six blocks of 2 x 2 cells
    order = torch.empty(24, dtype=torch.int64)
    order[cells.flatten()] = cells[blocks][:, places].flatten()
    return order.tolist()


PERMUTATIONS = [
    block_permutation([0, 1, 2, 3, 4, 5], [3, 0, 2, 1]),
    block_permutation([4, 0, 5, 3, 1, 2], [0, 1, 2, 3]),
    torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist(),
]


@pytest.mark.parametrize(("name", "kind", "options"), SYMMETRY)
def test_permutations(name, kind, options):
    attn, x = build(name, options)
    for order, commutes in zip(PERMUTATIONS, KINDS[kind], strict=True):
        difference = (attn(x[:, order], GRID) - attn(x, GRID)[:, order]).abs().max()
        assert difference < 1e-10 if commutes else difference > 1e-4


@pytest.mark.parametrize(("name", "options"), [(n, options) for n, kind, options in SYMMETRY if kind == "blocks"])
def test_transposing_the_grid_commutes(name, options):
    attn, x = build(name, options)
    transposed = torch.arange(24).view(GRID).mT.flatten()
    assert_equal(attn(x[:, transposed], GRID[::-1]), attn(x, GRID)[:, transposed])


def test_every_mechanism_has_a_row():
    assert {name for name, _, _ in SYMMETRY} | GIVEN_THE_ASSIGNMENT == set(ATTENTION)
