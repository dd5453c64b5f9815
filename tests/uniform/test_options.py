"""Options of mechanisms: documented, frozen, each with an effect; impossible values are refused by name."""

import dataclasses

import pytest
import torch

from attention import ATTENTION, OptionError, create_attention, options_of
from tests.support.cases import Case, with_options
from tests.support.facts import CASES, FACTS, rows
from tests.support.partition import ONE_OF_A_KIND, chosen

GRID = (5, 7)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_option_has_a_row(name):
    """All but `fit`, which acts on grids that the other options do not allow; see test_fit.py."""
    assert set(FACTS[name].EFFECTS) == set(options_of(name)) - {"fit"}


def outputs(case: Case) -> list[torch.Tensor]:
    """Outputs of two training passes and one evaluation from fixed seeds."""
    attn, x = case.build(), case.tokens()
    torch.manual_seed(1)
    return [attn.train()(x, case.grid), attn(x, case.grid), attn.eval()(x, case.grid)]


@pytest.mark.parametrize(("name", "changed"), rows("EFFECTS"))
def test_every_option_has_an_effect(name, changed):
    context, value = FACTS[name].EFFECTS[changed]
    contexts = context, context, {**context, changed: value}
    before, same, after = (outputs(Case(name, GRID, options)) for options in contexts)
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "case",
    chosen(
        (case for case in CASES if len(case.grid) == 2 and "released" in options_of(case.name)),
        lambda case: case.name in ONE_OF_A_KIND,
    ),
    ids=str,
)
def test_released_is_short_for_options_that_can_be_set_by_themselves(case):
    """Runs over all cases, since the values that `released` chooses depend on the other options."""
    plain, released = (with_options(case, released=switch) for switch in (False, True))
    ours, theirs = (dataclasses.asdict(chosen.build().config) for chosen in (plain, released))
    choices = {name: value for name, value in theirs.items() if value != ours[name] and name != "released"}
    by_hand = with_options(plain, **choices)
    assert dataclasses.asdict(by_hand.build().config) == {**theirs, "released": False}
    assert all(torch.equal(a, b) for a, b in zip(outputs(released), outputs(by_hand), strict=True))
    for name, value in choices.items():
        assert name not in case.options
        assert dataclasses.asdict(with_options(plain, **{name: value}).build().config) == {**ours, name: value}
        kept = with_options(released, **{name: ours[name]})
        assert dataclasses.asdict(kept.build().config) == {**theirs, name: ours[name]}


@pytest.mark.parametrize(("name", "refused"), rows("REFUSED"))
def test_what_cannot_be_honoured_is_refused(name, refused):
    options, message = refused
    with pytest.raises(OptionError, match=message):
        create_attention(name, **({"dim": 16, "num_heads": 2, "grid": (14, 14)} | options))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"dim": 16.0}, "dim: expected int, got 16.0"),
        ({"num_heads": 3}, "num_heads = 3 does not divide dim = 16"),
        ({"grid": (0, 4)}, "grid = 0 is below the least valid value 1"),
        ({"grid": 14}, "grid: expected a list, got 14"),
        ({"num_prefix_tokens": -1}, "num_prefix_tokens = -1 is below the least valid value 0"),
        ({"reduction": -2}, "reduction = -2 is below the least valid value 1"),
        ({"qkv_bias": "no"}, "qkv_bias: expected bool, got 'no'"),
        ({"proj_drop": 1.5}, "proj_drop = 1.5 is above the largest valid value 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["softmax", "sra"])
def test_a_context_that_cannot_be_is_refused(name, context, message):
    with pytest.raises(OptionError) as refused:
        create_attention(name, **({"dim": 16, "num_heads": 2, "grid": (14, 14)} | context))
    own = "attention(sra)." if name == "sra" and "reduction" in context else ""  # its own option of this name
    assert str(refused.value) == own + message


def test_a_grid_may_be_a_list_and_an_option_hides_the_context():
    attn = create_attention("sra", dim=16, num_heads=2, grid=[14, 14], reduction=7)
    assert (attn.config.reduction, attn.sr.stride) == (7, (7, 7))
