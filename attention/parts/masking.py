"""Key masks, (B, N) bool: true for tokens of an image that count.

The polarity is that of `F.scaled_dot_product_attention` and of Hugging Face's attention_mask. Masked tokens, for which
it is false, have weights of exactly zero; outputs of the others are the same as without the masked tokens. Without a
mask every function here is the identity, or the plain mean.
"""

import torch
from torch import Tensor

from .features import compute_dtype


def mask_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Sets tokens or features (B, h, N, d) to zero where key_mask (B, N) is false."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def mask_logits(logits: Tensor, key_mask: Tensor | None, dim: int = -1) -> Tensor:
    """Sets logits (B, h, ...), with keys along the axis `dim`, to the least number where key_mask (B, N) is false.

    Unlike -inf, this number keeps rows without any other key finite: rows of masked queries, which are never read.
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
    """Replaces masked tokens of (B, N, C) by a token of their image that counts, without gradient, or by zeros if none
    counts. So the values of masked tokens affect no maximum over tokens.
    """
    counts = key_mask[..., None]
    image, first = torch.arange(x.shape[0], device=x.device), key_mask.to(torch.uint8).argmax(1)
    return torch.where(counts, x, x.masked_fill(~counts, 0)[image, first][:, None].detach())


def of_grid(key_mask: Tensor | None, N: int) -> Tensor | None:
    """Drops the prefix tokens from a mask: (B, P + N) -> (B, N)."""
    return None if key_mask is None else key_mask[:, -N:]
