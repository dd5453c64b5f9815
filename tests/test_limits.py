"""Limits and identities of local attention and EVA: where theory says "equal", it is (float64, 1e-10).

The estimators' limits (RFA, RA, LARA) stand in `test_performer.py`, `test_ra.py` and `test_lara.py`.
"""

import itertools

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.mechanisms.eva import eva, group_values
from attention.mechanisms.local import local
from attention.mechanisms.scatterbrain import scatterbrain
from attention.mechanisms.softmax import softmax
from attention.ops.joint_softmax.op import exact_set, window_logits
from attention.ops.random_features.op import random_feature_attention
from attention.parts.features import log_features, scale
from attention.parts.geometry import from_windows, to_windows, window_indices
from attention.parts.groups import Groups, bins, bins_outside, chunks_outside, gather_groups, group_mean
from attention.parts.position import PositionBias, t5_bucket
from tests.support.identities import CPU, B, assert_equal, d, draw, every_grid, h, layer, tokens, under_mask


def eva_of(q, k, v, groups, grid, window, *, omega=None, samples: int = 1, mu=None, transform=0.3, **options) -> Tensor:
    """EVA with landmarks transform * mean, by default arbitrary means and samples."""
    k_tilde = transform * group_mean(k, groups)
    mu = draw(*k_tilde.shape, seed=7) if mu is None else mu.expand_as(k_tilde)
    omega = mu[..., None, :] + draw(*mu.shape[:-1], samples, d, seed=8) if omega is None else omega
    return eva(q, k, v, k_tilde, mu, omega, groups=groups, grid=grid, window=window, **options)


# Local attention


@every_grid
def test_local_with_the_grid_as_window_is_softmax(grid):
    q, k, v = tokens(grid)
    assert_equal(local(q, k, v, grid=grid, window=grid), softmax(q, k, v))
    assert_equal(local(q, k, v, grid=grid, window=(2, 2), overlap=(max(grid), max(grid))), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize(("window", "overlap"), [((2, 2), (0, 0)), ((3, 3), (0, 0)), ((3, 2), (1, 1))])
def test_local_is_softmax_under_a_dense_mask(grid, window, overlap):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    mask = torch.zeros(N, N, dtype=torch.bool)
    for n in range(N):
        mask[n, exact_set(n, grid, window, overlap)[0]] = True
    if overlap == (0, 0):
        assert torch.equal(mask, mask.mT)  # blocks: who sees whom is mutual
    assert_equal(local(q, k, v, grid=grid, window=window, overlap=overlap), under_mask(q, k, v, mask))


@every_grid
def test_windows_round_trip_and_cover_every_token_once(grid):
    (x,) = tokens(grid, 1)
    for window in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
        assert torch.equal(from_windows(to_windows(x, grid, window), grid, window), x)
        index = window_indices(grid, window, (0, 0), CPU)
        assert sorted(index[index >= 0].tolist()) == list(range(grid[0] * grid[1]))


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
    for table_gradient, index in zip(bias.table.grad, bias.index, strict=True):
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
    assert PositionBias(kind, 3, 64, window, overlap).table.shape[1:] == (rows, 3)


def test_table_bias_is_a_function_of_the_offset_alone_and_tells_all_offsets_apart():
    index = PositionBias("table", 1, 8, (3, 3), (1, 1)).index[0]
    offsets = {}
    for query in range(9):
        for key in range(25):
            offset = (query // 3 - (key // 5 - 1), query % 3 - (key % 5 - 1))
            offsets.setdefault(offset, set()).add(index[query, key].item())
    assert all(len(rows) == 1 for rows in offsets.values())
    assert len(set.union(*offsets.values())) == len(offsets) == 49


def test_released_table_confuses_offsets():
    """w = 7, e = 0: 169 offsets share 97 rows, e.g. (0, +1) and (+1, -6)."""
    index = PositionBias("table_released", 1, 8, (7, 7)).index[0]
    assert len(index.unique()) == 97
    assert index[1, 0] == index[7, 6]


def test_t5_buckets():
    """16 buckets, distance 7: 0..3 exact, then 4 + floor(4 ln(a/4) / ln(7/4)), at most 7; a later key adds 8."""
    offset = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 40, -1, -4, -5, -40])
    assert t5_bucket(offset, 16, 7).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 12, 13, 15]


def test_table_bias_at_zero_leaves_local_unchanged_and_t5_is_a_sum_over_axes():
    q, k, v = tokens((6, 6))
    bias = PositionBias("t5", h, d, (3, 3)).double()
    y, x = torch.cartesian_prod(torch.arange(3), torch.arange(3)).mT
    by, bx = (bias.table[axis][t5_bucket(c[:, None] - c, 16, 3)] for axis, c in enumerate((y, x)))
    assert_equal(bias(), (by + bx).permute(2, 0, 1))
    zero = torch.zeros(h, 9, 9, dtype=torch.float64)
    assert_equal(local(q, k, v, zero, grid=(6, 6), window=(3, 3)), local(q, k, v, grid=(6, 6), window=(3, 3)))


