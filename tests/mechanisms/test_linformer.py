"""Linformer."""

import copy
from functools import partial

import torch

from attention.mechanisms.linformer import linformer
from attention.mechanisms.softmax import softmax
from attention.parts.geometry import resample
from attention.parts.groups import group_mean
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import averaging, draw, every_grid, layer, tokens

case = partial(Case, "linformer", (5, 7), mixes_values=False)
FEW = {"num_landmarks": 6}

CASES = [
    case(FEW),
    case({**FEW, "sharing": "kv"}),
    case({**FEW, "sharing": "none"}),
    case({**FEW, "sharing": "layers"}),
    case({**FEW, **PREFIX}),
]
EFFECTS = {"num_landmarks": ({}, 6), "sharing": ({}, "kv"), "attn_drop": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [(set(), FEW)]  # the projection depends on every position
SYMBOLS = {"c": 49}
LEARNED = {"projection"}


@every_grid
def test_linformer_limits(grid):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    assert_equal(linformer(q, k, v, torch.eye(N, dtype=torch.float64)[None, None]), softmax(q, k, v))
    groups, matrix = averaging(grid)
    assert_equal(linformer(q, k, v, matrix), softmax(q, *(group_mean(x, groups)[:, :, 0] for x in (k, v))))


def test_the_identity_is_softmax_over_prefix_tokens_too():
    GRID, N, P = (4, 6), 24, 2
    attn = Case("linformer", GRID, {"num_landmarks": N, **PREFIX}).build()
    softmax, x = Case("softmax", GRID, PREFIX).build(), draw(2, P + N, 12)
    softmax.load_state_dict(attn.state_dict(), strict=False)
    with torch.no_grad():
        attn.projection.copy_(torch.eye(N).expand_as(attn.projection))
    assert_equal(attn(x, GRID), softmax(x, GRID))


def test_layers_share_one_projection():

    from models import create_model

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_classes": 2}
    model = create_model("deit", {"name": "linformer", "num_landmarks": 5, "sharing": "layers"}, **options)
    model = copy.deepcopy(model)  # as a weight average does
    names = [name for name in model.state_dict() if "projection" in name]
    assert names == ["blocks.0.attn.projection"]
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    with torch.no_grad():
        model.blocks[0].attn.projection.zero_()
    attention = [block.attn for block in model.blocks]
    assert all(attn.owner[0] is attention[0] for attn in attention)
    assert not torch.allclose(model(images), before)
    assert attention[2](torch.randn(2, 16, 24), (4, 4)).std(1).max() < 1e-6  # all keys and values are zero
    other = create_model("deit", {"name": "linformer", "num_landmarks": 5, "sharing": "layers"}, **options)
    assert other.blocks[0].attn.projection is not attention[0].projection
    stages = create_model("pvtv2_b0", {"name": "linformer", "sharing": "layers"}, img_size=64).stages
    assert [sum("projection" in name for name in stage.state_dict()) for stage in stages] == [1, 1, 1, 0]


@every_grid
def test_resampling_keeps_averages_and_smooth_images(grid):
    """A mean over all tokens remains a mean on any grid, and a linear ramp a ramp (inside, away from the borders)."""
    q, k, v = tokens((7, 5))
    attn = layer("linformer", grid, num_landmarks=1, sharing="kv")
    with torch.no_grad():
        attn.projection.fill_(1 / (grid[0] * grid[1]))
    assert_equal(attn.attend(q, k, v, (7, 5)), v.mean(2, keepdim=True).expand_as(v))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    ramp = (2 * y + 3 * x + 1).flatten()[None]
    fine = resample(ramp, grid, (2 * grid[0], 2 * grid[1])).view(2 * grid[0], 2 * grid[1])
    y, x = torch.meshgrid(*(torch.arange(2 * n, dtype=torch.float64) / 2 - 0.25 for n in grid), indexing="ij")
    assert_equal(fine[1:-1, 1:-1], (2 * y + 3 * x + 1)[1:-1, 1:-1])
    assert resample(ramp, grid, grid) is ramp
