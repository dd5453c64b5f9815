"""Checks the Triton kernels, and on a GPU times them: python -m attention.kernels.check

Without a GPU, TRITON_INTERPRET=1 in the environment runs the same check in Triton's interpreter. Exit status 1: a kernel
is off. Times are of the core alone, from q, k, v to the output, in bf16; benchmark.py times whole layers and models.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attention.base import Grid, split_heads
from attention.exact import joint_softmax
from attention.features import upcast
from attention.kernels.triton_joint import triton_joint_softmax, triton_joint_softmax_reference
from attention.windows import to_windows

NAMES = "q", "k", "v", "bias", "k_tilde", "beta"
FP32_ERROR, BEYOND_PLAIN = 1e-5, 1.15
"""RMS error relative to the result in float64: at most this in fp32, in half types this many times plain PyTorch's."""


class Case(NamedTuple):
    """A shape to check: B images, h heads of width d, c landmarks, P prefix tokens."""

    grid: Grid
    window: Grid
    overlap: Grid = (0, 0)
    c: int = 6
    d: int = 16
    P: int = 0
    B: int = 1
    h: int = 2
    bias: bool = True
    log_count: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)}
        return ", ".join(f"{name} {value}" for name, value in changed.items())


CASES = [
    Case((5, 7), (3, 4)),
    Case((4, 6), (2, 3), B=2, h=1, d=20, log_count=True),
    Case((5, 3), (3, 3), B=2, h=3, c=1, bias=False),
    Case((5, 4), (3, 4), (1, 1), P=2, log_count=True),
    Case((3, 7), (2, 3), (3, 4), c=5, d=12),
    Case((4, 5), (4, 5), c=0, d=40),
    Case((4, 5), (2, 3), (1, 0), c=0, P=1, bias=False),
    Case((1, 30), (1, 8), (0, 3), d=33),
    Case((9, 10), (9, 9), c=70, d=16),
    Case((4, 6), (3, 3), d=128),
    *(Case((5, 7), (3, 4), d=24, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(Case((5, 6), (3, 3), (1, 1), dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
]


def example(case: Case, device: torch.device) -> tuple[list[Tensor | None], dict[str, Grid]]:
    """Positional arguments and keywords of `triton_joint_softmax`: q, k, v of the fused projection of half type, what
    autocast leaves in fp32 in fp32.
    """
    generator = torch.Generator().manual_seed(0)
    B, h, c, d, N = case.B, case.h, case.c, case.d, case.grid[0] * case.grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = split_heads(draw(B, case.P + N, 3 * h * d).to(case.dtype), 3, h)
    (rows, columns), (above, beside) = case.window, case.overlap
    bias = draw(h, rows * columns, (rows + 2 * above) * (columns + 2 * beside)) if case.bias else None
    k_tilde, beta = draw(2, B, h, c, d) if c else (None, None)
    log_count = torch.arange(1.0, c + 1, device=device).log() if case.log_count and c else None
    windows = {"grid": case.grid, "window": case.window, "overlap": case.overlap}
    return [q[:, :, case.P :], k, v, bias, k_tilde, beta, log_count], windows


def plain(q, k, v, bias, k_tilde, beta, log_count, **windows) -> Tensor:
    """`triton_joint_softmax` by way of `joint_softmax`."""
    if k_tilde is None:
        return joint_softmax(q, k, v, bias, **windows)
    logits = upcast(to_windows(q, windows["grid"], windows["window"])) * q.shape[-1] ** -0.5 @ k_tilde[:, :, None].mT
    logits = logits if log_count is None else logits + log_count
    return joint_softmax(q, k, v, bias, logits, beta[:, :, None], **windows)


def value_and_gradients(function: Callable, inputs: list[Tensor | None], windows: dict[str, Any]) -> dict[str, Tensor]:
    """The output y and the gradient of every input."""
    *inputs, log_count = inputs
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    y = function(*leaves, log_count, **windows)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(probe)
    return {"y": y} | {f"d{name}": x.grad for name, x in zip(NAMES, leaves, strict=True) if x is not None}


def errors(case: Case, device: torch.device) -> dict[str, tuple[float, float]]:
    """RMS errors of the output and of all gradients relative to the literal twin in float64: of the kernels, of plain
    PyTorch.
    """
    inputs, windows = example(case, device)
    exact = [x if x is None else x.double() for x in inputs]
    truth = value_and_gradients(triton_joint_softmax_reference, exact, windows)
    found = [value_and_gradients(function, inputs, windows) for function in (triton_joint_softmax, plain)]
    return {
        name: tuple(((x[name] - y).square().mean() / y.square().mean()).sqrt().item() for x in found)
        for name, y in truth.items()
    }


def excess(case: Case, error: float, plain_error: float) -> float:
    """How many times the error that is allowed an error is."""
    return error / (FP32_ERROR if case.dtype == torch.float32 else BEYOND_PLAIN * plain_error)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        sys.exit("no CUDA device; TRITON_INTERPRET=1 checks the kernels in Triton's interpreter")
    failed = False
    for case in CASES:
        found = errors(case, device)
        off = [name for name, pair in found.items() if not excess(case, *pair) <= 1]
        failed |= bool(off)
        print("OFF" if off else "ok ", case, "|", ", ".join(f"{name} {pair[0]:.1e}" for name, pair in found.items()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