# Partitions


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (24, 24)], ids=str)
@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (4, 4), (1, 4)], ids=str)
def test_bins_are_disjoint_cover_the_grid_and_have_the_stated_edges(grid, counts):
    groups = bins(grid, counts, CPU)
    assert groups.index.shape[1] == counts[0] * counts[1]
    assert sorted(groups.index[groups.valid].tolist()) == list(range(grid[0] * grid[1]))
    (H, W), (rows, columns) = grid, counts
    for i, j in itertools.product(range(rows), range(columns)):
        y, x = (range(a * size // n, (a + 1) * size // n) for a, size, n in ((i, H, rows), (j, W, columns)))
        c = i * columns + j
        assert groups.index[0, c][groups.valid[0, c]].tolist() == [a * W + b for a in y for b in x]


@pytest.mark.parametrize("overlap", [(0, 0), (1, 1)])
@pytest.mark.parametrize(("grid", "window"), [((6, 4), (2, 2)), ((5, 7), (3, 3))], ids=str)
def test_partitions_outside_the_exact_set_complete_it(grid, window, overlap):
    H, W = grid
    shared = bins(grid, (2, 2), CPU)
    outside = [bins_outside(shared, grid, window, overlap), chunks_outside(grid, window, overlap, 4, CPU)]
    for groups, n in itertools.product(outside, range(H * W)):
        g = (n // W // window[0]) * -(-W // window[1]) + n % W // window[1]
        exact = exact_set(n, grid, window, overlap)[0]
        assert sorted([*exact, *groups.index[g][groups.valid[g]].tolist()]) == list(range(H * W))
    chunks = outside[1]
    for g in range(len(chunks.index)):
        members = [c[v].tolist() for c, v in zip(chunks.index[g], chunks.valid[g], strict=True)]
        assert [*itertools.chain(*members)] == sorted(itertools.chain(*members))
        assert max(map(len, members)) - min(map(len, members)) <= 1


def test_complement_chunks_of_the_papers():
    """735/49 = 15 tokens a chunk at N = 784, 3 at 196, 63 at 3136."""
    for side, size in ((28, 15), (14, 3), (56, 63)):
        groups = chunks_outside((side, side), (7, 7), (0, 0), 49, CPU)
        assert (groups.count() == size).all()


# EVA


@every_grid
def test_e1_exact_set_of_all_tokens_is_softmax(grid):
    q, k, v = tokens(grid)
    expected = softmax(q, k, v)
    masked = bins_outside(bins(grid, (2, 2), CPU), grid, grid, (0, 0))
    for groups in (chunks_outside(grid, grid, (0, 0), 3, CPU), masked):
        for samples in (1, 3):
            assert_equal(eva_of(q, k, v, groups, grid, grid, samples=samples), expected)
    attn = layer("eva", grid, window_size=max(grid), num_landmarks=0)
    torch.nn.init.zeros_(attn.position_bias.table)
    assert_equal(attn.attend(q, k, v, grid), expected)
    # With groups over all tokens the group logits stay beside the exact ones.
    assert (eva_of(q, k, v, bins(grid, (2, 2), CPU), grid, grid) - expected).abs().max() > 1e-3


@every_grid
@pytest.mark.parametrize("samples", [1, 3])
def test_e2_singleton_groups_alone_are_softmax(grid, samples):
    q, k, v = tokens(grid)
    y = eva_of(q, k, v, bins(grid, grid, CPU), grid, (0, 0), samples=samples, transform=1.0)
    assert_equal(y, softmax(q, k, v))
    options = {"window_size": 0, "num_landmarks": q.shape[2], "landmark_transform": "identity", "num_samples": samples}
    assert_equal(layer("eva", grid, **options).train().attend(q, k, v, grid), softmax(q, k, v))


@every_grid
def test_e3_one_group_alone_is_self_normalised_importance_sampling(grid):
    q, k, v = tokens(grid)
    omega = draw(B, h, 6, d, seed=3)
    everything = bins(grid, (1, 1), CPU)
    for mean in (torch.zeros(1, dtype=torch.float64), draw(B, h, 1, 1, d, seed=4)):
        y = eva_of(q, k, v, everything, grid, (0, 0), mu=mean, omega=omega[:, :, None, None])
        log_density = log_features(mean.expand(B, h, 1, 1, d)[:, :, 0], omega)  # log N(w; mu, I) / N(w; 0, I)
        assert_equal(y, random_feature_attention(scale(q), scale(k), v, omega, -log_density))


@every_grid
def test_e4_one_group_with_one_sample_gives_every_query_the_same_output(grid):
    y = eva_of(*tokens(grid), bins(grid, (1, 1), CPU), grid, (0, 0))
    assert_equal(y, y[:, :, :1].expand_as(y))


@every_grid
def test_e5_no_groups_is_local(grid):
    attn, expected = layer("eva", grid, window_size=3, num_landmarks=0), layer("local", grid, window_size=3)
    expected.load_state_dict(attn.state_dict())
    x = draw(B, grid[0] * grid[1], h * d)
    assert_equal(attn(x, grid), expected(x, grid))


@every_grid
def test_e6_random_feature_weight_of_the_complement_is_scatterbrain(grid):
    """Exact logits beside g(q', w_s) + L_s - log S of the complement, in one softmax."""
    q, k, v = tokens(grid)
    window, S = (2, 2), 5
    omega = draw(S, d, seed=5)
    complement = chunks_outside(grid, window, (0, 0), 1, CPU)
    G = len(complement.index)
    beta, log_mass = group_values(k, v, omega.expand(B, h, G, 1, S, d), complement)
    queries = to_windows(q, grid, window)
    logits = log_features(scale(queries), omega) + log_mass - torch.tensor(S).double().log()
    weights = torch.cat([window_logits(q, k, None, grid, window, (0, 0)), logits], -1).softmax(-1)
    y = from_windows(weights[..., :4] @ to_windows(v, grid, window) + weights[..., 4:] @ beta, grid, window)
    expected = scatterbrain(q, k, v, omega.expand(h, S, d), grid=grid, window=window)
    assert_equal(y, expected)
    # Equation 16's group weight exp(t) is another one.
    zero = torch.zeros(1, dtype=torch.float64)
    other = eva_of(q, k, v, complement, grid, window, mu=zero, omega=omega.expand(B, h, G, 1, S, d))
    assert (other - expected).abs().max() > 1e-3


@every_grid
def test_e7_exact_group_averages_and_weights_are_softmax(grid):
    """Eq. 13: with beta_c and the group weights exact, nothing is approximated."""
    q, k, v = tokens(grid)
    window = (2, 2)
    groups = chunks_outside(grid, window, (0, 0), 3, CPU)
    queries, keys, values = to_windows(q, grid, window), gather_groups(k, groups), gather_groups(v, groups)
    inside = torch.einsum("bhgwd,bhgctd->bhgwct", queries, keys) * d**-0.5
    inside = inside.masked_fill(~groups.valid[:, None], -torch.inf)
    beta = torch.einsum("bhgwct,bhgctd->bhgwcd", inside.softmax(-1), values)
    weights = torch.cat([window_logits(q, k, None, grid, window, (0, 0)), inside.logsumexp(-1)], -1).softmax(-1)
    y = weights[..., :4] @ to_windows(v, grid, window) + torch.einsum("bhgwc,bhgwcd->bhgwd", weights[..., 4:], beta)
    assert_equal(from_windows(y, grid, window), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("samples", [1, 3])
def test_e8_equal_keys_in_a_group_average_its_values(grid, samples):
    _, _, v = tokens(grid)
    groups = bins(grid, (2, 2), CPU)
    k = torch.empty_like(v)
    for c, key in enumerate(draw(4, d, seed=6)):
        k[:, :, groups.index[0, c][groups.valid[0, c]]] = key
    beta, _ = group_values(k, v, draw(B, h, 1, 4, samples, d, seed=7), groups)
    assert_equal(beta, group_mean(v, groups).repeat_interleave(samples, 3))


@every_grid
def test_e9_constant_values_come_back(grid):
    q, k, _ = tokens(grid)
    v = draw(B, h, 1, d, seed=9).expand_as(q)
    partitions: list[tuple[Groups, dict]] = [
        (bins(grid, (2, 2), CPU), {}),
        (bins_outside(bins(grid, (2, 2), CPU), grid, (2, 2), (1, 1)), {"overlap": (1, 1)}),
        (chunks_outside(grid, (2, 2), (0, 0), 3, CPU), {"log_count": True}),
    ]
    for (groups, options), samples in itertools.product(partitions, (1, 2)):
        assert_equal(eva_of(q, k, v, groups, grid, (2, 2), samples=samples, **options), v)


def test_empty_groups_are_ignored():
    """A 2x2 bin inside a 2x2 window has no member left; deleting the group changes nothing."""
    grid = (6, 4)
    q, k, v = tokens(grid)
    groups = bins_outside(bins(grid, (3, 2), CPU), grid, (2, 2), (0, 0))
    assert (groups.count() == 0).sum() == 6
    assert groups.count().diagonal().eq(0).all()
    kept = torch.tensor([[c for c in range(6) if c != g] for g in range(6)])
    thinner = Groups(*(x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1])) for x in groups[:2]))
    mu, omega = draw(B, h, 6, 6, d, seed=1), draw(B, h, 6, 6, 2, d, seed=2)
    expected = eva_of(
        q,
        k,
        v,
        thinner,
        grid,
        (2, 2),
        mu=mu.gather(3, kept[:, :, None].expand(B, h, -1, -1, d)),
        omega=omega.gather(3, kept[:, :, None, None].expand(B, h, -1, -1, 2, d)),
    )
    assert_equal(eva_of(q, k, v, groups, grid, (2, 2), mu=mu, omega=omega), expected)


# Noise


def test_activation_checkpointing_replays_the_noise():
    attn, x = layer("eva", (6, 4), window_size=2, num_landmarks=6).train(), draw(B, 24, h * d)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        attn.zero_grad()
        run = (
            (lambda y: torch.utils.checkpoint.checkpoint(attn, y, (6, 4), use_reentrant=False))
            if checkpointed
            else (lambda y: attn(y, (6, 4)))
        )
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in attn.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
