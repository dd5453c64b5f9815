"""Checks the Triton kernels, and on a GPU times them: python -m attention.kernels.check

Without a GPU, TRITON_INTERPRET=1 in the environment runs the same check in Triton's interpreter. Exit status 1 where a
kernel is off. Times are of the core alone, from q, k, v to the output, in bf16; benchmark.py has layers and models.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from attention.base import Grid, split_heads
from attention.exact import joint_softmax
from attention.features import upcast
from attention.kernels import triton_joint
from attention.windows import to_windows

NAMES = "q", "k", "v", "bias", "keys", "values"
FP32_ERROR, BEYOND_PLAIN = 1e-5, {"dkeys": 1.5}
"""RMS error relative to the result in float64: at most this in fp32; in half types this many times plain PyTorch's, by
default 1.15. Plain PyTorch keeps landmarks and the gradients of their logits in fp32, the kernels round them for the
tensor cores.
"""


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
    Case((3, 5), (2, 3), (3, 2), c=5, d=12, h=1),
    Case((4, 5), (4, 5), c=0, d=40),
    Case((4, 5), (2, 3), (1, 0), c=0, P=1, bias=False),
    Case((1, 30), (1, 8), (0, 3), d=33),
    Case((7, 8), (7, 7), c=40, h=1),
    Case((4, 6), (3, 3), d=128),
    *(Case((5, 7), (3, 4), d=24, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(Case((3, 5), (3, 3), (1, 1), h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
]

TIMED = [
    Case((side, side), (7, 7), c=49, d=64, B=B, h=3, dtype=torch.bfloat16)
    for side, B in ((14, 128), (28, 128), (56, 32), (56, 128))
]


def example(case: Case, device: torch.device) -> tuple[list[Tensor | None], dict[str, Grid]]:
    """Positional arguments and keywords of `joint_softmax`: q, k, v of the fused projection of half type, what
    autocast leaves in fp32 in fp32.
    """
    generator = torch.Generator().manual_seed(0)
    B, h, c, d, N = case.B, case.h, case.c, case.d, case.grid[0] * case.grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = split_heads(draw(B, case.P + N, 3 * h * d).to(case.dtype), 3, h)
    (rows, columns), (above, beside) = case.window, case.overlap
    bias = draw(h, rows * columns, (rows + 2 * above) * (columns + 2 * beside)) if case.bias else None
    keys, values = draw(2, B, h, 1, c, d) if c else (None, None)
    logits = torch.arange(1.0, c + 1, device=device).log() if case.log_count and c else None
    windows = {"grid": case.grid, "window": case.window, "overlap": case.overlap}
    return [q[:, :, case.P :], k, v, bias, keys, values, logits], windows


def plain(q, k, v, bias=None, keys=None, values=None, logits=None, **windows) -> Tensor:
    """The op that the kernels stand in for."""
    if keys is not None:
        on_keys = upcast(to_windows(q, windows["grid"], windows["window"])) * q.shape[-1] ** -0.5 @ keys.mT
        logits = on_keys if logits is None else on_keys + logits
    return joint_softmax(q, k, v, bias, values=values, logits=logits, **windows)


def value_and_gradients(function: Callable, inputs: list[Tensor | None], windows: dict[str, Any]) -> dict[str, Tensor]:
    """The output y and the gradient of every input."""
    *inputs, logits = inputs
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    y = function(*leaves, logits, **windows)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(probe)
    return {"y": y} | {f"d{name}": x.grad for name, x in zip(NAMES, leaves, strict=True) if x is not None}


def errors(case: Case, device: torch.device) -> dict[str, tuple[float, float]]:
    """RMS errors of the output and of all gradients relative to the literal twin in float64: of the kernels, of plain
    PyTorch.
    """
    inputs, windows = example(case, device)
    exact = [x if x is None else x.double() for x in inputs]
    truth = value_and_gradients(triton_joint.joint_softmax_reference, exact, windows)
    found = [value_and_gradients(function, inputs, windows) for function in (triton_joint.joint_softmax, plain)]
    return {
        name: tuple(((x[name] - y).square().mean() / y.square().mean()).sqrt().item() for x in found)
        for name, y in truth.items()
    }


def excess(case: Case, name: str, error: float, plain_error: float) -> float:
    """How many times the error that is allowed for a tensor its error is."""
    return error / (FP32_ERROR if case.dtype == torch.float32 else BEYOND_PLAIN.get(name, 1.15) * plain_error)


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of a call, its inputs' and output's included."""
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function()
    return sum(kept.values())


def milliseconds(function: Callable[[], Any]) -> float:
    return triton.testing.do_bench(function, return_mode="median")


def bandwidth(device: torch.device) -> float:
    """Bytes per millisecond that a copy reads and writes."""
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    return 2 * x.nbytes / milliseconds(lambda: torch.empty_like(x).copy_(x))


def timings(case: Case, device: torch.device, per_ms: float) -> list[str]:
    """Rows of the table: forward, and forward with backward."""
    inputs, windows = example(case, device)
    leaves = [x if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    *with_gradient, logits = leaves
    functions = {
        "SDPA": lambda: F.scaled_dot_product_attention(*with_gradient[:3]),
        "plain": lambda: plain(*with_gradient, logits, **windows),
        "kernels": lambda: triton_joint.joint_softmax(*with_gradient, logits, **windows),
    }
    saved = [saved_bytes(function) / 2**20 for function in functions.values()]
    dy, rows = torch.randn_like(functions["SDPA"]()), []

    # Tensors of the size of q: q, k, v, y; in the backward pass q, k, v, y, dy, dq, dk, dv.
    for mode, moved in ("forward", 4), ("forward+backward", 12):
        calls = functions.values()
        if moved == 12:
            calls = [lambda f=f: torch.autograd.grad(f(), with_gradient, dy, allow_unused=True) for f in calls]
        with torch.set_grad_enabled(moved == 12):
            sdpa, slow, fast = times = [milliseconds(call) for call in calls]
        floor = moved * dy.nbytes / per_ms
        N, B = dy.shape[2], dy.shape[0]
        cells = [N, B, mode, *(f"{t:.3f}" for t in times), f"{sdpa / fast:.2f}", f"{slow / fast:.2f}"]
        rows.append([*cells, f"{floor / fast:.0%}", *(f"{x:.1f}" for x in saved)])
    return [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        sys.exit("no CUDA device; TRITON_INTERPRET=1 checks the kernels in Triton's interpreter")
    failed = False
    for case in CASES:
        found = errors(case, device)
        off = any(not excess(case, name, *pair) <= 1 for name, pair in found.items())
        failed |= off
        print("OFF" if off else "ok ", case, "|", ", ".join(f"{name} {pair[0]:.1e}" for name, pair in found.items()))
    if device.type == "cuda":
        print(
            f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, 3 heads"
        )
        columns = "N|B|mode|SDPA (ms)|plain (ms)|kernels (ms)|over SDPA|over plain|of the floor"
        print(f"|{columns}|SDPA saved (MiB)|plain saved|kernels saved|\n|{'---|' * 12}")
        per_ms = bandwidth(device)
        for case in TIMED:
            print(*timings(case, device, per_ms), sep="\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
