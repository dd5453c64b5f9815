"""Agent attention."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from attention import create_attention
from attention.mechanisms.agent import agent
from attention.mechanisms.softmax import softmax
from attention.parts.groups import bins, group_mean
from tests.mechanisms.test_sra import average
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, identity, layer, one_head, tokens

case = partial(Case, "agent", (5, 7))
FEW = {"num_landmarks": 6}

CASES = [
    case(FEW),
    case({"num_landmarks": 4, "released": True, "local": False, **PREFIX}),  # overlapping bins of 3 x 4 tokens
    case({**FEW, "reduction": 2, **PREFIX}, stock_keys=False),
]
EFFECTS = {
    **effects(FEW, num_landmarks=4, reduction=2, local=False, attn_drop=0.5),
    **effects({"num_landmarks": 4}, released=True, released_pools=True),
}
SYMMETRIES = [(set(), FEW), (set(), {**FEW, "local": False})]  # biases depend on positions
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"reduction": 2})]
REFUSED = [
    ({"num_landmarks": 17}, r"attention\(agent\).num_landmarks = 17 does not divide the 14x14 grid .* valid: 16"),
    ({"reduction": 15}, r"attention\(agent\).reduction = 15: larger than the 14x14 grid; at most 14"),
]
SYMBOLS = {"c": 49}
LEARNED = {"image_positions", "row_positions", "column_positions", "local_term"}


def ours(w):
    """Stacks biases of agents on tokens and of tokens on agents; the module's tables differ in the order of axes."""

    def both(of_agents, of_tokens):
        return torch.stack([of_agents, of_tokens]).flatten(0, 2).flatten(1)

    names = {"qkv.": "qkv.", "proj.": "proj.", "dwc.": "local_term."}
    state = {new + key.removeprefix(old): w[key] for old, new in names.items() for key in w if key.startswith(old)}
    return state | {
        "image_positions.table": both(w["an_bias"], w["na_bias"]),
        "row_positions.table": both(w["ah_bias"][0, ..., 0], w["ha_bias"][0, :, :, 0].mT),
        "column_positions.table": both(w["aw_bias"][0, :, :, 0], w["wa_bias"][0, :, 0].mT),
        "prefix_bias": both(w["ac_bias"][0], w["ca_bias"][0].mT),
    }


VISION = {
    "agent_deit_8x8_cls_a9": ({"num_landmarks": 9, "released": True}, ours),
    "agent_deit_6x6_cls_a4_h4": ({"num_landmarks": 4}, ours),  # bins that divide the grid are the same
}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
SIX = bins(GRID, (3, 2), CPU)
B_1, B_2 = draw(h, 6, N, seed=7), draw(h, N, 6, seed=8)


def test_by_hand():
    """Two agents of two tokens: agents 1 and 0 give keys 0, 0, log 2, log 4 the weights 1 1 2 4 and 1 1 1 1."""
    q, k, v = one_head(0, 2, 1, -1), one_head(0, 0, math.log(2), math.log(4)), one_head(8, 16, 24, 32)
    none = torch.zeros(1, 2, 4, dtype=torch.float64)
    two = bins((1, 4), (1, 2), CPU)
    first, second = (8 + 16 + 48 + 128) / 8, 20
    mixed = [(math.exp(x) * first + second) / (math.exp(x) + 1) for x in (0, 2, 1, -1)]
    assert_equal(agent(q, k, v, none, none.mT, grid=(1, 4), bins=two), one_head(*mixed))
    b_1, b_2 = none.clone(), none.clone().mT
    b_1[0, 1, 3] = math.log(5)  # the second agent: weights 1 1 1 5
    b_2[0, 0, 0] = b_2[0, 1:, 1] = -math.inf  # only the first token attends to it
    y = agent(q, k, v, b_1, b_2, grid=(1, 4), bins=two)
    assert_equal(y, one_head((8 + 16 + 24 + 160) / 8, first, first, first))


