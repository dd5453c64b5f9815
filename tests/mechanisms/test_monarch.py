"""MonarchAttention."""

import itertools
from functools import partial

import pytest
import torch

from attention.mechanisms.monarch import monarch, monarch_reference
from attention.mechanisms.softmax import softmax
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import B, draw, h, shuffled, tokens

case = partial(Case, "monarch", (5, 7))

CASES = [case(), case({"steps": 1}), case({"steps": 3, "local": True}, mixes_values=False), case(PREFIX)]
CASES += [Case("monarch", (2, 17)), Case("monarch", (17, 2))]  # rows of 16 and more are not widened
EFFECTS = {"steps": ({}, 3), "local": ({}, True)}
SYMMETRIES = [(set(), {}), (set(), {"local": True})]
GROWTH = [Growth(1.5, 1.5)]
SYMBOLS = {"t": 2, "H": lambda N: N**0.5, "W": lambda N: N**0.5}
UNSIZED = True
VISION = {
    f"monarch_5x7_t{steps}": ({"steps": steps}, lambda w: {k: x for k, x in w.items() if k != "in.x"})
    for steps in (1, 3)
}

GRID, (H, W) = (6, 4), (6, 4)
Q, K, V = tokens(GRID)


@pytest.mark.parametrize("grid", [(1, 24), (24, 1)])
def test_one_row_or_one_column_is_softmax_attention(grid):
    assert_equal(monarch(Q, K, V, grid=grid, steps=1), softmax(Q, K, V))


def test_it_is_exact_if_the_choice_of_a_key_in_a_row_depends_on_the_column_of_the_query_alone():
    """Logits f(l, j, k) + g(j, k, i): the probability of key i given row k is the same for all queries of column j."""
    of_column = torch.eye(W, dtype=torch.float64).expand(B, h, H, W, W)
    q = torch.cat([draw(B, h, H, 1, 8).expand(-1, -1, -1, W, -1), of_column], -1).flatten(2, 3)
    k = torch.cat([draw(B, h, H, 1, 8, seed=6).expand(-1, -1, -1, W, -1), draw(B, h, H, W, W, seed=7)], -1).flatten(
        2, 3
    )
    assert_equal(monarch(q, k, V, grid=GRID, steps=1), softmax(q, k, V))
    assert not torch.allclose(monarch(Q, K, V, grid=GRID, steps=1), softmax(Q, K, V))


def weights(steps):
    """Attention weights (B, h, N, N): the outputs for values that are unit vectors."""
    N = H * W
    return monarch(Q, K, torch.eye(N, dtype=torch.float64).expand(B, h, N, N), grid=GRID, steps=steps)


def test_every_step_raises_the_variational_objective_towards_its_bound():
    logits = Q @ K.mT * Q.shape[-1] ** -0.5

    def objective(a):
        return (a * logits - torch.xlogy(a, a)).sum((-2, -1))

    values = [objective(weights(steps)) for steps in range(1, 8)] + [logits.logsumexp(-1).sum(-1)]
    assert all((after - before > -1e-9).all() for before, after in itertools.pairwise(values))
    assert (values[3] > values[0] + 1e-3).all()
    assert_equal(objective(logits.softmax(-1)), values[-1])


def test_it_commutes_with_any_order_of_rows_and_any_order_of_columns():
    n = torch.arange(H * W).view(H, W)
    for order in (n[shuffled(H)].flatten(), n[:, shuffled(W)].flatten()):
        moved = monarch(*(x[:, :, order] for x in (Q, K, V)), grid=GRID, steps=2)
        assert_equal(moved, monarch(Q, K, V, grid=GRID, steps=2)[:, :, order])


def test_a_row_that_no_query_attends_to_leaves_all_finite():
    q = Q.mean(2, keepdim=True).expand_as(Q).contiguous().requires_grad_()
    far = torch.cat([-1e5 * q.detach()[:, :, :W], K[:, :, W:]], 2)
    y = monarch(q, far, V, grid=GRID, steps=3)
    y.sum().backward()
    assert_equal(y, monarch_reference(q, far, V, grid=GRID, steps=3))
    assert q.grad.isfinite().all()
