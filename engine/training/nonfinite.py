"""Losses and gradients that are not finite: their updates are skipped, or end the run."""

import math
from collections.abc import Sequence

from torch import nn

from engine.checkpoints.progress import Progress
from engine.config.schema import Train


class FiniteGuard:
    """Checks the losses of all ranks and the gradient norm of every update.

    If `UpdateExchange` reads them one update late, the weights may already be corrupt, but nothing has been saved. A
    fused optimiser leaves them unchanged, see `keep_finite`. With fp16, loss scaling expects gradients that are
    not finite and skips their updates itself; here they are counted.

    Args:
        progress: counts the losses of updates that were made, and the updates that were skipped.
    """

    def __init__(self, options: Train, progress: Progress):
        self.options, self.progress = options, progress

    def begin_update(self, model: nn.Module) -> None:
        """Copies the buffers, which a forward pass changes (as BatchNorm does), if the update may be skipped."""
        if self.options.max_skipped:
            self.model, self.buffers = model, {name: buffer.clone() for name, buffer in model.named_buffers()}

    def check(self, losses: Sequence[float], norm: float, updates_ago: int) -> bool:
        """Returns whether to make the update with these losses, one per rank, and this gradient norm.

        The buffers of a skipped update are restored.

        Args:
            updates_ago: 1 if the update has been made already, else 0.
        Raises:
            FloatingPointError: the loss of a rank or the gradient is not finite, and the update is not to be skipped.
        """
        loss, is_scaled = sum(losses) / len(losses), self.options.amp == "fp16"
        if self.options.max_skipped and not (math.isfinite(loss) and (is_scaled or math.isfinite(norm))):
            self._skip(f"the loss is {loss:g} and the gradient norm {norm:g}")
            return False
        end = "no checkpoint was made after it" if updates_ago else "stopped before the update"
        if ranks := ", ".join(str(rank) for rank, x in enumerate(losses) if not math.isfinite(x)):
            self._stop(f"the loss is not finite on rank {ranks}; {end}", updates_ago)
        if is_scaled:
            self._count_overflow(not math.isfinite(norm), updates_ago)
        elif not math.isfinite(norm):
            self._stop(f"the gradient norm is {norm}; {end}", updates_ago)
        self.progress.loss_sum += loss
        self.progress.num_summed += 1
        return True

    def _skip(self, reason: str) -> None:
        if self.progress.num_skipped == self.options.max_skipped:
            self._stop(f"{reason}; {self.progress.num_skipped} updates have been skipped already", 0)
        self.progress.num_skipped += 1
        for name, buffer in self.model.named_buffers():  # a forward pass may have replaced the tensors
            buffer.copy_(self.buffers[name])

    def _count_overflow(self, overflows: bool, updates_ago: int) -> None:
        count = self.progress.num_overflows = self.progress.num_overflows + 1 if overflows else 0
        if count > self.options.max_overflows:
            self._stop(
                f"the gradient was not finite in {count} updates in a row, at any loss scale; train.max_overflows ="
                f" {self.options.max_overflows}; lower optim.lr, or set train.amp=bf16 (with --allow-change)",
                updates_ago,
            )

    def _stop(self, reason: str, updates_ago: int) -> None:
        raise FloatingPointError(f"step {self.progress.step - updates_ago}: {reason}")
