"""Which rearrangements of tokens commute with a mechanism, and which do not (float64, 1e-10).

On a grid of 6 x 4 with windows, groups and segments of 2 x 2: any permutation; one inside every block; one of whole
blocks; and the transposed grid. Position biases and convolutions tell places apart, and leave fewer.
"""

import pytest
import torch
from torch import Tensor

from attention import ATTENTION
from attention.mechanisms.clustered import clustered
from attention.mechanisms.ra import ra
from tests.support.identities import B, assert_equal, assert_mean, d, deviation, draw, h, layer, shuffled, tokens

GRID = (6, 4)
TRANSPOSED = torch.arange(24).view(GRID).mT.flatten()


def permutations() -> dict[str, Tensor]:
    """The token that comes to each place, (24,)."""
    cells = torch.arange(24).view(3, 2, 2, 2).transpose(1, 2).reshape(6, 4)  # block, place
    back = cells.flatten().argsort()
    within = torch.stack([block[shuffled(4, seed=i)] for i, block in enumerate(cells)])
    return {"any": shuffled(24), "within": within.flatten()[back], "between": cells[shuffled(6)].flatten()[back]}


ALL = {"any", "within", "between", "transposed"}
BLOCKS = {"within", "between", "transposed"}
WINDOW, FREE = {"window_size": 2}, {"position_bias": "none"}
FEW = {"num_landmarks": 6}
SYMMETRIES = [  # what commutes, mechanism, options
    (ALL, "softmax", {}),
    *((ALL, "performer", {"features": x}) for x in ("positive", "hyperbolic", "trigonometric", "relu", "favorp")),
    *((ALL, "ra", {"proposal": x}) for x in ("biased", "mean_key")),
    *((ALL, name, {}) for name in ("linear", "t2r", "rfa", "dpfp", "xca", "transnormer")),
    (ALL, "transnormer", {"variant": "t1"}),
    (ALL, "abc", FEW),
    (ALL, "orthoformer", FEW),
    (ALL, "smyrf", {"cluster_size": 5}),
    (ALL, "scatterbrain", {"support": "lsh", **WINDOW, **FREE}),
    (ALL, "transformer_ls", {**FEW, "window_size": 0}),
    (BLOCKS, "local", {**WINDOW, **FREE}),
    (BLOCKS, "eva", {**FEW, **WINDOW, **FREE}),
    (BLOCKS, "eva", {**FEW, **WINDOW, **FREE, "num_samples": 2}),
    (BLOCKS, "eva", {**FEW, **WINDOW, **FREE, "partition": "mask"}),
    *((BLOCKS, "lara", {**FEW, "proposal": x}) for x in ("pool", "pool_mixed", "attended_keys", "mixture")),
    *((BLOCKS, "lara", {**FEW, "weighting": x}) for x in ("balance", "coupled", "coupled_density")),
    (BLOCKS, "nystrom", {**FEW, "conv": "none"}),
    *((BLOCKS, "combiner", {**WINDOW, **FREE, "pool": x}) for x in ("max", "mean")),
    *((BLOCKS, "scatterbrain", {**WINDOW, **FREE, "complement": x}) for x in ("merge", "subtract", "released")),
    (BLOCKS, "transformer_ls", {**FEW, **WINDOW, **FREE}),
    *((BLOCKS, "transnormer", {**WINDOW, "depth": 2, "variant": x}) for x in ("t1", "t2")),
    # windows that overlap or do not divide the grid
    *(({"transposed"}, "local", {"window_size": 3, "overlap": x, **FREE}) for x in (0, 1)),
    *(({"transposed"}, "eva", {**FEW, "window_size": 3, "partition": x, **FREE}) for x in ("all", "mask")),
    ({"transposed"}, "combiner", {"window_size": 3, **FREE}),
    ({"transposed"}, "transformer_ls", {**FEW, "window_size": 3, "overlap": 1, **FREE}),
    ({"transposed"}, "scatterbrain", {"window_size": 3, **FREE}),
    ({"transposed"}, "scatterbrain", {**WINDOW, "overlap": 1, "complement": "subtract", **FREE}),
    ({"transposed"}, "nystrom", {"num_landmarks": 2, "conv": "none"}),
    # patterns and distances of the grid
    ({"transposed"}, "cosformer", {"layout": "2d"}),
    ({"transposed"}, "longformer", {"radius": 1, "layout": "2d"}),
    ({"transposed"}, "linear_sra", {"pool_size": 3}),
    # a bias knows places inside a window, not which window it is; nor do a strided convolution's keys have an order
    *(({"between"}, name, WINDOW) for name in ("local", "combiner", "scatterbrain")),
    *(({"between"}, name, {**FEW, **WINDOW}) for name in ("eva", "transformer_ls")),
    ({"between"}, "sra", {"reduction": 2}),
    ({"within"}, "bigbird", {"block_size": 2, "layout": "2d", "num_random": 0}),
    # the order of the raster matters
    (set(), "softmax", {"causal": True}),
    (set(), "local", {"layout": "1d", "window_size": 5, **FREE}),
    (set(), "eva", {**FEW, **WINDOW, **FREE, "partition": "complement"}),
    *((set(), "nystrom", {**FEW, "conv": x, "conv_size": 3}) for x in ("1d", "2d")),
    (set(), "ra", {}),  # evaluation's draws belong to places; see the law below
    (set(), "clustered", {"num_clusters": 4, "num_top_keys": 5}),  # so do the first centroids; see below
    (set(), "linformer", FEW),
    (set(), "synthesizer", {}),
    (set(), "cosformer", {}),
    (set(), "longformer", {"radius": 2}),
    (set(), "bigbird", {"block_size": 2}),
    (set(), "sparse_transformer", {}),
    (set(), "reformer", {"chunk_size": 4}),
]


