"""Key masks: which tokens of each image count, (B, N) bool, true for those that do.

The polarity is that of `F.scaled_dot_product_attention` and of Hugging Face's attention_mask. Masked tokens, where it
is false, have weights of exactly zero, and the others are as if these were not there. Without a mask every function
here is the identity, or the plain mean.
"""

import torch
from torch import Tensor

from attention.parts.features import compute_dtype


def mask_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Tokens or features (B, h, N, d), zero where key_mask (B, N) is false."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def mask_logits(logits: Tensor, key_mask: Tensor | None, dim: int = -1) -> Tensor:
    """Logits (B, h, ...) along the keys of the axis `dim`, the least number where key_mask (B, N) is false.

    Unlike -inf, it leaves a row without any other key finite: that of a masked query, which nobody reads.
    """
    if key_mask is None:
        return logits
    masked = ~key_mask[:, None, None] if dim == -1 else ~key_mask[:, None, :, None]
    return logits.masked_fill(masked, torch.finfo(logits.dtype).min)


def masked_mean(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of (B, h, N, d) over the tokens that count, (B, h, d)."""
    if key_mask is None:
        return x.mean(2)
    total = mask_tokens(x, key_mask).sum(2, dtype=compute_dtype(x))
    return (total / key_mask.sum(1).clamp(min=1)[:, None, None]).to(x.dtype)


def stand_in(x: Tensor, key_mask: Tensor) -> Tensor:
    """Tokens (B, N, C), masked ones replaced by one of their image that counts, without gradient; by zeros where none
    does. So no maximum over tokens is a masked token's alone, whatever it holds.
    """
    counts = key_mask[..., None]
    image, first = torch.arange(x.shape[0], device=x.device), key_mask.to(torch.uint8).argmax(1)
    return torch.where(counts, x, x.masked_fill(~counts, 0)[image, first][:, None].detach())


def of_grid(key_mask: Tensor | None, N: int) -> Tensor | None:
    """Of prefix tokens and those of the grid (B, P + N) -> of the grid alone (B, N)."""
    return None if key_mask is None else key_mask[:, -N:]
