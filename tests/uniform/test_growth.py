"""Growth of multiply-accumulates and memory with the number of tokens, see tests/support/growth.py."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.facts import rows
from tests.support.growth import SIDES, Growth, order, own_costs
from tests.support.partition import ONE_OF_A_KIND, chosen


def label(argument: str | Growth) -> str:
    """A mechanism's name, or the options of a row."""
    if isinstance(argument, str):
        return argument
    return "-".join(f"{key}={value}" for key, value in argument.options(SIDES[0]).items())


@pytest.mark.parametrize(
    ("name", "growth"), chosen(rows("GROWTH"), lambda name, growth: name in ONE_OF_A_KIND), ids=label
)
def test_costs_grow_as_stated(name, growth):
    """Counts on the meta device, without computing or storing anything."""
    with sdpa_kernel(SDPBackend.MATH):
        macs, saved_bytes = zip(*(own_costs(name, s, growth.options(s), "meta") for s in SIDES), strict=True)
    assert order(macs) == pytest.approx(growth.macs, abs=0.15)
    assert order(saved_bytes) == pytest.approx(growth.saved_bytes, abs=0.15)
