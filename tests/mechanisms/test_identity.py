"""Identity attention."""

from functools import partial

import torch

from attention.mechanisms.identity import identity
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, layer, one_head
from tests.support.symmetry import ALL

case = partial(Case, "identity")

CASES = [case((5, 7))]
EFFECTS = {}
SYMMETRIES = [(ALL, {})]
UNSIZED = True


def test_by_hand():
    assert_equal(identity(one_head(6, 12, 18)), one_head(6, 12, 18))


def test_a_layer_is_a_linear_map_of_every_token_by_itself():
    attn, x = layer("identity", (4, 6)), draw(B, 24, h * d)
    y = (x @ attn.qkv.weight.mT + attn.qkv.bias) @ attn.proj.weight.mT + attn.proj.bias
    assert_equal(attn(x, (4, 6)), y)
    jacobian = torch.autograd.functional.jacobian(lambda x: attn(x, (4, 6))[0].sum(-1), x[:1])[:, 0]  # (N, N, C)
    assert not jacobian[~torch.eye(24, dtype=torch.bool)].any()


def test_order_does_not_matter():
    """Patches may be left out of the input."""
    assert layer("identity", (4, 6)).ignores_order()
