"""Time and memory of attention layers, measured here once for a sweep, and stored in its output."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention import Attention, Grid, LayerContext
from attention.fitting import fitted
from bench.timing import Quartiles, cpu_clock, elapsed, time_rounds
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

MAX_TIMING_SECONDS = 10.0
"""Longest time (s) of the rounds in which a layer is timed; there are at least two rounds, even if they take longer."""


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
            raise ConfigError(f"{self.path}: holds no measurements of a sweep; move it away to measure again") from None


def is_answer(answer: Mapping[str, Any]) -> bool:
    """Returns whether an entry of the file names a machine, and has measurements of sizes."""
    sizes = {int(size): Measurement(*values) for size, values in answer["sizes"].items()}
    return isinstance(answer["machine"], str) and all(
        size > 0 < found.cost and found.error >= 0 <= found.seconds for size, found in sizes.items()
    )


def to_key(question: Mapping[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


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
    clock = cpu_clock()
    seconds, _ = elapsed(call, 1, device, clock)
    if kind == "memory":
        return Measurement(peak_bytes(call, device) / 2**20, 0.0, seconds)
    rounds = max(2, min(ROUNDS, int(MAX_TIMING_SECONDS / seconds)))
    quartiles = Quartiles.of(time_rounds({kind: call}, rounds, device, clock=clock).seconds[kind])
    return Measurement(1e3 * quartiles.median, quartiles.error, quartiles.median)
