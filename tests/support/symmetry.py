"""Rearrangements of the tokens of a 6 x 4 grid, by blocks of 2 x 2."""

import torch
from torch import Tensor

from tests.support.inputs import shuffled

GRID = (6, 4)
TRANSPOSED = torch.arange(24).view(GRID).mT.flatten()
ALL = {"any", "within", "between", "transposed"}
BLOCKS = {"within", "between", "transposed"}


def permutations() -> dict[str, Tensor]:
    """Index of the token that moves to each position, (24,): in any order; within every block; whole blocks."""
    blocks = torch.arange(24).view(3, 2, 2, 2).transpose(1, 2).reshape(6, 4)  # block, position in it
    back = blocks.flatten().argsort()
    within = torch.stack([block[shuffled(4, seed=i)] for i, block in enumerate(blocks)])
    return {"any": shuffled(24), "within": within.flatten()[back], "between": blocks[shuffled(6)].flatten()[back]}
