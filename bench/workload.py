"""Workloads of a benchmark: single layers and whole models by name, with random inputs, as repeatable calls."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AttentionFactory, Grid, kernels
from attention.options import OptionError
from bench.operators import count_operators
from engine.config.yaml_files import parse_yaml
from engine.run.load import load_run
from engine.runtime.distributed import autocast
from engine.runtime.errors import ConfigError
from engine.runtime.memory import peak_bytes, saved_bytes
from models import create_model, is_host
from models.base import Backbone, is_same_attention
from models.block import compiled
from models.costs import Costs, costs_of

DEPTH = 12
"""Layers of a network whose layers differ by their number: DeiT's."""
PLACE = ", layer "
"""Beginning of the place in the name of a layer that is not alone."""
WARM_UP = 3
"""Number of calls before the first measurement."""


@dataclass(frozen=True)
class Subject:
    """A layer or model that is measured.

    Attributes:
        name: entry of the command line, and the place of a layer of `layers_that_differ`. path: path of
            attention.kernels. build: size -> network.
        example: network, size, batch, device -> random arguments of its call. A size is the (H, W) or
            (T, H, W) tokens of a layer, or the pixels of an image.
    """

    name: str
    path: kernels.Path
    build: Callable[[Grid], nn.Module]
    example: Callable[[nn.Module, Grid, int, torch.device | str], tuple[Any, ...]]

    @contextmanager
    def on_path(self) -> Iterator[None]:
        """Context of calls on its path. On the path "plain" torch's softmax attention, too, computes its matrix."""
        with kernels.use(self.path), sdpa_kernel(SDPBackend.MATH) if self.path == "plain" else nullcontext():
            yield

    def costs(self, size: Grid) -> Costs:
        """Counts the costs for one image in evaluation, on the meta device.

        Raises:
            OptionError, ConfigError: the network refuses its options or the size.
        """
        try:
            with torch.device("meta"):
                network = self.build(size).eval()
                return costs_of(network, *self.example(network, size, 1, "meta"))
        except OptionError:
            raise
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # timm's ways to refuse
            raise ConfigError(f"{self.name} at {'x'.join(map(str, size))}: {str(error).splitlines()[0]}") from None


def attention_layer(text: str, dim: int, num_heads: int, layer: int | None = None) -> Subject:
    """Parses the layer ``"NAME[@PATH][:OPTION=VALUE,...]"``.

    Args:
        layer: number of the layer in a network of `DEPTH` layers, which its name then has; None: a layer by itself.
    Raises:
        OptionError, ConfigError: unknown mechanism, path or option.
    """
    factory, path = factory_of(text), _split_path(text, text.partition(":")[0])[1]

    def tokens(layer: nn.Module, grid: Grid, batch: int, device: torch.device | str) -> tuple[Any, ...]:
        return torch.randn(batch, math.prod(grid), dim, device=device, requires_grad=True), grid

    place, where = ({}, "") if layer is None else ({"layer": layer, "depth": DEPTH}, f"{PLACE}{layer} of {DEPTH}")
    return Subject(text + where, path, lambda grid: factory(dim=dim, num_heads=num_heads, grid=grid, **place), tokens)


def factory_of(name: str) -> AttentionFactory:
    """Returns the mechanism with its checked options of a layer, by the name of its subject."""
    text = name.partition(PLACE)[0]
    mechanism, _, options = text.partition(":")
    return AttentionFactory.from_options({"name": _split_path(text, mechanism)[0], **read_options(text, options)})


def layers_that_differ(text: str, dim: int, num_heads: int, grid: Grid) -> list[int | None]:
    """Numbers of the first layer of each kind in a network of `DEPTH` layers `text`; [None] if all layers are alike.

    Raises:
        OptionError, ConfigError: see `attention_layer`, or a layer that cannot have the grid.
    """
    with torch.device("meta"):
        layers = [attention_layer(text, dim, num_heads, layer=layer).build(grid) for layer in range(DEPTH)]
    first = [n for n, layer in enumerate(layers) if not any(is_same_attention(layer, other) for other in layers[:n])]
    return [*first] if len(first) > 1 else [None]