@pytest.mark.parametrize(
    ("commuting", "name", "options"),
    SYMMETRIES,
    ids=["-".join([name, *map(str, options.values())]) for _, name, options in SYMMETRIES],
)
def test_what_commutes(commuting, name, options):
    attn, x = layer(name, GRID, **options), draw(B, 24, h * d)
    y, turned = attn(x, GRID), layer(name, GRID[::-1], **options)
    turned.load_state_dict(attn.state_dict())
    differences = {kind: attn(x[:, order], GRID) - y[:, order] for kind, order in permutations().items()}
    differences["transposed"] = turned(x[:, TRANSPOSED], GRID[::-1]) - y[:, TRANSPOSED]
    for kind, difference in differences.items():
        if kind in commuting:
            assert_equal(difference, torch.zeros_like(difference))
        else:
            assert difference.abs().max() > 1e-3, kind


def test_every_mechanism_is_in_the_table():
    assert {name for _, name, _ in SYMMETRIES} == set(ATTENTION)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "commuting"),
    [("ra", {}, {"any", "within", "between"}), ("eva", {**FEW, **WINDOW, **FREE}, BLOCKS), ("lara", FEW, BLOCKS)],
    ids=["ra", "eva", "lara"],
)
def test_what_commutes_in_law(name, options, commuting):
    """Mean and mean square over 2000 draws of training, one for every image of a batch."""
    attn, x = layer(name, GRID, **options).train(), draw(1, 24, h * d).expand(2000, -1, -1)
    y = attn(x, GRID)
    for kind, order in permutations().items():
        moved, stayed = attn(x[:, order], GRID), y[:, order]
        if kind in commuting:
            assert_mean(moved - stayed, 0)
            assert_mean(moved.square() - stayed.square(), 0)
        else:
            assert deviation(moved - stayed, 0).max() > 6


def test_ra_commutes_with_permutations_of_tokens_together_with_their_noise():
    q, k, v = tokens(GRID)
    noise, order = draw(B, h, 24, 3, d, seed=3), shuffled(24)
    for proposal in ("biased", "mean_key"):
        y = ra(q, k, v, noise, proposal=proposal)[:, :, order]
        assert_equal(ra(*(x[:, :, order] for x in (q, k, v, noise)), proposal=proposal), y)


@pytest.mark.parametrize("num_top_keys", [0, 3])
def test_clustered_commutes_with_permutations_given_the_assignment(num_top_keys):
    q, k, v = tokens(GRID)
    cluster, order = torch.arange(24).remainder(4).expand(B, h, -1), shuffled(24)
    options = {"num_clusters": 4, "num_top_keys": num_top_keys}
    moved = clustered(*(x[:, :, order] for x in (q, k, v, cluster)), **options)
    assert_equal(moved, clustered(q, k, v, cluster, **options)[:, :, order])
