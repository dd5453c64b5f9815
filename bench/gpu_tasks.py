"""Tasks of `bench.gpu_run`, "MODEL/NETWORK": what a process builds, and measures when it has a turn."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from bench.results import MEASURED, quartile_columns
from bench.timing import Call, Quartiles, capturing, time_rounds
from engine.checkpoints.progress import Progress
from engine.config.schema import Run
from engine.objectives.classification import Classification, label_loss
from engine.run.load import load_run
from engine.runtime.distributed import World, autocast, set_arithmetic
from engine.runtime.files import append_whole, dicts_to_csv
from engine.runtime.memory import is_out_of_memory
from engine.runtime.provenance import device_name
from engine.runtime.text import describe_error
from engine.training.compilation import compiled_blocks
from engine.training.device import chosen_kernels
from engine.training.graphs import graph_passes
from engine.training.optim import create_optimizer
from models import create_model

VERSIONS = "device", "torch", "triton", "timm"
SECONDS = [name for name in MEASURED if name.startswith("seconds")]
FILE = "gpu_training.csv"
COLUMNS = (
    *(*VERSIONS, "model", "tokens", "batch", "name", "execution", *SECONDS),
    *("images_per_second", "peak_bytes", "failure"),
)
"""Columns of the file.

peak_bytes: everything, with weights and the optimiser's state. failure: why a row has no measurements.
"""


class Shape(NamedTuple):
    """A model that is trained.

    Attributes:
        recipe: configuration that it inherits. options: overrides that name the model. peer: the model of timm, and its
            options. tokens, batch: of an image in the first stage, and images. smallest: overrides for a trial.
    """

    recipe: str
    options: Sequence[str]
    peer: tuple[str, dict[str, Any]]
    tokens: int
    batch: int
    smallest: Sequence[str] = ("model.img_size=112", "model.depth=1")


def deit(size: str, patch_size: int, batch: int) -> Shape:
    options = [f"model.name=deit_{size}_p{max(8, patch_size)}", f"model.patch_size={patch_size}"]
    of_peer = {"patch_size": patch_size, "class_token": False, "global_pool": "avg"}
    return Shape("deit", options, (f"vit_{size}_patch16_224", of_peer), (224 // patch_size) ** 2, batch)


MODELS = {
    "tiny8": deit("tiny", 8, 128),
    "small16": deit("small", 16, 256),
    "tiny4": deit("tiny", 4, 32),
    "pvtv2_b1": Shape(
        *("pvtv2", ["model.name=pvtv2_b1"], ("pvt_v2_b1", {}), 3136, 128),
        smallest=["model.img_size=112", "model.depths=[1,1,1,1]"],
    ),
    "tiny16": deit("tiny", 16, 256),
    "small8": deit("small", 8, 64),
}
"""Models to train."""
OURS = {name: name for name in ("softmax", "eva", "lara", "local")} | {"performer": "performer:num_samples=64"}
"""Network of a task -> our model's attention."""
BEST = "compiled-cuda-graph"
"""Execution of train.py, and the fastest of timm's model."""


def layout_of(run: Run) -> torch.memory_format:
    return torch.channels_last if run.train.channels_last else torch.contiguous_format


def captured(call: Call) -> Call:
    """Captures a call in a CUDA graph after a warm-up; returns the call itself on a CPU."""
    if not torch.cuda.is_available():
        return call
    torch.cuda.synchronize()
    with capturing() as capture:
        for _ in range(3):
            call()
        return capture(call)


