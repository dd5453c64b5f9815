"""Compares mechanisms and models side by side, in one process: time, memory, multiply-accumulates, parameters.

    python benchmark.py --attention eva lara performer                        # single layers, against softmax
    python benchmark.py --attention eva eva:num_landmarks=196 --tokens 196 784 3136 --modes forward train \\
        --dtypes fp32 bf16 --output runs/benchmark                            # table and CSV
    python benchmark.py --attention all --tokens 784 --modes forward+backward  # is any slower than its arithmetic?
    python benchmark.py --attention lara lara@plain  # fast path and definition
    python benchmark.py --models timm:vit_tiny_patch16_224:patch_size=8 deit_tiny_p8:eva
    python benchmark.py --macs                                                # beside the papers' figures
    python benchmark.py --attention all --tokens 28x28 --modes inference --budget macs=0.5 ms=100      # a choice

Calls are timed in turns, A B C, then C B A. A speed-up is the median of the ratios of two times of the same round, with
quartiles. --rounds 3 gives a quick look.
"""

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.arguments import check_arguments, every_mechanism, image_size, positive, token_grid
from bench.choice import BUDGETS, format_choices, parse_budget
from bench.comparison import BATCH_TOKENS, compare, plan
from bench.costs import print_costs
from bench.results import MEMORY, NOISE, format_results, write_tables
from bench.workload import DTYPES, EXECUTIONS, MODES
from engine.config.papers import read_papers
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import refuse_bad_input
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance
from engine.runtime.signals import end_at_interrupt
from engine.runtime.terminal import progress


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        check_arguments(args)
        if args.macs:
            return print_costs(read_papers())
        budgets = [parse_budget(text, BUDGETS) for text in args.budget]
        device = init_distributed(args.device).device
        comparisons = plan(args, device)
        metadata = provenance(device) | {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
        metadata["rounds"] = args.rounds
        metadata["load"] = round(os.getloadavg()[0], 2)
        rows = []
        try:
            with limit_memory(device), progress("benchmark", len(comparisons), "comparisons") as bar:
                for comparison in comparisons:
                    rows += compare(comparison, args.rounds, device)
                    bar.update()
                    if args.output:
                        write_tables(metadata, rows, args.output)
        finally:  # keeps the measurements, whatever ends the rest
            if rows:
                print(format_results(metadata, rows), end="")
                if budgets:
                    print("", format_choices(rows, budgets), sep="\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = textwrap.fill(f"{MEMORY} {NOISE}", 79)
    example = "python benchmark.py --attention eva lara --tokens 784"
    parser = ArgumentParser(description=f"Compare mechanisms and models side by side.\n\n    {example}", epilog=epilog)
    add, many, entries = parser.add_argument, {"nargs": "+"}, {"nargs": "+", "default": []}
    layers, models = "NAME[@PATH][:OPTION=VALUE,...]", "NAME:ATTENTION[@PATH][:OPTION=VALUE,...]"
    batch = f"as many as have {BATCH_TOKENS['cpu']} tokens, on a GPU {BATCH_TOKENS['cuda']}"
    modes = "forward: with a graph, as in training; train: forward, backward and AdamW; inference: without a graph"
    executions = "compiled: for each shape; cuda-graph: eager kernels, launched at once"
    add("--macs", action="store_true", help="parameters and multiply-accumulates beside the papers' figures")
    add("--attention", **entries, metavar=layers, help="single layers, or all; PATH: fast paths, as train.kernels")
    add("--models", **entries, metavar="MODEL", help=f"{models}, timm:NAME[:OPTION=VALUE,...], or a YAML file")
    add("--tokens", **many, type=token_grid, default=[(28, 28)], metavar="N|HxW", help="tokens of a layer")
    pixels = "images of models, in pixels; default: 224"
    add("--image-sizes", **many, type=image_size, default=[(224, 224)], metavar="SIDE|HxW", help=pixels)
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    add("--batch-size", type=positive, help=f"images; default: {batch}")
    first = ["forward", "forward+backward"]
    add("--modes", **many, choices=MODES, default=first, help=f"{modes}; default: the first two")
    add("--dtypes", **many, choices=DTYPES, default=["fp32"], help="half precision uses autocast")
    add("--execution", **many, choices=EXECUTIONS, default=["eager"], help=executions)
    add("--rounds", type=Count(2), default=10, help="measurements of each; default: %(default)s")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--output", type=Path, help="directory for table.md and results.csv")
    limits = "; ".join(f"{key}: {meaning}" for key, meaning in BUDGETS.items())
    limits = f"second table of the layers within these limits, sorted by stored quality; {limits}"
    add("--budget", **entries, metavar="KEY=LIMIT", help=limits)
    args = parser.parse_args(arguments)
    args.attention = every_mechanism(args.attention)
    return args


if __name__ == "__main__":
    main()
