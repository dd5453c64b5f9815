"""Nystromformer."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from attention.mechanisms.nystrom import Nystrom, nystrom, pseudo_inverse
from attention.mechanisms.softmax import softmax
from attention.parts.groups import bins, group_mean
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, rms_ratio
from tests.support.growth import Growth
from tests.support.inputs import CPU, averaging, d, draw, every_grid, h, tokens
from tests.support.symmetry import BLOCKS

case = partial(Case, "nystrom", (5, 7), mixes_values=False, well_conditioned=False)
FEW = {"num_landmarks": 6}
SMALL = {**FEW, "conv_size": 3}

CASES = [
    case(SMALL),
    case({**SMALL, "segments": "1d", "pinv_iterations": 4}),
    case({**SMALL, "conv": "2d"}),
    case({**FEW, "conv_size": 33, "conv": "none"}),
    case({**SMALL, **PREFIX}),
]
EFFECTS = effects(SMALL, num_landmarks=4, segments="1d", pinv_iterations=5, conv="2d", conv_size=5)
SYMMETRIES = [
    (BLOCKS, {**FEW, "conv": "none"}),
    ({"transposed"}, {"num_landmarks": 2, "conv": "none"}),  # segments that are not blocks
    *((set(), {**FEW, "conv": x, "conv_size": 3}) for x in ("1d", "2d")),
]
# The iterations for the inverse, 24 h c^3, do not grow; with 49 landmarks they are nearly half the MACs at N = 784.
GROWTH = [Growth(1, 1, lambda side: {"num_landmarks": 9})]
REFUSED = [
    ({"num_landmarks": 47}, r"attention\(nystrom\).num_landmarks = 47 .* nearest valid: 48"),
    ({"conv_size": 4}, r"attention\(nystrom\).conv_size = 4: must be odd; nearest valid: 3"),
    ({"conv": "none", "conv_size": 3}, r"attention\(nystrom\).conv_size = 3: does not act with"),
]
SYMBOLS = {"c": 49, "i": 6, "t": 33}
LEARNED = {"filters"}


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


@pytest.mark.parametrize("num_prefix", [0, 2])
@every_grid
def test_a_landmark_for_each_token_makes_softmax(grid, num_prefix):
    """In float64, which allows more iterations than the option."""
    q, k, v = tokens(grid)
    k, v = (torch.cat([draw(*x.shape[:2], num_prefix, d, seed=7), x], 2) for x in (k, v))
    y = nystrom(q, k, v, groups=bins(grid, grid, CPU), grid=grid, iterations=32)
    torch.testing.assert_close(y, softmax(q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.01, 0.1, 1, 8])
def test_float32_is_sound_at_the_largest_number_of_iterations(scale):
    """Within 2e-3 of float64, twice the largest error that was measured for landmarks from 4 to 196."""
    fields = {field.name: field for field in dataclasses.fields(Nystrom.Config)}
    most = fields["pinv_iterations"].metadata["high"]
    q, k, v = tokens((14, 14))
    for landmarks in (2, 2), (7, 7):
        groups = bins((14, 14), landmarks, CPU)
        single, double = (
            nystrom(*(x.to(dtype) for x in (scale * q, scale * k, v)), groups=groups, grid=(14, 14), iterations=most)
            for dtype in (torch.float32, torch.float64)
        )
        assert rms_ratio(single, double) < 2e-3


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
    shifted[:, 0, 0] = 1  # the previous token in raster order; zero before the first
    before = torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, :-1]], 2)
    line = (1, grid[0] * grid[1])
    assert_equal(nystrom(q, k, v, shifted, groups=groups, grid=line, iterations=20), y + before)
