"""Compares mechanisms and models side by side, in one process: time, memory, multiply-accumulates, parameters.

    python benchmark.py --attention eva lara performer                        # single layers, against softmax
    python benchmark.py --attention eva eva:num_landmarks=196 --tokens 196 784 3136 --modes forward train \\
        --dtypes fp32 bf16 --output runs/benchmark                            # table, CSV, JSON and figures
    python benchmark.py --core --attention lara lara@plain --baseline lara@plain  # fast path against the definition
    python benchmark.py --against plain --attention eva lara  # each against itself on another path
    python benchmark.py --models timm:vit_tiny_patch16_224:patch_size=8 deit_tiny_p8:eva
    python benchmark.py --macs [configs/deit_tiny_p8/*.yaml]                  # the papers' rows, or any files

Calls are timed in turns, A B C, then C B A: a speed-up is the median, with its quartiles, of the ratios of two times of
the same round. --rounds 3 is a quick look.
"""

import argparse
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from attention import ATTENTION, Grid, kernels
from attention.options import OptionError, nearest
from bench.costs import Costs, count_costs, stated_costs
from bench.figures import draw_figures
from bench.memory import limit_memory, memory_permitting
from bench.papers import PaperRow, read_papers
from bench.results import COLUMNS, MEMORY, NOISE, SETTINGS, describe, report, write_tables
from bench.timing import Call, Spread, time_rounds
from bench.workload import DTYPES, EXECUTIONS, MODES, Subject, Workload, attention_core, attention_layer, whole_model
from engine.config import load_run, refuse_bad_input
from engine.distributed import init_distributed
from engine.files import make_output
from engine.report import provenance
from engine.signals import end_at_interrupt

CONFIGS = Path(__file__).with_name("configs")
BATCH_TOKENS = {"cpu": 6272, "cuda": 100352}
"""Tokens of a batch: 8 or 128 images of 784. Of a model, patches of 8 x 8 pixels are counted."""


@dataclass(frozen=True)
class Comparison:
    """Subjects that are timed in the same rounds, since all but the subject is equal.

    Attributes:
        kind: "attention" for layers, "core" for what they do between their projections, or "model".
        baseline: name of the subject that speed-ups are relative to. costs: of each subject.
        size: (H, W) tokens of a layer, or pixels. batch: images.
    """

    kind: str
    subjects: Sequence[Subject]
    baseline: str
    costs: Sequence[Costs]
    size: Grid
    batch: int
    mode: str
    dtype: str
    execution: str


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        if args.macs:
            print_costs([PaperRow(config=os.path.relpath(path, CONFIGS)) for path in args.configs] or read_papers())
            if not args.configs:
                print_costs_by_size()
            return
        device = init_distributed(args.device).device
        comparisons = plan(args, device)
        torch.set_num_threads(args.threads)
        metadata = {
            **provenance(device),
            "cpus": os.cpu_count(),
            "threads": args.threads,
            "rounds": args.rounds,
            "clock": "processor" if args.processor_time else "wall",
            "load": round(os.getloadavg()[0], 2),
        }
        rows = []
        try:
            with limit_memory(device), tqdm(comparisons, unit="comparison", disable=None) as bar:
                for comparison in bar:
                    clock = time.process_time if args.processor_time else time.perf_counter
                    rows += compare(comparison, args.rounds, device, clock)
                    if args.output:
                        write_tables(metadata, rows, args.output)
        finally:  # what has been measured is not lost, whatever ends the rest
            if rows:
                print(report(metadata, rows), end="")
                if args.output:
                    draw_figures(rows, args.output)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare mechanisms and models side by side.", epilog=f"{MEMORY} {NOISE}".replace("%", "%%")
    )
    many = {"nargs": "+", "default": []}
    parser.add_argument("configs", nargs="*", help="with --macs: YAML files; none: the papers' rows, all mechanisms")
    parser.add_argument("--macs", action="store_true", help="parameters and multiply-accumulates beside the papers'")
    parser.add_argument(
        "--attention",
        **many,
        metavar="NAME[@PATH][:OPTION=VALUE,...]",
        help="single layers; PATH: their fast paths, as train.kernels",
    )
    parser.add_argument(
        "--core", action="store_true", help="of layers what they do between their projections, from q, k, v to values"
    )
    parser.add_argument(
        "--models",
        **many,
        metavar="MODEL",
        help="NAME:ATTENTION[@PATH][:OPTION=VALUE,...], timm:NAME[:OPTION=VALUE,...], or a YAML file",
    )
    parser.add_argument(
        "--against", choices=get_args(kernels.Path), help="time each layer beside itself on this path, not softmax"
    )
    parser.add_argument("--baseline", **many, metavar="ENTRY", help="default: softmax, and the first of the models")
    parser.add_argument("--tokens", nargs="+", type=token_grid, default=[(28, 28)], metavar="N|HxW", help="of a layer")
    parser.add_argument(
        "--image-sizes", nargs="+", type=image_size, default=[(224, 224)], metavar="SIDE|HxW", help="of models; pixels"
    )
    parser.add_argument("--dim", type=positive, default=192, help="channels of a layer")
    parser.add_argument("--num-heads", type=positive, default=3, help="heads of a layer")
    parser.add_argument(
        "--batch-size",
        type=positive,
        help=f"images; default: as many as have {BATCH_TOKENS['cpu']} tokens, on a GPU {BATCH_TOKENS['cuda']}",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["forward", "forward+backward"],
        help="forward: with a graph, as in training; train: forward, backward and AdamW; inference: without a graph",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"], help="half precision: autocast")
    parser.add_argument("--execution", nargs="+", choices=EXECUTIONS, default=["eager"], help="compiled: per shape")
    parser.add_argument("--rounds", type=positive, default=10, help="measurements of each")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time that the process ran on a CPU, not that passed: for a busy machine; with one thread",
    )
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--output", type=Path, help="directory for table.md, results.csv, results.json and figures")
    args = parser.parse_args(arguments)
    if not (args.macs or args.attention or args.models):
        parser.error("give --attention, --models or --macs")
    if args.configs and not args.macs:
        parser.error(f"{args.configs[0]}: configurations go with --macs, or after --models")
    if args.core and not args.attention:
        parser.error("--core: give --attention")
    if args.against and (args.models or args.baseline or not args.attention):
        parser.error("--against: give --attention, and neither --models nor --baseline")
    if args.processor_time and (args.threads > 1 or args.device == "cuda"):
        parser.error("--processor-time: give --threads 1, and --device cpu")
    if args.rounds < 2:
        parser.error("--rounds: quartiles take at least 2")
    return args


