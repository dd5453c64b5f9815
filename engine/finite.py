"""Losses and gradients that are not finite: found without an extra wait for the device, and skipped or fatal."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import cast

import torch
from torch import Tensor, nn

from engine.checkpoint import Checkpoints, Stateful
from engine.data import Loader, images_of
from engine.files import write_atomically
from engine.progress import Progress
from engine.sampler import EpochSampler
from engine.schema import Train


class FiniteGuard:
    """Checks the losses and the gradient norm of every update.

    The losses of all ranks are checked before the backward pass. To read the gradient norm before the optimiser's step
    would make every update wait for the device once more, so it is read with the losses of the next update: by then the
    weights may be spoilt, but nothing has been saved. Only where updates may be skipped is it read at once. With fp16,
    loss scaling expects gradients that are not finite, and skips them itself; here they are counted.

    Args:
        progress: counts the skipped updates. dump: writes down the update that many updates ago, and the reason; see
            `dump_step`.
    Attributes:
        unread_norm: gradient norm of the last update, on the device; 0 once it has been checked.
    """

    def __init__(self, options: Train, progress: Progress, dump: Callable[[str, int], None]):
        self.options, self.progress, self.dump = options, progress, dump
        self.unread_norm: Tensor | float = 0.0

    def begin_update(self, model: nn.Module) -> None:
        """Copies the buffers, which a forward pass changes (as BatchNorm does), if the update may be skipped."""
        if self.options.max_skipped:
            self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def check(self, losses: Sequence[float], norm: float) -> None:
        """Checks the losses of all ranks, and `unread_norm` as read; to be called before every backward pass.

        Raises:
            FloatingPointError: the gradient of the update before is not finite, or a loss, and it is not to be skipped.
        """
        self._check_norm(norm)
        ranks = ", ".join(str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss))
        if ranks and not self.options.max_skipped:
            self._stop(f"the loss is not finite on rank {ranks}; stopped before the update", 0)

    def accepts(self, loss: float, norm: Tensor) -> bool:
        """Whether to make the update with this loss and gradient norm; if not, the buffers are restored.

        Raises:
            FloatingPointError: it is to be skipped, but `max_skipped` have been skipped already.
        """
        scaled = self.options.amp == "fp16"
        if self.options.max_skipped and not (math.isfinite(loss) and (scaled or norm.isfinite())):
            reason = f"the loss is {loss:g} and the gradient norm {norm.item():g}"
            if self.progress.num_skipped == self.options.max_skipped:
                self._stop(f"{reason}; {self.progress.num_skipped} updates have been skipped already", 0)
            self.progress.num_skipped += 1
            for buffer, before in self.buffers:
                buffer.copy_(before)
            self.dump(reason, 0)
            return False
        self.unread_norm = norm
        return True

    def settle(self) -> None:
        """Waits for the last gradient norm and checks it; to be called before anything is saved.

        Raises:
            FloatingPointError: it is not finite.
        """
        self._check_norm(float(self.unread_norm))

    def _check_norm(self, norm: float) -> None:
        is_unread, self.unread_norm = torch.is_tensor(self.unread_norm), 0.0
        if self.options.amp == "fp16" and is_unread:
            self._count_overflow(not math.isfinite(norm))
        elif not math.isfinite(norm):
            self._stop(f"the gradient norm is {norm}; no checkpoint was made after it", 1)

    def _count_overflow(self, overflows: bool) -> None:
        count = self.progress.num_overflows = self.progress.num_overflows + 1 if overflows else 0
        if count > self.options.max_overflows:
            self._stop(
                f"the gradient was not finite in {count} updates in a row, at any loss scale; train.max_overflows ="
                f" {self.options.max_overflows}; lower optim.lr, or set train.amp=bf16 (with --allow-change)",
                1,
            )

    def _stop(self, reason: str, updates_ago: int) -> None:
        self.dump(reason, updates_ago)
        raise FloatingPointError(f"step {self.progress.step - updates_ago}: {reason}")


def dump_step(
    checkpoints: Checkpoints,
    loader: Loader,
    stateful: Mapping[str, Stateful],
    progress: Progress,
    reason: str,
    updates_ago: int,
) -> None:
    """Writes down the current update, or the one before, as `failed_step_S.json` and `.pt` beside the checkpoints.

    The first lists the images of the total batch, in order; rank r of R had every R-th. The second is a checkpoint of
    the present state, from which no run resumes.
    """
    if not checkpoints.world.is_primary:
        return
    sampler, images = cast(EpochSampler, loader.sampler), images_of(loader)
    start = progress.images - updates_ago * sampler.total_batch_size
    indices = sampler.order()[start : start + sampler.total_batch_size].tolist()
    record = {
        "step": progress.step - updates_ago,
        "reason": reason,
        "progress": asdict(progress),
        "processes": checkpoints.world.size,
        "images": [[index, str(images.filename(index))] for index in indices],
    }
    path = checkpoints.directory / f"failed_step_{record['step']}.json"
    write_atomically(path, json.dumps(record, indent=1).encode())
    checkpoints.write(path.with_suffix(".pt"), progress, stateful)
