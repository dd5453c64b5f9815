"""The order of the training images and their random numbers: functions of a position, so that a run can start anywhere.

A run has no random state to save. The random numbers of an image depend only on (seed, epoch, position in the order of
the epoch). A batch that is erased ahead, on a GPU, uses the numbers of its first image. Those
of an optimiser step, in the main process, depend on (seed, step, micro-batch, rank).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from engine.data.splits import Images
from engine.runtime.distributed import World, mix_seeds, seed_everything

Place = tuple[int, int, int]
"""A training image: its index in the dataset, the epoch, and its position in the epoch's order."""


class EpochSampler(Sampler[Place]):
    """One rank's share of a global order that depends on (seed, epoch) only.

    Rank r of R takes every R-th index, so that at any R the ranks' batches of a step make up the batch of a single
    process. An epoch consists of whole total batches; images that do not fill one are left out. With `repeats` every
    image comes that many times in a row, and so on different ranks, in an epoch of the same length (repeated
    augmentation, Hoffer et al. 2020). The order is that of DeiT's and timm's samplers, which round down to
    256 images instead.
    """

    def __init__(self, num_images: int, total_batch_size: int, world: World, seed: int, repeats: int = 0):
        self.num_images, self.total_batch_size = num_images, total_batch_size
        self.repeats, self.world, self.seed = max(1, repeats), world, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Selects the order of `epoch` from position `start` on, counted over all ranks. Call it before iterating."""
        self.epoch, self.start, self.order_seed = epoch, start, mix_seeds(self.seed, epoch)
        self.stop = start + (self.num_images - start) // self.total_batch_size * self.total_batch_size

    @property
    def updates_per_epoch(self) -> int:
        """Number of whole total batches in an epoch."""
        return self.num_images // self.total_batch_size

    def order(self, positions: range) -> Tensor:
        """Returns the image indices at `positions` of the epoch, for all ranks, (n,) int64."""
        places = torch.arange(positions.start, positions.stop, positions.step) // self.repeats
        generator = torch.Generator().manual_seed(self.order_seed)
        return torch.randperm(self.num_images, generator=generator)[places]

    def __len__(self) -> int:
        return (self.stop - self.start) // self.world.size

    def __iter__(self) -> Iterator[Place]:
        positions, epoch = range(self.start + self.world.rank, self.stop, self.world.size), self.epoch
        for index, position in zip(self.order(positions).numpy(), positions, strict=True):  # a list would be large
            yield int(index), epoch, position


class SeededDataset(Dataset):
    """Data set that seeds each image, so that the random numbers of an image are the same in any process."""

    def __init__(self, dataset: Images, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> Any:
        index, epoch, position = place
        seed_everything(self.seed, epoch, position)
        return self.dataset[index]
