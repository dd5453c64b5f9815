"""Bi-level routing attention."""

import math
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.bilevel_routing import bilevel_routing, route
from attention.mechanisms.local import local
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, under_mask
from tests.support.growth import Growth
from tests.support.inputs import CPU, d, draw, every_grid, h, identity, layer, one_head, tokens
from tests.support.symmetry import BLOCKS

# Products of means choose the regions.
case = partial(Case, "bilevel_routing")
FEW = {"num_regions": 3, "topk": 2}
THREE = {"num_regions": 2, "topk": 3}  # of four, of up to 3 x 4 tokens; rounding does not change the choice
GLOBAL = {"local": False}

CASES = [case((5, 7), THREE), case((6, 8), {"num_regions": 2, "topk": 1, **GLOBAL}), case((5, 7), {**THREE, **PREFIX})]
EFFECTS = effects(FEW, num_regions=2, topk=3, released=True, scale="dim", local=False, attn_drop=0.5)
SYMMETRIES = [(BLOCKS, {**FEW, **GLOBAL}), (set(), FEW)]
GROWTH = [Growth(2, 2, lambda side: {"num_regions": 2}), Growth(1, 1, lambda side: {"num_regions": side // 7})]
REFUSED = [({"num_regions": 3, "topk": 10}, r"attention\(bilevel_routing\).topk = 10: of 9 regions; at most so many")]
EVERYTHING = [{"num_regions": n, "topk": n * n, **GLOBAL} for n in (1, 2, 3)]
SYMBOLS = {"k": 4, "S": 7}
LEARNED = {"local_term"}
UNSIZED = True


def ours(w):
    """The module's filters may be smaller than ours."""
    rim = (5 - w["lepe.weight"].shape[-1]) // 2
    return {
        **{f"qkv.{name}": w[f"qkv.qkv.{name}"] for name in ("weight", "bias")},
        **{f"proj.{name}": w[f"wo.{name}"] for name in ("weight", "bias")},
        "local_term.weight": F.pad(w["lepe.weight"], (rim, rim, rim, rim)),
        "local_term.bias": w["lepe.bias"],
    }


VISION = {
    f"bilevel_routing_{grid}_n{n}_k{k}": ({"num_regions": n, "topk": k, "released": True}, ours)
    for grid, n, k in (("8x8", 4, 3), ("6x9", 3, 2))
}


def regions_of(grid, side: int) -> Windows:
    """Regions of `side` x `side` tokens."""
    return Windows(grid, (side, side))


def test_by_hand():
    """Four regions of one row, two tokens each: each attends to the one whose mean key is largest along its query."""
    q = one_head(1, 1, -1, -1, 2, 2, 0.5, 0.5)
    k = one_head(0, 0, math.log(3), math.log(9), -1, -3, 0, 1)
    v = one_head(0, 0, 10, 30, 50, 70, 0, 0)
    y = bilevel_routing(q, k, v, regions=Windows((1, 8), (1, 2)), topk=1)
    negative = (50 * math.e + 70 * math.e**3) / (math.e + math.e**3)
    root = math.sqrt(3)  # weights 3 and 9 to the power of the query
    expected = [(10 + 90) / 4] * 2 + [negative] * 2 + [(10 + 270) / 10] * 2 + [(10 + 30 * root) / (1 + root)] * 2
    assert_equal(y, one_head(*expected))


@every_grid
def test_it_is_softmax_under_the_mask_of_the_routes(grid):
    q, k, v = tokens(grid)
    regions = regions_of(grid, 3)
    routes, own = route(q, k, regions, 2)[:, 0], [regions.index_of(n) for n in range(q.shape[2])]
    visible = (routes[:, own, None] == torch.tensor(own)[:, None]).any(-1)  # (B, N, N)
    assert_equal(bilevel_routing(q, k, v, regions=regions, topk=2), under_mask(q, k, v, visible[:, None]))
    weights = under_mask(q, k, identity(q.shape[2]), visible[:, None])
    assert ((weights > 0) == visible[:, None]).all()


@every_grid
def test_regions_like_themselves_alone_are_local_attention(grid):
    q, k, v = tokens(grid)
    regions = regions_of(grid, 2)
    own = torch.tensor([regions.index_of(n) for n in range(q.shape[2])])
    code = 4 * F.one_hot(own, num_classes=16).double().view(1, -1, h, d).transpose(1, 2).expand_as(q)
    q, k = q / 10 + code, k / 10 + code
    assert torch.equal(route(q, k, regions, 1)[0, 0, :, 0], torch.arange(regions.num_windows))
    assert_equal(bilevel_routing(q, k, v, regions=regions, topk=1), local(q, k, v, windows=regions))


def test_equal_regions_are_taken_in_their_order():
    """Regions of an image of one colour are equal; their order is the same on any device."""
    routes = route(torch.ones(1, h, 24, d), torch.ones(1, h, 24, d), regions_of((6, 4), 2), 3)
    assert torch.equal(routes, torch.arange(3).expand(1, 1, 6, 3))


def test_padding_has_no_part_in_means():
    """The corner token of a 3 x 5 grid is a region of its own, in which three of four positions are padding."""
    q, k = torch.ones(1, 1, 15, 1), torch.ones(1, 1, 15, 1)
    k[:, :, 14] = 2
    assert (route(q, k, regions_of((3, 5), 2), 1) == 5).all()


def test_heads_share_routes_and_the_released_temperature_is_that_of_all_channels():
    grid, x = (6, 4), draw(2, 24, h * d)
    plain, released = (layer("bilevel_routing", grid, **FEW, released=value) for value in (False, True))
    q, k, _ = plain.project(x, grid)
    assert_equal(released.project(x, grid)[0] * d**-0.5, q * (h * d) ** -0.5)
    merged = (y.transpose(1, 2).flatten(2)[:, None] for y in (q, k))
    regions = Windows(grid, (2, 2))
    assert torch.equal(route(q, k, regions, 2), route(*merged, regions, 2))
    assert regions.indices(CPU).shape == (6, 4)


@pytest.mark.complete
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_compiled_gradients_of_gathered_values():
    """`torch.compile` for a CPU has wrong ones, without a warning, if weights of a matrix product come from `split`."""
    code = f"from {__name__} import compare_compiled; compare_compiled()"  # by itself: inductor loads setuptools
    subprocess.run([sys.executable, "-c", code], check=True)


def compare_compiled():
    leaves, gradients = [draw(2, 2, 42, 8, seed=i).requires_grad_() for i in range(3)], []
    regions = Windows((6, 7), (2, 2))
    for function in (bilevel_routing, torch.compile(bilevel_routing)):
        y = function(*leaves, regions=regions, topk=6)
        gradients.append(torch.autograd.grad((y * draw(*y.shape, seed=3)).sum(), leaves))
    for gradient, expected in zip(*gradients, strict=True):
        assert_equal(gradient, expected)
