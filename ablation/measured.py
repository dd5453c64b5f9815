"""Time and memory of attention layers, measured here once for a sweep, and stored in its output."""

import dataclasses
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention import Attention, Grid, LayerContext
from attention.fitting import fitted
from attention.sizes import Size
from bench.timing import Quartiles, elapsed, time_rounds
from bench.workload import Subject, Workload
from engine.config.schema import Run
from engine.runtime.errors import ConfigError
from engine.runtime.files import write_file
from engine.runtime.locks import hold_lock
from engine.runtime.memory import is_out_of_memory, limit_memory, peak_bytes
from engine.runtime.provenance import device_name
from engine.runtime.reading import read_bounded

MATCH_FILE = "match.json"
"""File of an output directory with the measurements of `match`."""

ROUNDS = 10
"""Rounds in which a layer is timed, at most."""

LONGEST = 10.0
"""Seconds of the longest pass that a target may need, and of the rounds in which a layer is timed, which are two at
least."""

MOST_SIZES = 16
"""Most sizes of a mechanism that are measured."""

FACTORS = (2.0, 4.0, 16.0, 256.0)
"""Multiples and parts of multiply-accumulates with which a larger, or smaller, size is looked for."""


class Measurement(NamedTuple):
    """A measured cost: milliseconds or MiB, and the relative standard error of the median (0 for memory).

    `seconds` are those of a pass; 0 in files of a version that did not store them.
    """

    cost: float
    error: float
    seconds: float = 0.0


