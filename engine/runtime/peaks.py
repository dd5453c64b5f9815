"""Peak arithmetic of GPUs, from NVIDIA's data sheets: dense matrix products, without structured sparsity."""

import re
from collections.abc import Mapping
from typing import Literal

Precision = Literal["bf16", "fp16", "tf32", "fp32"]


def _ampere(half: float, tf32: float, fp32: float) -> Mapping[Precision, float]:
    """Returns the peaks of an architecture since Ampere, which has bf16 and TF32."""
    return {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}


PEAKS: Mapping[str, Mapping[Precision, float]] = {
    # H100 Tensor Core GPU Architecture, whitepaper, table 2; H200: nvidia.com/en-us/data-center/h200
    "H100 80GB HBM3|H200": _ampere(989.4, 494.7, 66.9),
    "H100 PCIe": _ampere(756.0, 378.0, 51.2),
    # nvidia.com/en-us/data-center/a100
    "A100-(SXM4?|PCIE)-[48]0GB|A100 80GB PCIe": _ampere(312.0, 156.0, 19.5),
    # nvidia.com/en-us/data-center/ l40s, l4, a40, products/a10-gpu; the first two print figures with sparsity, halved
    "L40S": _ampere(362.05, 183.0, 91.6),
    "L4": _ampere(121.0, 60.0, 30.3),
    "A40": _ampere(149.7, 74.8, 37.4),
    "A10": _ampere(125.0, 62.5, 31.2),
    # nvidia.com/en-us/data-center/ v100, tesla-t4
    "V100-SXM2-(16|32)GB": {"fp16": 125.0, "fp32": 15.7},
    "V100-PCIE-(16|32)GB": {"fp16": 112.0, "fp32": 14.0},
    "T4": {"fp16": 65.0, "fp32": 8.1},
}
"""Model name of a GPU, without the vendor's, as a regular expression -> precision -> TFLOP/s."""


def peak_tflops(device: str, precision: Precision) -> float | None:
    """Returns the peak of the GPU that CUDA calls `device` (TFLOP/s); None if the table does not have it.

    A part of a GPU (MIG) is not in the table.
    """
    for name, peaks in PEAKS.items():
        if re.fullmatch(f"(NVIDIA |Tesla )?({name})", device):
            return peaks.get(precision)
    return None
