"""The joint softmax of windows and landmarks that all queries share, in Triton kernels, as operators of PyTorch.

Windows do not overlap, and heads have at most 64 channels; `covers_joint_softmax` states all conditions. Saved for the
backward pass: the output and one log-sum-exp per query; the weights are computed again from them.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...parts.geometry import Windows, split_prefix
from ..kernels import NAMESPACE, first_order, kernel
from ..memory import like_tokens
from ..triton_tokens import PROGRAMS, block_length, dense, launch, precision, supported, view
from .triton_kernels import Sizes, bias_gradient, forward, key_gradient, landmark_gradient, query_gradient

CONFIGURATIONS = {2: (64, 4, 2), 4: (16, 2, 1)}
"""Bytes of a number -> largest number of tokens of a block, warps, and stages of loads. Gradients of heads wider than
32 channels use twice the warps in fp32; in half types a second group of four warps repeats the work of the first.
"""


def _sizes(q: Tensor, k_tilde: Tensor | None, window: list[int], backward: bool) -> Sizes:
    d, block_d = q.shape[-1], block_length(q.shape[-1], 64)
    most, num_warps, num_stages = CONFIGURATIONS[q.element_size()]
    num_warps *= 2 if backward and block_d > 32 and most < 64 else 1
    lengths = window[0] * window[1], 1 if k_tilde is None else k_tilde.shape[2]
    blocks = (block_length(length, most) for length in lengths)
    return Sizes(d, block_d, *window, *blocks, precision(), num_warps, num_stages)


def _of_windows(prior: Tensor | None) -> tuple[Tensor, int] | None:
    """Kernel arguments for the term (1 or g, c) added to the logits of landmarks: the tensor and its window stride."""
    return None if prior is None else (prior, prior.shape[1] if prior.shape[0] > 1 else 0)


def _scalars(q: Tensor, grid: list[int], k_tilde: Tensor | None) -> tuple[int, int, int, int, float]:
    """Heads, rows and columns of the grid, landmarks, and the scale of logits."""
    return q.shape[1], *grid, 0 if k_tilde is None else k_tilde.shape[2], q.shape[-1] ** -0.5


@torch.library.custom_op(f"{NAMESPACE}::joint_softmax", mutates_args=())
def _joint_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    k_tilde: Tensor | None,
    beta: Tensor | None,
    prior: Tensor | None,
    grid: list[int],
    window: list[int],
) -> tuple[Tensor, Tensor]:
    """Output (B, h, N, d) and log-sum-exp (B, h, N)."""
    S = _sizes(q, k_tilde, window, backward=False)
    y, lse = like_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    inputs = *map(view, (q, k, v)), bias, *map(view, (k_tilde, beta)), _of_windows(prior)
    blocks = triton.cdiv(window[0] * window[1], S.block_w)
    programs = q.shape[0] * q.shape[1] * Windows(grid, window).num_windows * blocks
    launch(forward, (programs,), *inputs, view(y), lse, *_scalars(q, grid, k_tilde), S)
    return y, lse


@_joint_softmax.register_fake
def _(q, k, v, bias, k_tilde, beta, prior, grid, window):
    return like_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::joint_softmax_backward", mutates_args=())
def _joint_softmax_backward(
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    k_tilde: Tensor | None,
    beta: Tensor | None,
    prior: Tensor | None,
    grid: list[int],
    window: list[int],
    of_bias: bool,
    of_landmarks: bool,
) -> list[Tensor]:
    """Gradients of q, k, v; with `of_bias` also of the bias, with `of_landmarks` also of landmarks and their values."""
    (B, h, N, _), (H, W), S = q.shape, grid, _sizes(q, k_tilde, window, backward=True)
    _, _, _, c, scale = scalars = _scalars(q, grid, k_tilde)
    w, windows = window[0] * window[1], Windows(grid, window).num_windows
    blocks = triton.cdiv(w, S.block_w)

    def splits(length: int, programs: int) -> int:
        return min(length, triton.cdiv(PROGRAMS, programs))

    bias_splits = splits(B * windows, h * blocks**2)
    gradients = [like_tokens(x) for x in (q, k, v)]
    dq, dk, dv = map(view, gradients)
    dbias = lse.new_empty(bias_splits, *bias.shape) if of_bias else None
    saved = view(dy), lse, torch.empty_like(lse)
    on_grid, on_landmarks = (*map(view, (q, k, v)), bias), (*map(view, (k_tilde, beta)), _of_windows(prior))
    with_keys, programs = ((dk, dv, dbias), bias_splits) if blocks == 1 else ((None,) * 3, B * windows * blocks)
    arguments = *on_grid, *on_landmarks, view(y), *saved, dq, *with_keys
    launch(query_gradient, (h * programs,), *arguments, B, *scalars, S)
    if blocks > 1:
        programs = B * h * windows * blocks
        launch(key_gradient, (programs,), *on_grid, *saved, dk, dv, h, H, W, scale, S)
        if of_bias:
            programs = h * blocks**2, bias_splits
            launch(bias_gradient, programs, *on_grid, *saved, dbias, B, h, H, W, scale, S)
    if of_bias:
        gradients.append(dbias.sum(0).to(bias.dtype))
    if of_landmarks:
        programs = B * h * triton.cdiv(c, S.block_c)
        landmark_splits = splits(triton.cdiv(N, S.block_w), programs)
        shares = [lse.new_empty(B, h, landmark_splits * c, x.shape[3]) for x in (k_tilde, beta)]
        arguments = view(q), *on_landmarks, *saved, *map(view, shares)
        launch(landmark_gradient, (programs, landmark_splits), *arguments, *scalars, S)
        sums = [share.unflatten(2, (landmark_splits, c)).sum(2) for share in shares]
        gradients += [x.to(like.dtype) for x, like in zip(sums, (k_tilde, beta), strict=True)]
    return gradients


@_joint_softmax_backward.register_fake
def _(dy, y, lse, q, k, v, bias, k_tilde, beta, prior, grid, window, of_bias, of_landmarks):
    summaries = [bias] * of_bias + [k_tilde, beta] * of_landmarks
    return [*map(like_tokens, (q, k, v)), *(x.new_empty(x.shape) for x in summaries)]


@register_flop_formula(getattr(torch.ops, NAMESPACE).joint_softmax, get_raw=True)
def _flops(q, k, v, bias, k_tilde, beta, prior, grid, window, **kwargs) -> int:
    """Operations of two products for each query and each of its keys and landmarks, for torch's FlopCounterMode."""
    return 4 * q.numel() * (window[0] * window[1] + (0 if k_tilde is None else k_tilde.shape[2]))


