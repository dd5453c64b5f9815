"""Options: plain values become typed ones, and whatever does not fit is refused by name."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Literal

import pytest

from attention import AttentionFactory
from attention.options import OptionError, option, parse_options


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


# Options as earlier versions wrote them


@pytest.mark.parametrize(
    ("name", "old", "new", "value"),
    [
        ("performer", "draws", "omega_sampling", "orthogonal"),
        ("performer", "eval_draws", "eval_omega_sampling", "orthogonal"),
        ("performer", "sampling", "feature_redraw", "learnable"),
        ("performer", "redraw_every", "feature_redraw_interval", 3),
        ("scatterbrain", "draws", "omega_sampling", "orthogonal"),
        ("scatterbrain", "sampling", "feature_redraw", "fixed"),
        ("scatterbrain", "complement", "leave_one_out", "released"),
        ("scatterbrain_lsh", "draws", "omega_sampling", "orthogonal"),
        ("scatterbrain_lsh", "sampling", "feature_redraw", "fixed"),
    ],
)
def test_a_renamed_option_acts_and_says_its_new_name(name, old, new, value):
    with pytest.warns(FutureWarning, match=rf"^attention\({name}\).{old} is now {new}$"):
        factory = AttentionFactory.from_options({"name": name, old: value})
    assert factory == AttentionFactory.from_options({"name": name, new: value})
    assert getattr(factory.config, new) == value


@pytest.mark.parametrize(("value", "now"), [(False, "positive"), (True, "hyperbolic"), ("cosine", "cosine")])
def test_a_renamed_option_says_its_former_values_in_the_words_of_today(value, now):
    with pytest.warns(FutureWarning, match=r"^attention\(ra\).hyperbolic is now features$"):
        factory = AttentionFactory.from_options({"name": "ra", "hyperbolic": value})
    assert factory == AttentionFactory.from_options({"name": "ra", "features": now})


@pytest.mark.parametrize("value", ["iid", "orthogonal"])
def test_an_option_under_both_of_its_names_is_refused(value):
    with pytest.raises(OptionError, match=r"^a\(performer\).draws: is now omega_sampling, .* leave draws out$"):
        AttentionFactory.from_options({"name": "performer", "draws": value, "omega_sampling": "iid"}, "a")


WINDOWED = {"support": "local", "window_size": 7, "layout": "2d", "overlap": 0, "position_bias": "none"}
HASHED = {**WINDOWED, "support": "lsh"}
WRITTEN_OUT = {"complement": "merge", "num_rounds": 2, "draws": "iid", "sampling": "redraw", "features": "positive"}


@pytest.mark.parametrize(
    ("options", "cluster_size"),
    [
        ({**HASHED, **WRITTEN_OUT, "num_samples": 96}, 49),
        ({"support": "lsh", "position_bias": "none"}, 49),
        ({**HASHED, "window_size": 8, "layout": "1d"}, 8),
        ({**HASHED, "window_size": 3}, 9),
    ],
    ids=str,
)
def test_scatterbrain_on_hashed_clusters_is_a_mechanism_of_its_own(options, cluster_size):
    with pytest.warns(FutureWarning) as told:
        factory = AttentionFactory.from_options({"name": "scatterbrain", **options})
    assert factory == AttentionFactory.from_options({"name": "scatterbrain_lsh", "cluster_size": cluster_size})
    assert str(told[0].message) == "attention: scatterbrain with support: lsh is now scatterbrain_lsh"
    assert {str(warning.message) for warning in told[1:]} == {
        f"attention(scatterbrain_lsh).{old} is now {new}"
        for old, new in {"draws": "omega_sampling", "sampling": "feature_redraw"}.items()
        if old in options
    }


def test_scatterbrain_on_windows_needs_no_support():
    with warnings.catch_warnings(action="error"):
        factory = AttentionFactory.from_options({"name": "scatterbrain", **WINDOWED, "num_rounds": 2})
    assert factory == AttentionFactory.from_options({"name": "scatterbrain", "position_bias": "none"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": "a"}, r"window_size: expected int, got 'a'"),
        ({"window_size": "a", "layout": "1d"}, r"window_size: expected int, got 'a'"),
        ({"window_size": True}, r"window_size: expected int, got True"),
        ({"window_size": -7}, r"window_size = -7 is below the least valid value 1"),
        ({"layout": "3d"}, r"layout: '3d' is not a choice"),
        ({"position_bias": "table"}, r"position_bias: 'table' is not a choice"),
        ({"overlap": 1}, r"overlap: 1 is not a choice"),
        ({"complement": "released"}, r"complement: 'released' is not a choice"),
        ({"support": "lhs"}, r"support: 'lhs' is not a choice; did you mean 'lsh'\?"),
    ],
    ids=str,
)
def test_what_was_invalid_with_hashing_still_is(options, message):
    with pytest.raises(OptionError, match=rf"^attention\(scatterbrain\).{message}"):
        AttentionFactory.from_options({"name": "scatterbrain", "support": "lsh", **options})


def test_rounds_of_hashing_without_support_are_no_option_of_windows():
    with pytest.raises(OptionError, match=r"^attention\(scatterbrain\).num_rounds: unknown option"):
        AttentionFactory.from_options({"name": "scatterbrain", "num_rounds": 3})
