"""Counts what attention layers move, compute and launch on a GPU, without one: python -m bench.traffic

    python -m bench.traffic --attention eva eva@triton lara --tokens 784 3136

An eager layer is counted on the path that tensors off a CPU take, without @PATH on the path "torch"; a Triton kernel is
one operator. Nothing is allocated or computed. Autocast's list of operators is that of a CPU.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from attention import Grid
from bench.arguments import every_mechanism, positive, token_grid
from bench.operators import OperatorCounter, off_cpu
from bench.workload import DTYPES, MODES, Subject, attention_layer
from engine.reporting.tables import markdown_table
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import autocast
from engine.runtime.errors import refuse_bad_input

TITLES = ("tokens", "name", "GB", "GFLOP, 16 bits", "GFLOP, 32 bits", "operators", "peak (MiB)")


def count(
    subject: Subject, size: Grid, batch: int, mode: str, dtype: str, on_cpu: bool = False, has_kernels: bool = False
) -> OperatorCounter:
    """Counts the operators of a call of a layer, and their memory, on fake tensors.

    Args:
        mode: forward, forward+backward or inference. on_cpu: counts the path on a CPU, with its chunks one by one.
        has_kernels: counts the path "auto" as on a GPU that runs Triton's kernels.
    """
    network = subject.build(size).train(mode != "inference")
    path, amp = nullcontext() if on_cpu else off_cpu(has_kernels), None if dtype == "fp32" else dtype
    with path, FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(mode != "inference"):
        inputs = subject.example(network, size, batch, "cpu")
        with OperatorCounter() as counter, subject.on_path(), autocast(amp, torch.device("cpu")):
            y = network(*inputs)
        if mode == "forward+backward":
            gradient = torch.empty_like(y)
            with counter:
                torch.autograd.grad(y, [inputs[0], *network.parameters()], gradient, allow_unused=True)
    return counter


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.traffic", description=__doc__.partition(":")[0])
    add, layers = parser.add_argument, "NAME[@PATH][:OPTION=VALUE,...]"
    add("--attention", nargs="+", default=["all"], metavar=layers, help="layers beside softmax; default: all")
    add("--tokens", nargs="+", type=token_grid, default=[(28, 28)], metavar="N|HxW", help="tokens of an image")
    add("--batch-size", type=positive, default=256, help="images; default: %(default)s")
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    add("--mode", choices=[mode for mode in MODES if mode != "train"], default="forward+backward")
    add("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        names = every_mechanism(["softmax", *args.attention])
        subjects = [attention_layer(name, args.dim, args.num_heads, "torch") for name in names]
        for size in args.tokens:
            for subject in subjects:
                subject.costs(size)
    rows = []
    for size in args.tokens:
        for subject in tqdm(subjects, unit="layer", disable=None):
            counter = count(subject, size, args.batch_size, args.mode, args.dtype)
            flops = [sum(o.flops for o in counter.found if o.dtype.itemsize == width) for width in (2, 4)]
            row = [str(math.prod(size)), subject.name, f"{sum(o.nbytes for o in counter.found) / 1e9:.2f}"]
            row += [f"{each / 1e9:.1f}" for each in flops]
            rows.append([*row, str(len(counter.found)), f"{counter.peak_bytes / 2**20:.0f}"])
    print(f"{args.mode}, {args.dtype}, {args.batch_size} images\n\n{markdown_table(TITLES, rows)}")


if __name__ == "__main__":
    main()
