"""CUDA graphs of a run: the network's passes over a full micro-batch are captured once, and replayed in every step.

A replay launches all kernels of a pass at once. Launched one by one, small kernels take the host longer than the
device. Loss, clipping, optimiser, weight average and the exchange of gradients stay outside the graphs.

torch.cuda.make_graphed_callables does the same for batches of one size. Up to torch 2.14 it returns gradients in memory
that the next replay overwrites, so that those of several micro-batches do not add up (pytorch issue 181723).
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attention.parts.tables import held_tables
from engine.config.micro_batches import micro_batch_size
from engine.config.schema import Run, num_channels
from engine.objectives.objective import Objective
from engine.run.checks import why_eager
from engine.runtime.distributed import Amp, World, autocast
from engine.runtime.errors import UserError
from engine.runtime.memory import is_out_of_memory
from engine.runtime.text import describe_error
from engine.training.compilation import CompilationFailed
from models.freeze import set_train_mode


class Uncapturable(Exception):
    """A pass does what a CUDA graph cannot repeat."""


def graph_passes(
    objective: Objective, model: nn.Module, run: Run, world: World, layout: torch.memory_format
) -> tuple[nn.Module, str]:
    """Returns the network of a training step, with its passes in CUDA graphs or as it is, and which of them, and why.

    Args:
        layout: memory format of the images.
    Raises:
        UserError: train.cuda_graph is true, and a pass does what a graph cannot repeat.
        CompilationFailed: the capture fails for another reason.
    """
    network = graphed = objective.wrap(model)
    if not (reason := why_eager(run, world.on_cuda)):
        set_train_mode(model)
        inputs = example_inputs(run, objective, world, layout)
        try:
            graphed = GraphedNetwork(network, inputs, run.train.amp, run.train.grad_accum_steps > 1, Capture())
        except Uncapturable as error:
            reason = str(error)
        reason = world.first(reason)
        if reason and run.train.cuda_graph is True:
            raise UserError(f"train.cuda_graph = true: {reason}; set it to auto or false")
    text = f"off: {reason}" if reason else f"on, for micro-batches of {micro_batch_size(run, world.size):,} images"
    world.tell(f"train.cuda_graph: {text}" if world.on_cuda else "")
    return network if reason else graphed, text


def example_inputs(run: Run, objective: Objective, world: World, layout: torch.memory_format) -> list[Tensor]:
    """Returns inputs of the network with the shapes and types of a full micro-batch."""
    shape = micro_batch_size(run, world.size), num_channels(run), *to_2tuple(run.model["img_size"])
    dtype = torch.uint8 if objective.inputs == "tokens" else torch.float32
    inputs = [torch.zeros(shape, dtype=dtype, device=world.device).to(memory_format=layout)]
    if objective.takes_targets and (create_target := objective.create_targets(run, False)):
        target = create_target(0).to(world.device)
        inputs.append(target.expand(shape[0], *target.shape).clone())
    return inputs


class Capture:
    """Captures passes on one stream, with common memory."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context of passes on the stream, which compile, tune and allocate what a capture cannot."""
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.synchronize()

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """Context in which a pass that waits for the device is refused."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            raise Uncapturable("a pass of the network waits for the device, or copies from the host") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Returns a function that replays `run`, and its result, which every replay overwrites.

        Other threads, as those of loaders, may use the device at the same time.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            problem = "train.cuda_graph: the passes of the network cannot be captured; set it to false"
            raise CompilationFailed(f"{problem} ({describe_error(error)})") from error
        return graph.replay, result


class GraphedNetwork(nn.Module):
    """A network whose passes over full micro-batches are replayed in training.

    Batches of another size, and calls in evaluation or without gradients, go to the network itself. A replay draws
    random numbers from the state that the device's generator has then. The construction leaves weights, gradients,
    buffers and random states as they were. DistributedDataParallel may wrap the result, not the network before it.

    Args:
        network: function of tensors, in the mode that training has; returns one tensor, or several.
        inputs: a full micro-batch; its values do not count.
        accumulates: whether gradients of several micro-batches add up.
    Raises:
        Uncapturable: a pass waits for the device, or changes a state of the host.
    """

    def __init__(
        self, network: nn.Module, inputs: Sequence[Tensor], amp: Amp, accumulates: bool, capture: Capture
    ) -> None:
        super().__init__()
        self.network, self.amp, self.accumulates = network, amp, accumulates
        self.inputs = list(inputs)
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.outputs: tuple[Tensor, ...] = ()
        device = inputs[0].device
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._warm_up(capture)
                with held_tables() as self.tables:
                    self.replay_forward, self.results = capture.record(self._forward_pass)
                    self.replay_backward, self.gradients = capture.record(self._backward_pass)
        finally:
            for name, buffer in network.named_buffers():
                if name in buffers:  # otherwise the first pass registered it
                    buffer.copy_(buffers[name])
        self.outputs = ()

    def _warm_up(self, capture: Capture) -> None:
        with capture.warming_up():
            self._passes()
            before = host_state(self.network)
            self._passes()
            after = host_state(self.network)
            if changed := [name for name in after if before.get(name) != after[name]]:
                raise Uncapturable(f"a pass of the network changes {changed[0]} on the host")
            with capture.refusing_waits():
                self._passes()

    def _passes(self) -> None:
        self._forward_pass()
        self.of_outputs = [torch.zeros_like(y) for y in self.outputs]
        self._backward_pass()

    def _forward_pass(self) -> tuple[Tensor, ...]:
        with autocast(self.amp, self.inputs[0].device):  # its cache of weights begins and ends with the pass
            outputs = self.network(*self.inputs)
        self.is_single = isinstance(outputs, Tensor)
        self.outputs = (outputs,) if self.is_single else tuple(outputs)
        return tuple(y.detach() for y in self.outputs)

    def _backward_pass(self) -> tuple[Tensor | None, ...]:
        pairs = [pair for pair in zip(self.outputs, self.of_outputs, strict=True) if pair[0].requires_grad]
        outputs, of_outputs = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, self.weights, of_outputs, allow_unused=True)

    def forward(self, *inputs: Any) -> Any:
        if not (self.network.training and torch.is_grad_enabled() and len(inputs[0]) == len(self.inputs[0])):
            return self.network(*inputs)
        outputs = Replay.apply(self, *inputs, *self.weights)
        return outputs[0] if self.is_single else outputs


class Replay(torch.autograd.Function):
    """The passes of a `GraphedNetwork`."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedNetwork, *tensors: Tensor) -> tuple[Tensor, ...]:
        for static, given in zip(graphed.inputs, tensors, strict=False):  # the weights follow
            assert (static.shape, static.dtype) == (given.shape, given.dtype), "graphs are of one kind of batch"
            static.copy_(given)
        graphed.replay_forward()
        ctx.graphed = graphed
        return tuple(y.detach() for y in graphed.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        graphed: GraphedNetwork = ctx.graphed
        for static, given in zip(graphed.of_outputs, of_outputs, strict=True):
            static.copy_(given)
        graphed.replay_backward()
        gradients: list[Tensor | None] = [None] * (1 + len(graphed.inputs))
        for weight, gradient in zip(graphed.weights, graphed.gradients, strict=True):
            # Autograd keeps the first gradient of a weight as it is, and the next replay overwrites its memory.
            is_kept = graphed.accumulates and weight.grad is None and gradient is not None
            gradients.append(gradient.clone() if is_kept else gradient if gradient is None else gradient.detach())
        return tuple(gradients)


def host_state(network: nn.Module) -> dict[str, object]:
    """State that a pass could change on the host, which a replay would not do, by name.

    It consists of random states, plain attributes of modules, and which tensors are their buffers.
    """
    state: dict[str, object] = {
        "Python's random state": random.getstate(),
        "NumPy's random state": np.random.get_state(legacy=False)["state"]["key"].tobytes(),  # noqa: NPY002
    }
    if not next(network.parameters()).is_cpu:
        state["torch's random state"] = torch.get_rng_state().numpy().tobytes()
    for path, module in network.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        buffers = {name: id(buffer) for name, buffer in module.named_buffers(recurse=False)}
        state |= {f"{path}.{name}": value for name, value in (plain | buffers).items()}
    return state
