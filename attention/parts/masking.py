"""Key masks: which tokens of each image count, (B, N) bool, true for those that do.

The polarity is that of `F.scaled_dot_product_attention` and of Hugging Face's attention_mask. What a mask hides has
weights of exactly zero, and the rest is as if it were not there. Without a mask every function here is the identity, or
the plain mean.
"""

import torch
from torch import Tensor


def mask_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Tokens or features (B, h, N, d), zero where key_mask (B, N) is false."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def mask_logits(logits: Tensor, key_mask: Tensor | None, dim: int = -1) -> Tensor:
    """Logits (B, h, ...) along the keys of the axis `dim`, the least number where key_mask (B, N) is false.

    Unlike -inf that leaves a row of hidden keys alone finite, whose query is a hidden one, so that nobody reads it.
    """
    if key_mask is None:
        return logits
    hidden = ~key_mask[:, None, None] if dim == -1 else ~key_mask[:, None, :, None]
    return logits.masked_fill(hidden, torch.finfo(logits.dtype).min)


def masked_mean(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of (B, h, N, d) over the tokens that count, (B, h, d)."""
    if key_mask is None:
        return x.mean(2)
    return mask_tokens(x, key_mask).sum(2) / key_mask.sum(1).clamp(min=1)[:, None, None]


def stand_in(x: Tensor, key_mask: Tensor) -> Tensor:
    """Tokens (B, N, C), hidden ones as copies of one of their image that counts, without gradient; zeros where none
    does. So no maximum over tokens is a hidden token's alone, whatever it holds.
    """
    shown = x.masked_fill(~key_mask[..., None], 0)
    first = key_mask.to(torch.uint8).argmax(1)  # the first that counts
    return torch.where(key_mask[..., None], x, shown[torch.arange(len(x), device=x.device), first][:, None].detach())


def of_grid(key_mask: Tensor | None, N: int) -> Tensor | None:
    """Of prefix tokens and those of the grid (B, P + N) -> of the grid alone (B, N)."""
    return None if key_mask is None else key_mask[:, -N:]