def test_weights_are_a_product_of_two_that_sum_to_one():
    weights = agent(Q, K, identity(N), B_1, B_2, grid=GRID, bins=SIX)
    assert (weights > 0).all()
    assert_equal(weights.sum(-1), torch.ones(B, h, N, dtype=torch.float64))
    assert (torch.linalg.matrix_rank(weights, rtol=1e-12) == 6).all()


def test_one_agent_gives_every_token_the_same():
    one = bins(GRID, (1, 1), CPU)
    y = agent(Q, K, V, B_1[:, :1], B_2[..., :1], grid=GRID, bins=one)
    mean = (Q.mean(2, keepdim=True) @ K.mT / d**0.5 + B_1[:, :1]).softmax(-1) @ V
    assert_equal(y, mean.expand_as(y))


def test_agents_that_are_the_queries_are_softmax_only_where_each_attends_to_itself():
    """Queries have equal norms, and the temperature is near zero."""
    q, every = F.normalize(Q, dim=-1), bins(GRID, GRID, CPU)
    none = torch.zeros(h, N, N, dtype=torch.float64)
    exact = softmax(q, K, V)
    own = 1e6 * torch.eye(N, dtype=torch.float64).expand(h, N, N)
    assert_equal(agent(q, K, V, none, own, grid=GRID, bins=every), exact)
    assert (agent(q, K, V, none, none, grid=GRID, bins=every) - exact).abs().max() > 0.05


@every_grid
def test_a_reduction_by_averaging_attends_to_averages(grid):
    """The agents stay those of the grid, and tables of biases stretch over the shrunk grid for their own attention."""
    four, small = {"num_landmarks": 4}, (grid[0] // 2, grid[1] // 2)
    attn, whole = layer("agent", grid, **four, reduction=2), layer("agent", grid, **four)
    average(attn)
    whole.load_state_dict({key: x for key, x in attn.state_dict().items() if key in whole.state_dict()})
    x = draw(B, grid[0] * grid[1], h * d)
    q, k, v = whole.project(x, grid)
    k, v = (group_mean(part, bins(grid, small, CPU))[:, :, 0] for part in (k, v))
    of_agents, of_tokens = attn.biases(small)[0], attn.biases(grid)[1].mT
    y = agent(q, k, v, of_agents, of_tokens, grid=grid, bins=attn.bins(grid, CPU))
    image = F.interpolate(v.mT.flatten(0, 1).unflatten(2, small), grid, mode="bilinear").flatten(2).unflatten(0, (B, h))
    y = y + attn.local_term.convolve(image.mT, grid)
    assert_equal(attn(x, grid), attn.output(y, x))


def test_biases_are_those_of_image_row_and_column():
    attn = layer("agent", (7, 7), **FEW, num_prefix_tokens=1)
    tables = (attn.image_positions, attn.row_positions, attn.column_positions)
    image, row, column = (x.table.unflatten(0, (2, h, 6)) for x in tables)
    b = attn.biases((7, 7))
    assert b.shape == (2, h, 6, 50)
    assert_equal(b[..., 0], attn.prefix_bias.unflatten(0, (2, h, 6))[..., 0])
    for y, x in ((0, 0), (2, 5), (6, 1)):
        assert_equal(b[..., 1 + 7 * y + x], image[..., 7 * y + x] + row[..., y] + column[..., x])


def test_biases_of_prefix_tokens_start_near_zero():
    attn = create_attention("agent", dim=24, num_heads=3, grid=(7, 7), num_prefix_tokens=1, **FEW)
    assert attn.prefix_bias.abs().max() < 0.2


def test_biases_of_another_grid_are_resampled():
    """Twice as many rows still ascend, and columns are unchanged."""
    attn = layer("agent", (5, 7), **FEW)
    with torch.no_grad():
        for positions in (attn.image_positions, attn.column_positions):
            positions.table.zero_()
        attn.row_positions.table.copy_(torch.arange(5.0).expand(24, -1))
    b = attn.biases((10, 7)).unflatten(-1, (10, 7))
    assert_equal(b[..., :1].expand_as(b), b)
    assert_equal(b[0, 0, 0, 1:-1, 0].diff(), torch.full((7,), 0.5, dtype=torch.float64))
