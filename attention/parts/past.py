"""State that a causal layer keeps of earlier tokens during decoding."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Past:
    """State of the tokens of a sequence so far; causal attention reads it and adds the present token.

    Attributes:
        num_tokens: number of tokens before the present one.
        kept: running sums, keys, values and similar tensors, under names that their users choose.
    """

    num_tokens: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    def append(self, *tokens: Tensor, period: int = 0) -> list[Tensor]:
        """Appends tokens (B, h, 1, d) to earlier ones and returns all; starts again every `period` tokens."""
        begins = self.num_tokens == 0 or (period > 0 and self.num_tokens % period == 0)
        for i, x in enumerate(tokens):
            self.kept[f"tokens {i}"] = x if begins else torch.cat([self.kept[f"tokens {i}"], x], 2)
        return [self.kept[f"tokens {i}"] for i in range(len(tokens))]


Causal = bool | Past
"""Whether an op is causal; in decoding, where q, k and v hold the next token alone, the past of the sequence."""
