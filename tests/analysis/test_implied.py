"""Implied attention matrices act on values as the literal twins do; a mechanism without one is refused."""

import inspect
import sys

import pytest
import torch

from analysis.implied import NoMatrix, attention_inputs, implied_matrix
from attention import ATTENTION
from attention.mechanisms.softmax import softmax_reference
from models import create_model
from tests.support.calls import capture_op
from tests.support.cases import PREFIX, Case
from tests.support.facts import CASES, stated

WITHOUT = stated("NO_MATRIX")
FIRST = {case.name: case for case in reversed(CASES)}
"""A case of every mechanism."""


def implied(case: Case, **context):
    attn = case.build(**context).eval()
    x = torch.randn(2, case.num_tokens(case.grid) + attn.num_prefix_tokens, attn.proj.in_features, dtype=torch.float64)
    with torch.no_grad():
        projected = attn.project(x, case.grid)
        return implied_matrix(attn, projected, case.grid), projected, attn.attend_all(projected, case.grid)


@pytest.mark.parametrize("prefix", [{}, PREFIX], ids=["", "prefix"])
def test_softmax_gives_its_weights(prefix):
    matrix, (q, k, _), _ = implied(Case("softmax", (3, 5)), **prefix)
    torch.testing.assert_close(matrix, (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), rtol=0, atol=1e-9)


def test_performer_gives_the_matrix_of_its_twin():
    case = Case("performer", (3, 5), {"num_samples": 7})
    matrix, (q, k, _), _ = implied(case)
    omega, (q, k) = case.build().omega, (x * x.shape[-1] ** -0.25 for x in (q, k))
    features = [torch.exp(x @ omega.mT - x.square().sum(-1, keepdim=True) / 2) for x in (q, k)]
    kernel = features[0] @ features[1].mT
    torch.testing.assert_close(matrix, kernel / kernel.sum(-1, keepdim=True), rtol=0, atol=1e-9)


def test_prefix_tokens_of_a_window_attend_to_all_and_are_attended_to():
    matrix, (q, k, _), _ = implied(Case("local", (4, 6), {"window_size": 2}), **PREFIX)
    torch.testing.assert_close(matrix[:, :, :2], (q[:, :, :2] @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
    assert (matrix[:, :, 2:, :2] > 0).all()
    assert ((matrix[:, :, 2:, 2:] > 0).sum(-1) == 4).all()


@pytest.mark.parametrize("name", ATTENTION)
def test_the_matrix_is_that_of_the_literal_twin_or_the_refusal_says_why(name):
    """Twin and matrix give the same outputs for random values, as no other matrix would."""
    case = FIRST[name]
    if name in WITHOUT:
        with pytest.raises(NoMatrix, match=rf"attention\({name}\) has no .*{WITHOUT[name]}"):
            implied(case)
        return
    attn, x = case.build().eval(), case.tokens()
    op, args, options = capture_op(case, attn, x)
    twin, projected = getattr(sys.modules[op.__module__], f"{op.__name__}_reference"), attn.project(x, case.grid)
    if "sra" in name:  # the op makes keys and values, which softmax attends to
        twin, args, options = softmax_reference, projected, {}
    place = list(inspect.signature(twin).parameters).index("v")
    values = torch.randn_like(args[place])
    with torch.no_grad():
        matrix = implied_matrix(attn, projected, case.grid)
        expected = twin(*args[:place], values, *args[place + 1 :], **options)
    torch.testing.assert_close(matrix @ values, expected, rtol=0, atol=1e-9)


def test_noise_of_training_is_the_same_for_all_columns():
    case = FIRST["lara"]
    attn = case.build().train()
    q, k, v = (torch.randn(1, attn.num_heads, case.num_tokens(case.grid), attn.head_dim).double() for _ in "qkv")
    state = torch.get_rng_state()
    matrix = implied_matrix(attn, (q, k, v), case.grid)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(matrix @ v, attn.attend_all((q, k, v), case.grid), rtol=0, atol=1e-9)


def test_layers_are_seen_in_their_order_and_left_as_they_were():
    model = create_model("deit", img_size=8, patch_size=4, embed_dim=8, num_heads=2, depth=2, num_classes=3).eval()
    images = torch.randn(1, 3, 8, 8)
    layers, logits = attention_inputs(model, images)
    assert [(layer.layer, layer.grid) for layer in layers] == [(block.attn, (2, 2)) for block in model.blocks]
    torch.testing.assert_close(logits, model(images))
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)
