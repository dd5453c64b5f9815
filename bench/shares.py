"""Where the time of attention layers goes: the share of every kind of operator.

    python -m bench.shares                                    # all mechanisms, 784 tokens, forward and backward
    python -m bench.shares --attention nystrom bigbird --tokens 196 3136 --dtype bf16
    python -m bench.shares --csv shares.csv                   # the table as a file, too

PyTorch's profiler gives the time of every operator without that of the operators it calls. One core of the CPU runs
them. Products and convolutions are what multiply-accumulates count, projections among them; a layer without all other
operators would be faster by the inverse of their share.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from bench.arguments import every_mechanism, positive, refuse_too_large, token_grid
from bench.comparison import BATCH_TOKENS
from bench.operators import FUSED, SEARCHES
from bench.results import describe
from bench.workload import DTYPES, MODES, Workload, attention_layer
from engine.reporting.tables import markdown_table
from engine.runtime.arguments import ArgumentParser
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import check_output, to_csv, write_file
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance

CPU = torch.device("cpu")
EXPONENTIALS = {"celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "log_softmax", "logsumexp", "mish"}
EXPONENTIALS |= {"pow", "sigmoid", "silu", "sin", "softmax", "softplus", "tanh"}
GATHERS = {"embedding", "embedding_bag_forward_only", "embedding_dense", "gather", "index", "index_add", "index_copy"}
GATHERS |= {"index_fill", "index_put", "index_put_impl", "index_select", "scatter", "scatter_add", "scatter_reduce"}
GATHERS |= {"take_along_dim", "unfold"}
KINDS = {
    "products": {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"},
    "convolutions": {"convolution", "convolution_overrideable", "mkldnn_convolution", "slow_conv2d", "thnn_conv2d"},
    "exponentials": EXPONENTIALS,
    "gathers": GATHERS,
    "searches": SEARCHES,
    "copies": {"cat", "clone", "constant_pad_nd", "copy", "fill", "roll", "zero"},
}
"""Kind -> its operators, without underscores at the ends and without `_backward`; all others are of the kind "other":
elementwise arithmetic, sums, normalisation, random numbers, and the work between operators."""
COUNTED = ("products", "convolutions")
"""Kinds that multiply-accumulates count."""


def kind_of(event: str) -> str:
    """Returns the kind of an event of the profiler, for example ``"aten::_softmax_backward_data"``."""
    name = event.removeprefix("aten::").strip("_").removesuffix("_data").removesuffix("_backward")
    if FUSED in name:
        return "products"
    return next((kind for kind, names in KINDS.items() if name in names), "other") if "::" in event else "other"


def shares(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Profiles `calls` calls on the CPU. Returns the share of the time for every kind; shares add up to 1."""
    seconds: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # torch 2.11 warns without it
        for _ in range(calls):
            call()
    for event in profiler.key_averages():
        seconds[kind_of(event.key)] += event.self_cpu_time_total
    return {kind: seconds[kind] / seconds.total() for kind in (*KINDS, "other")}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m bench.shares", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    layers = "NAME[@PATH][:OPTION=VALUE,...]"
    add("--attention", nargs="+", default=["all"], metavar=layers, help="layers; default: all")
    add("--tokens", nargs="+", type=token_grid, default=[(28, 28)], metavar="N|HxW", help="tokens of an image; 784")
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    add("--mode", choices=MODES, default="forward+backward")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--calls", type=positive, default=5, help="profiled calls of a layer")
    add("--csv", type=Path, metavar="FILE", help="writes the shares as a table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.set_num_threads(1)
    with refuse_bad_input():
        subjects = [attention_layer(name, args.dim, args.num_heads) for name in every_mechanism(args.attention)]
        for subject in subjects:
            subject.check_path("eager", CPU)
            for size in args.tokens:
                subject.check(size)
        if args.csv:
            check_output(args.csv, "--csv", [".csv"])
    rows = []
    bar = tqdm(total=len(subjects) * len(args.tokens), unit="layer", disable=None)
    with refuse_bad_input(), refuse_too_large("give fewer --tokens"), limit_memory(CPU), bar:
        for size in args.tokens:
            batch = max(1, BATCH_TOKENS["cpu"] // math.prod(size))
            for subject in subjects:
                workload = Workload(subject, size, batch, args.mode, args.dtype, "eager", CPU)
                found = shares(workload.call, args.calls)
                rows.append([subject.name, str(math.prod(size)), *(f"{found[kind]:.3f}" for kind in found)])
                bar.update()
    header = ["name", "tokens", *KINDS, "other"]
    if args.csv:
        with refuse_bad_input():
            write_file(args.csv, to_csv(header, rows))
    print(describe(provenance(CPU)), f"{args.mode}, {args.dtype}, one core", sep="\n\n", end="\n\n")
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
