"""Key masks: masked tokens have the effect of absent tokens, or the mechanism refuses a mask and states why."""

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import ATTENTION, AttentionFactory, Grid, kernels
from attention.parts import transforms
from attention.parts.geometry import Windows
from attention.parts.groups import Groups
from tests.support.calls import capture_op
from tests.support.cases import Case
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.facts import CASES


def refusal(name: str) -> str | None:
    """Why the mechanism with default options refuses key masks; None if it takes them."""
    return ATTENTION[name].refuses_key_mask(AttentionFactory.from_options(name).config)


MASKED = [
    case
    for case in CASES
    if refusal(case.name) is None and "reduction" not in case.options  # a convolution of all tokens
]
REFUSED = [name for name in ATTENTION if refusal(name) is not None]
OF_A_SET = {
    *("softmax", "performer", "linear", "xca", "cosformer", "transnormer", "t2r", "rfa", "dpfp", "abc"),
    *("efficient", "hydra", "relu_linear", "identity", "mean"),
}
"""Mechanisms that depend at most on the order of tokens, not on their positions in the grid."""
one_case_of_each = pytest.mark.parametrize(  # the stress suite takes every case
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.stress] * (case.name == before.name))
        for before, case in itertools.pairwise([CASES[-1], *MASKED])
    ],
)


def masks(grid: Grid) -> Tensor:
    """Masks of two images, (2, N): one with holes and no token in the first window and group; one padded."""
    holes = torch.rand(grid, generator=torch.Generator().manual_seed(5)) > 0.4
    holes[0], holes[tuple(slice(4) for _ in grid)], holes[tuple(-1 for _ in grid)] = False, False, True
    smaller = torch.zeros(grid, dtype=torch.bool)
    smaller[: grid[0] - 2, ..., : grid[-1] - 1] = True
    return torch.stack([holes, smaller]).flatten(1)


def with_prefix(case: Case, key_mask: Tensor) -> Tensor:
    """The mask with prefix tokens, which always count, before the tokens of the grid."""
    return F.pad(key_mask, (case.options.get("num_prefix_tokens", 0), 0), value=True)


def leaf(x):
    floating = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().clone().requires_grad_() if floating else x


def of_image(value, b: int):
    """Arguments of a twin for one image of two: its tokens, and windows and groups without masked tokens."""
    if isinstance(value, Windows) and value.key_mask is not None:
        return value._replace(key_mask=value.key_mask[b, None])
    if isinstance(value, Groups):
        return value._replace(valid=value.valid[b, 0])
    return value[b, None] if isinstance(value, Tensor) and value.shape[0] == 2 else value


def taken(x: Tensor | None, keep: Tensor, axis: int) -> Tensor | None:
    """Entries of x that `keep` selects along the axis, counted from the last; x itself if its length differs."""
    of_each = isinstance(x, Tensor) and x.dim() >= axis and x.shape[-axis] == len(keep)
    return x.movedim(-axis, 0)[keep].movedim(0, -axis) if of_each else x


