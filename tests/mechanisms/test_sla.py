"""Sparse-linear attention."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from attention import create_attention
from attention.mechanisms.sla import importance, sla, soft_topk
from attention.mechanisms.softmax import softmax
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, perturbed
from tests.support.comparisons import assert_equal, under_mask
from tests.support.growth import Growth
from tests.support.inputs import draw, every_grid, one_head, tokens
from tests.support.symmetry import BLOCKS

# Products of means choose the blocks (rounding does not change the choice); a map with a bias follows.
case = partial(Case, "sla", mixes_values=False)
FEW = {"block_size": 2, "topk": 2, "negligible": 0.3}

CASES = [
    case((5, 7), FEW),
    case((6, 8), {"block_size": 3, "local": True}),
    case((5, 7), {"block_size": 4, **PREFIX}),
    case((5, 7), {**FEW, "block_size": 4, "router": True, **PREFIX}, two_modes=True),
]
EFFECTS = {
    "block_size": (FEW, 3),
    "topk": (FEW, 3),
    "negligible": (FEW, 0.6),
    "router": (FEW, True),
    "local": (FEW, True),
}
SYMMETRIES = [(BLOCKS, FEW), (set(), {**FEW, "local": True})]
GROWTH = [Growth(1.1, 1), Growth(2, 2, lambda side: {"block_size": side // 4, "topk": 8})]
SYMBOLS = {"k": 1, "w": 7}
LEARNED = {"learned"}
UNSIZED = True
NO_MATRIX = "not linear"  # the map has a bias


def ours(w):
    return {key.replace("core.proj_l", "learned"): x for key, x in w.items() if key != "in.x"}


VISION = {"sla_24x8": ({"block_size": 8, "topk": 1, "negligible": 0.0}, ours)}


def attend(q, k, v, blocks, topk, negligible=0.0):
    return sla(q, k, v, blocks=blocks, topk=topk, negligible=negligible, learned=nn.Identity())


def test_by_hand():
    """Three blocks of one row, two tokens each, one channel: phi is 1, so that a marginal block has its mean value."""
    q, k = one_head(1, 1, -1, -1, 2, 2), one_head(math.log(3), math.log(9), 0, 0, -1, -1)
    v, blocks = one_head(10, 30, 50, 70, 2, 4), Windows((1, 6), (1, 2))
    y = attend(q, k, v, blocks, 1, 1 / 3)
    positive = [(3**s * 10 + 9**s * 30) / (3**s + 9**s) + 60 for s in (1, 2)]
    assert_equal(y, one_head(*[positive[0]] * 2, *[3 + 60] * 2, *[positive[1]] * 2))
    everything = [(3**s * 10 + 9**s * 30) / (3**s + 9**s) + (60 + 3) / 2 for s in (1, 2)]
    assert_equal(attend(q, k, v, blocks, 1)[:, :, [0, 4]], one_head(*everything))


@every_grid
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_critical_blocks_have_softmax_attention_and_marginal_ones_linear_attention(grid, share):
    q, k, v = tokens(grid)
    blocks, own = (
        Windows(grid, (2, 2)),
        [n // grid[1] // 2 * (grid[1] // 2) + n % grid[1] // 2 for n in range(len(q[0, 0]))],
    )
    g = blocks.num_windows
    ranking = importance(q, k, None, blocks=blocks).argsort(-1, descending=True)
    rank = ranking.argsort(-1)[:, :, own][..., own]  # of each key's block for each query
    y = attend(q, k, v, blocks, 1, share)
    kernel = (q.softmax(-1) @ k.softmax(-1).mT) * ((rank >= 1) & (rank < g - int(share * g)))
    linear = kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-12) @ v
    assert_equal(y, under_mask(q, k, v, rank < 1) + linear)
    assert linear.any() == (share < 1)


def test_all_blocks_critical_is_softmax():
    q, k, v = tokens((6, 4))
    assert_equal(attend(q, k, v, Windows((6, 4), (5, 3)), 4), softmax(q, k, v))


def test_at_first_it_is_sparse_attention():
    x, sparse = draw(2, 24, 16), {**FEW, "negligible": 1.0}
    attn, other = (create_attention("sla", dim=16, num_heads=2, grid=(6, 4), **o).double() for o in (FEW, sparse))
    other.load_state_dict(attn.state_dict())
    assert_equal(attn(x), other(x))
    nn.init.ones_(attn.learned.weight)
    assert not torch.allclose(attn(x), other(x))


def largest(scores, topk):
    return scores.argsort(-1, descending=True).argsort(-1) < topk


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_weights_of_blocks(topk):
    scores = draw(3, 5, 6)
    scores[..., 2] = -torch.inf  # a block without tokens
    log_odds, others = soft_topk(scores, largest(scores, topk)), [0, 1, 3, 4, 5]
    assert_equal(log_odds.sigmoid().sum(-1), torch.full((3, 5), float(topk)).double())
    offset = (log_odds - scores / 0.1)[..., others]
    assert_equal(offset, offset[..., :1].expand_as(offset))
    assert (log_odds[..., 2] == -torch.inf).all()
    assert_equal(soft_topk(scores, largest(scores, 9))[..., others].sigmoid(), torch.ones(3, 5, 5).double())
    near, top = draw(2, 5).div(20).requires_grad_(), largest(draw(2, 5), topk)
    assert torch.autograd.gradcheck(lambda x: soft_topk(x, top), near)
    assert torch.autograd.gradgradcheck(lambda x: soft_topk(x, top), near)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3])
def test_weights_of_blocks_in_single_precision(scale):
    """Weights near 1 count by what is missing: the rest of the row, however small."""
    scores = (draw(4, 16) * scale).float()
    top = largest(scores, 2)
    log_odds = soft_topk(scores, top)
    others = log_odds.double().sigmoid().where(~top, 0).sum(-1)
    missing = torch.sigmoid(-log_odds.double()).where(top, 0).sum(-1)
    torch.testing.assert_close(missing, others, rtol=1e-3, atol=1e-30)


def routed(**options):
    torch.manual_seed(0)
    layer = perturbed(create_attention("sla", dim=16, num_heads=2, grid=(6, 4), router=True, **FEW, **options), 0.3)
    return layer.double(), draw(2, 24, 16)


def test_a_router_is_trained_by_weights_of_blocks_and_chooses_when_frozen_or_evaluated():
    layer, x = routed()
    chosen, weighted = layer.eval()(x), layer.train()(x)
    assert not torch.allclose(chosen, weighted)
    weighted.square().sum().backward()
    assert all(weight.grad.any() for weight in layer.router)
    assert layer.alpha.grad.all()
    layer.router.requires_grad_(False)
    assert_equal(layer(x), chosen)
    for weight in layer.router.requires_grad_(True):
        weight.data.mul_(1e4)  # weights are 0 or 1
    assert_equal(layer(x), layer.eval()(x))


def test_a_router_begins_with_the_products_of_means_and_equal_shares():
    torch.manual_seed(0)
    layer, x = (
        create_attention("sla", dim=16, num_heads=2, grid=(6, 4), router=True, **FEW).double().eval(),
        draw(2, 24, 16),
    )
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    blocks = Windows((6, 4), (2, 2))
    exact = sla(q, k, v, blocks=blocks, topk=2, negligible=1.0, learned=nn.Identity())
    both = sla(q, k, v, blocks=blocks, topk=2, negligible=0.3, learned=nn.Identity())
    assert_equal(layer(x), layer.proj(((exact + (both - exact)) / 2).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("soft", [False, True])
def test_a_routed_output_is_a_mean_of_values(soft):
    q, k, _ = tokens((6, 4))
    options = {"blocks": Windows((6, 4), (3, 3)), "topk": 2, "soft": soft}
    router, alpha = draw(2, q.shape[-1], q.shape[-1]), torch.rand(q.shape[1], dtype=q.dtype)
    for negligible in (0.0, 0.5, 1.0):
        y = sla(q, k, torch.ones_like(q), router, alpha, negligible=negligible, **options)
        assert_equal(y, torch.ones_like(q))
    y = sla(q, k, v := draw(*q.shape), router, alpha, negligible=0.0, **{**options, "topk": 4})
    assert_equal(y, softmax(q, k, v))
