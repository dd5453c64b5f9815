"""Parameters and multiply-accumulates equal closed forms, and through them the figures of the papers.

N tokens, C channels, h heads, d = C/h, W = 49 keys of a window, L = 49 landmarks, S samples; MACs and parameters of an
attention layer are those beside the four C x C projections.
"""

import functools
import math
from pathlib import Path

import pytest

import benchmark
from attention import ATTENTION
from bench.costs import Costs, count_costs
from bench.papers import read_papers
from engine.config import load_run

CONFIGS = Path(__file__).parents[2] / "configs"
W = L = 49
TABLE = 13 * 13  # relative offsets of a 7 x 7 window

MACS = {  # mechanism: MACs in addition to the projections
    "softmax": lambda N, C, h: 2 * N * N * C,
    "local": lambda N, C, h: 2 * N * W * C,
    "performer": lambda N, C, h, S=128: 4 * N * S * C,
    "ra unbiased": lambda N, C, h: 3 * N * N * C,
    "ra biased": lambda N, C, h: 4 * N * N * C,
    "lara light": lambda N, C, h: 5 * N * L * C + 3 * L * L * C + 2 * L * C * (C // h),
    "lara light eq. 34, 36": lambda N, C, h: 4 * N * L * C + L * L * C + 2 * L * C * (C // h),
    "lara dense": lambda N, C, h: 5 * N * L * C + 3 * L * L * C + 2 * L * C * C,
    "eva": lambda N, C, h: 2 * N * W * C + 2 * N * L * C + 2 * N * C + 2 * L * C * (C // h),
    "eva 49 samples": lambda N, C, h: eva_macs(N, C, h, groups=L, samples=49),
    "eva 1 group, 49 samples": lambda N, C, h: eva_macs(N, C, h, groups=1, samples=49),
    "combiner": lambda N, C, h: 2 * N * W * C + 2 * N * (N // W) * C + 2 * N * C + 2 * N * C * (C // h),
    "transformer_ls": lambda N, C, h, r=49: 2 * N * W * C + (4 + h) * N * r * C,
    "transformer_ls 16": lambda N, C, h: MACS["transformer_ls"](N, C, h, r=16),
    "smyrf": lambda N, C, h, rounds=2: rounds * (2 * N * 49 * C + 2 * N * (C + 2 * h)),
    "scatterbrain": lambda N, C, h, S=96: 4 * N * S * C + 2 * N * W * C,
    "scatterbrain subtracting": lambda N, C, h, S=96: 5 * N * S * C + 2 * N * W * C,
    "scatterbrain lsh": lambda N, C, h, S=96: 4 * N * S * C + 2 * N * W * S * h + MACS["smyrf"](N, C, h),
    # a convolution of stride R to 49 tokens, and keys and values of these alone
    "sra": lambda N, C, h: N * C * C - 2 * (N - 49) * C * C + 2 * N * 49 * C,
    **dict.fromkeys(("linear", "xca"), lambda N, C, h: 2 * (C // h) * N * C),
    "cosformer": lambda N, C, h: 4 * (C // h) * N * C,
    "cosformer 2d": lambda N, C, h: 8 * (C // h) * N * C,
    "transnormer": lambda N, C, h: N * W * C + N * (C // h) * C,  # half the layers each
    "t2r": lambda N, C, h: 4 * N * 32 * C,
    "rfa": lambda N, C, h: 6 * N * 64 * C,
    "dpfp": lambda N, C, h: 4 * (C // h) * N * C,
    "linear_sra": lambda N, C, h: 49 * C * C - 2 * (N - 49) * C * C + 2 * N * 49 * C,
    "nystrom": lambda N, C, h: 4 * N * L * C + h * L * L * N + L * L * C + 24 * h * L**3 + 33 * N * C,
    "nystrom without conv": lambda N, C, h: 4 * N * L * C + h * L * L * N + L * L * C + 24 * h * L**3,
    "linformer": lambda N, C, h: 4 * N * L * C,
    "abc": lambda N, C, h: 4 * N * L * C + h * L * N * C,
    "synthesizer": lambda N, C, h: 8 * h * N * N + N * N * C - 2 * N * C * C,
    "orthoformer": lambda N, C, h: 5 * N * L * C,
    # a band in tiles of 24 queries and 72 keys, where 49 are within reach; a global column and a global row
    "longformer": lambda N, C, h: 2 * N * (72 + 2) * C,
    "sparse_transformer": lambda N, C, h: 2 * N * (2 * math.isqrt(N) - 1) * C,
    # published analyses leave out the global rows: 2 blocks of 16 queries
    "bigbird": lambda N, C, h: 2 * N * (3 + 2 + 3 + 2) * 16 * C,
    "clustered, 32 bits": lambda N, C, h: N * 32 * C + 2 * N * L * C,
    "clustered improved, 32 bits": lambda N, C, h: N * 32 * C + 2 * N * (L + 32) * C,
    "clustered": lambda N, C, h: N * 63 * C + 2 * N * (L + 32) * C,
    # one set of n = N / 49 rotations, or two of sqrt(n / 2) where n is above 49
    "reformer": lambda N, C, h: (
        4 * (int(N / 49 if N <= 49 * 49 else (2 * N / 49) ** 0.5) * N * C + 4 * N * 49 * C) - N * C * C
    ),
}
PARAMETERS = {  # mechanism: parameters in addition to the projections
    "local": lambda N, C, h: h * TABLE,
    "lara light": lambda N, C, h: 2 * ((C // h) ** 2 + 3 * (C // h)),
    "lara light eq. 34, 36": lambda N, C, h: 2 * ((C // h) ** 2 + 3 * (C // h)),
    "lara dense": lambda N, C, h: 2 * (C * C + 3 * C),
    "eva": lambda N, C, h: 2 * ((C // h) ** 2 + 3 * (C // h)) + h * TABLE,
    "eva 49 samples": lambda N, C, h: 2 * ((C // h) ** 2 + 3 * (C // h)) + h * TABLE,
    "eva 1 group, 49 samples": lambda N, C, h: 2 * ((C // h) ** 2 + 3 * (C // h)) + h * TABLE,
    "combiner": lambda N, C, h: 2 * (C // h) ** 2 + h * TABLE,
    "transformer_ls": lambda N, C, h, r=49: (C + 1) * h * r + 4 * C + h * TABLE,
    "transformer_ls 16": lambda N, C, h: PARAMETERS["transformer_ls"](N, C, h, r=16),
    "scatterbrain": lambda N, C, h: h * TABLE,
    "scatterbrain subtracting": lambda N, C, h: h * TABLE,
    "sra": lambda N, C, h: N // 49 * C * C + 3 * C,
    "xca": lambda N, C, h: h,
    "transnormer": lambda N, C, h: C // 2,  # of half the layers
    "t2r": lambda N, C, h: 32 * C + 32 * h,
    "rfa": lambda N, C, h: h,
    "linear_sra": lambda N, C, h: C * C + 3 * C,
    "nystrom": lambda N, C, h: 33 * h,
    "linformer": lambda N, C, h: 2 * N * L,
    "abc": lambda N, C, h: C * h * L + h * L,
    "synthesizer": lambda N, C, h: 2 * h * N * 8 - 2 * (C * C + C),
    "reformer": lambda N, C, h: -C * C - C,
}


@functools.cache
def costs(config: str, overrides: tuple[str, ...] = ()) -> Costs:
    run = load_run(CONFIGS / f"{config}.yaml", overrides)
    return count_costs(run.model, run.attention)


def eva_macs(N: int, C: int, h: int, groups: int, samples: int) -> int:
    return (
        2 * N * W * C + N * groups * C + 2 * N * samples * C + 2 * N * groups * samples * C + 2 * groups * C * (C // h)
    )


def deit(N: int, C: int, h: int, mechanism: str, depth: int = 12) -> tuple[int, int]:
    """Parameters and MACs of a DeiT with `depth` layers for N patches of a 224 x 224 image."""
    patch = 3 * 224 * 224 // N
    layer = 12 * C * C + 13 * C + PARAMETERS.get(mechanism, lambda *_: 0)(N, C, h)
    parameters = (patch + 1) * C + N * C + depth * layer + 2 * C + 1001 * C - C + 1000
    return parameters, N * C * patch + depth * (12 * N * C * C + MACS[mechanism](N, C, h)) + 1000 * C


def pvt(depths: tuple[int, ...], mechanism: str) -> tuple[int, int]:
    """Parameters and MACs of a PVT-v2 with doubled heads for a 224 x 224 image; the last stage has softmax."""
    parameters = macs = 0
    before, ratios = 3, (8, 8, 4, 4)
    for s, (C, h) in enumerate(zip((64, 128, 320, 512), (2, 4, 10, 16), strict=True)):
        N, kernel, hidden = (56 >> s) ** 2, 49 if s == 0 else 9, C * ratios[s]
        name = mechanism if s < 3 else "softmax"
        embed = kernel * before * C
        layer = 4 * C * C + 2 * C * hidden + 9 * hidden  # matrices
        vectors = 4 * C + 4 * C + hidden + hidden + C  # two norms and the biases of qkv, proj, fc1, dwconv, fc2
        parameters += embed + C + 2 * C + 2 * C
        parameters += depths[s] * (layer + vectors + PARAMETERS.get(name, lambda *_: 0)(N, C, h))
        macs += N * embed + depths[s] * (N * layer + MACS[name](N, C, h))
        before = C
    return parameters + 513 * 1000, macs + 512 * 1000


TINY_784, TINY, SMALL = (784, 192, 3), (196, 192, 3), (196, 384, 6)
B1, B2, B3, B4 = (2, 2, 2, 2), (3, 4, 6, 3), (3, 4, 18, 3), (3, 8, 27, 3)

ROWS = [  # configuration, overrides, (parameters, MACs) by formula, MACs in G where published analyses agree on them
    ("deit_tiny_p8/softmax", (), deit(*TINY_784, "softmax"), 7.023),
    ("deit_tiny_p8/local", (), deit(*TINY_784, "local"), 4.368),
    ("deit_tiny_p8/performer", (), deit(*TINY_784, "performer"), 5.116),
    ("deit_tiny_p8/softmax", ("attention={name: ra, proposal: unbiased}",), deit(*TINY_784, "ra unbiased"), 8.44),
    ("deit_tiny_p8/softmax", ("attention={name: ra, proposal: biased}",), deit(*TINY_784, "ra biased"), 9.86),
    ("deit_tiny_p8/lara", (), deit(*TINY_784, "lara light"), 4.664),
    (
        "deit_tiny_p8/lara",
        ("attention.proposal=pool", "attention.weighting=balance"),
        deit(*TINY_784, "lara light eq. 34, 36"),
        4.565,
    ),
    ("deit_tiny_p8/eva", (), deit(*TINY_784, "eva"), 4.563),
    ("deit_tiny_p8/eva", ("attention.num_samples=49",), deit(*TINY_784, "eva 49 samples"), 13.32),
    (
        "deit_tiny_p8/eva",
        ("attention.num_landmarks=1", "attention.num_samples=49"),
        deit(*TINY_784, "eva 1 group, 49 samples"),
        4.724,
    ),
    ("deit_tiny_p8/combiner", (), deit(*TINY_784, "combiner"), 4.661),
    ("deit_tiny_p8/transformer_ls", (), deit(*TINY_784, "transformer_ls"), 4.987),
    ("deit_tiny_p8/transformer_ls", ("attention.num_landmarks=16",), deit(*TINY_784, "transformer_ls 16"), 4.570),
    ("deit_tiny_p8/smyrf", (), deit(*TINY_784, "smyrf"), 4.552),
    ("deit_tiny_p8/scatterbrain", (), deit(*TINY_784, "scatterbrain"), 5.072),
    (
        "deit_tiny_p8/scatterbrain",
        ("attention.complement=released",),
        deit(*TINY_784, "scatterbrain subtracting"),
        5.235,
    ),
    (
        "deit_tiny_p8/scatterbrain",
        ("attention.support=lsh", "attention.position_bias=none"),
        deit(*TINY_784, "scatterbrain lsh"),
        None,
    ),
    ("deit_tiny_p8/softmax", ("attention=sra",), deit(*TINY_784, "sra"), 4.064),
    ("deit_tiny_p8/linear", (), deit(*TINY_784, "linear"), 4.422),
    ("deit_tiny_p8/xca", (), deit(*TINY_784, "xca"), 4.422),
    ("deit_tiny_p8/cosformer", (), deit(*TINY_784, "cosformer"), 4.653),
    ("deit_tiny_p8/cosformer", ("attention.layout=2d",), deit(*TINY_784, "cosformer 2d"), None),
    ("deit_tiny_p8/transnormer", (), deit(*TINY_784, "transnormer"), None),
    ("deit_tiny_p8/t2r", (), deit(*TINY_784, "t2r"), None),
    ("deit_tiny_p8/rfa", (), deit(*TINY_784, "rfa"), None),
    ("deit_tiny_p8/dpfp", (), deit(*TINY_784, "dpfp"), None),
    ("deit_tiny_p8/linear_sra", (), deit(*TINY_784, "linear_sra"), 3.739),
    ("deit_tiny_p8/nystrom", (), deit(*TINY_784, "nystrom"), 4.779),
    ("deit_tiny_p8/nystrom", ("attention.conv=none",), deit(*TINY_784, "nystrom without conv"), 4.72),
    ("deit_tiny_p8/linformer", (), deit(*TINY_784, "linformer"), 4.545),
    ("deit_tiny_p8/abc", (), deit(*TINY_784, "abc"), 4.810),
    ("deit_tiny_p8/synthesizer", (), deit(*TINY_784, "synthesizer"), 5.090),
    ("deit_tiny_p8/orthoformer", (), deit(*TINY_784, "orthoformer"), None),
    ("deit_tiny_p8/longformer", (), deit(*TINY_784, "longformer"), None),
    ("deit_tiny_p8/sparse_transformer", (), deit(*TINY_784, "sparse_transformer"), 4.390),
    ("deit_tiny_p8/bigbird", (), deit(*TINY_784, "bigbird"), 4.653 + 12 * 2 * 784 * 2 * 16 * 192 / 1e9),
    (
        "deit_tiny_p8/clustered",
        ("attention.num_bits=32", "attention.num_top_keys=0"),
        deit(*TINY_784, "clustered, 32 bits"),
        4.426,
    ),
    ("deit_tiny_p8/clustered", ("attention.num_bits=32",), deit(*TINY_784, "clustered improved, 32 bits"), 4.541),
    ("deit_tiny_p8/reformer", (), deit(*TINY_784, "reformer"), 5.376),
    ("deit_tiny_p16/softmax", (), deit(*TINY, "softmax"), 1.247),
    ("deit_tiny_p16/lara", (), deit(*TINY, "lara light"), 1.211),
    ("deit_tiny_p16/eva", (), deit(*TINY, "eva"), 1.173),
    ("deit_tiny_p16/ra", (), deit(*TINY, "ra unbiased"), None),
    ("deit_small_p16/softmax", (), deit(*SMALL, "softmax"), 4.574),
    ("deit_small_p16/local", (), deit(*SMALL, "local"), 4.308),
    ("deit_small_p16/lara", (), deit(*SMALL, "lara light"), 4.503),
    ("deit_small_p16/eva", (), deit(*SMALL, "eva"), 4.428),
    ("deit_small_p8/lara", (), deit(784, 384, 6, "lara light"), None),
    ("pvtv2_b3_2xheads/sra", ("attention=softmax",), pvt(B3, "softmax"), 11.80),
    ("pvtv2_b3_2xheads/local", (), pvt(B3, "local"), 7.160),
    ("pvtv2_b3_2xheads/eva", (), pvt(B3, "eva"), 7.394),
    *(
        (f"pvtv2_{size}_2xheads/{name}", (), pvt(depths, mechanism), macs)
        for size, depths, counts in (
            ("b1", B1, (2.108, 2.48, None)),
            ("b2", B2, (None, 4.74, None)),
            ("b3", B3, (6.897, 8.04, 7.709)),
            ("b4", B4, (None, 11.78, 11.311)),
        )
        for name, mechanism, macs in zip(
            ("sra", "performer", "lara"), ("sra", "performer", "lara dense"), counts, strict=True
        )
    ),
]


@pytest.mark.parametrize(
    ("config", "overrides", "expected", "giga_macs"), ROWS, ids=[" ".join((row[0], *row[1])) for row in ROWS]
)
def test_costs_equal_their_formulas(config, overrides, expected, giga_macs):
    parameters, macs = costs(config, overrides)
    assert parameters == expected[0]
    assert macs == pytest.approx(expected[1], rel=0.01)  # the formulas leave out normalisers of up to h N S
    if giga_macs is not None:
        assert macs / 1e9 == pytest.approx(giga_macs, rel=0.01)


DEFAULTS = {"ra": "ra unbiased", "lara": "lara light", "transformer_ls": "transformer_ls 16"}
"""Formulas of the mechanisms' default options, where they are not named after the mechanism."""


@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("name", ATTENTION)
def test_costs_of_every_mechanism_at_fewer_and_more_tokens(name, patch):
    """Of two layers, which is enough: TransNormer has two kinds."""
    parameters, macs = count_costs({"name": f"deit_tiny_p{patch}", "img_size": 224, "depth": 2}, name)
    expected = deit((224 // patch) ** 2, 192, 3, DEFAULTS.get(name, name), depth=2)
    assert parameters == expected[0]
    assert macs == pytest.approx(expected[1], rel=0.01)


@pytest.mark.parametrize(("samples", "total"), [(64, 4.653), (96, 4.885), (128, 5.116)])
def test_performer_costs_by_samples(samples, total):
    layer = MACS["performer"](*TINY_784, S=samples)
    expected = deit(*TINY_784, "performer")[1] + 12 * (layer - MACS["performer"](*TINY_784))
    assert costs("deit_tiny_p8/performer", (f"attention.num_samples={samples}",)).macs == pytest.approx(
        expected, rel=0.01
    )
    assert expected / 1e9 == pytest.approx(total, rel=0.01)


UNEXPLAINED = {  # where the papers' own configuration does not give their figures: what it gives (M, G)
    ("deit_tiny_p8/performer.yaml", ()): (5.7, 5.1),  # 4.9 G are those of 96 samples, not the 128 of EVA Table 9
    ("deit_tiny_p8/combiner.yaml", ()): (5.8, 4.7),  # 5.7 M leave no room for the summaries of EVA Table 9
    ("deit_tiny_p16/performer.yaml", ()): (5.7, 1.3),  # 1.2 G: 64 samples
    ("deit_small_p16/performer.yaml", ()): (22.0, 4.7),  # 4.4 G: 64 samples
    ("pvtv2_b1_2xheads/lara.yaml", ()): (12.6, 2.3),  # 13.7 M; b2, b3 and b4 agree
    ("pvtv2_b2_2xheads/performer.yaml", ()): (21.1, 4.7),  # 4.9 G
    ("pvtv2_b3_2xheads/performer.yaml", ()): (36.0, 8.0),  # 8.2 G
    ("pvtv2_b4_2xheads/performer.yaml", ()): (48.6, 11.8),  # 11.9 G
}


@pytest.mark.parametrize("row", [row for row in read_papers() if row.source], ids=lambda row: row.config)
def test_costs_are_those_printed_in_the_papers(row):
    parameters, macs = costs(row.config.removesuffix(".yaml"), row.overrides)
    printed = UNEXPLAINED.get((row.config, row.overrides), (row.parameters, row.macs))
    assert row.note or (row.config, row.overrides) not in UNEXPLAINED
    # 0.07: the tables round to one decimal, not always to the nearest (22.16 M is "22.2", 4.66 G "4.6", 22.46 M "22.4")
    assert parameters / 1e6 == pytest.approx(printed[0], abs=0.07)
    if printed[1] is not None:
        assert macs / 1e9 == pytest.approx(printed[1], abs=0.07)


def test_benchmark_prints_the_table(capsys):
    benchmark.main(["--macs", str(CONFIGS / "deit_tiny_p16/eva.yaml")])
    assert capsys.readouterr().out.splitlines()[-1] == "| deit_tiny_p16/eva.yaml | 5.826 |  | 1.173 |  |  |  |"
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--macs", "absent.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("absent.yaml: No such file or directory\n")


def test_benchmark_prints_every_mechanism_by_size(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "read_papers", list)
    monkeypatch.setattr(benchmark, "ATTENTION", ["softmax", "local"])
    benchmark.main(["--macs"])
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "| DeiT-Tiny with | MACs (G) at 196 tokens | parameters (M) | at 784 | parameters | at 3136 | parameters |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| softmax | 1.247 | 5.717 | 7.023 | 5.719 | 61.994 | 6.143 |",
        "| local | 1.114 | 5.723 | 4.368 | 5.725 | 17.384 | 6.149 |",
    ]
