"""Costs of hybrids that a budget limits: multiply-accumulates, time or memory, measured and predicted from layers."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from analysis.hybrids import OWN, Choices, Hybrids
from attention.ops import kernels
from bench.timing import Quartiles, cpu_clock, time_rounds
from bench.workload import WARM_UP
from engine.config.schema import Train
from engine.runtime.distributed import autocast
from engine.runtime.memory import peak_bytes
from engine.runtime.provenance import device_name
from engine.runtime.terminal import progress
from models.base import attention_layers

ROUNDS = 10
"""Number of rounds in which a hybrid and the trained model are timed in turns."""


class Prices(NamedTuple):
    """Prediction of the cost of any hybrid from its layers.

    Attributes:
        start: cost before the first layer. layers: number of a layer and its choice, the own attention too -> price.
        combine: cost of the layers before, price -> cost; it never falls with a price.
    """

    start: float
    layers: Mapping[tuple[int, str], float]
    combine: Callable[[float, float], float]

    def predict(self, choices: Choices) -> float:
        """Predicts the cost of a hybrid."""
        return reduce(self.combine, (self.layers[pair] for pair in enumerate(choices)), self.start)

    def cheapest(self) -> Choices:
        """Returns the hybrid of the lowest predicted cost."""
        found: dict[int, tuple[float, str]] = {}
        for (layer, name), price in self.layers.items():
            found[layer] = min((price, name), found.get(layer, (price, name)))
        return tuple(name for _, (_, name) in sorted(found.items()))


def forward(model: nn.Module, images: Tensor, options: Train) -> Callable[[], object]:
    """Returns a forward pass of a model, warmed up, with the precision and the fast paths of a run's options."""

    @torch.inference_mode()
    def call() -> Tensor:
        with kernels.use(options.kernels), autocast(options.amp, images.device):
            return model(images)

    for _ in range(WARM_UP):
        call()
    return call


class Found(NamedTuple):
    """A measured cost. noisy: whether it is too uncertain to be quoted."""

    cost: float
    noisy: bool = False


class Cost(ABC):
    """Cost of a forward pass of hybrids, in evaluation without a graph.

    Time and memory follow from shapes, not from weights, so that untrained layers stand for aligned ones. The run's
    precision and fast paths apply, without torch.compile.

    Args:
        batch_size: images of the pass; the sample is repeated if it has fewer.
    Attributes:
        name: key of `COSTS`. columns: columns of tables for the measured and the predicted cost, in units of a budget;
            none if tables have them already. unit: cost of a budget of 1. combine: see `Prices`. noisy: hybrids whose
            measurement is too uncertain.
    """

    name: str
    columns: tuple[str, ...] = ()
    unit: float
    combine: Callable[[float, float], float] = operator.add

    def __init__(self, hybrids: Hybrids, batch_size: int):
        sample, device = hybrids.laboratory.sample.images, hybrids.laboratory.trained.device
        self.hybrids, self.device, self.noisy = hybrids, device, set[Choices]()
        self.images = sample.repeat(-(-batch_size // len(sample)), 1, 1, 1)[:batch_size].to(device)

    @abstractmethod
    def measure(self, choices: Choices) -> float:
        """Returns the cost of a hybrid, counted or measured once."""

    def price(self, layer: int, name: str) -> float:
        """Returns the cost that a mechanism in one layer alone adds to the trained model's."""
        return self.measure(self.hybrids.single(layer, name)) - self.start()

    def start(self) -> float:
        return self.measure(self.hybrids.own)

    def prices(self) -> Prices:
        """Returns the prices of all layers."""
        layers, own = {}, [(layer, OWN) for layer in range(len(self.hybrids.own))]
        pairs = *own, *self.hybrids.pairs
        with progress(self.name, len(pairs), "layers") as bar:
            for pair in pairs:
                layers[pair] = self.price(*pair)
                bar.update()
        return Prices(self.start(), layers, self.combine)

    def cheapest(self, prices: Prices) -> float:
        """Returns the lower of the predicted and the measured cost of the hybrid with the lowest prediction."""
        choices = prices.cheapest()
        return min(prices.predict(choices), self.measure(choices))

    def text(self, cost: float) -> str:
        """Formats a cost as a budget is written."""
        return f"{self.name}={cost / self.unit:.4g}"

    def build(self, choices: Choices) -> nn.Module:
        return self.hybrids.build(choices, is_aligned=False)

    def call(self, model: nn.Module) -> Callable[[], object]:
        return forward(model, self.images, self.hybrids.laboratory.trained.run.train)

    def once(self, choices: Choices, compute: Callable[[], Found], **question: Any) -> float:
        """Returns the kept cost of a hybrid with this device, number of threads and batch; measures it if absent."""
        place = {"device": device_name(self.device), "threads": torch.get_num_threads(), "batch": len(self.images)}
        options = self.hybrids.laboratory.trained.run.train
        place |= {"amp": options.amp, "kernels": options.kernels}
        found = Found(**self.hybrids.once(choices, lambda: compute()._asdict(), of=self.name, **place, **question))
        if found.noisy:
            self.noisy.add(choices)
        return found.cost


class Macs(Cost):
    """Multiply-accumulates for one image; a budget is a share of the trained model's."""

    name = "macs"

    @property
    def unit(self) -> float:
        return self.hybrids.own_macs

    def measure(self, choices: Choices) -> float:
        return self.hybrids.macs(choices)


class Time(Cost):
    """Seconds; a budget is in milliseconds.

    A hybrid is timed in turns with the trained model. Its time is that model's, which is timed once, times the median
    ratio of two times of the same round, so that another load of the machine does not change the order. On a CPU, one
    thread is timed by processor time, which other programs do not lengthen.
    """

    name, columns, unit = "ms", ("ms", "predicted_ms"), 1e-3

    def measure(self, choices: Choices) -> float:
        own = self.hybrids.own
        if choices == own:
            return self.once(own, partial(self._time, own))
        return self.measure(own) * self.once(choices, partial(self._time, own, choices))

    def _time(self, *hybrids: Choices) -> Found:
        """Times a hybrid in seconds, or as a ratio to another one."""
        calls = {name: self.call(self.build(x)) for name, x in zip((OWN, "hybrid"), hybrids, strict=False)}
        times = time_rounds(calls, ROUNDS, self.device, clock=cpu_clock())
        found = times.speedup(*calls) if len(calls) > 1 else Quartiles.of(times.seconds[OWN])
        return Found(found.median, times.noisy(found))


class Memory(Cost):
    """Bytes at the peak, above the model and its images; a budget is in MiB.

    The peak of a model is the highest peak of its layers. The peak of a layer is measured in a model whose other
    attention layers return their input, so that they allocate nothing.
    """

    name = "memory"
    columns, unit = ("peak_mib", "predicted_peak_mib"), 2**20
    combine = max

    def measure(self, choices: Choices) -> float:
        return self.once(choices, lambda: Found(peak_bytes(self.call(self.build(choices)), self.device)))

    def start(self) -> float:
        return 0.0

    def price(self, layer: int, name: str) -> float:
        choices = self.hybrids.single(layer, name)
        return self.once(choices, lambda: self._alone(choices, layer), layer=layer)

    def _alone(self, choices: Choices, layer: int) -> Found:
        model = self.build(choices)
        for number, other in enumerate(attention_layers(model)):
            if number != layer:
                other.forward = lambda x, *_, **__: x
        return Found(peak_bytes(self.call(model), self.device))


COSTS: dict[str, type[Cost]] = {cost.name: cost for cost in (Macs, Time, Memory)}
"""Kind of a budget -> cost that it limits."""
