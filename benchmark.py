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

import os
from collections.abc import Sequence

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("bench.arguments:parse_arguments")

import torch

from bench.arguments import BUDGETS, check_arguments, parse_arguments
from bench.choice import format_choices, parse_budget
from bench.comparison import compare, plan
from bench.costs import print_costs
from bench.results import format_results, write_tables
from engine.config.papers import read_papers
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import refuse_bad_input
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance
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


if __name__ == "__main__":
    main()
