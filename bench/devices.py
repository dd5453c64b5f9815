"""Devices that are not here: their rates, and the times of operators of a layer that they predict.

An operator takes as long as the slowest of its launch, its bytes and its arithmetic at the device's rates, and a layer
takes the sum of its operators. Counted are eager layers on the path that tensors off a CPU take; nothing is allocated
or computed. Autocast's list of operators is that of a CPU. Triton's kernels are counted as operators.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import Grid
from bench.candidates import Candidate, Shape
from bench.cost_model import Prediction
from bench.operators import Operator, OperatorCounter, off_cpu
from bench.workload import Subject, attention_layer
from engine.runtime.distributed import autocast
from engine.runtime.peaks import peak_tflops

CPU = torch.device("cpu")


class Device(NamedTuple):
    """Rates of a device, a second.

    Attributes:
        bandwidth: bytes. half, single: operations of matrix products on 16-bit and 32-bit numbers. elements: numbers of
            an elementwise operator, as fast as exponentials. fused: share of `half` or `single` that fused attention
            reaches. launch: seconds between the starts of two operators. source: of the rates. measured: the path
            "auto" takes Triton's kernels (`attention.kernels.MEASURED`).
    """

    bandwidth: float
    half: float
    single: float
    elements: float
    fused: float
    launch: float
    source: str
    measured: bool = False

    def __str__(self) -> str:
        rates = f"{self.half / 1e12:.3g} and {self.single / 1e12:.3g} TFLOP/s on 16 and 32 bits"
        fused = f"{self.fused:.0%} of that in fused attention, {self.elements / 1e12:.3g}e12 elements/s"
        return f"{self.bandwidth / 1e9:.4g} GB/s, {rates}, {fused}, {1e6 * self.launch:.1f} us a launch ({self.source})"


def _peaks(gpu: str) -> tuple[float, float]:
    """Returns the operations a second of matrix products on 16-bit and on 32-bit numbers."""
    return 1e12 * peak_tflops(gpu, "bf16"), 1e12 * peak_tflops(gpu, "fp32")


FA2 = "FlashAttention-2 (arXiv:2307.08691) reaches 50 to 73 % of an A100"
FA3 = "FlashAttention-3 (arXiv:2407.08608): 3.9e12 exponentials a second, and 35 % of an H100 for FlashAttention-2"
SFU = "exponentials: 16 a clock and multiprocessor (CUDA C++ Programming Guide)"
DEVICES = {
    "a100": Device(2.039e12, *_peaks("A100-SXM4-80GB"), 2.44e12, 0.6, 5e-6, f"A100 80GB SXM data sheet; {SFU}; {FA2}"),
    "h100": Device(3.35e12, *_peaks("H100 80GB HBM3"), 3.9e12, 0.35, 5e-6, f"H100 SXM data sheet; {FA3}", True),
    "h200": Device(4.8e12, *_peaks("H200"), 3.9e12, 0.35, 5e-6, "H200 SXM data sheet; else as H100", True),
    "l4": Device(3e11, *_peaks("L4"), 1.96e12, 0.6, 5e-6, f"L4 data sheet; {SFU}; fused as A100"),
}
"""Devices by name. Products: `engine.runtime.peaks`. Launches are assumed; they matter for small batches alone."""


def predict(operators: Sequence[Operator], device: Device) -> float:
    """Returns the seconds that operators take on a device."""
    return sum(seconds_of(each, device) for each in operators)


def seconds_of(operator: Operator, device: Device) -> float:
    """Returns the seconds of one operator: the most of its launch, its bytes, its products and its elements."""
    peak = device.half if operator.dtype.itemsize == 2 else device.single
    products = operator.flops / (peak * (device.fused if operator.is_fused_attention else 1))
    return max(device.launch, operator.nbytes / device.bandwidth, products, operator.elements / device.elements)


def count(
    subject: Subject, size: Grid, batch: int, mode: str, dtype: str, on_cpu: bool = False, measured: bool = False
) -> OperatorCounter:
    """Counts the operators of a call of a layer, and their memory, on fake tensors.

    Args:
        mode: forward, forward+backward or inference. on_cpu: counts the path on a CPU, with its chunks one by one.
        measured: counts the path "auto" as on a device that is `measured`.
    """
    network = subject.build(size).train(mode != "inference")
    path, amp = nullcontext() if on_cpu else off_cpu(measured), None if dtype == "fp32" else dtype
    with path, FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(mode != "inference"):
        inputs = subject.example(network, size, batch, "cpu")
        with OperatorCounter() as counter, subject.on_path(), autocast(amp, CPU):
            y = network(*inputs)
        if mode == "forward+backward":
            gradient = torch.empty_like(y)
            with counter:
                torch.autograd.grad(y, [inputs[0], *network.parameters()], gradient, allow_unused=True)
    return counter


CAUTION = (
    "An optimistic estimate: on an H200, layers took 2.7 times as long in the median, 0.9 to 11 times (docs/gpus.md)."
)
"""Ratio of measured times to predicted ones, which every prediction shows."""
LEAST = 0.9
"""Least of these ratios: fused attention may reach more than the published share of the peak."""


class Roofline:
    """Predictions for a device that is not here, in the place of a calibration (`bench.calibration.Calibration`).

    An interval begins at `LEAST` times the prediction and has no end: no device reaches its rates throughout.
    """

    def __init__(self, name: str, mode: str, dtype: str):
        self.name, self.mode, self.dtype = name, mode, dtype

    def __str__(self) -> str:
        return f"Predicted for {self.name}, not measured: {DEVICES[self.name]}. {CAUTION}"

    def predict(self, candidate: Candidate, shape: Shape) -> tuple[Prediction, Prediction]:
        """Predicts seconds and bytes."""
        subject = attention_layer(candidate.entry, shape.dim, shape.num_heads)
        device = DEVICES[self.name]
        counter = count(subject, shape.grid, shape.batch, self.mode, self.dtype, measured=device.measured)
        seconds = predict(counter.found, device)
        return Prediction(seconds, LEAST * seconds, math.inf, 1.0), Prediction(*[float(counter.peak_bytes)] * 3, 1.0)
