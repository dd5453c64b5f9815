"""Orthoformer (Patrick et al. 2021, arXiv:2106.05392): attention through the c most orthogonal queries.

The landmarks P are chosen from the queries one by one; each is the query whose largest |cosine| to earlier landmarks is
least. The first is the longest query (the authors draw it at random), so that no choice depends on the order of tokens.
Then

    y = softmax(q P^T / sqrt(d)) softmax(P k^T / sqrt(d)) v.

Cost: 5 N c C multiply-accumulates, N c C of them for the choice.
Paper: LARA Table 3 'Orthoformer' (video).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, at_most
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from .softmax import softmax, softmax_reference


@full_precision
def orthoformer(q: Tensor, k: Tensor, v: Tensor, *, num_landmarks: int) -> Tensor:
    """Attention of queries to landmarks, which attend to all keys."""
    index = orthogonal_tokens(q, num_landmarks)
    landmarks = q.gather(2, index[..., None].expand(-1, -1, -1, q.shape[-1]))
    return softmax(q, landmarks, softmax(landmarks, k, v))


@torch.no_grad()
def orthogonal_tokens(x: Tensor, count: int) -> Tensor:
    """Indices (B, h, count) of the tokens (B, h, N, d) that a greedy search finds the most orthogonal."""
    unit = F.normalize(x, dim=-1).contiguous()
    chosen = [x.square().sum(-1).argmax(-1, keepdim=True)]
    largest = torch.zeros_like(x[..., 0])  # largest |cosine| to the chosen tokens
    for _ in range(count - 1):
        newest = unit.gather(2, chosen[-1][..., None].expand(-1, -1, -1, x.shape[-1]))
        largest = largest.maximum((unit @ newest.mT)[..., 0].abs()).scatter(2, chosen[-1], torch.inf)
        chosen.append(largest.argmin(-1, keepdim=True))
    return torch.cat(chosen, -1)


def orthoformer_reference(q, k, v, *, num_landmarks):
    """`orthoformer`, choice by choice."""
    y = []
    for q_h, k_h, v_h in zip(*(x.flatten(0, 1) for x in (q, k, v)), strict=True):
        chosen, rest = [q_h.norm(dim=-1).argmax().item()], set(range(len(q_h)))
        while len(chosen) < num_landmarks:
            rest.discard(chosen[-1])
            chosen.append(min(rest, key=lambda n: F.cosine_similarity(q_h[n], q_h[chosen], dim=-1).abs().max()))
        landmarks = q_h[chosen]
        y.append(softmax_reference(q_h, landmarks, softmax_reference(landmarks, k_h, v_h)))
    return torch.stack(y).view_as(v)


class Orthoformer(Attention):
    prefix_tokens = "plain"
    key_mask_refusal = "its landmarks are chosen among all queries"
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(49, "queries c that are landmarks", low=1)
        local: bool = local_option()
        fit: bool = fit_option(
            num_landmarks=at_most(lambda x, _: x.num_prefix_tokens + x.num_tokens, "more than the {most} tokens")
        )

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, c = context.num_tokens, context.dim, config.num_landmarks
        return Cost(0, (c - 1) * N * C + 4 * N * c * C)  # choice, attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        N, c = q.shape[2], self.config.num_landmarks
        if c > N and not self.config.fit:
            self.refuse("num_landmarks", c, f"more than the {N} tokens; at most {N}")
        return orthoformer(q, k, v, num_landmarks=min(c, N)).to(v.dtype)
