"""The processes of a run: ranks and devices, and the precision, determinism and random seeds of each."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from attention.options import OptionError
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error

Amp = Literal["auto", "bf16", "fp16"] | None
"""Precision of automatic mixed precision; None: off."""


@dataclass(frozen=True)
class World:
    """This process among the processes of the run.

    Attributes:
        device: device of this process. rank: its number. size: number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_primary(self) -> bool:
        """Returns whether this process writes files and prints messages."""
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def tell(self, line: str) -> None:
        """Prints `line` on the primary rank, unless it is empty."""
        if self.is_primary and line:
            print(line, flush=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, values: Sequence[float | Tensor]) -> list[list[float]]:
        """Gathers the `values` (scalars) of every rank in one collective: a list per rank; waits once."""
        return self.send(values)()

    def send(self, values: Sequence[float | Tensor]) -> Callable[[], list[list[float]]]:
        """Begins to gather the `values`. The returned function waits for them, but not for later work of the device."""
        table = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        for column, value in enumerate(values):
            table[self.rank, column] = value
        self.sum(table)
        if not self.on_cuda:
            return table.tolist
        copy, is_there = table.to("cpu", non_blocking=True), torch.cuda.Event()
        is_there.record()

        def read() -> list[list[float]]:
            is_there.synchronize()
            return copy.tolist()

        return read

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank."""
        return any(row[0] for row in self.gather([bool(flag)]))

    def first(self, text: str) -> str:
        """Returns the first text of all ranks that is not empty; "" if all are."""
        texts = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(texts, text)
        return next(filter(None, texts), "")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context whose refusal on any rank, of which the first counts, is a UserError on all ranks."""
        text = ""
        try:
            yield
        except (UserError, OptionError) as error:
            text = f"{f'rank {self.rank}: ' * (not self.is_primary)}{error}"
        if text := self.first(text):
            raise UserError(text)

    def share(self, value: Any) -> Any:
        """Returns the primary rank's `value`, of plain types, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def check_same_files(self, values: Mapping[str, object]) -> None:
        """Refuses files that are not the same on all ranks. All ranks give the same names in `values`, and plain types.

        Raises:
            UserError: the names whose values differ, and the first rank that has another than the primary rank.
        """
        digests = [hashlib.sha256(repr(value).encode()).digest()[:6] for value in values.values()]
        first, *others = self.gather([int.from_bytes(digest) for digest in digests])  # 48 bits are exact in float64
        differing = {name: [row[i] != first[i] for row in others] for i, name in enumerate(values)}
        ranks = {name: 1 + flags.index(True) for name, flags in differing.items() if any(flags)}
        if ranks:
            problem = f"{', '.join(ranks)}: rank {min(ranks.values())} has not those of rank 0"
            raise UserError(f"{problem}; give every node the same files, or read those of a file system that all share")

    def copy_buffers(self, module: nn.Module) -> None:
        """Copies the primary rank's buffers to all ranks, as DistributedDataParallel does before a forward pass."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    @contextmanager
    def average_gradients(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context of a wrapped `module`, whose backward passes average the gradients over all ranks.

        DistributedDataParallel rearranges its buckets after the first update. On a CPU the averages do not depend on
        that, so that a resumed run is bit-identical at any number of ranks.
        The wrapped module cannot be used after the context, which must end before `ending`.
        """
        if self.size == 1:
            yield module
            return
        network = DistributedDataParallel(module)
        if not self.on_cuda:  # on CUDA it would cost bandwidth
            network.register_comm_hook(None, average_in_rank_order)
        try:
            yield network
        finally:
            # The reducer must not be the last owner of the process group: its destructor keeps Python's lock while it
            # joins the group's threads, which may need the lock to release tensors. A traceback may hold the network.
            vars(network).clear()

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.on_cuda else None)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context after which the process group, if there is one, is destroyed.

        Nothing else may own it then, see `average_gradients`.
        """
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def world_size() -> int:
    """Returns the number of ranks that the launcher's environment states, 1 without a launcher.

    Raises:
        UserError: one of the variables is missing, or has a wrong value.
    """
    if "WORLD_SIZE" not in os.environ:  # timm would treat any SLURM allocation of several tasks as a launch
        return 1
    numbers = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
    wrong = [name for name in numbers if not os.environ.get(name, "").isdecimal()]
    if wrong := wrong + ["MASTER_ADDR"] * (not os.environ.get("MASTER_ADDR")):
        problem = f"{wrong[0]} = {os.environ.get(wrong[0])!r:.100}: no value of a launcher"
        raise UserError(
            f"{problem}; start ranks with torchrun, which sets it, or unset WORLD_SIZE to run in one process"
        )
    return int(os.environ["WORLD_SIZE"])


def choose_device(device: Literal["auto", "cuda", "cpu"]) -> Literal["cuda", "cpu"]:
    """Returns the kind of device that `train.device` means. OptionError: cuda was requested but is not available."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise OptionError("train.device", "cuda is not available here; use auto or cpu")
    return "cpu" if device == "cpu" or not has_cuda else "cuda"


def init_distributed(device: Literal["auto", "cuda", "cpu"], timeout_minutes: float = 10.0) -> World:
    """Joins the process group that torchrun's environment describes (nccl on cuda, gloo on cpu), if there is one.

    Args:
        timeout_minutes: how long a rank waits for the others before it fails.
    Raises:
        OptionError: cuda was requested but is not available.
        UserError: this machine has fewer GPUs than ranks; the environment is wrong, see `world_size`; or the ranks do
            not meet in time.
    """
    device, size = choose_device(device), world_size()
    if "WORLD_SIZE" not in os.environ:
        return World(torch.device(device))
    local = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if device == "cuda":
        if local.index >= (number := torch.cuda.device_count()):
            problem = f"LOCAL_RANK = {local.index}, but the GPUs of this machine are {number}, one for each rank"
            raise UserError(f"{problem}; start torchrun with --nproc_per_node={number}")
        torch.cuda.set_device(local)
    backend, timeout = "nccl" if device == "cuda" else "gloo", timedelta(minutes=timeout_minutes)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (OSError, RuntimeError) as error:
        master = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        problem = f"the {size} ranks have not met there in {timeout_minutes:g} minutes ({describe_error(error)})"
        remedy = "start all ranks with the address of the first, or raise train.timeout_minutes"
        raise UserError(f"MASTER_ADDR:MASTER_PORT = {master}: {problem}; {remedy}") from None
    return World(local, dist.get_rank(), dist.get_world_size())


def average_in_rank_order(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Communication hook that adds up every gradient in the order of ranks, wherever it lies in the bucket.

    All-reduce begins each chunk of a bucket with another rank; with three and more ranks the order matters.
    """
    mine = bucket.buffer()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]

    def average(future: Future) -> Tensor:
        future.wait()  # raises if a rank has not answered
        total, *others = gathered
        for other in others:
            total += other
        return total.div_(len(gathered))

    return dist.all_gather(gathered, mine, async_op=True).get_future().then(average)


