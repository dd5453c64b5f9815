"""Orders of the images of an epoch: functions of a seed and of a position, for any range of positions."""

from collections.abc import Callable

import numpy as np
import torch

from engine.runtime.distributed import mix_seeds

CHUNK = 2**16
"""Number of positions whose images a sampler looks up at a time."""


Order = Callable[[int, np.ndarray], np.ndarray]
"""Function of an epoch's seed and of positions (n,) -> image indices, (n,) int64; every index comes once."""


class ListOrder:
    """A random permutation of `number` images as a list: 8 bytes an image in every rank."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, seed: int, positions: np.ndarray) -> np.ndarray:
        return torch.randperm(self.number, generator=torch.Generator().manual_seed(seed)).numpy()[positions]


class BlockOrder:
    """An order that needs few shards at a time: blocks of `shards` random shards, each block shuffled.

    Args:
        firsts: number of the first image of every shard, and the number of images, ascending.
    """

    def __init__(self, firsts: np.ndarray, shards: int):
        self.firsts, self.sizes, self.shards = firsts, np.diff(firsts), shards
        self.known: tuple[int, np.ndarray, np.ndarray] = (-1, firsts, firsts)
        self.block: tuple[tuple[int, int], np.ndarray] = ((-1, -1), firsts)

    def __call__(self, seed: int, positions: np.ndarray) -> np.ndarray:
        begins = self._lay_out(seed)[2]
        blocks = np.searchsorted(begins, positions, "right") - 1
        found = np.empty(len(positions), np.int64)
        for block in np.unique(blocks):
            here = blocks == block
            found[here] = self._shuffle(seed, int(block))[positions[here] - begins[block]]
        return found

    def _lay_out(self, seed: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the seed, the shuffled shards and the first position of each block."""
        if self.known[0] != seed:
            shards = torch.randperm(len(self.sizes), generator=torch.Generator().manual_seed(seed)).numpy()
            ends = np.cumsum(self.sizes[shards])
            self.known = seed, shards, np.array([0, *ends[self.shards - 1 : -1 : self.shards]])
        return self.known

    def _shuffle(self, seed: int, block: int) -> np.ndarray:
        """The images of a block in their order."""
        if self.block[0] != (seed, block):
            shards = self._lay_out(seed)[1][block * self.shards :][: self.shards]
            images = np.concatenate([np.arange(self.firsts[shard], self.firsts[shard + 1]) for shard in shards])
            generator = torch.Generator().manual_seed(mix_seeds(seed, block))
            self.block = (seed, block), images[torch.randperm(len(images), generator=generator).numpy()]
        return self.block[1]
