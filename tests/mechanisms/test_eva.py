"""EVA."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention.mechanisms.eva import eva, group_values
from attention.mechanisms.scatterbrain import scatterbrain
from attention.mechanisms.softmax import softmax
from attention.ops.joint_softmax.op import window_logits
from attention.parts.features import log_features, scale
from attention.parts.geometry import Windows
from attention.parts.groups import Groups, bins, bins_outside, chunks_outside, gather_groups, group_mean
from tests.support.cases import CLIP, PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, layer, one_head, tokens
from tests.support.random_features import random_feature_attention
from tests.support.symmetry import BLOCKS

case = partial(Case, "eva", (5, 7), stochastic=True)
SMALL = {"window_size": 3, "num_landmarks": 6}
WINDOW, FREE, FEW = {"window_size": 2}, {"position_bias": "none"}, {"num_landmarks": 6}
CAUSAL = {"causal": True, "layout": "1d", "window_size": 8}

CASES = [
    case(SMALL),
    Case("eva", (6, 8), {"window_size": 2, "num_landmarks": 12, "position_bias": "none"}, stochastic=True),
    case({**SMALL, "overlap": 1, "position_bias": "t5"}),
    case({**SMALL, "layout": "1d"}),
    case({**SMALL, "partition": "all_1d"}),
    case({**SMALL, "partition": "complement"}),
    case({**SMALL, "partition": "complement", "overlap": 1, "num_samples": 2}),
    case({**SMALL, "partition": "mask"}),
    case({**SMALL, "partition": "mask", "overlap": 1, "num_samples": 2}),
    case({**SMALL, "num_samples": 3}),
    case({**SMALL, "num_samples": 3, "mu": "zero", "pool": "max"}),
    case({**SMALL, "mu": "q", "pool": "max", "local": True}),
    case({**SMALL, "mu": "trainable"}),
    case({**SMALL, "mu_scale": 0.5, "noise": "released", "position_bias": "table_released"}),
    case({**SMALL, "landmark_transform": "linear"}),
    case({**SMALL, "landmark_transform": "identity"}),
    case({**SMALL, "log_count": True}),
    case({**SMALL, "overlap": 1, "released_overlap_groups": True}),
    case({"window_size": 0, "num_landmarks": 6}),
    case({"window_size": 3, "num_landmarks": 0}, op="local", stochastic=False),
    case({**CAUSAL, "num_landmarks": 5}),
    case({**CAUSAL, "num_landmarks": 7, "overlap": 3, "num_samples": 2, "pool": "max"}),
    case({**CAUSAL, "num_landmarks": 7, "visibility": "released", "log_count": True}),
    case({**SMALL, **PREFIX}),
    case({**SMALL, **PREFIX, "partition": "mask", "overlap": 1, "num_samples": 2, "pool": "max"}),
    case({"window_size": 0, "num_landmarks": 6, **PREFIX, "local": True}),
    Case("eva", CLIP, {"window_size": (2, 2, 3), "num_landmarks": 12, **PREFIX}, stochastic=True),
    Case("eva", CLIP, {"window_size": 2, "num_landmarks": 4, "partition": "mask"}, stochastic=True),
]
EFFECTS = {
    **effects(SMALL, released=True, window_size=2, num_landmarks=4, layout="1d", overlap=1, position_bias="none"),
    **effects(SMALL, partition="mask", landmark_transform="linear", pool="max", num_samples=2, mu="q", mu_scale=0.5),
    **effects(SMALL, log_count=True, noise="released", attn_drop=0.5, local=True),
    "released_overlap_groups": ({**SMALL, "overlap": 1}, True),
    "causal": ({**SMALL, "layout": "1d"}, True),
    "visibility": ({**SMALL, "layout": "1d", "window_size": 8, "causal": True}, "released"),
}
SYMMETRIES = [
    (BLOCKS, {**FEW, **WINDOW, **FREE}),
    (BLOCKS, {**FEW, **WINDOW, **FREE, "num_samples": 2}),
    (BLOCKS, {**FEW, **WINDOW, **FREE, "partition": "mask"}),
    (BLOCKS, {**FEW, **WINDOW, **FREE, "pool": "max"}),
    # windows that do not divide the grid
    *(({"transposed"}, {**FEW, "window_size": 3, "partition": x, **FREE}) for x in ("all", "mask")),
    ({"between"}, {**FEW, **WINDOW}),  # a bias depends on positions inside a window, not on the window
    (set(), {**FEW, **WINDOW, **FREE, "partition": "complement"}),  # chunks of the raster
    (set(), {**FEW, **WINDOW, **FREE, "local": True}),
]
SYMMETRIES_IN_LAW = [(BLOCKS, {**FEW, **WINDOW, **FREE})]
GROWTH = [
    Growth(1, 1),
    # Every window has groups of its own: N/w^2 windows pool N tokens each, the most with small windows and few groups.
    Growth(2, 2, lambda side: {"partition": "complement", "window_size": 4, "num_landmarks": 1}),
]
REFUSED = [
    ({"windw_size": 7}, r"attention\(eva\).windw_size: unknown option; did you mean 'window_size'\?"),
    ({"window_size": "7"}, r"attention\(eva\).window_size: expected int, got '7'"),
    ({"num_landmarks": 47}, r"attention\(eva\).num_landmarks = 47 .* 14x14 .* nearest valid: 48"),
    ({"num_landmarks": 197}, r"attention\(eva\).num_landmarks = 197 .* 14x14 .* nearest valid: 196"),
    ({"window_size": 15}, r"attention\(eva\).window_size = 15: larger than the 14x14 grid; at most 14"),
    ({"num_landmarks": 148, "partition": "complement"}, r"num_landmarks = 148: .* at most 147"),
    ({"window_size": 0, "num_landmarks": 0}, r"attention\(eva\).window_size = 0: .* give one of them"),
    ({"window_size": 0, "partition": "mask"}, r"attention\(eva\).partition = mask: needs window_size"),
    ({"released_overlap_groups": True}, r"released_overlap_groups = True: needs overlap above 0"),
    ({"pool": "min"}, r"attention\(eva\).pool: 'min' is not a choice"),
    ({"attn_drop": 1.5}, r"attn_drop = 1.5 is above the largest valid value 1"),
    ({**CAUSAL, "position_bias": "t5_released"}, r"position_bias = t5_released: .* one of none, table, t5"),
    ({**CAUSAL, "partition": "mask"}, r"attention\(eva\).causal = True: needs .* partition all"),
    ({**CAUSAL, "local": True}, r"attention\(eva\).local = True: .* later tokens; with causal set local: false"),
    ({"visibility": "released"}, r"attention\(eva\).visibility = released: acts with causal; leave it out"),
]
EVERYTHING = [
    {"window_size": 6, "num_landmarks": 0, **FREE},
    {"window_size": 6, "num_landmarks": 4, "partition": "mask", **FREE},
    {"window_size": 0, "num_landmarks": 24, "landmark_transform": "identity", "mu": "zero"},
    {"window_size": 0, "num_landmarks": 24, "landmark_transform": "identity", "num_samples": 3, "pool": "max"},
    # no group lies before the only block
    {"causal": True, "layout": "1d", "window_size": 24, "num_landmarks": 1, **FREE},
    {"causal": True, "layout": "1d", "window_size": 24, "num_landmarks": 5, "num_samples": 2, **FREE},
]
AS_RELEASED = {"released": True}
OVERLAP = {**AS_RELEASED, "window_size": 4, "overlap": 2, "num_landmarks": 16}
RELEASED = {
    "eva_2d_rpe": AS_RELEASED,
    "eva_2d_norpe": {**AS_RELEASED, "position_bias": "none"},
    "train_eva_2d_rpe": AS_RELEASED,
    "eva_2d_overlap_rpe": OVERLAP,
    "eva_2d_overlap_t5_noln": {**OVERLAP, "position_bias": "t5_released", "landmark_transform": "linear"},
    "train_eva_2d_overlap_norpe": {**OVERLAP, "window_size": 2, "overlap": 1, "position_bias": "none"},
}
SYMBOLS = {"|E|": 49, "c": 49}
LEARNED = {"landmarks", "position_bias"}


def eva_of(q, k, v, groups, windows, *, omega=None, samples: int = 1, mu=None, transform=0.3, **options) -> Tensor:
    """EVA with landmarks transform * mean, by default arbitrary means and samples."""
    k_tilde = transform * group_mean(k, groups)
    mu = draw(*k_tilde.shape, seed=7) if mu is None else mu.expand_as(k_tilde)
    omega = mu[..., None, :] + draw(*mu.shape[:-1], samples, d, seed=8) if omega is None else omega
    return eva(q, k, v, k_tilde, mu, omega, groups=groups, windows=windows, **options)


def test_by_hand():
    """Windows of two tokens over three, and one group of all three with landmark 0 and omega = 1.

    xi(k) = exp(k - k^2 / 2) is 1 for the keys 0 and 2 and sqrt(e) for 1, so that the group stands for the value
    beta = (2 + 4 + 6 sqrt(e)) / (2 + sqrt(e)); its logit is q . 0 = 0 and its weight 1.
    """
    q, k, v = one_head(0, math.log(2), 1), one_head(0, 2, 1), one_head(2, 4, 6)
    root = math.e**0.5
    beta = (2 + 4 + 6 * root) / (2 + root)
    groups, zero, omega = bins((1, 3), (1, 1), CPU), torch.zeros(1).double(), torch.ones(1, 1, 1, 1, 1, 1).double()
    y = eva_of(q, k, v, groups, Windows((1, 3), (1, 2)), mu=zero, omega=omega, transform=0.0)
    # weights on the window's two tokens and the group: 1 1 1; 1 4 1; of the last, alone in its window, e and 1
    expected = one_head((2 + 4 + beta) / 3, (2 + 16 + beta) / 6, (6 * math.e + beta) / (math.e + 1))
    assert_equal(y, expected)
    # with the logarithm of its three tokens added the group weighs 3
    counted = eva_of(q, k, v, groups, Windows((1, 3), (1, 2)), mu=zero, omega=omega, transform=0.0, log_count=True)
    expected = one_head((2 + 4 + 3 * beta) / 5, (2 + 16 + 3 * beta) / 8, (6 * math.e + 3 * beta) / (math.e + 3))
    assert_equal(counted, expected)


@every_grid
def test_e1_exact_set_of_all_tokens_is_softmax(grid):
    q, k, v = tokens(grid)
    expected = softmax(q, k, v)
    everything = Windows(grid, grid)
    masked = bins_outside(bins(grid, (2, 2), CPU), everything)
    for groups in (chunks_outside(everything, 3, CPU), masked):
        for samples in (1, 3):
            assert_equal(eva_of(q, k, v, groups, everything, samples=samples), expected)
    # With groups over all tokens the group logits stay beside the exact ones.
    assert (eva_of(q, k, v, bins(grid, (2, 2), CPU), everything) - expected).abs().max() > 1e-3


@every_grid
@pytest.mark.parametrize("samples", [1, 3])
def test_e2_singleton_groups_alone_are_softmax(grid, samples):
    q, k, v = tokens(grid)
    y = eva_of(q, k, v, bins(grid, grid, CPU), Windows(grid, (0, 0)), samples=samples, transform=1.0)
    assert_equal(y, softmax(q, k, v))


@pytest.mark.parametrize("samples", [1, 2])
def test_evaluation_has_noise_from_two_samples_on(samples):
    attn = layer("eva", (4, 4), window_size=2, num_landmarks=4, num_samples=samples)
    assert attn.landmarks.noise(torch.zeros(1, h, 1, 4, d)).any() == (samples > 1)


@every_grid
def test_e3_one_group_alone_is_self_normalised_importance_sampling(grid):
    q, k, v = tokens(grid)
    omega = draw(B, h, 6, d, seed=3)
    everything = bins(grid, (1, 1), CPU)
    for mean in (torch.zeros(1, dtype=torch.float64), draw(B, h, 1, 1, d, seed=4)):
        y = eva_of(q, k, v, everything, Windows(grid, (0, 0)), mu=mean, omega=omega[:, :, None, None])
        log_density = log_features(mean.expand(B, h, 1, 1, d)[:, :, 0], omega)  # log N(w; mu, I) / N(w; 0, I)
        assert_equal(y, random_feature_attention(scale(q), scale(k), v, omega, -log_density))


@every_grid
def test_e6_random_feature_weight_of_the_complement_is_scatterbrain(grid):
    """One softmax covers exact logits and g(q', w_s) + L_s - log S of the complement."""
    q, k, v = tokens(grid)
    windows, S = Windows(grid, (2, 2)), 5
    omega = draw(S, d, seed=5)
    complement = chunks_outside(windows, 1, CPU)
    G = len(complement.members)
    beta, log_mass = group_values(k, v, omega.expand(B, h, G, 1, S, d), complement)
    queries = windows.partition(q)
    logits = log_features(scale(queries), omega) + log_mass - torch.tensor(S).double().log()
    weights = torch.cat([window_logits(q, k, None, windows), logits], -1).softmax(-1)
    y = windows.reverse(weights[..., :4] @ windows.partition(v) + weights[..., 4:] @ beta)
    expected = scatterbrain(q, k, v, omega.expand(h, S, d), windows=windows)
    assert_equal(y, expected)
    # Equation 16's group weight exp(t) differs.
    zero = torch.zeros(1, dtype=torch.float64)
    other = eva_of(q, k, v, complement, windows, mu=zero, omega=omega.expand(B, h, G, 1, S, d))
    assert (other - expected).abs().max() > 1e-3


@every_grid
def test_e7_exact_group_averages_and_weights_are_softmax(grid):
    """By eq. 13, nothing is approximated if beta_c and the group weights are exact."""
    q, k, v = tokens(grid)
    windows = Windows(grid, (2, 2))
    groups = chunks_outside(windows, 3, CPU)
    queries, keys, values = windows.partition(q), gather_groups(k, groups), gather_groups(v, groups)
    inside = torch.einsum("bhgwd,bhgctd->bhgwct", queries, keys) * d**-0.5
    inside = inside.masked_fill(~groups.valid[:, None], -torch.inf)
    beta = torch.einsum("bhgwct,bhgctd->bhgwcd", inside.softmax(-1), values)
    weights = torch.cat([window_logits(q, k, None, windows), inside.logsumexp(-1)], -1).softmax(-1)
    y = weights[..., :4] @ windows.partition(v) + torch.einsum("bhgwc,bhgwcd->bhgwd", weights[..., 4:], beta)
    assert_equal(windows.reverse(y), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("samples", [1, 3])
def test_e8_equal_keys_in_a_group_average_its_values(grid, samples):
    _, _, v = tokens(grid)
    groups = bins(grid, (2, 2), CPU)
    k = torch.empty_like(v)
    for c, key in enumerate(draw(4, d, seed=6)):
        k[:, :, groups.members[0, c][groups.valid[0, c]]] = key
    beta, _ = group_values(k, v, draw(B, h, 1, 4, samples, d, seed=7), groups)
    assert_equal(beta, group_mean(v, groups).repeat_interleave(samples, 3))


def test_empty_groups_are_ignored():
    """A 2x2 bin inside a 2x2 window has no member left; deleting the group changes nothing."""
    grid = (6, 4)
    q, k, v = tokens(grid)
    windows = Windows(grid, (2, 2))
    groups = bins_outside(bins(grid, (3, 2), CPU), windows)
    assert (groups.num_members() == 0).sum() == 6
    assert groups.num_members().diagonal().eq(0).all()
    kept = torch.tensor([[c for c in range(6) if c != g] for g in range(6)])
    thinner = Groups(*(x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1])) for x in groups[:2]))
    mu, omega = draw(B, h, 6, 6, d, seed=1), draw(B, h, 6, 6, 2, d, seed=2)
    y = eva_of(q, k, v, groups, windows, mu=mu, omega=omega)
    mu = mu.gather(3, kept[:, :, None].expand(B, h, -1, -1, d))
    omega = omega.gather(3, kept[:, :, None, None].expand(B, h, -1, -1, 2, d))
    assert_equal(y, eva_of(q, k, v, thinner, windows, mu=mu, omega=omega))
