"""Checks the Triton kernels, and on a GPU times them: python -m bench.check_kernels

Without a GPU, TRITON_INTERPRET=1 in the environment runs the same check in Triton's interpreter. Exit status 1 where a
kernel is off. Times are of the core alone, from q, k, v to the output, in bf16, on every path of attention.kernels, in
interleaved rounds (`bench.timing`) with cold caches; benchmark.py has layers and models.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import kernels
from attention.mechanisms.lara import lara, lara_reference
from attention.mechanisms.performer import performer, performer_reference
from attention.ops.group_values import triton_groups
from attention.ops.group_values.op import group_values, group_values_reference
from attention.ops.joint_softmax import triton_joint
from attention.ops.joint_softmax.op import joint_softmax, joint_softmax_reference
from attention.ops.random_features import triton_random_features
from attention.ops.triton_tokens import INTERPRETED
from attention.parts.features import upcast
from attention.parts.geometry import Grid, Windows, split_heads
from attention.parts.groups import bins
from bench.memory import saved_bytes
from bench.results import NOISE, describe, quote
from bench.timing import Call, Spread, Times, count_launches, time_rounds
from engine.report import device_name

FP32_ERROR, BEYOND_PLAIN = 1e-5, 1.15
"""RMS error relative to the result in float64: at most this in fp32; in half precision this many times PyTorch's."""
ROUNDS, COPIED_BYTES = 20, 2**30
FLUSHED_BYTES, FLUSHES = 2**28, 150
"""Written before every measurement: more than caches hold, so often that it takes a GPU 10 ms or more."""


def changed(case: NamedTuple) -> str:
    """A case's fields that are not at their default."""
    given = {name: value for name, value in case._asdict().items() if value != case._field_defaults.get(name)}
    return ", ".join(f"{name} {value}" for name, value in given.items())


class Case(NamedTuple):
    """A joint softmax: B images, h heads of width d, c landmarks, P prefix tokens.

    log_count: the landmarks' logits differ. leave_one_out: every window attends to all landmarks but one of its own.
    """

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
    leave_one_out: bool = False
    dtype: torch.dtype = torch.float32
    __str__ = changed


class GroupCase(NamedTuple):
    """Values of groups: rows and columns of bins, each grown by a margin."""

    grid: Grid
    bins: Grid
    margin: Grid = (0, 0)
    samples: int = 1
    d: int = 16
    B: int = 1
    h: int = 2
    dtype: torch.dtype = torch.float32
    __str__ = changed


class PerformerCase(NamedTuple):
    """Attention of N queries to P + N tokens by s samples."""

    N: int
    s: int
    d: int = 16
    P: int = 0
    B: int = 1
    h: int = 2
    dtype: torch.dtype = torch.float32
    __str__ = changed


class LaraCase(NamedTuple):
    """Attention of N queries to P + N tokens by s samples of c proposals each."""

    N: int
    c: int
    weighting: str = "decoupled"
    s: int = 1
    d: int = 16
    P: int = 0
    B: int = 1
    h: int = 2
    dtype: torch.dtype = torch.float32
    __str__ = changed


