"""Prefix tokens (class token, registers): ordinary tokens to mechanisms without order, exact to all others."""

import pytest
import torch

from attention import ATTENTION, OptionError
from models import create_model
from tests.support.cases import CASES, PREFIX, Case
from tests.support.identities import assert_equal, draw

GRID, P = (4, 6), 2
N = GRID[0] * GRID[1]
EXACT = [case for case in CASES if case.options.get("num_prefix_tokens") and not ATTENTION[case.name].plain_prefix]
FREE = {"position_bias": "none"}


def test_every_mechanism_that_is_not_plain_has_a_case():
    assert {case.name for case in EXACT} == {name for name in ATTENTION if not ATTENTION[name].plain_prefix}


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_prefix_tokens_attend_to_all_tokens_by_softmax(case):
    attn, x = case.build(), case.tokens()
    q, k, v, *_ = attn.project(x, case.grid)
    y = (q[:, :, :P] @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    assert_equal(attn(x, case.grid)[:, :P], attn.proj(y.transpose(1, 2).flatten(2)))
    if case.name not in ("sra", "linear_sra", "reformer", "transformer_ls"):  # keys or values that are not qkv's alone
        softmax = Case("softmax", case.grid, PREFIX).build()
        softmax.load_state_dict(attn.state_dict(), strict=False)
        assert_equal(attn(x, case.grid)[:, :P], softmax(x, case.grid)[:, :P])


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_every_token_sees_prefix_tokens_and_their_order_is_free(case):
    attn, x = case.build().eval(), case.tokens(batch=1).requires_grad_()
    y = attn(x, case.grid)
    probe = draw(*y.shape)
    seen = []
    for n in range(P, y.shape[1]):
        (gradient,) = torch.autograd.grad((y[:, n] * probe[:, n]).sum(), x, retain_graph=True)
        seen.append(gradient[0, :P].abs().amax(-1) > 1e-9)
    rectified = case.name in ("cosformer", "transnormer")  # weights that can be 0
    assert torch.stack(seen).any(0).all() if rectified else torch.stack(seen).all()
    order = torch.cat([torch.tensor([1, 0]), torch.arange(P, y.shape[1])])
    assert_equal(attn(x[:, order], case.grid), y[:, order])


EVERYTHING = [  # options under which every token sees every token exactly
    ("local", {"window_size": 6, **FREE}),
    ("eva", {"window_size": 6, "num_landmarks": 0, **FREE}),
    ("eva", {"window_size": 6, "num_landmarks": 4, "partition": "mask", **FREE}),
    ("eva", {"window_size": 0, "num_landmarks": N, "landmark_transform": "identity", "mu": "zero"}),
    ("combiner", {"window_size": 6, **FREE}),
    ("transformer_ls", {"window_size": 6, "num_landmarks": 0, "dual_norm": False, **FREE}),
    ("scatterbrain", {"window_size": 6, **FREE}),
    ("scatterbrain", {"layout": "1d", "window_size": N, "support": "lsh", **FREE}),
    ("transnormer", {"window_size": 6, "depth": 2}),
    ("sra", {"reduction": 1}),
    ("longformer", {"radius": N}),
    ("longformer", {"radius": 0, "num_global": N}),
    ("sparse_transformer", {"block_size": N}),
    ("sparse_transformer", {"block_size": 4, "num_summary": 4}),
    ("bigbird", {"block_size": 4, "num_random": 6}),
    ("nystrom", {"num_landmarks": N, "conv": "none", "pinv_iterations": 40}),
]


@pytest.mark.parametrize(("name", "options"), EVERYTHING)
def test_what_sees_everything_is_softmax_over_prefix_tokens_too(name, options):
    attn, softmax = (Case(mechanism, GRID, {**own, **PREFIX}) for mechanism, own in ((name, options), ("softmax", {})))
    x, attn, softmax = attn.tokens(), attn.build().eval(), softmax.build()
    softmax.load_state_dict(attn.state_dict(), strict=False)
    assert_equal(attn(x, GRID), softmax(x, GRID))


def test_linformer_with_the_identity_is_softmax():
    attn = Case("linformer", GRID, {"num_landmarks": N, **PREFIX}).build()
    softmax, x = Case("softmax", GRID, PREFIX).build(), draw(2, P + N, 12)
    softmax.load_state_dict(attn.state_dict(), strict=False)
    with torch.no_grad():
        attn.projection.copy_(torch.eye(N).expand_as(attn.projection))
    assert_equal(attn(x, GRID), softmax(x, GRID))


def test_synthesizer_without_factors_averages_prefix_tokens_too():
    attn, x = Case("synthesizer", GRID, PREFIX).build(), draw(2, P + N, 12)
    with torch.no_grad():
        attn.factors.zero_()
    v = attn.qkv(x)
    assert_equal(attn(x, GRID), attn.proj(v.mean(1, keepdim=True).expand_as(v)))


@pytest.mark.parametrize("case", [case for case in EXACT if case.name != "transnormer"], ids=str)
def test_windows_landmarks_and_places_are_the_grids_alone(case):
    """Prefix keys of no weight change nothing (elu + 1, of TransNormer, gives every key some)."""
    attn, x = case.build().eval(), case.tokens()
    q, k, v, *others = attn.project(x, case.grid)
    q, k = (torch.cat([y[..., :-1], torch.ones_like(y[..., :1])], -1) for y in (q, k))
    k[:, :, :P] = torch.tensor([0.0, 0.0, 0.0, -1e4])
    cells = q[:, :, P:]
    assert_equal(
        attn.attend(cells, k, v, *others, case.grid), attn.attend(cells, k[:, :, P:], v[:, :, P:], *others, case.grid)
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_deit_with_class_token_and_registers_takes_any_mechanism(name):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = create_model("deit", attention=name, class_token=True, reg_tokens=2, **options)
    images = torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    assert features.shape == (2, 3 + 64, 12)
    logits = model(images)
    logits.square().sum().backward()
    for parameter in (model.cls_token, model.reg_token):
        assert parameter.grad.abs().sum() > 0
    assert logits.shape == (2, 5)


def test_causal_attention_refuses_prefix_tokens():
    with pytest.raises(OptionError, match=r"attention\(softmax\).causal = True: prefix tokens see every token"):
        create_model("deit", attention={"name": "softmax", "causal": True}, class_token=True)
