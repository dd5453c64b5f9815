"""Values that ranks exchange in every update: losses, gradient norm, stop requests, broken images, save clocks."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from engine.checkpoints.progress import Progress
from engine.config.schema import Run
from engine.data.loaders import check_broken
from engine.runtime.distributed import World

MAX_OVERFLOWS = 40
"""Updates in a row that loss scaling (fp16) may skip; it halves the loss scale, 65536 at first, at each."""


class UpdateExchange:
    """Exchanges the values of an update between all ranks, in one collective, and checks the losses and the norm.

    On a CPU, the values are read before the optimiser's step. On a GPU every update would have to wait for the device;
    there they are read one update late, before the next optimiser's step and before anything is logged or saved: the
    weights may already be corrupt, but nothing has been saved. A fused optimiser leaves them unchanged, see
    `keep_finite`. With fp16, loss scaling expects gradients that are not finite and skips their updates itself; here
    they are counted.

    Args:
        progress: counts the losses, the updates that loss scaling skips, and the broken images.
    Attributes:
        norm: gradient norm of the last update that was read. stopped: whether any rank was asked to stop.
        overdue: whether it was time to save, by the first rank's clock.
    """

    def __init__(self, run: Run, world: World, progress: Progress):
        self.max_broken, self.world, self.progress = run.data.max_broken, world, progress
        self.is_scaled, self.reads_late = run.train.amp == "fp16", world.on_cuda
        self.norm, self.stopped, self.overdue = math.nan, False, False
        self.unread: Callable[[], list[list[float]]] | None = None

    def send(self, loss: Tensor, norm: Tensor, stop: bool, num_broken: int, overdue: bool) -> None:
        """Sends the values of an update that is about to be made.

        Args:
            loss, norm: scalars on the device. stop: true if this rank has a stop signal. num_broken: number of images
                that this rank left out. overdue: true if a checkpoint is due by this rank's clock.
        Raises:
            FloatingPointError: the loss of a rank or the gradient is not finite, of this update or the one before.
            BrokenImage: more images are broken than the options allow.
        """
        self.settle()
        self.unread = self.world.send([loss, norm, stop, num_broken, overdue])
        if not self.reads_late:
            self._receive(0)

    def settle(self) -> None:
        """Waits for the update before and checks it as `send` does; call it before anything is logged or saved."""
        if self.unread:
            self._receive(1)

    def begin_save(self) -> None:
        """Waits for the update before, as `settle`; after it, no save is overdue."""
        self.settle()
        self.overdue = False

    def _receive(self, updates_ago: int) -> None:
        """Reads the values of an update, which has been made already (`updates_ago` = 1) or not (0)."""
        assert self.unread is not None, "values were sent"
        read, self.unread = self.unread, None
        losses, norms, stops, nums_broken, overdue = zip(*read(), strict=True)
        self.norm, self.stopped, self.overdue = norms[0], self.stopped or any(stops), bool(overdue[0])
        self.progress.broken += int(sum(nums_broken))
        check_broken(self.progress.broken, self.max_broken)
        self._check(losses, updates_ago)
        self.progress.loss_sum += sum(losses) / len(losses)
        self.progress.num_summed += 1

    def _check(self, losses: Sequence[float], updates_ago: int) -> None:
        progress, reason = self.progress, ""
        end = "no checkpoint was made after it" if updates_ago else "stopped before the update"
        if ranks := ", ".join(str(rank) for rank, x in enumerate(losses) if not math.isfinite(x)):
            reason = f"the loss is not finite on rank {ranks}; {end}"
        elif self.is_scaled:
            progress.num_overflows = 0 if math.isfinite(self.norm) else progress.num_overflows + 1
            if progress.num_overflows > MAX_OVERFLOWS:
                problem = f"the gradient was not finite in {progress.num_overflows} updates in a row, at any loss scale"
                reason = f"{problem}; lower optim.lr, or set train.amp=bf16 (with --allow-change)"
        elif not math.isfinite(self.norm):
            reason = f"the gradient norm is {self.norm}; {end}; lower optim.lr (with --allow-change), or clip gradients"
        if reason:
            raise FloatingPointError(f"step {progress.step - updates_ago}: {reason}")