CASES = [
    Case((5, 7), (3, 4)),
    Case((4, 6), (2, 3), B=2, h=1, d=20, log_count=True),
    Case((5, 3), (3, 3), B=2, h=3, c=1, bias=False),
    Case((5, 7), (3, 4), P=1, h=1, leave_one_out=True),
    Case((3, 5), (2, 3), (1, 1), h=1, log_count=True, leave_one_out=True),
    Case((5, 4), (3, 4), (1, 1), P=2, h=1, log_count=True),
    Case((3, 5), (2, 3), (3, 2), c=5, d=12, h=1),
    Case((4, 5), (4, 5), c=0, d=40),
    Case((4, 5), (2, 3), (1, 0), c=0, P=1, bias=False),
    Case((1, 20), (1, 6), (0, 2), d=33, h=1),
    Case((7, 8), (7, 7), c=40, h=1),
    Case((4, 6), (3, 3), d=128),
    *(Case((9, 8), (7, 7), c=49, d=40, h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(Case((9, 8), (7, 7), (3, 3), c=49, d=40, h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    GroupCase((5, 7), (2, 3)),
    GroupCase((6, 7), (2, 3), (1, 1), samples=2, d=20, B=2, h=1),
    GroupCase((6, 7), (5, 7), d=40, h=1),
    *(GroupCase((5, 7), (2, 3), h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    GroupCase((6, 8), (2, 4), d=20, B=2, h=3),
    GroupCase((6, 10), (6, 5), d=64, B=2),
    GroupCase((4, 6), (4, 6), h=1),
    *(GroupCase((16 + more, 16), (1, 1), h=1) for more in (0, 1)),
    GroupCase((6, 4), (3, 2), samples=2, h=1),
    *(GroupCase((9, 6), (3, 2), d=40, h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    PerformerCase(35, 20),
    PerformerCase(40, 40, d=20, P=3, B=2, h=1),
    PerformerCase(5, 2, d=128, h=1),
    *(PerformerCase(35, 6, h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    LaraCase(35, 6),
    LaraCase(40, 36, d=20, P=3, h=1),
    LaraCase(9, 3, d=128, B=2, h=1),
    LaraCase(35, 6, "balance", s=2, h=1),
    *(LaraCase(35, 6, h=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
]
SIZES = (14, 128), (28, 128), (56, 32), (56, 128)
TIMED = [
    *(Case((side, side), (7, 7), c=49, d=64, B=B, h=3, dtype=torch.bfloat16) for side, B in SIZES),
    *(PerformerCase(side**2, 128, d=64, B=B, h=3, dtype=torch.bfloat16) for side, B in SIZES[1:3]),
    *(LaraCase(side**2, 49, d=64, B=B, h=3, dtype=torch.bfloat16) for side, B in SIZES[1:3]),
]


def normal_sampler(device: torch.device) -> Callable[..., Tensor]:
    """A function that samples standard normal tensors of the shape it is called with."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def projected(case: Case | PerformerCase | LaraCase, N: int, normal: Callable[..., Tensor]) -> list[Tensor]:
    """q, k, v of the fused projection, P tokens before q."""
    q, k, v = split_heads(normal(case.B, case.P + N, 3 * case.h * case.d).to(case.dtype), 3, case.h)
    return [q[:, :, case.P :], k, v]


def example(case: Case, device: torch.device) -> tuple[list[Tensor | None], dict[str, Windows]]:
    """Positional arguments and keywords of `joint_softmax`. In all examples, what autocast keeps in fp32 is in fp32."""
    B, h, c, d, normal = case.B, case.h, case.c, case.d, normal_sampler(device)
    tokens, windows = projected(case, math.prod(case.grid), normal), Windows(case.grid, case.window, case.overlap)
    bias = normal(h, windows.num_queries, windows.num_keys) if case.bias else None
    keys, values = normal(2, B, h, 1, c, d) if c else (None, None)
    logits, landmark = None, torch.arange(c, device=device)
    if case.log_count or case.leave_one_out:
        logits = (landmark + 1.0).log()[None, None] * case.log_count
    if case.leave_one_out:
        window = torch.arange(windows.count, device=device)[:, None, None]
        logits = logits.masked_fill(window % c == landmark, -torch.inf)
    return [*tokens, bias, keys, values, logits], {"windows": windows}


def plain(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows) -> Tensor:
    """The op that the kernels stand in for, with logits of landmarks in fp32, which autocast would round."""
    if keys is not None:
        on_keys = upcast(windows.partition(q)) * q.shape[-1] ** -0.5 @ keys.mT
        logits = on_keys if logits is None else on_keys + logits
    return joint_softmax(q, k, v, bias, values=values, logits=logits, windows=windows)


def group_example(case: GroupCase, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of `group_values`."""
    generator, c = torch.Generator().manual_seed(0), case.bins[0] * case.bins[1]
    tokens = torch.randn(case.B, case.grid[0] * case.grid[1], 2 * case.h * case.d, generator=generator)
    omega = torch.randn(case.B, case.h, 1, c, case.samples, case.d, generator=generator)
    tokens, omega = tokens.to(device, case.dtype), omega.to(device)
    return [*split_heads(tokens, 2, case.h), omega, bins(case.grid, case.bins, device, case.margin)], {}


def performer_example(case: PerformerCase, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of `performer`."""
    normal = normal_sampler(device)
    return [*projected(case, case.N, normal), normal(case.h, case.s, case.d)], {}


def lara_example(case: LaraCase, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of `lara`."""
    normal = normal_sampler(device)
    tokens, landmarks = projected(case, case.N, normal), normal(2, case.B, case.h, case.c, case.d)
    return [*tokens, *landmarks, normal(case.h, case.c, case.s, case.d)], {"weighting": case.weighting}


class Checked(NamedTuple):
    """What a kind of case checks: functions of one signature, and its first arguments' names, whose gradients count.

    op: what layers call, whatever the path. plain: for half precision too without autocast.
    """

    example: Callable
    names: tuple[str, ...]
    op: Callable
    kernels: Callable
    plain: Callable
    reference: Callable


CHECKED = {
    Case: Checked(
        example,
        ("q", "k", "v", "bias", "keys", "values"),
        joint_softmax,
        triton_joint.joint_softmax,
        plain,
        joint_softmax_reference,
    ),
    GroupCase: Checked(
        group_example,
        ("k", "v", "omega"),
        group_values,
        triton_groups.group_values,
        group_values,
        group_values_reference,
    ),
    PerformerCase: Checked(
        performer_example,
        ("q", "k", "v", "omega"),
        performer,
        triton_random_features.performer,
        performer,
        performer_reference,
    ),
    LaraCase: Checked(
        lara_example,
        ("q", "k", "v", "q_bar", "k_bar"),
        lara,
        triton_random_features.lara,
        lara,
        lara_reference,
    ),
}


def outputs_and_gradients(function: Callable, names: Sequence[str], inputs: list, options: dict) -> dict[str, Tensor]:
    """The outputs, and the gradients of the inputs that have names."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs[: len(names)]]
    outputs = function(*leaves, *inputs[len(names) :], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(y.shape, generator=generator).to(y) for y in outputs])
    gradients = {f"d{name}": x.grad for name, x in zip(names, leaves, strict=True) if x is not None}
    return dict(zip(("y", "log_mass"), outputs, strict=False)) | gradients


def errors(case: NamedTuple, device: torch.device) -> dict[str, tuple[float, float]]:
    """RMS errors of outputs and gradients relative to the literal twin in float64: of the kernels, of plain PyTorch."""
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case, device)
    exact = [x.double() if isinstance(x, Tensor) else x for x in inputs]
    truth = outputs_and_gradients(checked.reference, checked.names, exact, options)
    functions = checked.kernels, checked.plain
    found = [outputs_and_gradients(function, checked.names, inputs, options) for function in functions]
    return {
        name: tuple(((x[name] - y).square().mean() / y.square().mean()).sqrt().item() for x in found)
        for name, y in truth.items()
    }


def excess(case: NamedTuple, error: float, plain_error: float) -> float:
    """How many times the allowed error an error is."""
    beyond_plain = 0.0 if case.dtype == torch.float32 else BEYOND_PLAIN * plain_error
    return error / max(FP32_ERROR, beyond_plain)


def time_cold(calls: Mapping[str, Call], device: torch.device) -> Times:
    """Single calls in turns. Before each, memory is written: it leaves a GPU's caches cold, and takes so long that the
    host has launched the call by then, so that the host's work does not count.
    """
    cold = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def flush(number: int) -> None:
        for _ in range(FLUSHES):
            cold.zero_()

    return time_rounds(calls, ROUNDS, device, sample_seconds=0, before=flush)


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of `COPIED_BYTES` reads and writes."""
    x = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = time_cold({"copy": lambda: y.copy_(x)}, device)
    return 2 * COPIED_BYTES / Spread.of(times.seconds["copy"]).median


def on_path(path: kernels.Path, op: Callable[..., Tensor], arguments: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """An op as layers call it in mixed precision: under autocast, its output in the dtype of q."""
    q = arguments[0]
    with kernels.use(path), torch.autocast(q.device.type, q.dtype):
        return op(*arguments, **options).to(q.dtype)


def timings(case: NamedTuple, device: torch.device, bytes_per_second: float) -> list[dict[str, Any]]:
    """Rows of the table by column: forward, and forward with backward."""
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case, device)
    with_gradient = [x.detach().requires_grad_() for x in inputs[: len(checked.names)]]
    arguments = *with_gradient, *inputs[len(checked.names) :]
    functions = {"SDPA": partial(F.scaled_dot_product_attention, *with_gradient[:3])}
    functions |= {path: partial(on_path, path, checked.op, arguments, options) for path in ("plain", "auto", "triton")}
    saved = {f"{name} saved (MiB)": f"{saved_bytes(f, ()) / 2**20:.1f}" for name, f in functions.items()}
    dy, rows = torch.randn_like(functions["SDPA"]()), []

    # Tensors of the size of q: q, k, v, y; in the backward pass q, k, v, y, dy, dq, dk, dv.
    for mode, moved in ("forward", 4), ("forward+backward", 12):
        calls = functions
        if moved == 12:
            calls = {
                name: lambda f=f: torch.autograd.grad(f(), with_gradient, dy, allow_unused=True)
                for name, f in functions.items()
            }
        with torch.set_grad_enabled(moved == 12):
            for call in calls.values():
                call()  # compiled, its memory at hand
            times = time_cold(calls, device)
            launched = {f"{name} launches": count_launches(call, device) for name, call in calls.items()}
        row = {"op": checked.op.__name__, "N": dy.shape[2], "B": dy.shape[0], "mode": mode}
        for name, seconds in times.seconds.items():
            row[f"{name} (ms)"] = quote(describe("time", Spread.of(seconds), times), "time", 1e-3, ".3f")
        for name in ("SDPA", "plain", "auto"):
            row[f"over {name}"] = quote(describe("ratio", times.speedup("triton", name), times), "ratio", 1, ".2f")
        floor, triton = moved * dy.nbytes / bytes_per_second, Spread.of(times.seconds["triton"])
        row["of the floor"] = f"{'~' * times.noisy(triton)}{floor / triton.median:.0%}"
        rows.append(row | launched | saved)
    return rows


def table(device: torch.device) -> Iterator[str]:
    """Lines of the table of times, and what ~ means in it."""
    bytes_per_second, columns = bandwidth(device), None
    for case in TIMED:
        for row in timings(case, device, bytes_per_second):
            if columns is None:
                columns = list(row)
                yield f"|{'|'.join(columns)}|"
                yield f"|{'---|' * len(columns)}"
            yield f"|{'|'.join(map(str, row.values()))}|"
    yield f"\n{NOISE}"


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not INTERPRETED.value:
        sys.exit("no CUDA device; TRITON_INTERPRET=1 checks the kernels in Triton's interpreter")
    failed = False
    for case in CASES:
        found = errors(case, device)
        off = any(not excess(case, *pair) <= 1 for pair in found.values())
        failed |= off
        print("OFF" if off else "ok ", case, "|", ", ".join(f"{name} {pair[0]:.1e}" for name, pair in found.items()))
    if device.type == "cuda":
        print(f"\n{device_name(device)}, torch {torch.__version__}, triton {version('triton')}, bf16, 3 heads")
        for line in table(device):
            print(line, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
