"""Options of mechanisms: documented, frozen, each with an effect; what cannot be honoured is refused by name."""

import dataclasses

import pytest
import torch

from attention import ATTENTION, OptionError, create_attention
from tests.support.cases import Case
from tests.support.facts import FACTS, rows

GRID = (5, 7)


@pytest.mark.parametrize("name", ATTENTION)
def test_options_are_documented_frozen_dataclasses(name):
    config = ATTENTION[name].Config()
    for field in dataclasses.fields(config):
        assert field.metadata["meaning"], field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_option_has_a_row(name):
    assert set(FACTS[name].EFFECTS) == {field.name for field in dataclasses.fields(ATTENTION[name].Config)}


def outputs(name: str, options: dict) -> list[torch.Tensor]:
    """What two training passes and one evaluation give from fixed seeds."""
    case = Case(name, GRID, options)
    attn, x = case.build(), case.tokens()
    torch.manual_seed(1)
    return [attn.train()(x, GRID), attn(x, GRID), attn.eval()(x, GRID)]


@pytest.mark.parametrize(("name", "changed"), rows("EFFECTS"))
def test_every_option_has_an_effect(name, changed):
    context, value = FACTS[name].EFFECTS[changed]
    before, same, after = (outputs(name, options) for options in (context, context, {**context, changed: value}))
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("name", "refused"), rows("REFUSED"))
def test_what_cannot_be_honoured_is_refused(name, refused):
    options, message = refused
    with pytest.raises(OptionError, match=message):
        create_attention(name, **({"dim": 16, "num_heads": 2, "grid": (14, 14)} | options))


def test_an_unknown_mechanism_is_refused():
    with pytest.raises(OptionError, match=r"attention.name: unknown mechanism 'sofmax'; did you mean 'softmax'\?"):
        create_attention("sofmax", dim=16, num_heads=2, grid=(14, 14))
