"""The fused Triton kernels: in Triton's interpreter on a CPU, compiled for GPUs that are not there, and on one that is.

The interpreter computes as the kernels say, one program after another; it knows nothing of threads, shared memory or
speed. What it takes for Triton may still not compile, hence the second.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.ops import triton_tokens as tiles
from attention.ops.group_values import triton_groups, triton_tiles
from attention.ops.joint_softmax import triton_joint
from attention.ops.random_features import triton_random_features
from attention.parts.geometry import Windows
from attention.parts.groups import bins, bins_outside
from bench.check_kernels import (
    CASES,
    CHECKED,
    Case,
    GroupCase,
    LaraCase,
    PerformerCase,
    errors,
    excess,
    outputs_and_gradients,
)

ROOT = Path(__file__).parents[2]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """What `interpreted.py` prints."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    warnings = ["-W", "error", "-W", "ignore:Conversion of an array:DeprecationWarning"]  # NumPy's, of Triton 3.6
    command = [sys.executable, *warnings, "-m", "tests.support.interpreted"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        (lambda: None, "tf32x3"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "tf32"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"), "tf32x3"),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "tf32"),
        (lambda: setattr(torch.backends, "fp32_precision", "ieee"), "tf32x3"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "tf32"),
        (lambda: torch.set_float32_matmul_precision("high"), "tf32"),
        (lambda: torch.set_float32_matmul_precision("medium"), "tf32"),
    ],
)
def test_precision_follows_every_switch_of_torch(switch, expected):
    try:
        switch()
        assert tiles.precision() == expected
    finally:
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"


@every_case
def test_interpreted_kernels_equal_the_literal_twin_in_value_and_all_gradients(case, interpreted):
    found = interpreted["errors"][str(case)]
    assert {"y", "dk", "dv"} < set(found)
    for name, (error, plain_error) in found.items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


def test_kernels_under_every_use(interpreted):
    """Twice in a graph, checkpointed, compiled, all kinds of strides, frozen inputs, types that differ."""
    assert len(interpreted["uses"]) == 18
    for use, difference in interpreted["uses"].items():
        assert difference <= 1e-6, use


def test_layers_on_the_path_call_the_kernels(interpreted):
    assert set(interpreted["layers"]) == {"eva", "combiner", "lara", "performer"}
    for name, difference in interpreted["layers"].items():
        assert difference <= 1e-5, name  # gradients are sums over all tokens


def described(argument, path: tuple, constants: dict):
    """The type of a kernel's argument, in Triton's notation."""
    if isinstance(argument, tuple) and not hasattr(argument, "block_d"):
        return tuple(described(x, (*path, i), constants) for i, x in enumerate(argument))
    if isinstance(argument, torch.Tensor):
        return POINTERS[argument.dtype]
    if isinstance(argument, (int, float)) and argument != 1:
        return "i32" if isinstance(argument, int) else "fp32"
    constants[path] = argument
    return "constexpr"


WINDOWS = Case((14, 14), (7, 7), c=49, d=128, log_count=True, dtype=torch.bfloat16)
OF_WINDOWS = {"_forward", "_query_gradient", "_landmark_gradient"}
OF_GROUPS = {"_forward", "_token_gradient", "_sample_gradient"}
OF_SAMPLES = {"_mix", "_query_sums", "_sample_sums", "_query_gradient"}


@pytest.mark.parametrize(
    ("capability", "case", "kernels"),
    [
        (80, WINDOWS._replace(overlap=(3, 3)), {*OF_WINDOWS, "_key_gradient", "_bias_gradient"}),
        (90, WINDOWS, OF_WINDOWS),
        (90, GroupCase((5, 7), (2, 3), dtype=torch.bfloat16), OF_GROUPS),
        (90, GroupCase((28, 28), (7, 7), d=64, dtype=torch.bfloat16), {"_forward", "_gradient"}),
        (90, PerformerCase(70, 40, dtype=torch.bfloat16), OF_GROUPS | OF_SAMPLES),
        (80, LaraCase(70, 40, dtype=torch.bfloat16), OF_GROUPS | OF_SAMPLES | {"_mean_ratio"}),
    ],
    ids=["windows that overlap", "windows", "groups", "tiles", "performer", "lara"],
)
def test_kernels_compile_for_a_gpu(capability, case, kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = {}

    def compile_only(kernel, programs, *arguments):
        constants = {}
        named = zip(kernel.arg_names, arguments, strict=True)
        types = {name: described(x, (i,), constants) for i, (name, x) in enumerate(named)}
        source, options = ASTSource(kernel, types, constants), tiles.launch_options(arguments[-1])
        compiled[kernel.__name__] = triton.compile(source, GPUTarget("cuda", capability, 32), options)

    for module in (triton_joint, triton_groups, triton_tiles, triton_random_features):
        monkeypatch.setattr(module, "launch", compile_only)
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case, torch.device("cpu"))
    outputs_and_gradients(checked.kernels, checked.names, inputs, options)
    assert set(compiled) == kernels
    for name, kernel in compiled.items():
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 163 * 2**10, name  # of a multiprocessor of an A100, the least of its kind


