"""The fused Triton kernels compiled for absent GPUs: the resources that they use lie within stated bounds.

Above 255 registers a thread's numbers spill to memory. Blocks of threads that share more than `SHARED` do not launch.
"""

import pytest
import torch

from attention.ops.packed import triton_packed
from attention.ops.random_features import triton_features
from tests.support.compiled import compiler
from tests.support.kernel_cases import Case, FeatureCase, PackedCase, checked_by, outputs_and_gradients

SHARED = {80: 163 * 2**10, 86: 99 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10, 120: 99 * 2**10}
"""Shared memory of a block in bytes, by compute capability: A100, RTX 30, 40, H100, B200, RTX 50."""
FEATURES = {  # registers, and bytes that spill, stored and loaded
    "forward_values": (168, 0),
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
GIVEN = {"attend": (192, 0), "summarise": (128, 16), "landmark_gradient": (255, 104)}
"""Other bounds with landmarks that are given; Triton 3.6 spills a value, and 3.8 some on the A100."""
BLACKWELL = {"transform_gradient": (255, 1250)}
"""Other bounds from compute capability 10.0 on."""
LARA = FeatureCase(196, 49, "decoupled", B=2, h=3)
PACKED = PackedCase((28, 28), (7, 7), (7, 7), B=2, h=3)
PREFIXED = PACKED._replace(P=5)
JOINT = Case((28, 28), (7, 7), c=49, leave_one_out=True, B=2, h=3)
ROWS = [(capability, case, d) for capability in SHARED for case in (LARA, PACKED, PREFIXED, JOINT) for d in (32, 64)]
DEFAULT = [(capability, case, 64) for capability in (86, 90) for case in (LARA, PACKED, PREFIXED, JOINT)]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("capability", "case", "d"),
    [pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.stress) for row in ROWS],
    ids=str,
)
def test_kernels_fit_a_gpu(capability, case, d, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}
    for module in (triton_features, triton_packed):
        monkeypatch.setattr(module, "launch", compiler(capability, found))
    checked = checked_by(case)
    inputs, options = checked.example(case._replace(dtype=torch.bfloat16, d=d), torch.device("cpu"))
    outputs_and_gradients(checked.kernels, checked.names, inputs, options)
    others = ({} if case is PACKED else GIVEN) | (BLACKWELL if capability >= 100 else {})
    bounds = FEATURES if case is LARA else ON_PACKED | others
    assert set(found) == ({"attend", "landmark_gradient", "token_gradient"} if case is JOINT else set(bounds))
    for name, kernel in ((name, kernel) for name, launches in found.items() for kernel in launches):
        registers, spilled = bounds[name]
        assert 16 <= kernel.registers <= registers, (name, kernel)
        assert kernel.spilled <= spilled, (name, kernel)
        if (capability, d) == (90, 64):
            assert kernel.spilled <= (80 if case is LARA else 90), (name, kernel)
        assert kernel.shared <= SHARED[capability], (name, kernel)
