"""Comparisons of layers and models: which subjects are timed together, and their measurements."""

import argparse
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from attention import Grid
from bench.arguments import BATCH_TOKENS
from bench.choice import every_mechanism
from bench.results import COLUMNS, FILES, SETTINGS, quartile_columns
from bench.timing import Call, Quartiles, capturing, time_rounds
from bench.workload import Subject, Workload, attention_layer, layers_that_differ, whole_model
from engine.runtime.errors import ConfigError
from engine.runtime.memory import memory_permitting
from engine.runtime.ownership import make_output
from models.costs import Costs


@dataclass(frozen=True)
class Comparison:
    """Subjects that are timed in the same rounds with the same settings.

    Attributes:
        kind: "attention" for layers, or "model".
        baseline: name of the subject that speed-ups are relative to. costs: costs of each subject.
        size: (H, W) or (T, H, W) tokens of a layer, or pixels of an image. batch: number of images.
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


def plan(args: argparse.Namespace, device: torch.device) -> list[Comparison]:
    """Returns the comparisons of a command line, after building every network once on the meta device.

    Raises:
        OptionError, UserError: a name, option, size or directory that cannot be honoured.
    """
    if any(name.endswith("cuda-graph") for name in args.execution) and device.type != "cuda":
        raise ConfigError("--execution cuda-graph needs a GPU; use eager")
    if args.output:
        make_output(args.output, FILES)
    kinds = []
    if args.attention:
        entries = every_mechanism(args.attention)
        names = entries if "softmax" in entries else ["softmax", *entries]
        size = args.dim, args.num_heads
        layers = [(name, n) for name in dict.fromkeys(names) for n in layers_that_differ(name, *size, args.tokens[0])]
        kinds.append(("attention", [attention_layer(name, *size, layer=n) for name, n in layers], args.tokens, 1))
    if args.models:
        kinds.append(("model", [whole_model(name) for name in dict.fromkeys(args.models)], args.image_sizes, 64))
    for _, subjects, _, _ in kinds:
        for subject in subjects:
            if subject.path == "triton" and device.type == "cpu":
                raise ConfigError(f"{subject.name!r}, path triton: Triton's kernels need a GPU; use the path auto")

    comparisons = []
    for kind, subjects, sizes, patch in kinds:
        baseline = subjects[0].name if kind == "model" else "softmax"
        for size in sizes:
            costs = [subject.costs(size) for subject in subjects]
            batch = args.batch_size or max(1, BATCH_TOKENS[device.type] * patch // math.prod(size))
            comparisons += [
                Comparison(kind, subjects, baseline, costs, size, batch, *setting)
                for setting in itertools.product(args.modes, args.dtypes, args.execution)
            ]
    return comparisons


def compare(comparison: Comparison, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measures all subjects. Returns a row of results.csv for each; None for subjects that exceed the memory."""
    calls, counts = set_up(comparison, device)
    times = time_rounds(calls, rounds, device)
    H = comparison.size[0]
    square = H if comparison.kind == "model" else H * H  # pixels along a side, or tokens
    size = str(square) if comparison.size == (H, H) else "x".join(map(str, comparison.size))
    rows, macs = [], {each.name: costs.macs for each, costs in zip(comparison.subjects, comparison.costs, strict=True)}
    for subject, costs in zip(comparison.subjects, comparison.costs, strict=True):
        row = {name: getattr(comparison, name, None) for name in COLUMNS}
        row |= costs._asdict() | counts.get(subject.name, {})
        row |= {"name": subject.name, "size": size}
        if subject.name in calls:
            row |= quartile_columns("seconds", Quartiles.of(times.seconds[subject.name]), times)
            row |= {"waited": times.waited, "images_per_second": comparison.batch / row["seconds"]}
        if {subject.name, comparison.baseline} <= calls.keys():
            row |= quartile_columns("speedup", times.speedup(subject.name, comparison.baseline), times)
            row["peak_ratio"] = row["peak_bytes"] / counts[comparison.baseline]["peak_bytes"]
            row["macs_ratio"] = macs[comparison.baseline] / row["macs"]
            row["efficiency"] = row["speedup"] / row["macs_ratio"]
        rows.append(row)
    return rows


def set_up(comparison: Comparison, device: torch.device) -> tuple[dict[str, Call], dict[str, dict[str, int | None]]]:
    """Returns calls to time, and their `Workload.counts`, for all subjects that fit into memory together."""
    torch.compiler.reset()  # otherwise the next shape would be compiled as a dynamic one, which is slower
    setting = [getattr(comparison, name) for name in SETTINGS]
    workloads, calls, counts = {}, {}, {}
    in_graph = capturing() if comparison.execution.endswith("cuda-graph") else nullcontext(lambda call: call)
    # All mechanisms share one function, which the compiler would otherwise stop compiling at its limit.
    with torch._dynamo.config.patch(recompile_limit=1000), in_graph as to_time:
        for subject in comparison.subjects:
            with memory_permitting():
                workloads[subject.name] = Workload(subject, *setting, device)
        for name, workload in workloads.items():
            with memory_permitting():
                counts[name] = workload.counts()
                calls[name] = to_time(workload.call)
    return calls, counts
