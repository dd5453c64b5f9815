"""Losses and gradients that are not finite: found without an extra wait for the device, and skipped or fatal."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import cast

from torch import Tensor, nn

from engine.checkpoint import Checkpoints, Stateful
from engine.data import Loader, check_broken, images_of
from engine.distributed import Exchanged, World, exchange
from engine.files import write_atomically
from engine.progress import Progress
from engine.sampler import EpochSampler
from engine.schema import Run


class FiniteGuard:
    """Checks the losses of all ranks and the gradient norm of every update, and keeps count of what the ranks tell.

    On a CPU, and where updates may be skipped, they are read before the optimiser's step. On a GPU every update would
    have to wait for the device; there they are read one update late, before its optimiser's step and before anything is
    logged or saved. By then the weights may be spoilt (a fused optimiser leaves them as they are, see
    `engine.optim.keep_weights_finite`), but nothing has been saved. With fp16, loss scaling expects gradients that are
    not finite, and skips them itself; here they are counted.

    Args:
        progress: counts the images left out, the losses of updates that were made and those that were skipped.
        dump: writes down the update that many updates ago, and the reason; see `dump_step`.
    Attributes:
        norm: gradient norm of the last update that was read. stopped: whether any rank was asked to stop.
        overdue: whether it was time to save, by the first rank's clock; what saves makes it false.
    """

    def __init__(self, run: Run, world: World, progress: Progress, dump: Callable[[str, int], None]):
        self.options, self.max_broken, self.world, self.progress = run.train, run.data.max_broken, world, progress
        self.dump, self.norm, self.stopped, self.overdue = dump, math.nan, False, False
        self.reads_late = world.on_cuda and not run.train.max_skipped
        self.unread: Callable[[], Exchanged] | None = None

    def begin_update(self, model: nn.Module) -> None:
        """Copies the buffers, which a forward pass changes (as BatchNorm does), if the update may be skipped."""
        if self.options.max_skipped:
            self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def accepts(self, loss: Tensor, norm: Tensor, stop: bool, num_broken: int, overdue: bool) -> bool:
        """Whether to make the update with this loss and gradient norm; if not, the buffers are restored.

        Args:
            loss, norm: on the device. stop: whether this rank is asked to stop. num_broken: images it left out.
            overdue: whether it is time to save, by this rank's clock.
        Raises:
            FloatingPointError: the loss of a rank or the gradient is not finite, of this update or of the one before,
                and it is not to be skipped.
            BrokenImage: more images are broken than the options allow.
        """
        self.settle()
        found = exchange(self.world, loss, norm, stop, num_broken, overdue)
        if self.reads_late:
            self.unread = found
            return True
        return self._check(found(), 0)

    def settle(self) -> None:
        """Waits for the update before and checks it; to be called before anything is logged or saved.

        Raises:
            FloatingPointError, BrokenImage: as `accepts`.
        """
        if self.unread:
            found, self.unread = self.unread, None
            self._check(found(), 1)

    def _check(self, found: Exchanged, updates_ago: int) -> bool:
        self.norm, self.stopped, self.overdue = found.norm, self.stopped or found.stop, found.overdue
        self.progress.broken += found.num_broken
        check_broken(self.progress.broken, self.max_broken)
        loss, is_scaled = sum(found.losses) / len(found.losses), self.options.amp == "fp16"
        if self.options.max_skipped and not (math.isfinite(loss) and (is_scaled or math.isfinite(found.norm))):
            self._skip(f"the loss is {loss:g} and the gradient norm {found.norm:g}")
            return False
        end = "no checkpoint was made after it" if updates_ago else "stopped before the update"
        if ranks := ", ".join(str(rank) for rank, x in enumerate(found.losses) if not math.isfinite(x)):
            self._stop(f"the loss is not finite on rank {ranks}; {end}", updates_ago)
        if is_scaled:
            self._count_overflow(not math.isfinite(found.norm), updates_ago)
        elif not math.isfinite(found.norm):
            self._stop(f"the gradient norm is {found.norm}; {end}", updates_ago)
        self.progress.loss_sum += loss
        self.progress.num_summed += 1
        return True

    def _skip(self, reason: str) -> None:
        if self.progress.num_skipped == self.options.max_skipped:
            self._stop(f"{reason}; {self.progress.num_skipped} updates have been skipped already", 0)
        self.progress.num_skipped += 1
        for buffer, before in self.buffers:
            buffer.copy_(before)
        self.dump(reason, 0)

    def _count_overflow(self, overflows: bool, updates_ago: int) -> None:
        count = self.progress.num_overflows = self.progress.num_overflows + 1 if overflows else 0
        if count > self.options.max_overflows:
            self._stop(
                f"the gradient was not finite in {count} updates in a row, at any loss scale; train.max_overflows ="
                f" {self.options.max_overflows}; lower optim.lr, or set train.amp=bf16 (with --allow-change)",
                updates_ago,
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
