"""The fused Triton kernels compiled for absent GPUs: the resources that they use lie within stated bounds.

Above 255 registers a thread's numbers spill to memory. Blocks of threads that share more than `SHARED` do not launch.
"""

import pytest
import torch
import triton
from packaging.version import Version

from attention.ops.group_values import triton_tiles
from attention.ops.joint_softmax import triton_joint
from attention.ops.packed import triton_packed
from attention.ops.random_features import triton_features
from tests.support.compiled import compiler
from tests.support.kernel_cases import Case, FeatureCase, GroupCase, PackedCase, checked_by, outputs_and_gradients

SHARED = {80: 163 * 2**10, 86: 99 * 2**10, 90: 227 * 2**10}
"""Shared memory of a block in bytes, by compute capability: A100, RTX 30 and 40, H100."""
WINDOWS = {  # registers, and bytes that spill, stored and loaded
    "forward": (168, 0),
    "query_gradient": (255, 820),  # four warps that spill take two thirds of the time of eight that do not (H100)
    "key_gradient": (160, 0),
    "bias_gradient": (255, 0),
    "landmark_gradient": (255, 280),
}
if Version(triton.__version__) < Version("3.9"):  # those compilers spill more, which costs time on a GPU
    WINDOWS |= {"forward": (186, 0), "bias_gradient": (255, 164)}
if Version(triton.__version__).release[:2] == (3, 8):  # float32 of 64 channels on the A100; 3.6 and 3.7 keep to 164
    WINDOWS["bias_gradient"] = (255, 260)
TILES = {"_forward": (64, 0), "_gradient": (128, 0)}
FEATURES = {
    "forward_values": (90, 0),
    "forward_mix": (255, 0),
    "backward_mix": (255, 1000),  # 72 at most for 64 channels on the H100, as measured
    "backward_values": (255, 760),
}
ON_PACKED = {
    "summarise": (128, 0),
    "attend": (190, 0),
    "landmark_gradient": (255, 40),
    "group_gradient": (170, 0),
    "transform_gradient": (255, 300),
    "token_gradient": (255, 1060),  # 90 at most for 64 channels on the H100, as measured
}
ONE_BLOCK = WINDOWS.keys() - {"key_gradient", "bias_gradient"}
BF16, FP32 = torch.bfloat16, torch.float32
SEVEN = Case((14, 14), (7, 7), c=49, B=2, h=3)
LARA = FeatureCase(196, 49, "decoupled", B=2, h=3)
PACKED = PackedCase((28, 28), (7, 7), (7, 7), B=2, h=3)
LARGE, SMALL = (GroupCase((32, 32), bins, B=2, h=3) for bins in ((2, 2), (8, 8)))
ROWS = [
    (capability, case, dtype, d)
    for capability in SHARED
    for case in (SEVEN, SMALL, LARGE, LARA, PACKED)
    for dtype in ((BF16,) if case in (LARA, PACKED) else (BF16, FP32))
    for d in (32, 64)
]
DEFAULT = (
    *((80, SEVEN, BF16, 64), (86, SEVEN, FP32, 64), (80, SMALL, BF16, 32), (90, SMALL, FP32, 64)),
    *((86, LARA, BF16, 64), (90, LARA, BF16, 64), (86, PACKED, BF16, 64), (90, PACKED, BF16, 64)),
)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("capability", "case", "dtype", "d"),
    [pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.stress) for row in ROWS],
    ids=str,
)
def test_kernels_fit_a_gpu(capability, case, dtype, d, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}
    for module in (triton_joint, triton_tiles, triton_features, triton_packed):
        monkeypatch.setattr(module, "launch", compiler(capability, found))
    checked = checked_by(case)
    inputs, options = checked.example(case._replace(dtype=dtype, d=d), torch.device("cpu"))
    outputs_and_gradients(checked.kernels, checked.names, inputs, options)
    bounds = {SEVEN: WINDOWS, LARA: FEATURES, PACKED: ON_PACKED}.get(case, TILES)
    assert set(found) == (ONE_BLOCK if case is SEVEN and dtype == BF16 else set(bounds))
    for name, kernel in found.items():
        registers, spilled = bounds[name]
        assert 16 <= kernel.registers <= registers, (name, kernel)
        assert kernel.spilled <= spilled, (name, kernel)
        if (capability, d) == (90, 64) and case in (LARA, PACKED):
            assert kernel.spilled <= (80 if case is LARA else 90), (name, kernel)
        assert kernel.shared <= SHARED[capability], (name, kernel)