def positive(text: str) -> int:
    """A number of the command line, at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def image_size(text: str) -> Grid:
    """``"224"`` or ``"224x320"`` -> rows and columns."""
    sides = [positive(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a side nor HxW")
    return sides[0], sides[-1]


def token_grid(text: str) -> Grid:
    """``"784"``, a square, or ``"14x28"`` -> rows and columns."""
    if "x" in text:
        return image_size(text)
    side = math.isqrt(positive(text))
    if side**2 != int(text):
        nearest_square = round(int(text) ** 0.5) ** 2
        raise argparse.ArgumentTypeError(f"{text} is no square number; nearest: {nearest_square}; or give HxW")
    return side, side


def plan(args: argparse.Namespace, device: torch.device) -> list[Comparison]:
    """All comparisons that were asked for; every network has been built once, without memory.

    Raises:
        OptionError, UserError: a name, an option, a size or a directory that cannot be honoured.
    """
    if args.output:
        make_output(args.output, ())
    kinds = []
    if args.attention:
        kind, subject = ("core", attention_core) if args.core else ("attention", attention_layer)
        beside_softmax = args.attention if "softmax" in args.attention else ["softmax", *args.attention]
        sets = [(on_path(name, args.against), name) for name in args.attention] if args.against else [beside_softmax]
        for names in sets:
            subjects = [subject(name, args.dim, args.num_heads) for name in dict.fromkeys(names)]
            kinds.append((kind, subjects, args.tokens, 1))
    if args.models:
        kinds.append(("model", [whole_model(name) for name in dict.fromkeys(args.models)], args.image_sizes, 64))
    known = [subject.name for _, subjects, _, _ in kinds for subject in subjects]
    for name in args.baseline:
        if name not in known:
            raise OptionError("--baseline", f"{name!r} is not compared{nearest(name, known)}")

    comparisons = []
    for kind, subjects, sizes, patch in kinds:
        names = [subject.name for subject in subjects]
        default = names[0] if kind == "model" or args.against else "softmax"
        baseline = next((name for name in args.baseline if name in names), default)
        for size in sizes:
            costs = [subject.check(size) for subject in subjects]
            batch = args.batch_size or max(1, BATCH_TOKENS[device.type] * patch // math.prod(size))
            comparisons += [
                Comparison(kind, subjects, baseline, costs, size, batch, *setting)
                for setting in itertools.product(args.modes, args.dtypes, args.execution)
            ]
    return comparisons


def on_path(text: str, path: str) -> str:
    """The entry ``"NAME[@PATH][:OPTION=VALUE,...]"`` on another path."""
    name, colon, options = text.partition(":")
    return f"{name.partition('@')[0]}@{path}{colon}{options}"


def compare(
    comparison: Comparison, rounds: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """Measures all subjects: one row each, with the columns of results.csv; None for what does not fit into memory."""
    torch.compiler.reset()  # else the next shape would be compiled for any shape, and be slower
    # All mechanisms are one function to the compiler, which would leave those beyond its limit uncompiled.
    with torch._dynamo.config.patch(recompile_limit=1000):
        calls, counts = set_up(comparison, device)
        times = time_rounds(calls, rounds, device, clock=clock)

    rows = []
    for subject, costs in zip(comparison.subjects, comparison.costs, strict=True):
        row = {name: getattr(comparison, name, None) for name in COLUMNS}
        row |= costs._asdict() | counts.get(subject.name, {}) | {"name": subject.name, "size": size_text(comparison)}
        if subject.name in calls:
            row |= describe("seconds", Spread.of(times.seconds[subject.name]), times)
            row |= {"waited": times.waited, "images_per_second": comparison.batch / row["seconds"]}
        if {subject.name, comparison.baseline} <= calls.keys():
            row |= describe("speedup", times.speedup(subject.name, comparison.baseline), times)
            row["peak_ratio"] = row["peak_bytes"] / counts[comparison.baseline]["peak_bytes"]
        rows.append(row)
    return rows


def set_up(comparison: Comparison, device: torch.device) -> tuple[dict[str, Call], dict[str, dict[str, int | None]]]:
    """Calls to time, and what they cost beside time, of all subjects that fit into memory beside each other."""
    setting = [getattr(comparison, name) for name in SETTINGS]
    workloads, calls, counts = {}, {}, {}
    for subject in comparison.subjects:
        with memory_permitting():
            workloads[subject.name] = Workload(subject, *setting, device)
    for name, workload in workloads.items():
        with memory_permitting():
            counts[name] = workload.counts()
            calls[name] = workload.call
    return calls, counts


def size_text(comparison: Comparison) -> str:
    """``"784"`` tokens of a square grid or ``"224"`` pixels of a square image's side, otherwise ``"14x28"``."""
    height, width = comparison.size
    if height != width:
        return f"{height}x{width}"
    return str(height * width if comparison.kind != "model" else height)


