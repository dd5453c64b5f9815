"""The fused Triton kernels: in Triton's interpreter on a CPU, and on a GPU where there is one.

The interpreter runs the programs of a kernel one after another; it ignores threads, shared memory and speed. Code that
it accepts may still not compile: see test_compiled.py.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from packaging.version import Version
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from attention import create_attention, kernels
from attention.ops import memory
from attention.ops import triton_tokens as tiles
from attention.ops.packed import triton_packed
from attention.ops.random_features import triton_features
from attention.parts.geometry import Windows
from engine.runtime.locks import hold_lock
from tests.support.kernel_cases import (
    CASES,
    Case,
    FeatureCase,
    PackedCase,
    checked_by,
    errors,
    excess,
    outputs_and_gradients,
)

ROOT = Path(__file__).parents[2]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def interpreted(pytestconfig, tmp_path_factory) -> dict:
    """The output of `interpreted.py`, which runs once for all workers of pytest-xdist."""
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip("Triton's interpreter before 3.7 fails with NumPy 2.4 and later (triton-lang/triton issue 9171)")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    filters = *pytestconfig.getini("filterwarnings"), "ignore:Conversion of an array:DeprecationWarning"  # Triton 3.6
    command = [sys.executable, *(f"-W{each}" for each in filters), "-m", "tests.support.interpreted"]
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    results = directory / "interpreted.json"
    with hold_lock(directory / "interpreted.lock", wait=True, minutes=30):
        if not results.exists():
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            results.write_text(run.stdout)
    return json.loads(results.read_text())


@every_case
def test_interpreted_kernels_equal_the_literal_twin_in_value_and_all_gradients(case, interpreted):
    found = interpreted["errors"][str(case)]
    assert {"y", "dqkv"} <= set(found) or {"y", "dk", "dv"} < set(found)
    for name, (error, plain_error) in found.items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


def test_kernels_under_every_use(interpreted):
    """Twice in a graph, checkpointed, compiled, all kinds of strides, frozen inputs, types that differ."""
    assert len(interpreted["uses"]) == 21
    for use, difference in interpreted["uses"].items():
        assert difference <= 1e-6, use


def test_layers_on_the_path_call_the_kernels_that_cover_them(interpreted):
    assert interpreted["layers"] == {
        "eva": ["packed_attention"],
        "eva of one group": ["packed_attention"],
        "eva without images": [],
        "eva of 80 channels a head": [],
        "eva of windows that overlap": [],
        "eva of bins that differ": ["joint_softmax"],
        "eva of released options": ["packed_attention"],
        "eva of groups in raster order": ["joint_softmax"],
        "eva of groups outside windows": [],
        "eva of two samples": [],
        "eva with a local term": ["packed_attention"],
        "eva with a class token": ["packed_attention"],
        "eva with dropout": [],
        "shifted windows": ["packed_attention"],
        "local beyond the grid": ["packed_attention"],
        "combiner": ["joint_softmax"],
        "transformer_ls": ["joint_softmax"],
        "local with registers and a local term": ["packed_attention"],
        "lara": ["lara"],
        "lara of float32": [],
        "lara of 70 landmarks": [],
        "lara of balanced weights": ["lara"],
        "performer": ["performer"],
        "performer of 129 samples": [],
        "performer of relu": [],
    }


def test_the_default_takes_kernels_in_half_precision_on_gpus_that_run_them(interpreted):
    for way in "eager", "compiled":
        assert interpreted["default"][f"(8, 0) {way} auto"] == ["packed_attention"]
        others = "(8, 0) {} torch", "(8, 0) {} auto in float32", "(7, 5) {} auto"
        assert all(interpreted["default"][each.format(way)] == [] for each in others)


def test_the_default_takes_the_faster_path_of_each_call(interpreted):
    found = interpreted["timed"]
    assert found["lara 2x24x16 bfloat16"] == 2.0
    assert found["attention(eva) 24x3x2x16 bfloat16"] == pytest.approx(2 / 3)
    assert found["eager"] == found["compiled"] == ["lara"]


def test_kernels_refuse_second_derivatives(interpreted):
    assert len(interpreted["refusals"]) == 4
    assert all(text.startswith("fast paths have no second derivatives") for text in interpreted["refusals"])


class Quantised(torch.Tensor):
    """A weight that libraries quantise in place: the module keeps its type."""


def quantise(landmarks: nn.Module) -> None:
    linear = landmarks.k.linear
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Quantised))
    assert type(linear.weight) is Quantised


def test_what_the_kernels_of_packed_projections_do_not_cover(monkeypatch):
    monkeypatch.setattr(tiles.INTERPRETED, "value", True)

    def covers(name="eva", grid=(6, 8), dim=32, B=1, dtype=torch.float32, change=None, **options) -> bool:
        attn = create_attention(name, dim=dim, num_heads=2, grid=grid, **options)
        if change:
            change(attn.landmarks)
        packing, (H, W) = attn.packing(grid), grid
        qkv = torch.zeros(B, attn.num_prefix_tokens + H * W, 3, 2, dim // 2, dtype=dtype)
        return packing is not None and triton_packed.covers_packed(qkv, packing)

    eva = {"window_size": 3, "num_landmarks": 8}
    assert covers(**eva)
    assert covers(window_size=3, num_landmarks=0)
    assert covers(**eva, num_prefix_tokens=56)
    assert not covers(**eva, num_prefix_tokens=57)
    assert covers("local", window_size=4, layout="1d")
    assert covers("shifted_window", window_size=3, layer=1)
    for name, options in ("local", {"window_size": 3}), ("eva", eva):
        changes = {"overlap": 1}, {"causal": True, "layout": "1d"}, {"dim": 48}, {"dim": 160}, {"B": 0}
        for changed in (*changes, {"dtype": torch.float64}, {"window_size": 9, "grid": (9, 16)}):
            assert not covers(name, **options | changed), changed
    hook = {"change": lambda landmarks: landmarks.k.norm.register_forward_hook(lambda *x: None)}
    adapter = {"change": lambda landmarks: setattr(landmarks.q, "linear", nn.Sequential(landmarks.q.linear))}
    parametrised = {"change": lambda landmarks: weight_norm(landmarks.q.linear)}
    quantised = {"change": quantise}
    values = ("partition", "all_1d"), ("landmark_transform", "linear"), ("pool", "max"), ("num_samples", 2), ("mu", "q")
    grids = {"grid": (6, 7)}, {"grid": (12, 10), "num_landmarks": 120}
    for changed in (hook, adapter, parametrised, quantised, *({key: value} for key, value in values), *grids):
        assert not covers(**eva | changed), changed
    monkeypatch.setattr(tiles.INTERPRETED, "value", False)
    monkeypatch.setattr(memory, "on_gpu", lambda x: True)
    assert not covers(**eva)
    assert covers(**eva, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "of_q"),
    [
        ({"attn_drop": 0.1}, {}),
        ({"windows": Windows((1, 35), (1, 12), causal=True)}, {}),
        ({"windows": Windows((5, 7), (0, 0))}, {}),
        ({"windows": Windows((5, 7), (3, 4), (0, 1))}, {}),
        ({"windows": Windows((5, 7), (3, 4), key_mask=torch.ones(1, 35, dtype=torch.bool))}, {}),
        ({"keys": torch.zeros(1, 2, 6, 3, 16), "values": torch.zeros(1, 2, 6, 3, 16)}, {}),
        ({"keys": None}, {}),
        ({"keys": torch.zeros(1, 2, 1, 65, 16), "values": torch.zeros(1, 2, 1, 65, 16)}, {}),
        ({"logits": torch.zeros(6, 12, 3)}, {}),
        ({"logits": torch.zeros(2, 1, 1, 3)}, {}),
        ({"logits": torch.zeros(3, requires_grad=True)}, {}),
        ({}, {"dtype": torch.float64}),
        ({}, {"d": 48}),
        ({}, {"B": 0}),
    ],
    ids=str,
)
def test_what_the_kernels_of_the_joint_softmax_do_not_cover(changed, of_q, monkeypatch):
    monkeypatch.setattr(tiles.INTERPRETED, "value", True)

    def covers(changed, dtype=torch.float32, d=16, B=1):
        q, summaries = torch.zeros(B, 2, 35, d, dtype=dtype), torch.zeros(1, 2, 1, 3, d)
        arguments = {"keys": summaries, "values": summaries, "windows": Windows((5, 7), (3, 4))}
        return triton_packed.covers_joint_softmax(q, q, q, **arguments | changed)

    assert covers({})
    assert covers({"logits": torch.zeros(6, 1, 3)})
    assert not covers(changed, **of_q)


def test_what_the_kernels_of_random_features_do_not_cover(monkeypatch):
    monkeypatch.setattr(tiles.INTERPRETED, "value", True)
    q, omega = torch.zeros(1, 2, 35, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 128, 16)
    assert triton_features.covers_performer(q, q, q, omega)
    for v, samples in (q[..., :8], omega), (q.float(), omega), (q, torch.cat([omega, omega], 2)):
        assert not triton_features.covers_performer(q, q, v, samples)


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch):
    devices, x = [], torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: (devices.append(x), nullcontext())[1])
    for first in x, (x, 1, 1, 1):
        tiles.launch({(1,): lambda *arguments, **options: None}, (1,), first, SimpleNamespace(num_stages=1))
    assert devices == [x, x]


@pytest.mark.gpu
@every_case
def test_kernels_on_a_gpu_equal_the_literal_twin_in_value_and_all_gradients(case):
    for name, (error, plain_error) in errors(case, torch.device("cuda")).items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


HALF, BF16 = (torch.bfloat16, torch.float16), (torch.bfloat16,)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "d"),
    [
        (case, dtype, d)
        for case, dtypes in (
            (Case((14, 14), (7, 7), c=49, B=2, h=3), HALF),
            (FeatureCase(196, 64, B=2, h=3), BF16),
            (FeatureCase(196, 49, "decoupled", B=2, h=3), BF16),
            *((PackedCase((14, 14), (7, 7), (7, 7), P, B=2, h=3), HALF) for P in (0, 1, 5)),
        )
        for dtype in dtypes
        for d in ((32, 40, 64) if isinstance(case, FeatureCase) else (32, 64))
    ],
    ids=str,
)
def test_kernels_on_a_gpu_at_the_papers_sizes(case, dtype, d):
    case = case._replace(d=d, dtype=dtype)
    for name, (error, plain_error) in errors(case, torch.device("cuda")).items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((28, 28), (7, 7), c=49),
        FeatureCase(784, 64),
        FeatureCase(784, 49, "decoupled"),
        *(PackedCase((28, 28), (7, 7), (7, 7), P) for P in (0, 1)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*")  # advice on speed
def test_kernels_on_a_gpu_are_deterministic_and_compile(case):
    checked = checked_by(case)
    inputs, options = checked.example(case._replace(d=64, B=8, h=3, dtype=torch.bfloat16), torch.device("cuda"))
    compiled = torch.compile(checked.kernels, fullgraph=True, dynamic=False)
    functions = checked.kernels, checked.kernels, compiled
    first, again, graph = (outputs_and_gradients(f, checked.names, inputs, options) for f in functions)
    assert all(torch.equal(first[name], again[name]) for name in first)
    # samples, and sums of gradients, come from PyTorch's operators
    assert all((graph[name] - x).norm() < 0.01 * x.norm() for name, x in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eva", "local", "lara", "performer"])
def test_the_default_path_on_a_gpu(name):
    runs = torch.cuda.get_device_capability() >= kernels.LOWEST_CAPABILITY
    attn, x = create_attention(name, dim=128, num_heads=2, grid=(14, 14)).cuda(), torch.randn(2, 196, 128).cuda()
    found = {}
    for path in ("auto", "torch", "triton"):
        torch.manual_seed(0)
        with kernels.use(path), torch.autocast("cuda", torch.bfloat16):
            found[path] = attn(x, (14, 14))
            assert ("Triton's" in kernels.resolved()) == (path == "triton" or (runs and path == "auto"))
    assert torch.equal(found["auto"], found["triton" if runs else "torch"])
    assert not torch.equal(found["torch"], found["triton"])
