"""Losses and gradients that are not finite: found without a further wait for the device, skipped or stopped at."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from engine.checkpoint import Checkpoints, Progress
from engine.data import Loader
from engine.distributed import World
from engine.files import write_whole
from engine.interrupt import StopWish
from engine.schema import Train


class FiniteGuard:
    """Sees the loss and the gradient norm of every update.

    The losses of all ranks come to all ranks between forward and backward pass, the one wait of an update for the
    device: it waits for the forward pass alone, so that the device is idle only until the first kernel of the backward
    pass is queued. The gradient norm is read along with the loss of the next update, when the weights may have been
    spoilt but nothing has been saved; only to skip an update is it waited for. With fp16, loss scaling expects
    gradients that are not finite, and skips them itself.

    Args:
        progress: whose meter is kept. dump: writes down the step that many updates ago, and why; see `dump_step`.
    Attributes:
        stopping: whether any rank wished to stop when losses were exchanged last.
    """

    def __init__(self, options: Train, world: World, progress: Progress, dump: Callable[[str, int], None]):
        self.options, self.world, self.progress, self.dump = options, world, progress, dump
        self.norm: Tensor | float = 0.0
        self.loss, self.stopping = 0.0, False

    def begin_update(self, model: nn.Module) -> None:
        """Remembers the buffers, which a forward pass changes (as BatchNorm does), where the update may be skipped."""
        if self.options.max_skipped:
            self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def see_loss(self, loss: Tensor, stop: StopWish) -> None:
        """Exchanges losses and wishes to stop; to be called before every backward pass, on every rank.

        Raises:
            FloatingPointError: a loss, or the gradient of the update before, is not finite and not to be skipped; on
                every rank.
        """
        losses, norms, wishes = zip(*self.world.gather([loss.detach(), self.norm, bool(stop)]), strict=True)
        self._check_norm(norms[0])
        self.loss += sum(losses) / len(losses)
        self.stopping = any(wishes)
        ranks = ", ".join(str(rank) for rank, value in enumerate(losses) if not math.isfinite(value))
        if ranks and not self.options.max_skipped:
            self._stop(f"the loss is not finite on rank {ranks}; stopped before the update", 0)

    def accepts(self, norm: Tensor) -> bool:
        """Whether the update is to be made, whose gradient has this norm; if so, adds its loss to the meter.

        Raises:
            FloatingPointError: it is not, and enough have been skipped.
        """
        loss, self.loss = self.loss, 0.0
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
        self.norm = 0.0 if scaled else norm
        self.progress.loss_sum += loss
        self.progress.num_summed += 1
        return True

    def settle(self) -> None:
        """Waits for the last gradient norm; to be called before anything is saved.

        Raises:
            FloatingPointError: it is not finite.
        """
        self._check_norm(float(self.norm))

    def _check_norm(self, norm: float) -> None:
        self.norm = 0.0
        if not math.isfinite(norm):
            self._stop(f"the gradient norm is {norm}; no checkpoint was made after it", 1)

    def _stop(self, reason: str, updates_ago: int) -> None:
        self.dump(reason, updates_ago)
        raise FloatingPointError(f"step {self.progress.step - updates_ago}: {reason}")


def dump_step(
    checkpoints: Checkpoints,
    loader: Loader,
    parts: Mapping[str, Any],
    progress: Progress,
    reason: str,
    updates_ago: int,
) -> None:
    """Writes what an update, the next or one ago, was made of beside the checkpoints: `failed_step_S.json` and `.pt`.

    The first names the images of the total batch, in order; rank r of R has every R-th. The second is a checkpoint of
    the parts as they are, which no run resumes from.
    """
    if not checkpoints.world.is_primary:
        return
    sampler, images = loader.sampler, loader.dataset.dataset
    start = progress.images - updates_ago * sampler.total_batch_size
    indices = sampler.order()[start : start + sampler.total_batch_size].tolist()
    facts = {
        "step": progress.step - updates_ago,
        "reason": reason,
        "progress": asdict(progress),
        "processes": checkpoints.world.size,
        "images": [[index, str(images.filename(index))] for index in indices],
    }
    path = checkpoints.directory / f"failed_step_{facts['step']}.json"
    write_whole(path, json.dumps(facts, indent=1).encode())
    checkpoints.write(path.with_suffix(".pt"), progress, parts)
