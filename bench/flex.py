"""The joint softmax of windows and landmarks by PyTorch's FlexAttention (Dong et al. 2024, arXiv:2412.05496): exact.
It is a peer of the kernels in benchmarks, and no path of layers.

Keys are the prefix tokens, the tokens of the grid and the landmarks. A mask lets a query attend to its window and to
all prefix tokens and landmarks. The score function captures the position bias and the term added to landmarks' logits.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from attention.parts.geometry import Windows


def joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows: Windows) -> Tensor:
    """Computes `attention.ops.joint_softmax.op.joint_softmax` for windows without overlap and shared landmarks.

    It is fused on a GPU. On a CPU the whole matrix is in memory.

    Args:
        q: (B, h, N, d). k, v: (B, h, P + N, d). bias: position bias of the window, (h, w, w).
        keys, values: landmarks, (B, h, 1, c, d). logits: added to their logits, broadcast to (g windows, 1, c).
    Returns:
        (B, h, N, d).
    Raises:
        NotImplementedError: raised by PyTorch for tensors that require gradients on a CPU.
    """
    number = k.shape[2]  # position of the first landmark among the keys
    first = number - q.shape[2]  # position of the grid's first token
    if keys is not None:
        k, v = (torch.cat([x, summaries[:, :, 0].to(x.dtype)], 2) for x, summaries in ((k, keys), (v, values)))
    prior = None if logits is None else logits.expand(windows.count, 1, -1)[:, 0]

    def added(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        on_grid, on_landmark = (key >= first) & (key < number), key >= number
        if bias is not None:
            token = torch.where(on_grid, key - first, 0)
            of_pair = bias[head, _locate(query, windows)[1], _locate(token, windows)[1]]
            score = score + torch.where(on_grid, of_pair, 0.0)
        if prior is not None:
            of_landmark = prior[_locate(query, windows)[0], torch.where(on_landmark, key - number, 0)]
            score = score + torch.where(on_landmark, of_landmark, 0.0)
        return score

    mask = _mask(windows, first, number, k.shape[2], q.device)
    options = {"num_stages": 2}  # with three, what the score function captures exceeds an H200's shared memory
    return _attention(q.device.type)(q, k, v, score_mod=added, block_mask=mask, kernel_options=options)


@functools.cache
def _attention(device: str) -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


@functools.lru_cache(maxsize=16)
def _mask(windows: Windows, first: int, number: int, length: int, device: torch.device) -> BlockMask:
    """Returns the mask over `length` keys: a query attends to prefix tokens, its window, and keys from `number` on."""

    def attended(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = _locate(query, windows)[0] == _locate(key - first, windows)[0]
        return (key < first) | (key >= number) | own

    return create_block_mask(attended, None, None, number - first, length, device)


def _locate(n: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Returns the window of token n, and its position in the window."""
    (_, W), (rows, columns) = windows.grid, windows.size
    return n // W // rows * -(-W // columns) + n % W // columns, n // W % rows * columns + n % W % columns