class Update:
    """An update of a model as train.py makes it: forward and backward pass, clipped gradients, AdamW.

    Args:
        network: what calls the model. batch: images and soft targets.
    """

    def __init__(self, model: nn.Module, network: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor], run: Run):
        self.network, self.batch, self.run = network, batch, run
        self.objective = Classification(label_loss(run, model))
        self.optimizer = create_optimizer(model, run.optim, run.train.total_batch_size)
        self.parameters = list(model.parameters())

    def differentiate(self) -> None:
        self.optimizer.zero_grad()
        with autocast(self.run.train.amp, self.batch[0].device):
            loss = self.objective(self.network, *self.batch)
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.run.optim.clip_grad)
        self.optimizer.step()

    def __call__(self) -> None:
        self.differentiate()
        self.step()

    def in_graph(self) -> Call:
        """Returns the update with forward pass, loss and backward pass in one CUDA graph."""
        replay = captured(self.differentiate)
        gradients = [parameter.grad for parameter in self.parameters]

        def call() -> None:
            replay()
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.step()

        return call


class Worker:
    """Runs a task.

    Args:
        turn: waits until no other process uses the GPU.
    """

    def __init__(self, output: Path, smoke: bool, turn: Callable[[], object]):
        self.output, self.smoke, self.turn = output, smoke, turn
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rounds, self.seconds = (2, 0.0) if smoke else (8, 0.06)
        self.versions = {"device": device_name(self.device), **{name: version(name) for name in VERSIONS[1:]}}
        self.backend = {} if self.device.type == "cuda" else {"backend": "aot_eager"}
        set_arithmetic(deterministic=False, tf32=False)  # train.py's defaults

    def run(self, task: str) -> None:
        model, network = task.split("/")
        if network == "timm":
            self.train_timm(model)
        else:
            self.train(model, network)

    def write(self, row: dict[str, Any]) -> None:
        """Adds a row to the file, and prints it in short."""
        row = dict.fromkeys(COLUMNS) | self.versions | row
        lines = dicts_to_csv([row], COLUMNS).splitlines(keepends=True)
        append_whole(self.output / FILE, b"".join(lines[1:]))
        shown = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items() if x is not None}
        shown = {name: x for name, x in shown.items() if name not in VERSIONS and not name.endswith(("_q1", "_q3"))}
        print(*(f"{name}={x}" for name, x in shown.items()), flush=True)

    @contextmanager
    def guarded(self, row: dict[str, Any]) -> Iterator[None]:
        """Context that writes a failure as a row, and ends the process where the device cannot be used any more."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.write(row | {"failure": describe_error(error)[:300]})
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # raises after an illegal access

    def clear(self) -> None:
        """Gives memory back that others may need."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, model: str, network: str) -> None:
        """Measures our model in the first execution that works."""
        for execution in (BEST, "cuda-graph", "compiled", "eager"):
            row = self.row(model, OURS[network], execution)
            torch.compiler.reset()
            with self.guarded(row), ExitStack() as stack:
                peak = self.peak()
                call = self.built(partial(self.ours, model, network, execution, stack))
                self.measure({execution: call}, {execution: row | {"peak_bytes": peak()}})
                return

    def train_timm(self, model: str) -> None:
        """Measures timm's model compiled, also in a CUDA graph, and as it is; the graph once more."""
        calls, rows, peak = {}, {}, self.peak()
        for execution in ("compiled", BEST, "eager"):
            row = self.row(model, "timm", execution)
            with self.guarded(row):
                if execution == BEST:
                    peak(again=True)
                    make = calls["compiled"].in_graph
                else:
                    peak, make = self.peak(), partial(self.timm_update, model, execution)
                calls[execution] = self.built(make)
                rows[execution] = row | {"peak_bytes": peak()}
        self.measure(calls, rows)
        if BEST in calls:
            self.measure({BEST: calls[BEST]}, {BEST: rows[BEST]})

    def row(self, model: str, network: str, execution: str) -> dict[str, Any]:
        shape = self.shape(model)
        return {"model": model, "tokens": shape.tokens, "batch": shape.batch, "name": network, "execution": execution}

    def measure(self, calls: dict[str, Call], rows: dict[str, dict[str, Any]]) -> None:
        """Times calls, and writes their rows."""
        if not calls:
            return
        self.clear()
        self.turn()
        times = time_rounds(calls, self.rounds, self.device, self.seconds)
        for name, row in rows.items():
            row = row | quartile_columns("seconds", Quartiles.of(times.seconds[name]), times)
            self.write(row | {"images_per_second": row["batch"] / row["seconds"]})

    def shape(self, model: str) -> Shape:
        shape = MODELS[model]
        return shape._replace(batch=2, tokens=shape.tokens // 4) if self.smoke else shape

    def run_of(self, model: str, network: str, *overrides: str) -> Run:
        """Configuration of train.py for a network."""
        shape, (name, _, options) = self.shape(model), OURS[network].partition(":")
        given = [*shape.options, f"attention.name={name}", *overrides]
        given += [f"attention.{option}" for option in options.split(",") if option]
        given += [f"{key}={shape.batch}" for key in ("train.total_batch_size", "optim.lr_base_size")]
        given += shape.smallest if self.smoke else []
        return load_run(f"configs/{shape.recipe}.yaml", given)

    def prepare(self, model: nn.Module, shape: Shape, run: Run) -> tuple[Tensor, Tensor]:
        """Moves a model to the device, and returns random images, and soft targets as mixup makes them."""
        layout = layout_of(run)
        model.to(self.device, memory_format=layout).train()
        images = torch.randn(shape.batch, 3, *(2 * [run.model["img_size"]]), device=self.device)
        targets = torch.randn(shape.batch, run.model["num_classes"], device=self.device).softmax(1)
        return images.contiguous(memory_format=layout), targets

    def timm_update(self, model: str, execution: str) -> Update:
        shape, run = self.shape(model), self.run_of(model, "softmax")
        name, options = shape.peer
        if self.smoke:
            options = options | {"depth": 1, "img_size": 112} if name.startswith("vit") else {"depths": (1, 1, 1, 1)}
        peer = timm.create_model(name, drop_path_rate=run.model["drop_path_rate"], **options)
        batch = self.prepare(peer, shape, run)
        return Update(peer, torch.compile(peer, **self.backend) if execution == "compiled" else peer, batch, run)

    def ours(self, model: str, network: str, execution: str, stack: ExitStack) -> Update:
        """An update of our model, as train.py makes it."""
        shape, world = self.shape(model), World(self.device)
        graph = "graph" in execution and (True if world.on_cuda else "auto")  # true refuses what cannot be captured
        options = {"train.compile": "compiled" in execution, "train.cuda_graph": graph}
        run = self.run_of(model, network, *(f"{name}={str(value).lower()}" for name, value in options.items()))
        net = create_model(attention=run.attention, **run.model)
        batch = self.prepare(net, shape, run)
        print(stack.enter_context(chosen_kernels(run, lambda: net, Progress(), world)), flush=True)
        stack.enter_context(compiled_blocks([net], run, world, **self.backend))
        update = Update(net, net, batch, run)
        if run.train.cuda_graph:
            update.network, _ = graph_passes(update.objective, net, run, world, layout_of(run))
        return update

    def built(self, make: Callable[[], Call]) -> Call:
        """Makes an update and runs it, again if others have the memory."""
        for attempt in range(4):
            torch.manual_seed(0)
            try:
                call = make()
                for _ in range(1 if self.smoke else 3):
                    call()
                self.clear()
                return call
            except RuntimeError as error:
                if attempt == 3 or not is_out_of_memory(error):
                    raise
            self.clear()
            time.sleep(4)
        raise AssertionError

    def peak(self) -> Callable[..., int]:
        """Returns a function of the peak of memory since now, or since its last call, beyond what is there now."""
        if self.device.type == "cpu":
            return lambda again=False: 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

        def found(again: bool = False) -> int:
            if again:
                torch.cuda.reset_peak_memory_stats()
            return torch.cuda.max_memory_allocated() - before

        return found


def main(task: str, output: Path, smoke: bool, connection: Connection) -> None:
    """Runs a task in a process of its own."""

    def turn() -> None:
        connection.send("ready")
        connection.recv()

    torch.set_num_threads(2)
    torch._inductor.config.compile_threads = 2
    Worker(output, smoke, turn).run(task)
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of CUDA
