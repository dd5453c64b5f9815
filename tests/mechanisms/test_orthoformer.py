"""Orthoformer."""

import pytest
import torch
from torch import nn

from attention.mechanisms.orthoformer import orthoformer, orthogonal_tokens
from attention.mechanisms.softmax import softmax
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, every_grid, h, tokens
from tests.support.symmetry import ALL

FEW = {"num_landmarks": 6}

CASES = [Case("orthoformer", (5, 7), FEW, well_conditioned=False)]
EFFECTS = {"num_landmarks": (FEW, 4), "local": (FEW, True)}
SYMMETRIES = [(ALL, FEW)]
REFUSED = [({"num_landmarks": 197}, r"attention\(orthoformer\).num_landmarks = 197: .* at most 196")]
SYMBOLS = {"c": 49}


@every_grid
def test_landmarks_are_chosen_greedily(grid):
    (q,) = tokens(grid, 1)
    index = orthogonal_tokens(q, 6)
    unit = nn.functional.normalize(q, dim=-1)
    cosine = (unit @ unit.mT).abs()
    for b in range(B):
        for head in range(h):
            chosen = index[b, head].tolist()
            assert len(set(chosen)) == 6
            assert chosen[0] == q[b, head].norm(dim=-1).argmax()
            for i in range(1, 6):
                largest = cosine[b, head][:, chosen[:i]].amax(-1)
                rest = [n for n in range(grid[0] * grid[1]) if n not in chosen[:i]]
                assert largest[chosen[i]] == pytest.approx(largest[rest].min().item(), abs=1e-12)


def test_orthogonal_queries_are_found_among_copies():
    basis = torch.linalg.qr(draw(d, d))[0]
    kind = torch.randint(d, (40,), generator=torch.Generator().manual_seed(1))
    kind[:d] = torch.arange(d)
    q = (basis[kind] * (1 + draw(40, 1).abs())).expand(B, h, 40, d)
    assert all(sorted(kind[index].tolist()) == list(range(d)) for index in orthogonal_tokens(q, d).flatten(0, 1))


@every_grid
def test_orthoformer_with_one_query_for_all_is_softmax(grid):
    q, k, v = tokens(grid)
    same = q[:, :, :1].expand_as(q)
    assert_equal(orthoformer(same, k, v, num_landmarks=4), softmax(same, k, v))
    assert_equal(orthoformer(q, k[:, :, :1].expand_as(k), v, num_landmarks=4), v.mean(2, keepdim=True).expand_as(v))
