"""Costs of a layer: `Attention.cost` equals counted costs, the formula in the docstring, and published figures.

N tokens, C channels, h heads, d = C/h. Costs of a layer exclude its four C x C projections.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import ATTENTION, AttentionFactory, LayerContext, kernels
from attention.__main__ import layer_costs, read_docstring
from attention.base import Attention, Cost
from bench.costs import costs_of_row
from engine.config.papers import read_papers
from engine.run.load import load_run
from models import is_host
from models.costs import Costs, costs_of, count_costs
from tests.support.attention_in_full import resolve_attention
from tests.support.cases import HEAD_DIM, HEADS, Case
from tests.support.facts import CASES, FACTS, rows
from tests.support.growth import SIDES, Growth, order
from tests.support.partition import chosen, one_of_a_kind
from tests.uniform.test_growth import label

CONFIGS = Path(__file__).parents[2] / "configs"


def stated(mechanism: str | Mapping[str, Any], **context: Any) -> Cost:
    """`Attention.cost` of a mechanism with its options."""
    factory = AttentionFactory.from_options(mechanism)
    return ATTENTION[factory.name].layer_cost(LayerContext(**context), factory.config)


def stated_with(name: str, options: Mapping[str, Any], **context: Any) -> Cost:
    """`stated` with options that may be fields of `LayerContext`, of the mechanism, or both, as those of a `Case`."""
    place = {field.name for field in fields(LayerContext)} & options.keys()
    own = {field.name for field in fields(ATTENTION[name].Config)}
    of_mechanism = {key: value for key, value in options.items() if key not in place or key in own}
    return stated({"name": name, **of_mechanism}, **context, **{key: options[key] for key in place})


def counted(attn: Attention, grid: tuple[int, int]) -> Cost:
    """Counted cost of a layer on the meta device, in evaluation."""
    C, N = attn.proj.in_features, math.prod(grid)
    parameters, macs = costs_of(attn.eval(), torch.empty(1, N, C, device="meta"), grid)
    return Cost(parameters - (3 * C * (attn.qkv.bias is not None) + 4 * C * C + C), macs - 4 * N * C * C)


def without_prefix(case: Case) -> Case:
    """The case without prefix tokens, which costs leave out."""
    options = {name: value for name, value in case.options.items() if name != "num_prefix_tokens"}
    return Case(case.name, case.grid, options)


@pytest.mark.parametrize("path", ["auto", "plain"])
@pytest.mark.parametrize("case", {str(case): case for case in map(without_prefix, CASES)}.values(), ids=str)
def test_cost_is_what_is_counted(case: Case, path):
    """Counts the cost of every option, also in the cases with prefix tokens."""
    with torch.device("meta"), kernels.use(path):
        expected = counted(case.build(torch.float32), case.grid)
    assert stated_with(case.name, case.options, dim=HEADS * HEAD_DIM, num_heads=HEADS, grid=case.grid) == expected


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_cost_of_default_options_on_a_grid_that_windows_do_not_divide(name, qkv_bias):
    context = {"dim": 40, "num_heads": 5, "grid": (16, 15), "qkv_bias": qkv_bias}
    options = {"num_landmarks": 48} if name in ("eva", "lara", "nystrom") else {}  # 49 do not divide the grid
    with torch.device("meta"):
        expected = counted(AttentionFactory.from_options({"name": name, **options})(**context), context["grid"])
    assert stated({"name": name, **options}, **context) == expected


@pytest.mark.parametrize(
    "mechanism",
    [*({"name": x} for x in ("linear", "performer", "abc", "transnormer")), {"name": "performer", "features": "relu"}],
    ids=lambda mechanism: "-".join(mechanism.values()),
)
def test_cost_of_causal_attention_in_chunks(mechanism):
    """1, 3 and 240 tokens, the last padded to 256 by chunks of 64."""
    mechanism = {**mechanism, "causal": True}
    for grid in ((1, 1), (1, 3), (16, 15)):
        context = {"dim": 40, "num_heads": 5, "grid": grid}
        with torch.device("meta"):
            expected = counted(AttentionFactory.from_options(mechanism)(**context), grid)
        assert stated(mechanism, **context) == expected


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """Value of a formula such as ``"2 N (|E| + c) C / R^2"``; adjacent factors multiply, from left to right."""
    tokens = re.findall(r"\|E\||[A-Za-z]+|\d+|[-+/^()]", formula)
    assert "".join(tokens) == formula.replace(" ", ""), f"{formula}: not a formula"
    code = ""
    for before, token in itertools.pairwise(["(", *tokens]):
        if before not in [*"-+/^("] and token not in [*"-+/^)"]:
            code += "*"
        code += "**" if token == "^" else str(symbols[token]) if token[0].isalpha() or token[0] == "|" else token
    return eval(code)


@pytest.mark.parametrize("N", [784, 3136])
@pytest.mark.parametrize("name", ATTENTION)
def test_the_docstring_tells_the_cost(name, N):
    """The formula is within a tenth of the cost, because it may omit small terms."""
    costs = layer_costs(name, (math.isqrt(N), math.isqrt(N)))
    own = {letter: value(N) if callable(value) else value for letter, value in FACTS[name].SYMBOLS.items()}
    values = [
        evaluate(formula, {"N": N, "C": 192, "h": 3, "d": 64, **own})
        for formula in read_docstring(name)["cost"].split(" or ")
    ]
    assert values == pytest.approx([cost.macs for cost in costs], rel=0.1)


@pytest.mark.parametrize(("name", "growth"), rows("GROWTH"), ids=label)
def test_cost_grows_as_is_measured(name: str, growth: Growth):
    """The stated cost grows as measured at the sizes of tests/support/growth.py: one head of 8 channels."""
    macs = [stated_with(name, growth.options(side), dim=8, num_heads=1, grid=(side, side)).macs for side in SIDES]
    assert order(macs) == pytest.approx(growth.macs, abs=0.15)


RELEASED = [  # the closed forms of the released code at N = 784, C = 192, h = 3, less 4 N C^2, in numbers
    ({"name": "softmax"}, 236_027_904),  # 2 N^2 C
    ({"name": "local"}, 14_751_744),  # 2 N 49 C
    ({"name": "performer", "features": "favorp", "num_samples": 64}, 38_685_696),  # 4 N 64 C + N 64 h
    ({"name": "performer", "features": "trigonometric", "num_samples": 64}, 58_103_808),  # 6 N 64 C + 2 N 64 h
    ({"name": "ra"}, 354_041_856),  # 3 N^2 C
    ({"name": "ra", "proposal": "biased"}, 472_055_808),  # 4 N^2 C
    ({"name": "lara"}, 39_466_560),  # 5 N 49 C + 3 49^2 C + 2 49 h d^2
    ({"name": "lara", "proposal": "pool", "weighting": "balance"}, 31_168_704),  # 4 N 49 C + 49^2 C + 2 49 h d^2
    ({"name": "eva"}, 31_008_768),  # 4 N 49 C + 2 49 16 C + 2 49 h d^2
    ({"name": "scatterbrain", "leave_one_out": "released"}, 87_005_184),  # 2 N 49 C + 5 N 96 C
]


@pytest.mark.parametrize(("mechanism", "macs"), RELEASED, ids=[" ".join(map(str, m.values())) for m, _ in RELEASED])
def test_cost_is_that_of_the_released_code(mechanism, macs):
    assert stated(mechanism, dim=192, num_heads=3, grid=(28, 28)).macs == macs


def deit(N: int, C: int, h: int, attention: Any, depth: int = 12) -> Costs:
    """Parameters and MACs of a DeiT with `depth` layers for N patches of a 224 x 224 image."""
    patch, grid = 3 * 224 * 224 // N, (math.isqrt(N), math.isqrt(N))
    layers = [stated(attention, dim=C, num_heads=h, grid=grid, layer=i, depth=depth) for i in range(depth)]
    parameters = (patch + 1) * C + N * C + depth * (12 * C * C + 13 * C) + 2 * C + 1001 * C - C + 1000
    macs = N * C * patch + depth * 12 * N * C * C + 1000 * C
    return Costs(parameters + sum(c.parameters for c in layers), macs + sum(c.macs for c in layers))


def pvt(size: str, attention: Any, depths: Sequence[int] | None = None) -> Costs:
    """Parameters and MACs of a PVT-v2 with doubled heads for a 224 x 224 image; the last stage has softmax."""
    parameters = macs = 0
    before, ratios, depths = 3, (8, 8, 4, 4), depths or DEPTHS[size]
    stages = resolve_attention(f"pvtv2_{size}_2xheads", attention)
    for s, (C, h) in enumerate(zip((64, 128, 320, 512), (2, 4, 10, 16), strict=True)):
        side, kernel, hidden = 56 >> s, 49 if s == 0 else 9, C * ratios[s]
        N, embed = side * side, kernel * before * C
        own = stated(stages[s], dim=C, num_heads=h, grid=(side, side), reduction=8 >> s)
        layer = 4 * C * C + 2 * C * hidden + 9 * hidden  # matrices
        vectors = 4 * C + 4 * C + hidden + hidden + C  # two norms and the biases of qkv, proj, fc1, dwconv, fc2
        parameters += embed + C + 2 * C + 2 * C + depths[s] * (layer + vectors + own.parameters)
        macs += N * embed + depths[s] * (N * layer + own.macs)
        before = C
    return Costs(parameters + 513 * 1000, macs + 512 * 1000)


DEPTHS = {"b1": (2, 2, 2, 2), "b2": (3, 4, 6, 3), "b3": (3, 4, 18, 3), "b4": (3, 8, 27, 3)}
BACKBONES = {
    "deit_tiny_p8": functools.partial(deit, 784, 192, 3),
    "deit_tiny_p16": functools.partial(deit, 196, 192, 3),
    "deit_small_p8": functools.partial(deit, 784, 384, 6),
    "deit_small_p16": functools.partial(deit, 196, 384, 6),
    **{f"pvtv2_{size}_2xheads": functools.partial(pvt, size) for size in DEPTHS},
}


@functools.cache
def stated_of_model(config: str, overrides: tuple[str, ...] = ()) -> Costs:
    """Stated costs of a whole model, checked by counting a model with a block of every kind (TransNormer has two)."""
    run, backbone = load_run(CONFIGS / f"{config}.yaml", overrides), BACKBONES[config.partition("/")[0]]
    fewer = {"depths": (1, 1, 1, 1)} if "depths" in run.model else {"depth": 2}
    assert count_costs(run.model | fewer, run.attention) == backbone(run.attention, **fewer)
    return backbone(run.attention)


ROWS = [  # configuration, overrides, parameters in M, MACs in G: literal, most of them of published analyses
    ("deit_tiny_p8/softmax", (), 5.719, 7.023),
    ("deit_tiny_p8/local", (), 5.723, 4.368),
    ("deit_tiny_p8/performer", (), 5.719, 4.655),
    ("deit_tiny_p8/performer", ("attention.num_samples=128",), 5.719, 5.119),
    ("deit_tiny_p8/softmax", ("attention={name: ra, proposal: unbiased}",), 5.719, 8.44),
    ("deit_tiny_p8/softmax", ("attention={name: ra, proposal: biased}",), 5.719, 9.86),
    ("deit_tiny_p8/lara", (), 5.822, 4.664),
    ("deit_tiny_p8/lara", ("attention.proposal=pool", "attention.weighting=balance"), 5.822, 4.565),
    ("deit_tiny_p8/eva", (), 5.826, 4.563),
    ("deit_tiny_p8/eva", ("attention.num_samples=49",), 5.826, 13.32),
    ("deit_tiny_p8/eva", ("attention.num_landmarks=1", "attention.num_samples=49"), 5.826, 4.724),
    ("deit_tiny_p8/combiner", (), 5.824, 4.661),
    ("deit_tiny_p8/transformer_ls", (), 6.075, 4.987),
    ("deit_tiny_p8/transformer_ls", ("attention.num_landmarks=16",), 5.846, 4.57),
    ("deit_tiny_p8/smyrf", (), 5.719, 4.552),
    ("deit_tiny_p8/scatterbrain", (), 5.723, 5.235),
    ("deit_tiny_p8/scatterbrain", ("attention.leave_one_out=merge", "attention.position_bias=table"), 5.725, 5.072),
    ("deit_tiny_p8/scatterbrain_lsh", (), 5.719, 5.512),
    ("deit_tiny_p8/eva_lsh", (), 5.822, 4.567),  # as eva without a position bias, and the hash
    ("deit_tiny_p8/eva_clustered", (), 5.828, 4.673),  # as eva; the hash, in place of the products of features
    ("deit_tiny_p16/softmax", (), 5.717, 1.247),
    ("deit_tiny_p16/lara", (), 5.820, 1.211),
    ("deit_tiny_p16/eva", (), 5.823, 1.173),
    ("deit_tiny_p16/ra", (), 5.717, 1.335),
    ("deit_small_p16/softmax", (), 22.050, 4.574),
    ("deit_small_p16/local", (), 22.057, 4.308),
    ("deit_small_p16/lara", (), 22.153, 4.503),
    ("deit_small_p16/eva", (), 22.160, 4.428),
    ("deit_small_p8/lara", (), 22.157, 17.653),
    ("pvtv2_b3_2xheads/sra", ("attention=softmax",), 36.011, 11.8),
    ("pvtv2_b3_2xheads/local", (), 36.031, 7.16),
    ("pvtv2_b3_2xheads/eva", (), 36.087, 7.394),
    ("pvtv2_b1_2xheads/sra", (), 14.009, 2.108),
    ("pvtv2_b1_2xheads/performer", (), 12.138, 2.48),
    ("pvtv2_b1_2xheads/lara", (), 12.636, 2.314),
    ("pvtv2_b2_2xheads/sra", (), 25.363, 4.027),
    ("pvtv2_b2_2xheads/performer", (), 21.062, 4.74),
    ("pvtv2_b2_2xheads/lara", (), 22.463, 4.459),
    ("pvtv2_b3_2xheads/sra", (), 45.239, 6.897),
    ("pvtv2_b3_2xheads/performer", (), 36.011, 8.04),
    ("pvtv2_b3_2xheads/lara", (), 39.892, 7.709),
    ("pvtv2_b4_2xheads/sra", (), 62.556, 10.101),
    ("pvtv2_b4_2xheads/performer", (), 48.584, 11.78),
    ("pvtv2_b4_2xheads/lara", (), 54.459, 11.311),
]


@pytest.mark.parametrize(
    ("config", "overrides", "parameters", "giga_macs"),
    chosen(ROWS, lambda config, *_: config.partition("/")[2] in ("eva", "lara")),
    ids=[" ".join((row[0], *row[1])) for row in ROWS],
)
def test_costs_of_models(config, overrides, parameters, giga_macs):
    found = stated_of_model(config, overrides)
    assert found.parameters / 1e6 == pytest.approx(parameters, abs=6e-4)
    assert found.macs / 1e9 == pytest.approx(giga_macs, rel=0.01)


@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("name", one_of_a_kind(ATTENTION))
def test_costs_of_every_mechanism_at_fewer_and_more_tokens(name, patch):
    """Two layers are enough, because TransNormer has two kinds of layers."""
    found = count_costs({"name": f"deit_tiny_p{patch}", "img_size": 224, "depth": 2}, name)
    assert found == deit((224 // patch) ** 2, 192, 3, name, depth=2)


NOWHERE = "neither timm nor transformers has it"
COUNTED = [row for row in read_papers() if (row.parameters or row.macs or row.released_macs) and row.note != NOWHERE]


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: row.config)
def test_a_count_rounds_to_what_the_paper_prints_or_its_row_says_why_not(row):
    """Counts agree with the one decimal that tables print; EVA Table 10 prints whole millions of parameters."""
    if is_host(row.config):
        parameters, macs = costs_of_row(row.config, row.overrides)
    else:
        parameters, macs = stated_of_model(row.config.removesuffix(".yaml"), row.overrides)
    digits = 0 if row.source == "EVA Table 10" else 1
    agrees = all(
        printed is None or count == printed
        for count, printed in ((round(parameters / 1e6, digits), row.parameters), (round(macs / 1e9, 1), row.macs))
    )
    assert agrees != bool(row.note)
    assert row.released_macs in (None, round(macs / 1e9, 3))
