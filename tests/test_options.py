"""Options: plain values become typed ones, and a value that does not fit is refused by name."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from attention.options import OptionError, nearest, option, parse_options


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = option(0.5, "a rate", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int
    rate: float = option(0.5, "a rate", low=0, high=1)
    scale: float = option(1.0, "a factor", above=0)
    flag: bool = option(False, "a switch")
    kind: Literal["first", "second", 3] = option("first", "a choice")
    text: str | None = option(None, "a text")
    either: int | tuple[int, int] = option(1, "one or two", low=1)
    pair: tuple[float, float] = option((0.0, 1.0), "a range", high=1)
    many: tuple[int, ...] = option((), "any number", above=0)
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_a_long_list_of_choices_says_that_it_goes_on():
    assert nearest("q", range(10, 1050)).endswith(" 1025, ... (1,040)")
    assert nearest("q", "abc") == "; known: a, b, c"


def test_plain_values_become_typed_options():
    options = parse_options(
        Options,
        {"size": 3, "rate": 1, "text": "a", "either": [2, 3], "pair": [0, 1], "many": [1, 2, 3], "inner": {"rate": 0}},
    )
    assert options == Options(
        size=3, rate=1.0, text="a", either=(2, 3), pair=(0.0, 1.0), many=(1, 2, 3), inner=Inner(rate=0.0)
    )
    assert type(options.rate) is float
    assert parse_options(Options, {"size": 3, "text": None, "kind": 3}).kind == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "run.size: required, but not given"),
        ({"size": 1, "sise": 2}, "run.sise: unknown option; did you mean 'size'?"),
        ({"size": 1, "zzzz": 2}, "run.zzzz: unknown option; known: "),
        ({"size": 1.0}, "run.size: expected int, got 1.0"),
        ({"size": True}, "run.size: expected int, got True"),
        ({"size": 1, "rate": "1e-3"}, "run.rate: expected float, got '1e-3', text to YAML; write 0.001"),
        ({"size": 1, "rate": "1e-5"}, "run.rate: expected float, got '1e-5', text to YAML; write 1.0e-05"),
        ({"size": 1, "rate": "2.5e-5"}, "run.rate: expected float, got '2.5e-5', text to YAML; write 2.5e-05"),
        ({"size": 1, "rate": "high"}, "run.rate: expected float, got 'high'"),
        ({"size": 1, "rate": float("nan")}, "run.rate: nan is not a finite number"),
        ({"size": 1, "rate": 1.5}, "run.rate = 1.5 is above the largest valid value 1"),
        ({"size": 1, "rate": -1}, "run.rate = -1.0 is below the least valid value 0"),
        ({"size": 1, "scale": 0}, "run.scale = 0.0 must be greater than 0"),
        ({"size": 1, "flag": 1}, "run.flag: expected bool, got 1"),
        ({"size": 1, "kind": "secnd"}, "run.kind: 'secnd' is not a choice; did you mean 'second'?"),
        ({"size": 1, "kind": ["first"]}, "run.kind: ['first'] is not a choice"),
        ({"size": 1, "text": 3}, "run.text: expected str, got 3"),
        ({"size": 1, "pair": [1]}, "run.pair: expected 2 values, got [1]"),
        ({"size": 1, "pair": 1}, "run.pair: expected a list, got 1"),
        ({"size": 1, "pair": [0, 2]}, "run.pair = 2.0 is above the largest valid value 1"),
        ({"size": 1, "many": [1, "2"]}, "run.many[1]: expected int, got '2'"),
        ({"size": 1, "inner": {"rate": 2}}, "run.inner.rate = 2.0 is above the largest valid value 1"),
        ({"size": 1, "inner": 2}, "run.inner: expected a mapping of options, got 2"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options, message):
    with pytest.raises(OptionError) as error:
        parse_options(Options, options, "run")
    assert str(error.value).startswith(message)
