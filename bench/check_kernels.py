"""Checks the Triton kernels, and on a GPU times them: python -m bench.check_kernels

Without a GPU, TRITON_INTERPRET=1 in the environment runs the same check in Triton's interpreter. Exit status 1 means
that a kernel is wrong. Only the joint softmax is timed, from q, k, v to the output, in bf16, on every path of
attention.kernels, in interleaved rounds (`bench.timing`) with cold caches.
benchmark.py times layers and models.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import kernels
from attention.ops.joint_softmax.op import joint_softmax
from attention.ops.triton_tokens import INTERPRETED
from bench.kernel_cases import CASES, Case, errors, example, excess
from bench.results import NOISE, quartile_columns, quartiles_text
from bench.timing import Call, Quartiles, Times, count_launches, time_rounds
from engine.reporting.tables import markdown_table
from engine.runtime.arguments import ArgumentParser
from engine.runtime.memory import saved_bytes
from engine.runtime.provenance import device_name

ROUNDS, COPIED_BYTES = 20, 2**30
FLUSHED_BYTES, FLUSHES = 2**28, 150
"""Bytes written before every measurement, more than caches hold, and repeats, which take a GPU at least 10 ms."""
SIZES = (14, 128), (28, 128), (56, 32), (56, 128)
TIMED = [Case((side, side), (7, 7), c=49, d=64, B=B, h=3, dtype=torch.bfloat16) for side, B in SIZES]


def time_cold(calls: Mapping[str, Call], device: torch.device) -> Times:
    """Times single calls in turns, with memory written before each.

    The writes leave a GPU's caches cold. They take so long that the host launches the call meanwhile, so that the
    host's work does not count.
    """
    cold = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def flush(number: int) -> None:
        for _ in range(FLUSHES):
            cold.zero_()

    return time_rounds(calls, ROUNDS, device, sample_seconds=0, before=flush)


def bandwidth(device: torch.device) -> float:
    """Measures the bytes per second that a copy of `COPIED_BYTES` reads and writes."""
    x = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = time_cold({"copy": lambda: y.copy_(x)}, device)
    return 2 * COPIED_BYTES / Quartiles.of(times.seconds["copy"]).median


def on_path(path: kernels.Path, q: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Computes the joint softmax as layers do in mixed precision: under autocast, with output in the dtype of q."""
    with kernels.use(path), torch.autocast(q.device.type, q.dtype):
        return joint_softmax(q, *arguments, **options).to(q.dtype)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SDPA": lambda q, k, v, *others, windows: F.scaled_dot_product_attention(q, k, v),
    **{path: partial(on_path, path) for path in ("plain", "torch", "triton")},
}
"""Title of a column -> timed function. SDPA is softmax attention over all tokens, without the bias and landmarks."""


def timings(case: Case, device: torch.device, bytes_per_second: float) -> list[dict[str, Any]]:
    """Returns the rows of the table for forward, and for forward with backward."""
    inputs, options = example(case, device)
    leaves = [x.detach().requires_grad_() for x in inputs[:-1]]
    dy, rows = torch.randn_like(inputs[0]), []

    def forward(tensors: Sequence[Tensor | None], function: Callable[..., Tensor]) -> Tensor:
        return function(*tensors, inputs[-1], **options)

    def gradients(function: Callable[..., Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(forward(leaves, function), leaves, dy, allow_unused=True)

    # Tensors of the size of q: q, k, v, y; in the backward pass q, k, v, y, dy, dq, dk, dv.
    for mode, moved, run in ("forward", 4, partial(forward, inputs[:-1])), ("forward+backward", 12, gradients):
        calls = {name: partial(run, function) for name, function in FUNCTIONS.items()}
        for call in calls.values():
            call()  # compiles its kernels
        times = time_cold(calls, device)
        row = {"N": dy.shape[2], "B": dy.shape[0], "mode": mode}
        for name in FUNCTIONS:
            time = quartile_columns("time", Quartiles.of(times.seconds[name]), times)
            row[f"{name} (ms)"] = quartiles_text(time, "time", 1e-3, ".3f")
        for name in ("SDPA", "plain", "torch"):
            ratio = quartile_columns("ratio", times.speedup("triton", name), times)
            row[f"over {name}"] = quartiles_text(ratio, "ratio", 1, ".2f")
        floor, triton = moved * dy.nbytes / bytes_per_second, Quartiles.of(times.seconds["triton"])
        row["of the floor"] = f"{'~' * times.noisy(triton)}{floor / triton.median:.0%}"
        row |= {f"{name} launches": count_launches(calls[name], device) for name in FUNCTIONS}
        rows.append(row)
    saved = {f"{name} saved (MiB)": saved_bytes(partial(forward, leaves, FUNCTIONS[name]), ()) for name in calls}
    return [row | {name: f"{count / 2**20:.1f}" for name, count in saved.items()} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    ArgumentParser(prog="python -m bench.check_kernels", description=__doc__.partition(":")[0]).parse_args(arguments)
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
        print(
            f"\n{device_name(device)}, torch {torch.__version__}, triton {version('triton')}, bf16, 3 heads", flush=True
        )
        bytes_per_second = bandwidth(device)
        rows = [row for case in TIMED for row in timings(case, device, bytes_per_second)]
        print(markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows]), f"\n{NOISE}", sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
