"""Prefix tokens (class token, registers): ordinary tokens to mechanisms without order, exact to all others."""

import pytest
import torch

from attention import ATTENTION, OptionError
from models import create_model
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.facts import CASES, rows
from tests.support.inputs import draw

GRID, P = (4, 6), 2
EXACT = [
    case for case in CASES if case.options.get("num_prefix_tokens") and ATTENTION[case.name].prefix_tokens == "exact"
]


@pytest.mark.parametrize("name", [name for name in ATTENTION if ATTENTION[name].prefix_tokens == "exact"])
def test_every_mechanism_that_is_not_plain_has_a_case(name):
    assert any(case.name == name for case in EXACT), f"tests/mechanisms/test_{name}.py: no case has prefix tokens"


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_prefix_tokens_attend_to_all_tokens_by_softmax(case):
    attn, x = case.build(), case.tokens()
    q, k, v, *_ = attn.project(x, case.grid)
    y = (q[:, :, :P] @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    assert_equal(attn(x, case.grid)[:, :P], attn.proj(y.transpose(1, 2).flatten(2)))
    if case.stock_keys:
        softmax = Case("softmax", case.grid, PREFIX).build()
        softmax.load_state_dict(attn.state_dict(), strict=False)
        assert_equal(attn(x, case.grid)[:, :P], softmax(x, case.grid)[:, :P])


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_every_token_attends_to_prefix_tokens_and_their_order_is_free(case):
    attn, x = case.build().eval(), case.tokens(batch=1).requires_grad_()
    y = attn(x, case.grid)
    probe = draw(*y.shape)
    attended = []
    for n in range(P, y.shape[1]):
        (gradient,) = torch.autograd.grad((y[:, n] * probe[:, n]).sum(), x, retain_graph=True)
        attended.append(gradient[0, :P].abs().amax(-1) > 1e-9)
    assert torch.stack(attended).all() if case.positive_weights else torch.stack(attended).any(0).all()
    order = torch.cat([torch.tensor([1, 0]), torch.arange(P, y.shape[1])])
    assert_equal(attn(x[:, order], case.grid), y[:, order])


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        (name, options, prefix)
        for name, options in rows("EVERYTHING")
        for prefix in ({}, PREFIX)
        if not (prefix and (options.get("causal") or ATTENTION[name].prefix_tokens != "exact"))
    ],
)
def test_what_attends_to_everything_is_softmax(name, options, prefix):
    causal = {"causal": options.get("causal", False)}
    attn, softmax = Case(name, GRID, {**options, **prefix}), Case("softmax", GRID, {**causal, **prefix})
    x, attn, softmax = attn.tokens(), attn.build().eval(), softmax.build()
    softmax.load_state_dict(attn.state_dict(), strict=False)
    assert_equal(attn(x, GRID), softmax(x, GRID))


@pytest.mark.parametrize("case", [case for case in EXACT if case.far_keys_vanish], ids=str)
def test_windows_landmarks_and_positions_are_the_grids_alone(case):
    """Prefix keys with zero weight change nothing."""
    attn, x = case.build().eval(), case.tokens()
    q, k, v, *others = attn.project(x, case.grid)
    q, k = (torch.cat([y[..., :-1], torch.ones_like(y[..., :1])], -1) for y in (q, k))
    k[:, :, :P] = torch.tensor([0.0, 0.0, 0.0, -1e4])
    queries = q[:, :, P:]
    assert_equal(
        attn.attend(queries, k, v, *others, case.grid),
        attn.attend(queries, k[:, :, P:], v[:, :, P:], *others, case.grid),
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_deit_with_all_prefix_tokens_takes_every_mechanism_that_declares_them(name):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    options |= {"attention": name, "class_token": True, "dist_token": True, "reg_tokens": 1}
    if ATTENTION[name].prefix_tokens == "refused":
        with pytest.raises(OptionError, match=rf"\({name}\) takes no prefix tokens, and num_prefix_tokens = 3; set"):
            create_model("deit", **options)
        return
    model = create_model("deit", **options)
    images = torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    assert features.shape == (2, 3 + 64, 12)
    logits = model(images)
    logits.square().sum().backward()
    for parameter in (model.cls_token, model.dist_token, model.reg_token):
        assert parameter.grad.abs().sum() > 0
    assert logits.shape == (2, 5)
