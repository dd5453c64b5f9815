"""Decoding: what a causal layer keeps of the tokens before the present one."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Past:
    """What a sequence's tokens so far leave to later ones: causal attention reads it and adds the present token.

    Attributes:
        num_tokens: how many there were before the present one.
        kept: running sums, keys and values and the like, under names of their users' choice.
    """

    num_tokens: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    def append(self, *tokens: Tensor, period: int = 0) -> list[Tensor]:
        """Tokens (B, h, 1, d), each after those that were given earlier; every `period` tokens they begin anew."""
        begins = self.num_tokens == 0 or (period > 0 and self.num_tokens % period == 0)
        for i, x in enumerate(tokens):
            self.kept[f"tokens {i}"] = x if begins else torch.cat([self.kept[f"tokens {i}"], x], 2)
        return [self.kept[f"tokens {i}"] for i in range(len(tokens))]