@pytest.mark.parametrize(
    ("changed", "of_q"),
    [
        ({"attn_drop": 0.1}, {}),
        ({"windows": Windows((1, 35), (1, 12), causal=True)}, {}),
        ({"windows": Windows((5, 7), (0, 0))}, {}),
        ({"keys": torch.zeros(1, 2, 6, 3, 16), "values": torch.zeros(1, 2, 6, 3, 16)}, {}),
        ({"values": torch.zeros(1, 2, 1, 3, 16)}, {}),
        ({"logits": torch.zeros(6, 12, 3)}, {}),
        ({"logits": torch.zeros(12, 3)}, {}),
        ({"logits": torch.zeros(2, 1, 1, 3)}, {}),
        ({"logits": torch.zeros(3, requires_grad=True)}, {}),
        ({}, {"dtype": torch.float64}),
        ({}, {"d": 136}),
        ({}, {"is_cuda": False}),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_cover(changed, of_q, monkeypatch):
    def covers(changed, dtype=torch.float32, d=16, is_cuda=True):
        monkeypatch.setattr(tiles.INTERPRETED, "value", is_cuda)
        q = torch.zeros(1, 2, 35, d, dtype=dtype)
        arguments = {
            "keys": torch.zeros(1, 2, 1, 3, d),
            "values": torch.zeros(1, 2, 1, 3, d),
            "windows": Windows((5, 7), (3, 4)),
        }
        return triton_joint.covers_joint_softmax(q, q, q, **arguments | changed)

    assert covers({})
    assert covers({"logits": torch.zeros(6, 1, 3)})
    assert not covers(changed | ({"keys": None} if set(changed) == {"values"} else {}), **of_q)


def test_what_the_kernels_of_groups_do_not_cover(monkeypatch):
    monkeypatch.setattr(tiles.INTERPRETED, "value", True)
    k, wide = torch.zeros(1, 2, 35, 16), torch.zeros(1, 2, 35, 136)
    shared = bins((5, 7), (2, 3), k.device)
    of_windows = bins_outside(shared, Windows((5, 7), (3, 4)))
    covers = triton_groups.covers_group_values
    assert covers(k, k, k, shared)
    for x, groups in ((k.double(), shared), (wide, shared), (k, of_windows)):
        assert not covers(x, x, x, groups)
    monkeypatch.setattr(tiles.INTERPRETED, "value", False)
    assert not covers(k, k, k, shared)


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (GroupCase((6, 8), (2, 4)), triton_tiles),
        (GroupCase((16, 16), (1, 1)), triton_tiles),
        (GroupCase((17, 16), (1, 1)), triton_groups),
        (GroupCase((6, 8), (2, 4), samples=2), triton_groups),
        (GroupCase((6, 8), (2, 4), (1, 1)), triton_groups),
        (GroupCase((6, 7), (2, 4)), triton_groups),
    ],
    ids=str,
)
def test_which_kernels_groups_take(case, taken, monkeypatch):
    called = []
    for module in (triton_tiles, triton_groups):
        monkeypatch.setattr(module, "launch", lambda *_, module=module: called.append(module))
    inputs, _ = CHECKED[GroupCase].example(case, torch.device("cpu"))
    triton_groups.group_values(*inputs)
    assert called == [taken]


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("performer", {"features": "hyperbolic"}),
        ("lara", {"proposal": "mixture"}),
        ("lara", {"weighting": "coupled"}),
        ("lara", {"noise": torch.zeros(1, 1, 2, 1)}),
    ],
    ids=str,
)
def test_what_the_kernels_of_random_features_do_not_cover(op, options, monkeypatch):
    monkeypatch.setattr(tiles.INTERPRETED, "value", True)
    covers = getattr(triton_random_features, f"covers_{op}")
    x, samples = torch.zeros(1, 2, 35, 16), torch.zeros(1, 2, 3, 16)
    of_lara = {"q_bar": samples, "k_bar": samples, "noise": samples[:, :, :, None]}
    others = of_lara if op == "lara" else {"omega": samples}
    assert covers(x, x, x, **others)
    assert not covers(x, x, x, **others | options)
    for y in (x.double(), torch.zeros(1, 2, 35, 136)):
        assert not covers(y, y, y, **others)
    monkeypatch.setattr(tiles.INTERPRETED, "value", False)
    assert not covers(x, x, x, **others)


@gpu
@every_case
def test_kernels_on_a_gpu_equal_the_literal_twin_in_value_and_all_gradients(case):
    for name, (error, plain_error) in errors(case, torch.device("cuda")).items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case((14, 14), (7, 7), c=49, B=2, h=3),
        Case((14, 14), (7, 7), (3, 3), c=49, B=2, h=3),
        GroupCase((28, 28), (7, 7), B=2, h=3),
        PerformerCase(196, 128, B=2, h=3),
        LaraCase(196, 49, B=2, h=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [32, 64, 80, 128])
def test_kernels_on_a_gpu_at_the_papers_sizes(d, case, dtype):
    case = case._replace(d=d, dtype=dtype)
    for name, (error, plain_error) in errors(case, torch.device("cuda")).items():
        assert excess(case, error, plain_error) <= 1, (name, error, plain_error)


@gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((28, 28), (7, 7), c=49),
        GroupCase((28, 28), (7, 7)),
        PerformerCase(784, 128),
        LaraCase(784, 49, "balance"),
    ],
    ids=str,
)
def test_kernels_on_a_gpu_are_deterministic_and_compile(case):
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case._replace(d=64, B=8, h=3, dtype=torch.bfloat16), torch.device("cuda"))
    compiled = torch.compile(checked.kernels, fullgraph=True, dynamic=False)
    functions = checked.kernels, checked.kernels, compiled
    first, *others = (outputs_and_gradients(f, checked.names, inputs, options) for f in functions)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