def whole_model(text: str) -> Subject:
    """Parses ``"NAME:ATTENTION[@PATH][:OPTION=VALUE,...]"``, or a YAML file. NAME may be ``timm:NAME``; without
    attention, ``"timm:NAME[:OPTION=VALUE,...]"`` is the model as it is, with options of timm's constructor.

    Raises:
        OptionError, ConfigError: an unknown model of timm, or a refused file. Other names are checked at construction.
    """

    def images(model: nn.Module, size: Grid, batch: int, device: torch.device | str) -> tuple[Tensor]:
        return (torch.randn(batch, model.in_chans, *size, device=device),)

    if text.endswith(".yaml"):
        run = load_run(text)
        build = partial(create_model, attention=run.attention, **run.model)
        return Subject(text, run.train.kernels, lambda size: build(img_size=size), images)
    prefix = f"{text.partition(':')[0]}:" if is_host(text) else ""
    name, _, rest = text.removeprefix(prefix).partition(":")
    entry, _, options = rest.partition(":")
    has_own = bool(prefix) and (not entry or "=" in entry)
    mechanism, path = _split_path(text, "" if has_own else entry)
    options = read_options(text, rest if has_own else options)
    given: dict[str, Any] = {"attention": {"name": mechanism or "softmax", **options}}
    if has_own:
        own = {x: options.pop(x) for x in {"num_classes", "in_chans"} & options.keys()}
        given = {"attention": None, "kwargs": options, **own}
    return Subject(text, path, lambda size: create_model(prefix + name, img_size=size, **given), images)


def _split_path(text: str, name: str) -> tuple[str, kernels.Path]:
    """Splits ``"NAME[@PATH]"``, a part of the entry `text`, into mechanism and path, by default "auto"."""
    name, at, path = name.partition("@")
    try:
        with kernels.use(path if at else "auto"):
            return name, kernels.path()
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def read_options(text: str, options: str) -> dict[str, Any]:
    """Parses ``"window_size=7,num_landmarks=49"``, the end of the entry `text`, with values in YAML."""
    try:
        return parse_yaml(f"{{{options.replace('=', ': ')}}}", lambda line: text).values
    except ConfigError:
        raise ConfigError(f"{text!r}: expected OPTION=VALUE,... after the last colon") from None


def initialise_weights(network: nn.Module) -> nn.Module:
    """Initialises the linear layers of `network` so that they keep the variance of their input, and returns it.

    Queries and keys then have variance 1, as after training. With other variances the softmax may yield denormal
    numbers, which slow processors down many times over.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return network


class Workload:
    """Network and inputs of a subject as one repeatable `call`, which leaves no graph and no gradients behind.

    Modes: `forward` in training mode, with a graph; `forward+backward` to all parameters and all inputs but images;
    `train`, also a step of AdamW; `inference` in evaluation mode, without a graph. Half precision uses autocast. Calls
    for "cuda-graph" can go through `bench.timing.capturing`.

    Raises:
        torch.OutOfMemoryError: the GPU is too small.
    """

    def __init__(
        self, subject: Subject, size: Grid, batch: int, mode: str, dtype: str, execution: str, device: torch.device
    ):
        self.on_path, self.device, self.amp = subject.on_path, device, None if dtype == "fp32" else dtype
        torch.manual_seed(0)
        self.is_compiled = execution.startswith("compiled")
        network = initialise_weights(subject.build(size)).to(device)
        torch.manual_seed(0)  # gives the same inputs for every network
        with autocast(self.amp, device):
            self.inputs = subject.example(network, size, batch, device)
        self.parameters = list(network.parameters())
        self.leaves = [x for x in (*self.parameters, *self.inputs) if isinstance(x, Tensor) and x.requires_grad]
        self.network = network.train(mode != "inference")
        if self.is_compiled:
            if isinstance(network, Backbone):  # as in training
                network.compile_blocks({batch})
            else:
                network.forward = compiled(network.forward)
        self.call = {
            "forward": self.forward,
            "forward+backward": self.backward,
            "train": self.train,
            "inference": torch.inference_mode()(self.forward),
        }[mode]
        if mode in ("forward+backward", "train"):
            self.gradient = torch.randn_like(self.forward())
        if mode == "train":
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, capturable=execution.endswith("cuda-graph"))
        for _ in range(WARM_UP):
            self.call()

    def forward(self) -> Tensor:
        with self.on_path(), autocast(self.amp, self.device):
            return self.network(*self.inputs)

    def backward(self) -> None:
        torch.autograd.grad(self.forward(), self.leaves, self.gradient, allow_unused=True)

    def train(self) -> None:
        self.forward().backward(self.gradient)
        self.optimizer.step()
        for leaf in self.leaves:
            leaf.grad = None

    def counts(self) -> dict[str, int | None]:
        """Returns `operators`, `moved_bytes`, `peak_bytes`, `saved_bytes` of a call; None: do not apply."""
        counter = None if self.is_compiled else count_operators(self.call)
        return {
            "operators": counter and len(counter.found),
            "moved_bytes": counter and counter.nbytes,
            "peak_bytes": peak_bytes(self.call, self.device),
            "saved_bytes": saved_bytes(self.forward, self.parameters) if self.network.training else None,
        }
