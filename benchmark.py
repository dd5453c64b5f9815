"""Compares mechanisms and models side by side, in one process: time, memory, multiply-accumulates, parameters.

    python benchmark.py --attention eva lara performer                        # single layers, against softmax
    python benchmark.py --attention eva eva:num_landmarks=196 --tokens 196 784 3136 --modes forward train \\
        --dtypes fp32 bf16 --output runs/benchmark                            # table, CSV, JSON and figures
    python benchmark.py --attention all --tokens 784 --modes forward+backward  # is any slower than its arithmetic?
    python benchmark.py --core --attention lara lara@plain --baseline lara@plain  # fast path against the definition
    python benchmark.py --against plain --attention eva lara  # each against itself on another path
    python benchmark.py --models timm:vit_tiny_patch16_224:patch_size=8 deit_tiny_p8:eva
    python benchmark.py --macs [configs/deit_tiny_p8/*.yaml]                  # the papers' rows, or any files
    python benchmark.py --recommend --tokens 64x64 --dim 384 --num-heads 6 --budget ms=50 macs=0.5   # a ranking

Calls are timed in turns, A B C, then C B A. A speed-up is the median of the ratios of two times of the same round, with
quartiles. --rounds 3 gives a quick look.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from tqdm import tqdm

from attention import kernels
from bench.arguments import device_name, every_mechanism, image_size, positive, token_grid
from bench.calibration import LEAST_SHAPES, ROUNDS, stopwatch
from bench.choices import BUDGETS, Request
from bench.comparison import BATCH_TOKENS, compare, plan
from bench.costs import CONFIGS, print_costs, print_costs_by_size, print_costs_of_others
from bench.devices import DEVICES
from bench.figures import draw_figures
from bench.quality import MEASURES
from bench.recommend import recommend
from bench.results import MEMORY, NOISE, describe, format_results, write_tables
from bench.runtimes import RUNTIMES
from bench.workload import DTYPES, EXECUTIONS, MODES
from engine.config.papers import PaperRow, read_others, read_papers
from engine.runtime.arguments import PROCESSES, ArgumentParser, Count
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import refuse_bad_input
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance
from engine.runtime.signals import end_at_interrupt


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        if args.macs:
            print_costs([PaperRow(config=os.path.relpath(path, CONFIGS)) for path in args.configs] or read_papers())
            if not args.configs:
                print_costs_of_others(read_others())
                print_costs_by_size()
            return
        device = init_distributed(args.device).device
        request = Request.of(args) if args.recommend else None
        comparisons = [] if request else plan(args, device)
        torch.set_num_threads(args.threads)
        metadata = provenance(device) | {"cpus": os.cpu_count(), "threads": args.threads, "rounds": args.rounds}
        metadata |= {"clock": "processor" if args.processor_time else "wall", "load": round(os.getloadavg()[0], 2)}
        clock = time.process_time if args.processor_time else time.perf_counter
        if request:
            print(describe(metadata), end="\n\n", flush=True)
            with limit_memory(device):
                recommend(args, request, stopwatch(args.modes[0], args.dtypes[0], args.rounds, device, clock))
            return
        rows = []
        try:
            with limit_memory(device), tqdm(comparisons, unit="comparison", disable=None) as bar:
                for comparison in bar:
                    rows += compare(comparison, args.rounds, device, clock)
                    if args.output:
                        write_tables(metadata, rows, args.output)
        finally:  # keeps the measurements, whatever ends the rest
            if rows:
                print(format_results(metadata, rows), end="")
                if args.output:
                    draw_figures(rows, args.output)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = f"{MEMORY} {NOISE}".replace("%", "%%")
    parser = ArgumentParser(description="Compare mechanisms and models side by side.", epilog=epilog)
    add, many = parser.add_argument, {"nargs": "+", "default": []}
    layers, models = "NAME[@PATH][:OPTION=VALUE,...]", "NAME:ATTENTION[@PATH][:OPTION=VALUE,...]"
    add("configs", nargs="*", help="with --macs: YAML files; none: the papers' rows and all mechanisms")
    add("--macs", action="store_true", help="parameters and multiply-accumulates beside the papers' figures")
    add("--attention", **many, metavar=layers, help="single layers, or all; PATH: fast paths, as train.kernels")
    add("--core", action="store_true", help="layers without their projections: from q, k, v to attended values")
    add("--models", **many, metavar="MODEL", help=f"{models}, timm:NAME[:OPTION=VALUE,...], or a YAML file")
    on_path = "compare each layer with itself on this path, not with softmax"
    add("--against", choices=get_args(kernels.Path), help=on_path)
    add("--baseline", **many, metavar="ENTRY", help="default: softmax, and the first model")
    pixels = "images of models, in pixels; default: 224"
    add("--tokens", nargs="+", type=token_grid, default=[(28, 28)], metavar="N|HxW", help="tokens of a layer")
    add("--image-sizes", nargs="+", type=image_size, metavar="SIDE|HxW", help=pixels)
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    default = f"as many as have {BATCH_TOKENS['cpu']} tokens, on a GPU {BATCH_TOKENS['cuda']}; with --recommend 1"
    add("--batch-size", type=positive, help=f"images; default: {default}")
    modes = "forward: with a graph, as in training; train: forward, backward and AdamW; inference: without a graph"
    add("--modes", nargs="+", choices=MODES, help=f"{modes}; default: forward, forward+backward")
    add("--dtypes", nargs="+", choices=DTYPES, default=["fp32"], help="half precision uses autocast")
    exports = "onnx, onnx-int8, aot (AOTInductor): exported models, in inference"
    executions = f"compiled: for each shape; cuda-graph: eager kernels, launched at once; {exports}"
    add("--execution", nargs="+", choices=EXECUTIONS, default=["eager"], help=executions)
    add("--rounds", type=Count(2), help=f"measurements of each; default: 10, with --recommend {ROUNDS}")
    add("--device", type=device_name, choices=("auto", "cuda", "cpu"), default="auto")
    processor = "CPU time of the process instead of wall time, for a busy machine; needs one thread"
    add("--processor-time", action="store_true", help=processor)
    add("--threads", type=PROCESSES, help="CPU threads; default: PyTorch's choice")
    add("--output", type=Path, help="directory for table.md, results.csv, results.json and figures")
    asked = "calibrate this device and rank mechanisms by stored quality; --attention: these alone, without sizes"
    add("--recommend", action="store_true", help=f"{asked}; one of --tokens, --modes and --dtypes")
    budgets = "; ".join(f"{key}: {meaning}" for key, meaning in BUDGETS.items())
    add("--budget", **many, metavar="KEY=LIMIT", help=f"with --recommend: {budgets}")
    add("--measure", choices=tuple(MEASURES), help="quality that ranks; default: the first with stored values")
    limited = f"shapes that would take longer are left out, but for the first {LEAST_SHAPES}; default: 60"
    add("--calibrate", type=positive, metavar="SECONDS", help=limited)
    elsewhere = "with --recommend: predict for a device that is not here (bench/devices.py), without a calibration"
    add("--on", choices=tuple(DEVICES), help=elsewhere)
    held_out = "with --recommend: time all candidates at these grids (none: at --tokens), and compare"
    add("--verify", nargs="*", type=token_grid, metavar="N|HxW", help=held_out)
    args = parser.parse_args(arguments)
    args.attention = every_mechanism(args.attention)
    if not (args.macs or args.attention or args.models or args.recommend):
        parser.error("give --attention, --models or --macs, or --recommend")
    if args.recommend:
        refuse_beside_recommend(parser, args)
    elif args.budget or args.measure or args.calibrate or args.on or args.verify is not None:
        parser.error("--budget, --measure, --calibrate, --on and --verify: give --recommend")
    args.modes = args.modes or (["inference"] if args.recommend else ["forward", "forward+backward"])
    args.rounds = args.rounds or (ROUNDS if args.recommend else 10)
    args.threads, args.image_sizes = args.threads or torch.get_num_threads(), args.image_sizes or [(224, 224)]
    if args.recommend:
        args.batch_size, args.calibrate = args.batch_size or 1, args.calibrate or 60
    if args.configs and not args.macs:
        parser.error(f"{args.configs[0]}: configurations go with --macs, or after --models")
    if args.core and not args.attention:
        parser.error("--core: give --attention")
    if args.against and (args.models or args.baseline or not args.attention):
        parser.error("--against: give --attention, and neither --models nor --baseline")
    if args.processor_time and (args.threads > 1 or args.device == "cuda"):
        parser.error("--processor-time: give --threads 1, and --device cpu")
    unfit = args.attention or args.modes != ["inference"] or args.dtypes != ["fp32"] or args.device != "cpu"
    if unfit and (exported := [name for name in args.execution if name in RUNTIMES]):
        parser.error(f"--execution {exported[0]}: takes --models, --modes inference and --device cpu, in fp32")
    return args


def is_given(parser: ArgumentParser, args: argparse.Namespace, name: str) -> bool:
    """Returns whether an option has another value than its default."""
    key = name.replace("-", "_")
    return getattr(args, key) != parser.get_default(key)


def refuse_beside_recommend(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses options that a recommendation does not take, or takes one value of."""
    for name in ("macs", "core", "models", "against", "baseline", "image-sizes"):
        if is_given(parser, args, name):
            parser.error(f"--{name}: not with --recommend; leave it out")
    for name in ("tokens", "modes", "dtypes"):
        values = getattr(args, name)
        if values and len(values) > 1:
            parser.error(f"--{name}: --recommend takes one value, got {len(values)}; give one")
    measuring = ("verify", "calibrate", "rounds", "device", "threads", "processor-time")
    useless = [f"--{name}" for name in measuring if is_given(parser, args, name)]
    useless += ["--modes train"] if args.modes == ["train"] else []
    if args.on and useless:
        parser.error(f"--on: a device that is not here is not measured; leave out {', '.join(useless)}")
    if args.execution != ["eager"]:
        parser.error("--execution: --recommend times eager layers; leave it out")


if __name__ == "__main__":
    main()