def without_masked(name: str, args: list, options: dict, b: int) -> tuple[list, dict]:
    """Arguments of an op for image b without a mask: the masked tokens, and the landmarks of segments with only masked
    tokens, are removed.
    """
    keep, filled = options.pop("key_mask")[b], options.pop("filled", None)
    queries = keep[-args[0].shape[2] :]
    args[:3] = [taken(x, keep if i else queries, 2) for i, x in enumerate(args[:3])]  # q, k, v, or v alone
    if name in ("abc", "vittt"):
        args[3] = taken(args[3], keep, 2)
    if name == "ra":
        args[3:] = taken(args[3], keep, 3), taken(args[4], keep, 2)
    if name == "lara" and filled is not None:
        args[3:] = (taken(x, filled[b], axis) for x, axis in zip(args[3:], (2, 2, 3, 2), strict=True))
    if "grid" in options:
        (H, W), n = options["grid"], int(queries.sum())
        options["grid"] = (1, n) if H == 1 else (H - 2, W - 1)
    return args, options


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.stress)], ids=["train", "eval"])
@one_case_of_each
def test_masked_op_is_its_twin_without_the_masked_tokens(case, training):
    """Values and all gradients are equal; gradients of masked tokens are zero."""
    key_mask = masks(case.grid)
    attn = case.build().train(training)
    op, args, options = capture_op(case, attn, case.tokens(), key_mask)
    args, twin = [leaf(x) for x in args], getattr(sys.modules[op.__module__], f"{op.__name__}_reference")
    probe = torch.randn((y := op(*args, **options)).shape, dtype=torch.float64)
    counts = with_prefix(case, key_mask)[:, -y.shape[2] :]
    on_grid = min(options.get("grid", (1, 1))) > 1  # on a grid, holes keep their positions
    images = [1] if on_grid else [0, 1]
    total, total_twin = 0, 0
    for b in images:
        own, own_options = [of_image(x, b) for x in args], {key: of_image(x, b) for key, x in options.items()}
        removed = "key_mask" in options
        if removed:
            own, own_options = without_masked(case.name, own, {**options}, b)
        expected = twin(*own, **own_options)
        expected = expected if removed else expected[:, :, counts[b]]
        result, weight = y[b, None][:, :, counts[b]], probe[b, None][:, :, counts[b]]
        torch.testing.assert_close(result, expected, rtol=FP64, atol=FP64)
        total, total_twin = total + (result * weight).sum(), total_twin + (expected * weight).sum()
    inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    gradients, gradients_twin = (torch.autograd.grad(t, inputs, allow_unused=True) for t in (total, total_twin))
    for gradient, expected, x in zip(gradients, gradients_twin, inputs, strict=True):
        gradient, expected = (torch.zeros_like(x) if g is None else g for g in (gradient, expected))
        torch.testing.assert_close(gradient, expected, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


ANY = torch.rand(24, generator=torch.Generator().manual_seed(6)) > 0.4
PADDED, LAST_OF_SIX = torch.arange(24) < 18, torch.arange(24) % 6 < 5
WINDOWS = {"window_size": 6, "layout": "1d", "position_bias": "none"}
IN_PLACES = {"depth", "local", "scales"}  # options of windows, and of convolutions
REMOVED = [
    *(
        (case.name, case.options, {}, ANY)
        for case in MASKED
        if case.name in OF_A_SET and not IN_PLACES & case.options.keys()
    ),
    *((name, {"local": True}, {}, PADDED) for name in ("efficient", "hydra", "relu_linear", "linear", "performer")),
    ("relu_linear", {"scales": (3,)}, {}, PADDED),
    ("softmax", {"causal": True}, {}, ANY),
    ("cosformer", {"layout": "2d"}, {}, ANY),
    ("ra", {"proposal": "biased"}, {}, ANY),
    ("ra", {"proposal": "mean_key"}, {}, ANY),
    # windows from the first token on; windows and groups without a token vanish
    *(("local", {**WINDOWS, "window_size": 8, **options}, {}, PADDED) for options in ({}, {"overlap": 3})),
    ("local", {"window_size": 7, "layout": "1d", "causal": True}, {}, PADDED),
    *(("transnormer", {"window_size": 4, "depth": 2, "variant": variant}, {}, PADDED) for variant in ("t1", "t2")),
    *(("combiner", {**WINDOWS, **options}, {}, PADDED) for options in ({}, {"pool": "mean"}, {"causal": True})),
    ("transformer_ls", {**WINDOWS, "num_landmarks": 3}, {}, PADDED),
    *(
        ("scatterbrain", {**WINDOWS, **options}, {}, PADDED)
        for options in ({}, {"overlap": 2}, {"overlap": 2, "causal": True})
    ),
    ("eva", {"window_size": 7, "layout": "1d", "num_landmarks": 0}, {}, PADDED),
    ("eva", {"window_size": 7, "layout": "1d", "num_landmarks": 4}, {"num_landmarks": 3}, PADDED),
    ("eva", {**WINDOWS, "num_landmarks": 4, "causal": True}, {"num_landmarks": 3}, PADDED),
    ("eva", {**WINDOWS, "num_landmarks": 4, "pool": "max", "local": True}, {"num_landmarks": 3}, PADDED),
    ("lara", {"num_landmarks": 4, "local": True}, {"num_landmarks": 3}, PADDED),
    ("lara", {"num_landmarks": 4, "proposal": "mixture", "weighting": "coupled"}, {"num_landmarks": 3}, PADDED),
    # one token of every window and group is gone
    ("eva", {**WINDOWS, "num_landmarks": 4}, {"window_size": 5}, LAST_OF_SIX),
    ("eva", {**WINDOWS, "num_landmarks": 4, "causal": True, "log_count": True}, {"window_size": 5}, LAST_OF_SIX),
    ("eva", {"window_size": 0, "num_landmarks": 4, "num_samples": 2}, {}, LAST_OF_SIX),
    ("lara", {"num_landmarks": 4}, {}, LAST_OF_SIX),
    ("lara", {"num_landmarks": 4, "proposal": "single"}, {}, LAST_OF_SIX),
    ("lara", {"num_landmarks": 4, "proposal": "attended_keys", "num_prefix_tokens": 2}, {}, LAST_OF_SIX),
]


@pytest.mark.parametrize(
    ("name", "options", "other", "key_mask"),
    REMOVED,
    ids=lambda x: f"{int(x.sum())}-tokens" if isinstance(x, Tensor) else str(x),
)
def test_a_sequence_with_masked_tokens_is_the_sequence_without_them(name, options, other, key_mask):
    n, case = int(key_mask.sum()), Case(name, (1, 24), options)
    attn, shorter = case.build().eval(), Case(name, (1, n), {**options, **other}).build().eval()
    shorter.load_state_dict(attn.state_dict())
    x, counts = case.tokens(), with_prefix(case, key_mask[None])[0]
    y = attn(x, (1, 24), key_mask.expand(2, -1))
    torch.testing.assert_close(y[:, counts], shorter(x[:, counts], (1, n)), rtol=1e-12, atol=1e-12)


SIZES = (9, 14), (14, 7), (13, 11)
"""Images of several sizes, padded to 14 x 14."""


@pytest.mark.parametrize("name", dict.fromkeys(case.name for case in MASKED))
def test_a_padded_image_is_itself_alone_but_for_the_mechanisms_that_the_page_names(name):
    """At default options. All layers of a network, where they differ."""
    page = (Path(__file__).parents[2] / "docs/integration.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page.partition("what belongs to the padded grid")[2].partition("\n\n")[0], re.M)
    named, errors = {name for row in rows for name in re.findall(r"`(\w+)`", row)}, []
    assert named <= ATTENTION.keys()
    for layer in range(2):
        attn = Case(name, (14, 14)).build(layer=layer, depth=2).eval()
        images = [torch.randn(1, *size, 12, dtype=torch.float64) for size in SIZES]
        x, mask = torch.zeros(len(SIZES), 14, 14, 12, dtype=torch.float64), torch.zeros(len(SIZES), 14, 14, dtype=bool)
        for b, (H, W) in enumerate(SIZES):
            x[b, :H, :W], mask[b, :H, :W] = images[b], True
        y = attn(x.flatten(1, 2), (14, 14), mask.flatten(1)).view_as(x)
        for b, (H, W) in enumerate(SIZES):
            errors.append((y[b, :H, :W].flatten(0, 1) - attn(images[b].flatten(1, 2), (H, W))[0]).abs().max().item())
    if name in named:
        assert max(errors) > 1e-3
    else:
        assert max(errors) < 1e-12


@one_case_of_each
def test_masked_tokens_have_no_effect_no_gradient_and_outputs_of_zero(case):
    """This holds even for NaN, and for an image in which no token counts."""
    attn, key_mask = case.build(), F.pad(masks(case.grid), (0, 0, 0, 1))
    counts, x = with_prefix(case, key_mask), case.tokens(batch=3)
    results = []
    for content, upstream in ((torch.nan, 1.0), (7.0, -5.0)):
        tokens = torch.where(counts[..., None], x, content).requires_grad_()
        torch.manual_seed(0)
        y = attn(tokens, case.grid, key_mask)
        y.backward(torch.where(counts[..., None], x, upstream))
        assert not y[~counts].any()
        assert not tokens.grad[~counts].any()
        results.append([y, tokens.grad, *(p.grad for p in attn.parameters() if p.grad is not None)])
        attn.zero_grad()
    for result, other in zip(*results, strict=True):
        assert result.isfinite().all()
        assert torch.equal(result, other)


@one_case_of_each
def test_a_mask_of_ones_is_none(case):
    attn, x = case.build().eval(), case.tokens()
    ones = torch.ones_like(masks(case.grid))
    torch.testing.assert_close(attn(x, case.grid, ones), attn(x, case.grid), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.stress)], ids=str)
