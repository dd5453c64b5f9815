"""Limits and identities of sparse patterns and clustering: where theory says "equal", it is (float64, 1e-10)."""

import math

import pytest
import torch
from torch import Tensor

from attention import OptionError, create_attention
from attention.mechanisms.bigbird import bigbird, choose_blocks, global_blocks
from attention.mechanisms.clustered import clustered, hamming_clusters, hash_bits, pack, popcount
from attention.mechanisms.longformer import longformer
from attention.mechanisms.reformer import hash_buckets, reformer, rotation_counts
from attention.mechanisms.softmax import softmax
from attention.mechanisms.sparse_transformer import sparse_transformer
from tests.support.identities import CPU, B, assert_equal, d, draw, every_grid, h, layer, shuffled, tokens, under_mask


def weights_of(op, q: Tensor, k: Tensor, *args, **options) -> Tensor:
    """The matrix (B, h, N, N) that `op` mixes values with."""
    N = q.shape[2]
    columns = torch.eye(N, dtype=q.dtype).expand(*q.shape[:2], N, N)
    return torch.cat([op(q, k, part, *args, **options) for part in columns.split(q.shape[-1], -1)], -1)


# Longformer


@every_grid
def test_longformer_with_an_endless_band_is_softmax(grid):
    q, k, v = tokens(grid)
    N = q.shape[2]
    for cells in (torch.empty(0, dtype=torch.int64), torch.tensor([0, N // 2])):
        for radius in (N - 1, N, 3 * N):
            assert_equal(longformer(q, k, v, cells=cells, grid=(1, N), radius=radius), softmax(q, k, v))
        assert_equal(longformer(q, k, v, cells=cells, grid=grid, radius=max(grid) - 1), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("radius", [0, 1, 3])
def test_longformer_with_global_tokens_alone_is_softmax(grid, radius):
    q, k, v = tokens(grid)
    cells = shuffled(q.shape[2])
    for area in (grid, (1, q.shape[2])):
        assert_equal(longformer(q, k, v, cells=cells, grid=area, radius=radius), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("layout", ["1d", "2d"])
@pytest.mark.parametrize("cells", [[], [0, 5]], ids=str)
def test_longformer_is_softmax_under_a_dense_mask(grid, layout, cells):
    q, k, v = tokens(grid)
    (H, W), n = grid, torch.arange(q.shape[2])
    cells = torch.tensor(cells, dtype=torch.int64)
    is_global = torch.isin(n, cells)
    for radius in (0, 1, 2, 3):
        if layout == "1d":
            near = (n[:, None] - n).abs() <= radius
        else:
            near = ((n[:, None] // W - n // W).abs() <= radius) & ((n[:, None] % W - n % W).abs() <= radius)
        y = longformer(q, k, v, cells=cells, grid=grid if layout == "2d" else (1, H * W), radius=radius)
        assert_equal(y, under_mask(q, k, v, near | is_global | is_global[:, None]))


def test_longformer_sees_2_rho_plus_1_keys():
    q, k, _ = tokens((8, 8))
    seen = weights_of(longformer, q, k, cells=torch.empty(0, dtype=torch.int64), grid=(1, 64), radius=3) > 0
    assert (seen[:, :, 3:-3].sum(-1) == 7).all()


def test_longformer_separate_projections_start_as_the_shared_ones_and_act_on_global_rows_alone():
    site = {"dim": 16, "num_heads": h, "grid": (5, 7), "radius": 2, "num_global": 3}
    attn = create_attention("longformer", separate_global=True, **site).double()
    shared = create_attention("longformer", **site).double()
    shared.load_state_dict({key: value for key, value in attn.state_dict().items() if "global" not in key})
    x, cells = draw(B, 35, 16), attn.cells((5, 7), CPU)
    y = shared(x, (5, 7))
    assert_equal(attn(x, (5, 7)), y)
    assert sum(p.numel() for p in attn.qkv_global.parameters()) == 3 * 16**2 + 3 * 16
    with torch.no_grad():
        attn.qkv_global.weight.mul_(3)
    changed = ((attn(x, (5, 7)) - y).abs() > 1e-6).any(-1).any(0)
    assert changed.nonzero()[:, 0].tolist() == cells.tolist()


@pytest.mark.parametrize(
    ("grid", "count", "expected"), [((5, 7), 1, [17]), ((4, 6), 6, [7, 9, 11, 19, 21, 23]), ((3, 2), 6, range(6))]
)
def test_longformer_global_cells_are_the_centres_of_equal_parts(grid, count, expected):
    attn = create_attention("longformer", dim=16, num_heads=h, grid=grid, num_global=count)
    assert attn.cells(grid, CPU).tolist() == list(expected)


# Sparse Transformer


@every_grid
def test_sparse_transformer_with_all_as_summaries_or_one_block_is_softmax(grid):
    q, k, v = tokens(grid)
    for b in (1, 3, grid[1], q.shape[2]):
        assert_equal(sparse_transformer(q, k, v, block_size=b, num_summary=b), softmax(q, k, v))
    assert_equal(sparse_transformer(q, k, v, block_size=q.shape[2], num_summary=1), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize(("b", "c"), [(4, 1), (4, 3), (6, 2)])
def test_sparse_transformer_is_the_union_of_both_fixed_patterns(grid, b, c):
    q, k, v = tokens(grid)
    n = torch.arange(q.shape[2])
    own, summary = n[:, None] // b == n // b, (n % b >= b - c).expand(len(n), -1)
    assert_equal(sparse_transformer(q, k, v, block_size=b, num_summary=c), under_mask(q, k, v, own | summary))


# BigBird


def pattern(n: int, w: int, g: int, r: int, heads: int = h, seed: int = 0) -> Tensor:
    return choose_blocks(w, g, torch.rand(heads, n, r, generator=torch.Generator().manual_seed(seed)))


@every_grid
@pytest.mark.parametrize(("w", "g", "r"), [(3, 2, 99), (99, 0, 0), (1, 0, 99), (1, 99, 0)])
def test_bigbird_that_covers_all_blocks_is_softmax(grid, w, g, r):
    q, k, v = tokens(grid)
    N = q.shape[2]
    for area, block in (((1, N), (1, 3)), (grid, (2, 2))):
        n = math.ceil(area[0] / block[0]) * math.ceil(area[1] / block[1])
        blocks = pattern(n, w, g, min(r, n))
        assert_equal(bigbird(q, k, v, blocks, grid=area, block=block, num_global=g), softmax(q, k, v))


@pytest.mark.parametrize(("n", "w", "g", "r"), [(12, 3, 2, 3), (5, 3, 2, 3), (1, 3, 2, 3), (9, 1, 3, 8), (7, 5, 0, 2)])
def test_bigbird_blocks_are_window_global_and_distinct_others(n, w, g, r):
    chosen = pattern(n, w, g, r, heads=50)
    for head in range(50):
        for i in range(n):
            fixed = {j for j in range(n) if abs(i - j) <= w // 2} | set(global_blocks(n, g))
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


def test_bigbird_pattern_is_that_of_the_layer_and_survives_training_and_reloading():
    def build(seed: int):
        torch.manual_seed(seed)
        return create_attention("bigbird", dim=16, num_heads=h, grid=(14, 14))

    attn, other = build(0), build(1)
    grid, block = (1, 196), (1, 16)
    blocks = attn.blocks(grid, block)
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks, other.blocks(grid, block))
    attn.train()(torch.randn(1, 196, 16), (14, 14))
    assert torch.equal(blocks, attn.eval().blocks(grid, block))
    other.load_state_dict(attn.state_dict())
    assert torch.equal(blocks, other.blocks(grid, block))


# Clustered


@every_grid
def test_improved_clusters_on_all_keys_are_softmax_for_any_clustering(grid):
    q, k, v = tokens(grid)
    cluster = torch.randint(5, q.shape[:3], generator=torch.Generator().manual_seed(0))
    assert_equal(clustered(q, k, v, cluster, num_clusters=6, num_top_keys=q.shape[2]), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("k_top", [0, 3])
def test_clusters_of_one_query_or_of_equal_queries_are_softmax(grid, k_top):
    q, k, v = tokens(grid)
    N = q.shape[2]
    alone = shuffled(N).expand(B, h, N)
    assert_equal(clustered(q, k, v, alone, num_clusters=N, num_top_keys=k_top), softmax(q, k, v))
    cluster = torch.randint(4, (B, h, N), generator=torch.Generator().manual_seed(0))
    equal = q[:, :, :4].gather(2, cluster[..., None].expand_as(q))
    assert_equal(clustered(equal, k, v, cluster, num_clusters=7, num_top_keys=k_top), softmax(equal, k, v))


def test_popcount_of_packed_bits():
    bits = torch.rand(200, 63, generator=torch.Generator().manual_seed(0)) > torch.linspace(0, 1, 200)[:, None]
    bits[0], bits[1] = True, False
    codes = pack(bits)
    assert codes[0] == 2**63 - 1
    assert (codes >= 0).all()
    assert torch.equal(popcount(codes), bits.sum(-1))
    assert torch.equal(popcount(codes[:, None] ^ codes), (bits[:, None] ^ bits).sum(-1))


@pytest.mark.parametrize(("num_bits", "iterations"), [(63, 0), (63, 3), (5, 1), (5, 4), (2, 3)])
def test_hamming_clusters_are_lloyds(num_bits, iterations):
    N, J = 30, 6
    bits = torch.rand(1, 1, N, num_bits, generator=torch.Generator().manual_seed(0)) > 0.5
    cluster = hamming_clusters(bits, J, iterations)[0, 0].tolist()
    points = [tuple(map(bool, point)) for point in bits[0, 0].tolist()]
    centroids = [points[j * N // J] for j in range(J)]
    for i in range(iterations + 1):
        distances = [[sum(a != b for a, b in zip(p, c, strict=True)) for c in centroids] for p in points]
        expected = [row.index(min(row)) for row in distances]
        if i < iterations:
            for j in range(J):
                if members := [p for p, e in zip(points, expected, strict=True) if e == j]:
                    centroids[j] = tuple(2 * sum(column) > len(members) for column in zip(*members, strict=True))
    assert cluster == expected


def test_hash_distance_grows_with_the_angle():
    """Planes through the origin part two vectors with the probability angle / pi (4 standard errors)."""
    bits, angles = 40000, torch.linspace(0, math.pi, 7, dtype=torch.float64)
    q = torch.stack([angles.cos(), angles.sin()], -1)[None, None]
    planes = torch.cat([draw(1, bits, 2), torch.zeros(1, bits, 1, dtype=torch.float64)], -1)
    hashed = hash_bits(q, planes)[0, 0]
    p = angles / math.pi
    assert ((hashed ^ hashed[:1]).double().mean(-1) - p <= 4 * (p * (1 - p) / bits).sqrt()).all()
    assert ((hashed ^ hashed[:1]).double().mean(-1) - p >= -4 * (p * (1 - p) / bits).sqrt()).all()


# Reformer


def buckets(q: Tensor, rounds: int, half: int) -> Tensor:
    return hash_buckets(q, draw(h, rounds, d, half, seed=9))


@every_grid
@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_in_one_or_two_chunks_is_softmax_over_the_others(grid, rounds):
    q, _, v = tokens(grid)
    N, k = q.shape[2], torch.nn.functional.normalize(q, dim=-1)
    expected = under_mask(q, k, v, ~torch.eye(N, dtype=torch.bool))
    for c in (N, N + 5, math.ceil(N / 2)):  # of two chunks each sees the other as the one before
        assert_equal(reformer(q, k, v, buckets(q, rounds, 3), chunk_size=c), expected)


@pytest.mark.parametrize("same_bucket", [False, True])
def test_reformer_is_blind_to_equal_rounds(same_bucket):
    q, _, v = tokens((5, 7))
    k, once = torch.nn.functional.normalize(q, dim=-1), buckets(q, 1, 3)
    options = {"chunk_size": 6, "same_bucket": same_bucket}
    assert_equal(reformer(q, k, v, once.repeat(1, 1, 3, 1), **options), reformer(q, k, v, once, **options))


def test_reformer_attends_to_itself_only_when_alone():
    q, _, v = tokens((3, 4))
    k, each = torch.nn.functional.normalize(q, dim=-1), torch.arange(12).expand(B, h, 2, 12)
    assert_equal(reformer(q, k, v, each, chunk_size=4, same_bucket=True), v)
    assert weights_of(reformer, q, k, each, chunk_size=4).diagonal(dim1=-2, dim2=-1).abs().max() == 0


def test_reformer_with_the_bucket_mask_is_softmax_within_buckets_that_fit_a_chunk():
    q, _, v = tokens((8, 8))
    k = torch.nn.functional.normalize(q, dim=-1)
    bucket = (torch.arange(64) * 5 % 16).expand(B, h, 1, 64)  # 4 tokens each
    visible = (bucket[:, :, 0, :, None] == bucket[:, :, 0, None]) & ~torch.eye(64, dtype=torch.bool)
    assert_equal(reformer(q, k, v, bucket, chunk_size=4, same_bucket=True), under_mask(q, k, v, visible))


def test_reformer_hashes_near_queries_alike():
    """Angle 0 and scale never part two queries; opposite queries always."""
    q = draw(1, 1, 500, d)
    R, other = draw(1, 4, d, 8, seed=1), draw(1, 4, d, 3, seed=2)
    bucket = hash_buckets(q, R)
    assert torch.equal(bucket, hash_buckets(3 * q, R))
    assert torch.equal((bucket + 8) % 16, hash_buckets(-q, R))
    assert bucket.unique().tolist() == list(range(16))
    assert torch.equal(hash_buckets(q, R, other), 6 * bucket + hash_buckets(q, other))


@pytest.mark.parametrize(("chunks", "size", "counts"), [(16, 49, (16,)), (49, 49, (49,)), (64, 49, (6, 6))])
def test_reformer_has_twice_as_many_buckets_as_chunks(chunks, size, counts):
    assert rotation_counts(chunks, size) == counts
    assert math.prod(2 * count for count in counts) >= 2 * chunks


# Options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("longformer", {"num_global": 47}, r"attention\(longformer\).num_global = 47 .* nearest valid: 48"),
        (
            "longformer",
            {"num_global": 0, "separate_global": True},
            r"separate_global = True: .* set num_global above 0",
        ),
        ("sparse_transformer", {"block_size": 197}, r"block_size = 197: larger than the 196 tokens .*; at most 196"),
        ("sparse_transformer", {"num_summary": 15}, r"num_summary = 15: a block has 14 tokens; at most 14"),
        ("bigbird", {"block_size": 197}, r"block_size = 197: larger than the 14x14 grid; at most 196"),
        ("bigbird", {"block_size": 15, "layout": "2d"}, r"block_size = 15: larger than the 14x14 grid; at most 14"),
        ("bigbird", {"num_window": 4}, r"num_window = 4: .* odd; nearest valid: 3"),
        ("clustered", {"num_clusters": 197}, r"num_clusters = 197: more than the tokens .*; at most 196"),
        ("clustered", {"num_top_keys": 197}, r"num_top_keys = 197: more than the tokens .*; at most 196"),
        ("clustered", {"num_bits": 64}, r"num_bits = 64 is above the largest valid value 63"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        create_attention(name, dim=16, num_heads=2, grid=(14, 14), **options)


def test_a_grid_of_rows_shorter_than_their_summary_is_refused_when_it_comes():
    attn = layer("sparse_transformer", (6, 4), num_summary=4)
    with pytest.raises(OptionError, match=r"sparse_transformer\).num_summary = 4: a block has 3 tokens; at most 3"):
        attn(draw(B, 24, h * d), (8, 3))
