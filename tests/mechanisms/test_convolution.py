"""The local term by itself."""

from functools import partial

import torch

from attention.mechanisms.convolution import convolution
from attention.parts.local_term import LocalTerm
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, layer, one_head

case = partial(Case, "convolution", (5, 7), mixes_values=False)

CASES = [case(), case({"kernel_size": 3})]
EFFECTS = {"kernel_size": ({}, 3)}
SYMMETRIES = [(set(), {})]
REFUSED = [
    ({"kernel_size": 4}, r"attention\(convolution\).kernel_size = 4: must be odd; nearest valid: 3"),
    ({"kernel_size": 29}, r"attention\(convolution\).kernel_size = 29: .*; at most 27"),
]
LEARNED = {"filters"}
NO_MATRIX = "not linear"  # a bias is added

GRID = (6, 4)


def test_by_hand():
    """A row of three under the filter 1, 2, 3 and the bias 1; zeros beyond the grid."""
    filters = LocalTerm(1, 3).double()
    with torch.no_grad():
        filters.weight.zero_()[0, 0, 1] = torch.tensor([1.0, 2.0, 3.0])
        filters.bias.fill_(1)
    # 2 * 1 + 3 * 10; 1 + 2 * 10 + 3 * 100; 10 + 2 * 100; and 1
    assert_equal(convolution(one_head(1, 10, 100), filters, grid=(1, 3)), one_head(33, 322, 211))


def test_it_is_what_local_adds_to_a_mechanism():
    """Mean attention with the local term is mean attention and this one, of the same projections."""
    x, both = draw(B, 24, h * d), layer("mean", GRID, local=True)
    state = both.state_dict()
    mean, alone = layer("mean", GRID), layer("convolution", GRID)
    mean.load_state_dict({key: y for key, y in state.items() if not key.startswith("local_term")})
    alone.load_state_dict({key.replace("local_term", "filters"): y for key, y in state.items()})
    assert_equal(both(x, GRID) + both.proj.bias, mean(x, GRID) + alone(x, GRID))
