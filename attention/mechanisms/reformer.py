"""Reformer (Kitaev et al. 2020, arXiv:2001.04451): chunks of c tokens sorted by hash, l rounds, queries being keys.

Queries and keys share one projection, k_n = q_n / |q_n|. Each of l rounds hashes them by random rotations, sorts tokens
by bucket and cuts the order into chunks of c; a chunk attends to itself and to the chunk before it, the first chunk to
the last. All rounds together form one softmax over the union of their pairs: a pair that meets in r rounds has weight
1/r in each. A token attends to itself only if it has no other key.
Cost: 4 l N c C - N C^2 multiply-accumulates, the last for the missing projection of keys; for the hash l N b C more,
b = N / c up to N = c^2, then about sqrt(2 N / c); and a sort. Linear in N except for the sort and the hash.
Papers: EVA Table 3, LARA Table 9, Scatterbrain Table 2.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..options import Options, local_option, option
from ..parts.features import compute_dtype, full_precision
from ..parts.geometry import Grid, gather_tokens, split_prefix
from ..parts.sampling import counter_normal

SELF_LOGIT = -5e4


@full_precision
def reformer(q: Tensor, k: Tensor, v: Tensor, bucket: Tensor, *, chunk_size: int) -> Tensor:
    """One softmax over the pairs of all rounds.

    bucket: bucket of every token of the grid in every round, (B, h, l, N) int64. chunk_size: tokens c of a chunk; one
    chunk if c >= N.
    """
    (*_, num_rounds, N), c = bucket.shape, min(chunk_size, q.shape[2])
    n = -(-N // c)
    bucket = F.pad(bucket, (0, n * c - N), value=2**31)  # padding sorts last
    (k_prefix, k), (v_prefix, v) = split_prefix(k, N), split_prefix(v, N)
    on_prefix = q.shape[-1] ** -0.5 * q @ k_prefix.mT
    q, k, v = (F.pad(x, (0, 0, 0, n * c - N)) for x in (q, k, v))
    order = bucket.argsort(dim=-1, stable=True)
    position = order.argsort(-1)  # (B, h, l, n*c)
    own = order.unflatten(-1, (n, c))
    attended = torch.cat([own.roll(1, 3), own], -1) if n > 1 else own  # (B, h, l, n, 2c)
    visible = (attended < N)[..., None, :]  # of the pairs of a round (B, h, l, n, c, 2c): those without padding
    chunk, meetings = (position // c).int(), bucket.new_zeros((), dtype=torch.int8)
    for r in range(num_rounds):  # of the pairs of all rounds, those that meet in round r too
        chunks = chunk[:, :, r].gather(2, attended.flatten(2)).view_as(attended)
        met = equal_pairs(chunks[..., -c:], chunks) | equal_pairs(chunks[..., -c:], (chunks + 1) % n)
        meetings = meetings + met
    logits = q.shape[-1] ** -0.5 * gather_tokens(q, own) @ gather_tokens(k, attended).mT
    logits = logits - meetings.to(logits.dtype).log()
    logits = logits.masked_fill(~visible, -torch.inf)
    logits = logits.masked_fill(equal_pairs(own, attended), SELF_LOGIT)
    y = (logits.softmax(-1) @ gather_tokens(v, attended)).flatten(3, 4)
    position = position[..., :N]
    log_mass = logits.logsumexp(-1).flatten(3).gather(3, position).mT  # (B, h, N, l)
    weights = torch.cat([log_mass, on_prefix], -1).softmax(-1)
    of_round, of_prefix = weights[..., :num_rounds], weights[..., num_rounds:]
    y = y.gather(3, position[..., None].expand(*position.shape, y.shape[-1]))
    return (of_round.mT[..., None] * y).sum(2) + of_prefix @ v_prefix


def equal_pairs(own: Tensor, attended: Tensor) -> Tensor:
    """Which of the numbers own (..., c) and attended (..., e) are equal: (..., c, e)."""
    return own[..., None] == attended[..., None, :]


@torch.no_grad()
@full_precision
def hash_buckets(q: Tensor, *rotations: Tensor) -> Tensor:
    """argmax [q R; -q R] in every round: q (B, h, N, d), rotations R (h, l, d, s/2) -> (B, h, l, N) int64 below s.

    With several sets of rotations, a bucket is the tuple of their buckets, as one number below the product of their s.
    """
    bucket = q.new_zeros((), dtype=torch.int64)
    for R in rotations:
        projected = q[:, :, None] @ R
        bucket = bucket * 2 * R.shape[-1] + torch.cat([projected, -projected], -1).argmax(-1)
    return bucket


def rotation_counts(num_chunks: int, chunk_size: int) -> tuple[int, ...]:
    """s/2 for each set of rotations, so that n chunks of c tokens have about 2 n buckets (one set up to n = c)."""
    if num_chunks <= chunk_size:
        return (num_chunks,)
    first = math.ceil((num_chunks / 2) ** 0.5)
    return first, math.ceil(num_chunks / (2 * first))


def reformer_reference(q, k, v, bucket, *, chunk_size):
    """`reformer` as softmax under the dense mask of all pairs that meet in some round."""
    (B, h, num_rounds, N), c = bucket.shape, min(chunk_size, q.shape[2])
    visible = torch.zeros(B, h, N, N, dtype=torch.bool)
    for b, head, r in ((b, head, r) for b in range(B) for head in range(h) for r in range(num_rounds)):
        buckets = bucket[b, head, r].tolist()
        order = sorted(range(N), key=lambda m: (buckets[m], m))
        chunk = {m: i // c for i, m in enumerate(order)}
        for n in range(N):
            for m in range(N):
                before = (chunk[n] - 1) % -(-N // c)
                visible[b, head, n, m] |= chunk[m] in (chunk[n], before)
    P = k.shape[2] - N
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~F.pad(visible, (P, 0), value=True), -torch.inf)
    return logits.masked_fill(F.pad(torch.eye(N, dtype=torch.bool), (P, 0)), SELF_LOGIT).softmax(-1) @ v


class Reformer(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its chunks of equal size are cut from all tokens"

    num_projections = 2
    size_option = "chunk_size"
    eval_seed: Tensor

    class Config(Options):
        chunk_size: int = option(
            49, "tokens c of a chunk, which attends to 2c keys; N / c chunks, 2N / c buckets", low=1
        )
        num_rounds: int = option(4, "rounds l of hashing", low=1, high=64)
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.register_buffer("eval_seed", torch.randint(2**32, ()))

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, C) -> queries, the same as unit keys, and values, each (B, h, N, d)."""
        q, v = super().project(x, grid)
        return q, F.normalize(q, dim=-1, eps=1e-6), v

    def rotations(self, q: Tensor) -> tuple[Tensor, ...]:
        """Sets R (h, l, d, s/2), standard normal: drawn in training, a function of `eval_seed` in evaluation."""
        c = min(self.config.chunk_size, q.shape[2])
        counts, dtype = rotation_counts(-(-q.shape[2] // c), c), compute_dtype(q)
        shape = (self.num_heads, self.config.num_rounds, self.head_dim, sum(counts))
        if self.training:
            return torch.randn(shape, device=q.device, dtype=dtype).split(counts, -1)
        return counter_normal(self.eval_seed, shape).to(dtype).split(counts, -1)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        c = min(config.chunk_size, N)
        n = -(-N // c)
        hashes, attention = N * sum(rotation_counts(n, c)) * C, 2 * n * c * (2 * c if n > 1 else c) * C
        return Cost(0, config.num_rounds * (hashes + attention))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        bucket = hash_buckets(q, *self.rotations(q))
        return reformer(q, k, v, bucket, chunk_size=self.config.chunk_size).to(v.dtype)
