"""Evaluation is deterministic; training draws new noise, from the generator alone."""

import pytest
import torch

from attention import ATTENTION, options_of
from tests.support.comparisons import assert_mean
from tests.support.facts import CASES, FACTS
from tests.support.partition import one_of_a_kind

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_evaluation_is_deterministic_and_survives_a_state_dict(case):
    attn, x = case.build().eval(), case.tokens()
    y = attn(x, case.grid)
    assert torch.equal(y, attn(x, case.grid))
    other = case.build(seed=5).eval()
    assert not torch.equal(y, other(x, case.grid))
    other.load_state_dict(attn.state_dict(), strict=True)
    assert torch.equal(y, other(x, case.grid))


@pytest.mark.parametrize("case", [case for case in CASES if case.stochastic], ids=str)
def test_training_draws_anew(case):
    x, runs = case.tokens(), []
    for _ in range(2):
        attn = case.build().train()
        torch.manual_seed(3)
        runs.append([attn(x, case.grid) for _ in range(3)])
    assert not torch.equal(runs[0][0], runs[0][2])
    assert all(torch.equal(y, same) for y, same in zip(*runs, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if not case.two_modes], ids=str)
def test_training_equals_evaluation_without_noise(case):
    attn, x = case.build(), case.tokens()
    assert torch.equal(attn.train()(x, case.grid), attn.eval()(x, case.grid))


@torch.no_grad()
@pytest.mark.parametrize("name", one_of_a_kind(name for name in ATTENTION if "attn_drop" in options_of(name)))
def test_dropout_of_weights_keeps_the_mean_and_ends_with_training(name):
    case = FACTS[name].CASES[0]
    plain, dropping = (case.build(attn_drop=rate) for rate in (0.0, 0.5))
    x = case.tokens(batch=1)
    assert torch.equal(dropping.eval()(x, case.grid), plain.eval()(x, case.grid))
    plain.train(), dropping.train()
    torch.manual_seed(3)
    differences = torch.cat([dropping(x, case.grid) - plain(x, case.grid) for _ in range(200)])
    assert (differences.abs().amax((1, 2)) > 1e-3).all()
    assert_mean(differences, 0)
