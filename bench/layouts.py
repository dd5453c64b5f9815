"""Times of copies, products and softmaxes on one device, in the memory layouts and types that attention layers use.

    python -m bench.layouts                            # the layer of DeiT-Tiny at 28 x 28 tokens, 256 images, on a GPU
    python -m bench.layouts --device cpu --batch-size 4

These numbers decide what the fast paths do off a CPU: copies in words (`attention.ops.memory.copy`), spare columns of
logits (`attention.ops.joint_softmax.fused`), factors in bfloat16 (`attention.ops.products`), and the layout of weights
(`attention.ops.random_features.fused`).
"""

import math
from collections.abc import Iterator, Sequence

import torch

from attention.ops.memory import WORDS
from attention.parts.geometry import Windows
from bench.arguments import device_name, positive, refuse_too_large
from bench.results import NOISE, describe, quartile_columns, quartiles_text
from bench.timing import Call, Quartiles, time_rounds
from engine.reporting.tables import markdown_table
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import refuse_bad_input
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance

GRID, HEADS, WIDTH, WINDOW, SAMPLES = (28, 28), 3, 64, (7, 7), 64
"""Tokens, heads, channels of a head, tokens of a window, and samples of random features."""
ROUNDS, WARM_UP = 10, 3


def calls(batch: int, device: torch.device) -> Iterator[tuple[str, int, Call]]:
    """Yields operations: name, bytes that it must read and write at least, call."""
    tokens, windows = math.prod(GRID), Windows(GRID, WINDOW)
    half, full = torch.bfloat16, torch.float32
    qkv = torch.randn(batch, tokens, 3, HEADS, WIDTH, device=device, dtype=half)
    q = qkv[:, :, 0].transpose(1, 2)  # (B, h, N, d), as the projection lays it out
    nbytes, source = q.nbytes, windows.view(q)
    target, in_full = torch.empty_like(source, memory_format=torch.contiguous_format), q.float().contiguous()
    yield "windows of tokens, numbers of 2 bytes", 2 * nbytes, lambda: target.copy_(source)
    for word in reversed(WORDS):
        x, y = source.view(word), target.view(word)
        yield f"windows of tokens, words of {word.itemsize} bytes", 2 * nbytes, lambda x=x, y=y: y.copy_(x)
    yield "tokens of heads to float32", 3 * nbytes, lambda: q.to(full, memory_format=torch.contiguous_format)

    count, w = batch * HEADS * windows.count, windows.num_queries
    queries = torch.randn(count, w, WIDTH, device=device, dtype=half)
    for columns in (w, w + -w % 8):
        keys = torch.randn(count, columns, WIDTH, device=device, dtype=half)
        read = queries.nbytes + keys.nbytes + 2 * count * w * columns
        yield f"logits of windows, {columns} columns", read, lambda k=keys: torch.bmm(queries, k.mT)

    keys = in_full.flatten(0, 1)
    in_half, samples = keys.to(half), torch.randn(batch * HEADS, SAMPLES, WIDTH, device=device)
    logits = samples @ keys.mT
    yield "random features, float32", keys.nbytes + logits.nbytes, lambda: torch.bmm(samples, keys.mT)
    if device.type == "cuda":  # no other device has the operator
        of_half, moved = samples.to(half), in_half.nbytes + logits.nbytes
        name = "random features, bfloat16 with sums in float32"
        yield name, moved, lambda: torch.bmm(of_half, in_half.mT, out_dtype=full)
    by_query = logits.mT.contiguous()
    yield "softmax over samples, tokens side by side", 2 * logits.nbytes, lambda: logits.softmax(-2)
    yield "softmax over samples, samples side by side", 2 * logits.nbytes, lambda: by_query.softmax(-1)


def measure(batch: int, device: torch.device) -> list[list[str]]:
    """Returns a row of each operation: name, microseconds with quartiles, and GB/s of the bytes that it must move."""
    timed, moved = {}, {}
    for name, nbytes, call in calls(batch, device):
        timed[name], moved[name] = call, nbytes
        for _ in range(WARM_UP):
            call()
    times, rows = time_rounds(timed, ROUNDS, device), []
    for name, seconds in times.seconds.items():
        found = quartile_columns("time", Quartiles.of(seconds), times)
        rate = f"{moved[name] / found['time'] / 1e9:.0f}"
        rows.append([name, quartiles_text(found, "time", 1e-6, ".1f"), rate])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.layouts", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=device_name, choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--batch-size", type=positive, default=256, help="images; default: %(default)s")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        device = init_distributed(args.device).device
    print(describe(provenance(device)), end="\n\n", flush=True)
    with refuse_bad_input(), refuse_too_large("give a smaller --batch-size"), limit_memory(device):
        rows = measure(args.batch_size, device)
    print(markdown_table(["operation", "microseconds", "GB/s"], rows), NOISE, sep="\n\n")


if __name__ == "__main__":
    main()