def precision(amp: Amp, device: torch.device) -> str:
    """Returns the precision of the forward pass: bf16, fp16 or fp32; see `train.amp` for auto."""
    has_bf16 = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return ("bf16" if has_bf16 else "fp32") if amp == "auto" else amp or "fp32"


def autocast(amp: Amp, device: torch.device) -> torch.autocast:
    """Returns the context of automatic mixed precision for the forward pass; disabled in fp32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision(amp, device))
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def set_arithmetic(deterministic: bool, tf32: bool) -> None:
    """Chooses the algorithms of torch. Call it before CUDA is used.

    Args:
        deterministic: only deterministic ones, so that an operation without one raises; otherwise the fastest.
        tf32: on a GPU, matrix products of fp32 in TF32. Convolutions keep torch's default, TF32.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cuda.matmul.allow_tf32 = tf32


def mix_seeds(*key: int) -> int:
    """Returns one 32-bit seed for the integers `key`, e.g. (seed, epoch); neighbouring keys give unrelated seeds."""
    return int(np.random.SeedSequence((len(key), *key)).generate_state(1)[0])  # NumPy ignores trailing zeros


def seed_everything(*key: int) -> None:
    """Seeds Python, NumPy and torch on the CPU and on this process's CUDA device from the integers `key`."""
    seed = mix_seeds(*key)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 timm draws from the global one
    torch.default_generator.manual_seed(seed)  # ten times as fast as torch.manual_seed, which asks every backend
    if torch.cuda.is_initialized():  # false in loader workers
        torch.cuda.manual_seed(seed)