def print_costs(rows: Sequence[PaperRow]) -> None:
    """Prints parameters and MACs of every row beside the paper's and the released code's figures, as Markdown."""
    columns = "configuration", "parameters (M)", "paper", "MACs (G)", "paper", "released code", "top-1 (%)", "source"
    print(f"| {' | '.join(columns)} | note |\n|{' --- |' * (len(columns) + 1)}")
    for row in rows:
        parameters, macs = costs_of_run(row.config, row.overrides)
        cells = [
            " ".join((row.config, *row.overrides)),
            f"{parameters / 1e6:.3f}",
            row.parameters or "",
            f"{macs / 1e9:.3f}",
            row.macs or "",
            row.released_macs or "",
            row.top1 or "",
            row.source,
            row.note,
        ]
        print(f"| {' | '.join(map(str, cells))} |")


@functools.cache
def costs_of_run(config: str, overrides: tuple[str, ...]) -> Costs:
    """Costs of the model of a file below configs/; several rows may be of the same."""
    run = load_run(CONFIGS / config, overrides)
    return count_costs(run.model, run.attention)


def print_costs_by_size() -> None:
    """Prints MACs and parameters of DeiT-Tiny for 196, 784 and 3136 tokens with every mechanism at its defaults."""
    cells = "MACs (G) at 196 tokens", "parameters (M)", "at 784", "parameters", "at 3136", "parameters"
    print(f"\n| DeiT-Tiny with | {' | '.join(cells)} |\n|{' --- |' * 7}")
    by_size = [stated_costs(f"deit_tiny_p{patch}") for patch in (16, 8, 4)]
    for name in ATTENTION:
        costs = [by_name[name] for by_name in by_size]
        print(f"| {name} | {' | '.join(f'{c.macs / 1e9:.3f} | {c.parameters / 1e6:.3f}' for c in costs)} |")


if __name__ == "__main__":
    main()
