"""Options: every one of a mechanism changes what it computes, and whatever does not fit is refused by name."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from attention import ATTENTION
from attention.options import OptionError, option, parse_options
from tests.support.cases import Case

GRID = (5, 7)
EVA = {"window_size": 3, "num_landmarks": 6}
LARA = {"num_landmarks": 6}
WINDOW = {"window_size": 3}
CLUSTERS = {"cluster_size": 7}
NYSTROM = {"num_landmarks": 6, "conv_size": 3}
LONGFORMER = {"radius": 3}
BIGBIRD = {"block_size": 3}
CLUSTERED = {"num_clusters": 5, "num_top_keys": 3, "num_iterations": 2}
REFORMER = {"chunk_size": 8}

EFFECTS = {
    "softmax": {"causal": ({}, True), "attn_drop": ({}, 0.5)},
    "local": {
        "window_size": ({"window_size": 3}, 2),
        "layout": ({"window_size": 3}, "1d"),
        "overlap": ({"window_size": 3}, 1),
        "position_bias": ({"window_size": 3}, "none"),
        "causal": ({"window_size": 3, "layout": "1d"}, True),
        "attn_drop": ({"window_size": 3}, 0.5),
    },
    "eva": {
        "window_size": (EVA, 2),
        "num_landmarks": (EVA, 4),
        "layout": (EVA, "1d"),
        "overlap": (EVA, 1),
        "position_bias": (EVA, "none"),
        "partition": (EVA, "mask"),
        "landmark_transform": (EVA, "linear"),
        "num_samples": (EVA, 2),
        "mu": (EVA, "q"),
        "mu_scale": (EVA, 0.5),
        "log_count": (EVA, True),
        "noise": (EVA, "released"),
        "released_overlap_groups": ({**EVA, "overlap": 1}, True),
        "causal": ({**EVA, "layout": "1d"}, True),
        "visibility": ({**EVA, "layout": "1d", "window_size": 8, "causal": True}, "released"),
        "attn_drop": (EVA, 0.5),
    },
    "sra": {"reduction": ({"reduction": 2}, 3), "attn_drop": ({"reduction": 2}, 0.5)},
    "linear_sra": {"pool_size": ({}, 3), "attn_drop": ({}, 0.5)},
    "nystrom": {
        "num_landmarks": (NYSTROM, 4),
        "segments": (NYSTROM, "1d"),
        "pinv_iterations": (NYSTROM, 5),
        "conv": (NYSTROM, "2d"),
        "conv_size": (NYSTROM, 5),
    },
    "linformer": {"num_landmarks": ({}, 6), "sharing": ({}, "kv"), "attn_drop": ({}, 0.5)},
    "abc": {"num_landmarks": ({}, 6), "attn_drop": ({}, 0.5)},
    "synthesizer": {"rank": ({}, 2), "attn_drop": ({}, 0.5)},
    "orthoformer": {"num_landmarks": ({"num_landmarks": 6}, 4)},
    "performer": {
        "num_samples": ({}, 10),
        "features": ({}, "hyperbolic"),
        "draws": ({}, "orthogonal"),
        "eval_draws": ({}, "orthogonal"),
        "sampling": ({}, "fixed"),
        "redraw_every": ({}, 2),
    },
    "ra": {
        "num_samples": ({}, 2),
        "num_eval_samples": ({}, 2),
        "proposal": ({}, "biased"),
        "hyperbolic": ({}, True),
        "noise": ({}, "released"),
        "eval_noise": ({}, False),
    },
    "lara": {
        "num_landmarks": (LARA, 4),
        "landmark_transform": (LARA, "none"),
        "proposal": (LARA, "pool"),
        "weighting": (LARA, "coupled"),
        "beta": (LARA, 1.0),
        "samples_per_proposal": (LARA, 2),
        "antithetic": ({**LARA, "samples_per_proposal": 2}, True),
        "noise": (LARA, "released"),
    },
    "combiner": {
        "window_size": (WINDOW, 2),
        "layout": (WINDOW, "1d"),
        "summary": (WINDOW, "identity"),
        "pool": (WINDOW, "mean"),
        "position_bias": (WINDOW, "none"),
        "causal": ({**WINDOW, "layout": "1d"}, True),
        "attn_drop": (WINDOW, 0.5),
    },
    "transformer_ls": {
        "num_landmarks": (WINDOW, 4),
        "window_size": (WINDOW, 2),
        "layout": (WINDOW, "1d"),
        "overlap": (WINDOW, 1),
        "dual_norm": (WINDOW, False),
        "position_bias": (WINDOW, "none"),
        "attn_drop": (WINDOW, 0.5),
    },
    "smyrf": {
        "cluster_size": (CLUSTERS, 8),
        "num_rounds": (CLUSTERS, 1),
        "attn_drop": (CLUSTERS, 0.5),
    },
    "scatterbrain": {
        "num_samples": (WINDOW, 10),
        "support": ({**WINDOW, "position_bias": "none"}, "lsh"),
        "window_size": (WINDOW, 2),
        "layout": (WINDOW, "1d"),
        "overlap": ({**WINDOW, "complement": "subtract"}, 1),
        "position_bias": (WINDOW, "none"),
        "complement": (WINDOW, "released"),
        "num_rounds": ({**WINDOW, "support": "lsh", "position_bias": "none"}, 1),
        "features": (WINDOW, "hyperbolic"),
        "draws": (WINDOW, "orthogonal"),
        "sampling": (WINDOW, "fixed"),
    },
    "linear": {},
    "xca": {"attn_drop": ({}, 0.5)},
    "cosformer": {"layout": ({}, "2d")},
    "transnormer": {
        "variant": ({}, "t1"),
        "window_size": ({"depth": 2, "window_size": 3}, 2),
        "norm": ({}, "heads"),
    },
    "t2r": {"num_features": ({}, 6)},
    "rfa": {"num_samples": ({}, 10)},
    "dpfp": {"nu": ({}, 2)},
    "longformer": {
        "radius": (LONGFORMER, 2),
        "layout": (LONGFORMER, "2d"),
        "num_global": (LONGFORMER, 2),
        "separate_global": (LONGFORMER, True),
        "attn_drop": (LONGFORMER, 0.5),
    },
    "sparse_transformer": {"block_size": ({}, 5), "num_summary": ({}, 2), "attn_drop": ({}, 0.5)},
    "bigbird": {
        "block_size": (BIGBIRD, 4),
        "layout": (BIGBIRD, "2d"),
        "num_window": (BIGBIRD, 1),
        "num_global": (BIGBIRD, 1),
        "num_random": (BIGBIRD, 1),
        "attn_drop": (BIGBIRD, 0.5),
    },
    "clustered": {
        "num_clusters": (CLUSTERED, 4),
        "num_top_keys": (CLUSTERED, 0),
        "num_bits": (CLUSTERED, 8),
        "num_iterations": (CLUSTERED, 0),
    },
    "reformer": {
        "chunk_size": (REFORMER, 6),
        "num_rounds": (REFORMER, 1),
        "same_bucket": (REFORMER, True),
    },
}
"""Mechanism -> option -> (options that give it its context, a value other than there)."""


@pytest.mark.parametrize("name", ATTENTION)
def test_every_option_has_a_row(name):
    assert set(EFFECTS[name]) == {field.name for field in dataclasses.fields(ATTENTION[name].Config)}


def outputs(name: str, options: dict) -> list[torch.Tensor]:
    """What two training passes and one evaluation give from fixed seeds."""
    case = Case(name, GRID, options)
    attn, x = case.build(), case.tokens()
    torch.manual_seed(1)
    return [attn.train()(x, GRID), attn(x, GRID), attn.eval()(x, GRID)]


@pytest.mark.parametrize(("name", "changed"), [(name, o) for name, rows in EFFECTS.items() for o in rows])
def test_every_option_has_an_effect(name, changed):
    context, value = EFFECTS[name][changed]
    before, same, after = (outputs(name, options) for options in (context, context, {**context, changed: value}))
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