@one_case_of_each
def test_half_types_are_finite(case, dtype):
    attn, x = case.build(torch.float32), (30 if case.bounded else 1) * case.tokens(torch.float32, batch=3)
    key_mask = F.pad(masks(case.grid), (0, 0, 0, 1))
    with torch.autocast("cpu", dtype):
        y = attn(x, case.grid, key_mask)
    assert y.isfinite().all()
    y.float().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attn.parameters() if parameter.grad is not None)
    assert attn.to(dtype)(x.to(dtype), case.grid, key_mask).isfinite().all()


@one_case_of_each
def test_no_path_ignores_a_mask(case, monkeypatch):
    attn, x, key_mask, results = case.build().eval(), case.tokens(), masks(case.grid), []
    for path in ("plain", "auto"):
        with kernels.use(path), monkeypatch.context() as patch:
            patch.setattr(transforms, "by_definition", True)  # torch's softmax attention rounds alike on all paths
            results.append(attn(x, case.grid, key_mask))
    assert torch.equal(results[0], results[1])


@pytest.mark.stress
@one_case_of_each
def test_masks_compile_into_one_graph(case):
    torch.compiler.reset()
    attn, x, key_mask = case.build().eval(), case.tokens(), masks(case.grid)
    compiled = torch.compile(attn, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(compiled(x, case.grid, key_mask), attn(x, case.grid, key_mask))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_reason(name):
    reason = refusal(name)
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(ValueError, match=rf"attention\({name}\): takes no key_mask: {reason}"):
        case.build()(case.tokens(), case.grid, masks(case.grid))


@pytest.mark.parametrize(
    ("key_mask", "got"),
    [
        (torch.ones(2, 35, dtype=torch.int64), r"torch.int64 \(2, 35\)"),
        (torch.ones(2, 34, dtype=torch.bool), r"torch.bool \(2, 34\)"),
        (torch.ones(1, 35, dtype=torch.bool), r"torch.bool \(1, 35\)"),
    ],
    ids=["type", "tokens", "images"],
)
def test_masks_of_another_type_or_shape_are_refused(key_mask, got):
    case = Case("softmax", (5, 7))
    message = rf"attention\(softmax\): got a key_mask of {got}; give torch.bool \(2, 35\), \(B, N\), true at"
    with pytest.raises(ValueError, match=message):
        case.build()(case.tokens(), (5, 7), key_mask)