@register_flop_formula(getattr(torch.ops, NAMESPACE).joint_softmax_backward, get_raw=True)
def _backward_flops(dy, y, lse, q, k, v, bias, k_tilde, beta, prior, grid, window, *others, **kwargs) -> int:
    """Operations of five products for each query and key, and of eight for each query and landmark."""
    return q.numel() * (10 * window[0] * window[1] + (0 if k_tilde is None else 16 * k_tilde.shape[2]))


def _save(ctx, inputs, output):
    *tensors, ctx.grid, ctx.window = inputs
    ctx.save_for_backward(*output, *tensors)


@first_order
def _backward(ctx, dy, _):
    y, lse, *tensors = ctx.saved_tensors
    wanted = [True] * 3 + [ctx.needs_input_grad[3]] + [any(ctx.needs_input_grad[4:6])] * 2
    gradients = iter(_joint_softmax_backward(dense(dy), y, lse, *tensors, ctx.grid, ctx.window, *wanted[3:5]))
    return *(next(gradients) if each else None for each in wanted), None, None, None


_joint_softmax.register_autograd(_backward, setup_context=_save)


def covers_joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0) -> bool:
    """Returns whether the kernels can compute a joint softmax of these arguments.

    They cannot if the tensors are not `supported`, windows are empty or overlap, attention is causal, keys are masked,
    weights are dropped, summary tokens differ among windows or have no keys, or added logits differ within a window or
    need a gradient.
    """
    shared = values is None or (keys is not None and keys.shape[2] == 1)
    of_windows = logits is None or set(logits.shape[:-3] + logits.shape[-2:-1]) <= {1}
    constant = logits is None or not logits.requires_grad
    apart = not windows.is_empty and windows.overlap == (0, 0) and not windows.causal and windows.key_mask is None
    return supported(q, k, v) and apart and attn_drop == 0 and shared and of_windows and constant


@kernel(covers_joint_softmax)
def joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0):
    """`op.joint_softmax` with landmarks that all queries share, for covered arguments; in memory (B, N, h, d)."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    k_tilde, beta = (x if x is None else x[:, :, 0] for x in (keys, values))
    prior = None if logits is None else logits.reshape(-1, logits.shape[-1]).float()
    if k_prefix.shape[2]:  # each prefix token becomes a landmark
        prior = None if prior is None else F.pad(prior, (k_prefix.shape[2], 0))
        k_tilde, beta = (
            x if summaries is None else torch.cat([x.to(summaries.dtype), summaries], 2)
            for x, summaries in ((k_prefix, k_tilde), (v_prefix, beta))
        )
    q, k, v, k_tilde, beta = map(dense, (q, k, v, k_tilde, beta))
    bias, prior = (x if x is None else x.contiguous() for x in (bias, prior))
    return _joint_softmax(q, k, v, bias, k_tilde, beta, prior, *map(list, windows[:2]))[0]