class Measurements:
    """Measurements in the file `MATCH_FILE` of the directory `output`, and new ones until they are stored.

    A sweep that goes on, and every other worker, takes the same measurements, and so has the same sizes.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, output: Path):
        self.path = output / MATCH_FILE
        self.known = self._read()

    def take(
        self, question: Mapping[str, Any], size: int, measure: Callable[[], Measurement], machine: str
    ) -> Measurement:
        """Returns the measurement of a mechanism of this size that answers `question`, or makes it on `machine`."""
        sizes = self.known.setdefault(to_key(question), {"machine": machine, "sizes": {}})["sizes"]
        if str(size) not in sizes:
            sizes[str(size)] = [*measure()]
        return Measurement(*sizes[str(size)])

    def machine(self, question: Mapping[str, Any]) -> str:
        """Returns the machine of the measurements that answer `question`."""
        return self.known[to_key(question)]["machine"]

    def store(self) -> bool:
        """Stores what is new; returns whether another worker has stored other answers first, which then hold."""
        if not self.known:
            return False
        with hold_lock(self.path.with_name("lock"), wait=True):
            stored = self._read()
            is_other = any(stored.get(key, own) != own for key, own in self.known.items())
            self.known |= stored
            write_file(self.path, json.dumps(self.known, indent=1).encode())
        return is_other

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            known = json.loads(read_bounded(self.path, 2**24))
            if not all(map(is_answer, known.values())):
                raise ValueError("other values than measurements")
            return known
        except FileNotFoundError:
            return {}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{self.path}: holds no measurements of a sweep; delete it to measure again") from None


def is_answer(answer: Mapping[str, Any]) -> bool:
    """Returns whether an entry of the file names a machine, and has measurements of sizes."""
    sizes = {int(size): Measurement(*values) for size, values in answer["sizes"].items()}
    return isinstance(answer["machine"], str) and all(
        size > 0 < found.cost and found.error >= 0 <= found.seconds for size, found in sizes.items()
    )


def to_key(question: Mapping[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


def find_size(
    target: float, nearest: Callable[[float], Size], cost: Callable[[int], float], start: float, tolerance: float
) -> tuple[int, bool]:
    """Returns the measured size whose cost is nearest to `target`, and whether another's is on its other side.

    Sizes are tried by their multiply-accumulates, by which costs are interpolated.

    Args:
        nearest: multiply-accumulates of a layer -> the valid size nearest to them. cost: measures a size.
        start: multiply-accumulates of the first size. tolerance: share of the target within which the search ends.
    """
    found: dict[int, tuple[float, float]] = {}  # size -> multiply-accumulates, cost
    candidates: Sequence[float] = [start]
    below = above = None
    while len(found) < MOST_SIZES:
        size = next((size for macs in candidates if (size := nearest(macs)).value not in found), None)
        if size is None:
            break
        found[size.value] = size.macs, cost(size.value)
        if abs(found[size.value][1] / target - 1) <= tolerance:
            break
        below = max((pair for pair in found.values() if pair[1] <= target), default=None)
        above = min((pair for pair in found.values() if pair[1] > target), default=None)
        if below is None or above is None:
            macs = size.macs
            candidates = [macs / f for f in (*FACTORS, math.inf)] if below is None else [macs * f for f in FACTORS]
        else:
            share = (target - below[1]) / (above[1] - below[1])  # 0 if the larger size does not fit into memory
            candidates = [below[0] + share * (above[0] - below[0]), (below[0] + above[0]) / 2]
    best = min(found, key=lambda size: abs(found[size][1] - target))
    return best, below is not None and above is not None


def device_of(run: Run) -> torch.device:
    """Returns the device on which a run would be trained here."""
    return torch.device("cuda" if run.train.device != "cpu" and torch.cuda.is_available() else "cpu")


def machine_of(device: torch.device) -> str:
    """Returns the name of the device, and the number of threads of a processor."""
    threads = torch.get_num_threads()
    return device_name(device) + (f" ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else "")


def list_places(contexts: Sequence[LayerContext]) -> Counter[tuple]:
    """Returns how many layers have the same sizes: (C, h, grid, prefix tokens, reduction)."""
    return Counter((c.dim, c.num_heads, c.grid, c.num_prefix_tokens, c.reduction) for c in contexts)


def measure_layers(
    kind: str, mechanism: type[Attention], config: Any, contexts: Sequence[LayerContext], batch_size: int, run: Run
) -> Measurement:
    """Measures the mean of the layers at `contexts`, forward and backward, for a pass of `batch_size` images.

    Layers of the same sizes count as the first of them. Precision, fast paths and device are those of `run`, without
    torch.compile.

    Args:
        kind: "time" (ms), or "memory" (MiB at the peak, beyond weights and input).
    Returns:
        An infinite cost if memory runs out.
    """
    device, costs, error, seconds = device_of(run), 0.0, 0.0, 0.0
    places = list_places(contexts)
    first = {place: context for context in reversed(contexts) for place in list_places([context])}
    for place, count in places.items():
        context = dataclasses.replace(first[place], shared={})
        try:
            with limit_memory(device):
                of_run = batch_size, "forward+backward", run.train.amp or "fp32", "eager", device
                call = Workload(layer_at(context, mechanism, config, run), context.grid, *of_run).call
                found = measure_call(kind, call, device)
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            return Measurement(math.inf, 0.0)
        costs, error = costs + count * found.cost, max(error, found.error)
        seconds += count * found.seconds
    return Measurement(costs / len(contexts), error, seconds / len(contexts))


def layer_at(context: LayerContext, mechanism: type[Attention], config: Any, run: Run) -> Subject:
    """Returns the layer of a mechanism at a place of the model of `run`, with random tokens as its input."""

    def tokens(layer: nn.Module, grid: Grid, batch: int, device: torch.device | str) -> tuple[Tensor, Grid]:
        shape = batch, context.num_prefix_tokens + context.num_tokens, context.dim
        return torch.randn(shape, device=device, requires_grad=True), grid

    build = functools.partial(mechanism, context, fitted(mechanism, context, config))
    return Subject(mechanism.name(), run.train.kernels, lambda grid: build(), tokens)


def measure_call(kind: str, call: Callable[[], object], device: torch.device) -> Measurement:
    """Measures the time (ms) or the memory (MiB) of a call."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # others' work does not count
    seconds, _ = elapsed(call, 1, device, clock)
    if kind == "memory":
        return Measurement(peak_bytes(call, device) / 2**20, 0.0, seconds)
    rounds = max(2, min(ROUNDS, int(LONGEST / seconds)))
    quartiles = Quartiles.of(time_rounds({kind: call}, rounds, device, clock=clock).seconds[kind])
    return Measurement(1e3 * quartiles.median, quartiles.error, quartiles.median)
