"""Values that ranks exchange in every update: losses, gradient norm, stop requests, broken images, save clocks."""

import math
from collections.abc import Callable

from torch import Tensor

from engine.checkpoints.progress import Progress
from engine.config.schema import Run
from engine.data.loaders import check_broken
from engine.runtime.distributed import World


class UpdateExchange:
    """Exchanges the values of an update between all ranks, in one collective.

    On a CPU, and where updates may be skipped, the values are read before the optimiser's step. On a GPU every update
    would have to wait for the device; there they are read one update late, before the next optimiser's step and before
    anything is logged or saved.

    Args:
        progress: counts the broken images. check: `FiniteGuard.check`.
    Attributes:
        norm: gradient norm of the last update that was read. stopped: whether any rank was asked to stop.
        overdue: whether it was time to save, by the first rank's clock.
    """

    def __init__(self, run: Run, world: World, progress: Progress, check: Callable[..., bool]):
        self.max_broken, self.world, self.progress, self.check = run.data.max_broken, world, progress, check
        self.norm, self.stopped, self.overdue = math.nan, False, False
        self.reads_late = world.on_cuda and not run.train.max_skipped
        self.unread: Callable[[], list[list[float]]] | None = None

    def accepts(self, loss: Tensor, norm: Tensor, stop: bool, num_broken: int, overdue: bool) -> bool:
        """Returns whether to make the update with this loss and gradient norm.

        Args:
            loss, norm: scalars on the device. stop: true if this rank has a stop signal. num_broken: number of images
                that this rank left out. overdue: true if a checkpoint is due by this rank's clock.
        Raises:
            FloatingPointError: see `FiniteGuard.check`; for this update or the one before.
            BrokenImage: more images are broken than the options allow.
        """
        self.settle()
        read = self.world.send([loss, norm, stop, num_broken, overdue])
        if self.reads_late:
            self.unread = read
            return True
        return self._receive(read(), 0)

    def settle(self) -> None:
        """Waits for the update before and checks it as `accepts` does; call it before anything is logged or saved."""
        if self.unread:
            read, self.unread = self.unread, None
            self._receive(read(), 1)

    def begin_save(self) -> None:
        """Waits for the update before, as `settle`; after it, no save is overdue."""
        self.settle()
        self.overdue = False

    def _receive(self, rows: list[list[float]], updates_ago: int) -> bool:
        losses, norms, stops, nums_broken, overdue = zip(*rows, strict=True)
        self.norm, self.stopped, self.overdue = norms[0], self.stopped or any(stops), bool(overdue[0])
        self.progress.broken += int(sum(nums_broken))
        check_broken(self.progress.broken, self.max_broken)
        return self.check(losses, self.norm, updates_ago)
