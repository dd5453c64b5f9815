"""Partition of a parametrisation: chosen cells run in the default suite, and all of them in `make test-all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def chosen(values: Iterable[Any], choose: Callable[..., bool]) -> list[Any]:
    """Parameters of a test; those for which `choose` is false are marked `complete`.

    values: values, tuples of them for several names, or results of `pytest.param` (also for values that are tuples).
    choose: function of the value, or of the values of several names.
    """
    parameters = []
    for value in values:
        if not isinstance(value, type(pytest.param())):
            value = pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)
        if not choose(*value.values):
            value = pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.complete])
        parameters.append(value)
    return parameters


ONE_OF_A_KIND = (
    *("softmax", "sra", "local", "shifted_window", "eva", "lara", "performer", "ra", "scatterbrain", "eva_clustered"),
    *("reformer", "nystrom", "neighborhood", "abc", "bilevel_routing", "hilo", "xca", "convolution"),
)
"""Mechanisms that stand for all by their way to compute."""


def one_of_a_kind(names: Iterable[str]) -> list[Any]:
    """Parameters of a test of every mechanism; the default suite has one of each kind."""
    return chosen(names, lambda name: name in ONE_OF_A_KIND)
