"""Attention by random features that all queries share (`fused`), in Triton kernels, as operators of PyTorch.

The two softmaxes are two operators. `feature_values` has a softmax over tokens for every sample, and `mix_values` one
over samples for every query. Saved for the backward pass: sums of samples, and one log-sum-exp per query; the weights
are computed again from them.
"""

import torch
import triton
from torch import Tensor

from ...parts.features import upcast
from ..kernels import NAMESPACE, first_order, kernel
from ..memory import like_tokens
from ..triton_tokens import PROGRAMS, block_length, dense, launch, supported, view
from . import fused
from .triton_kernels import Sizes, backward_mix, backward_values, forward_mix, forward_values

MOST = 128
"""Largest number of samples and landmarks, whose weights for a few tokens registers must hold."""
BLOCK, BLOCK_OF_GRADIENTS = 64, 32
"""Tokens of a block, and in the backward pass of `mix_values`, which is short of registers."""


def _sizes(x: Tensor, omega: Tensor, block_s: int = MOST, block_n: int = BLOCK) -> Sizes:
    """Sizes of a kernel with at most `block_s` samples and `block_n` tokens in a block."""
    d = x.shape[3]
    lengths = block_length(d, 64), block_length(x.shape[2], block_n), block_length(omega.shape[2], block_s)
    return Sizes(d, *lengths, num_stages=2)


def _splits(x: Tensor, S: Sizes) -> int:
    """Number of shares of an image's tokens in a backward pass, enough to keep a GPU busy."""
    return min(triton.cdiv(x.shape[2], S.block_n), triton.cdiv(PROGRAMS, x.shape[0] * x.shape[1]))


def _scalars(x: Tensor, omega: Tensor) -> tuple[int, int, int, float]:
    """Heads, tokens, samples, and the scale of logits."""
    return *x.shape[1:3], omega.shape[2], x.shape[3] ** -0.25


def _shares(like: Tensor, splits: int, width: int | None = None) -> Tensor:
    """Empty shares of `splits` programs in a gradient of samples, (B, h, splits s, width) or (B, h, splits s)."""
    B, h, s = like.shape[:3]
    return like.new_empty((B, h, splits * s, *([] if width is None else [width])), dtype=torch.float32)


def _sum(shares: Tensor, splits: int) -> Tensor:
    return shares.unflatten(2, (splits, -1)).sum(2)


@torch.library.custom_op(f"{NAMESPACE}::feature_values", mutates_args=())
def _feature_values(x: Tensor, v: Tensor | None, omega: Tensor) -> tuple[Tensor, Tensor]:
    """With values v (B, h, N, d): their means u (B, h, s, d) under softmax_n g(x'_n, omega_s), and LSE_n g (B, h, s).
    Without: an empty tensor, and LSE_n[x'_n . omega_s]. In float32.
    """
    u, mass = _empty_sums(x, v, omega)
    S = _sizes(x, omega, 64)
    programs = x.shape[0] * x.shape[1], triton.cdiv(omega.shape[2], S.block_s)
    launch(forward_values, programs, *map(view, (x, v, omega, u)), mass, *_scalars(x, omega), S)
    return u, mass


def _empty_sums(x: Tensor, v: Tensor | None, omega: Tensor) -> tuple[Tensor, Tensor]:
    (B, h, s, _), width = omega.shape, 0 if v is None else v.shape[3]
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in ((B, h, s, width), (B, h, s)))


@_feature_values.register_fake
def _(x, v, omega):
    return _empty_sums(x, v, omega)


@torch.library.custom_op(f"{NAMESPACE}::feature_values_backward", mutates_args=())
def _feature_values_backward(
    x: Tensor, v: Tensor | None, omega: Tensor, mass: Tensor, u: Tensor, du: Tensor, dmass: Tensor, of_samples: bool
) -> list[Tensor]:
    """Gradients of x, of v if given, and with `of_samples` of omega."""
    S = _sizes(x, omega)
    splits = _splits(x, S)
    dx, dv = (each if each is None else like_tokens(each) for each in (x, v))
    shares = _shares(mass, splits, x.shape[3]) if of_samples else None
    tensors = *map(view, (x, v, omega)), mass, *map(view, (u, du)), dmass, *map(view, (dx, dv, shares))
    launch(backward_values, (x.shape[0] * x.shape[1], splits), *tensors, *_scalars(x, omega), S)
    gradients = [dx, dv, _sum(shares, splits).to(omega.dtype) if of_samples else None]
    return [each for each in gradients if each is not None]


@_feature_values_backward.register_fake
def _(x, v, omega, mass, u, du, dmass, of_samples):
    tokens = [like_tokens(each) for each in (x, v) if each is not None]
    return tokens + [omega.new_empty(omega.shape)] * of_samples


def _save_values(ctx, inputs, output):
    u, mass = output
    ctx.save_for_backward(*inputs, mass, u)


@first_order
def _gradients_of_values(ctx, du, dmass):
    x, v, omega, *others = ctx.saved_tensors
    wanted = True, v is not None, ctx.needs_input_grad[2]
    gradients = iter(_feature_values_backward(x, v, omega, *others, dense(du), dmass.contiguous(), wanted[2]))
    return tuple(next(gradients) if each else None for each in wanted)


_feature_values.register_autograd(_gradients_of_values, setup_context=_save_values)


@torch.library.custom_op(f"{NAMESPACE}::mix_values", mutates_args=())
def _mix_values(
    q: Tensor, omega: Tensor, mass: Tensor, u: Tensor, q_bar: Tensor | None, log_total: Tensor | None,
    balance: Tensor | None, beta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Means of u under softmax_s[q'_n . omega_s + mass_s + log alpha_ns], (B, h, N, d), and LSE_s, (B, h, N)."""
    S, (y, lse) = _sizes(q, omega), _empty_outputs(q)
    programs = q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], S.block_n)
    tensors = *map(view, (q, omega)), mass, *map(view, (u, q_bar)), log_total, balance, view(y), lse
    launch(forward_mix, programs, *tensors, *_scalars(q, omega), beta, S)
    return y, lse


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return like_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_mix_values.register_fake
def _(q, omega, mass, u, q_bar, log_total, balance, beta):
    return _empty_outputs(q)


@torch.library.custom_op(f"{NAMESPACE}::mix_values_backward", mutates_args=())
def _mix_values_backward(
    q: Tensor, omega: Tensor, mass: Tensor, u: Tensor, q_bar: Tensor | None, log_total: Tensor | None,
    balance: Tensor | None, beta: float, lse: Tensor, dy: Tensor, of_samples: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, mass and u, with `of_samples` of omega, and of q_bar, log_total and balance if given."""
    S, d = _sizes(q, omega, block_n=BLOCK_OF_GRADIENTS), q.shape[3]
    splits = _splits(q, S)
    widths = [d if of_samples else None, 0, d] + [None if q_bar is None else width for width in (d, 0, 0)]
    dq = like_tokens(q)
    domega, dmass, du, dq_bar, dtotal, dbalance = shares = [
        None if width is None else _shares(mass, splits, width or None) for width in widths
    ]
    tensors = *map(view, (q, omega)), mass, *map(view, (u, q_bar)), log_total, balance, lse, view(dy), view(dq)
    of_shares = view(domega), dmass, *map(view, (du, dq_bar)), dtotal, dbalance
    launch(backward_mix, (q.shape[0] * q.shape[1], splits), *tensors, *of_shares, *_scalars(q, omega), beta, S)
    like = omega, mass, u, q_bar, log_total, balance
    sums = [_sum(x, splits).to(other.dtype) for x, other in zip(shares, like, strict=True) if x is not None]
    return [dq, *sums]


@_mix_values_backward.register_fake
def _(q, omega, mass, u, q_bar, log_total, balance, beta, lse, dy, of_samples):
    given = [omega if of_samples else None, mass, u, q_bar, log_total, balance]
    return [like_tokens(q), *(x.new_empty(x.shape) for x in given if x is not None)]


def _save_mix(ctx, inputs, output):
    *tensors, ctx.beta = inputs
    ctx.save_for_backward(*tensors, output[1])


@first_order
def _gradients_of_mix(ctx, dy, _):
    *tensors, lse = ctx.saved_tensors
    of_alpha, of_samples = [tensors[4] is not None] * 3, ctx.needs_input_grad[1]
    gradients = iter(_mix_values_backward(*tensors, ctx.beta, lse, dense(dy), of_samples))
    return *(next(gradients) if each else None for each in (True, of_samples, True, True, *of_alpha)), None


_mix_values.register_autograd(_gradients_of_mix, setup_context=_save_mix)


def _supported(q: Tensor, k: Tensor, v: Tensor, held: int) -> bool:
    """Returns whether kernels take these tensors, and registers this number of samples and landmarks.

    Other types than bfloat16 need weights and gradients in float32, for which registers are too few.
    """
    fit = held <= MOST and q.shape[3] == k.shape[3] == v.shape[3]
    return fit and supported(q, k, v) and all(x.dtype == torch.bfloat16 for x in (q, k, v))


def covers_performer(q, k, v, omega, **options) -> bool:
    """Returns whether `fused.performer` covers the arguments, in bfloat16 and with at most `MOST` samples."""
    return fused.covers_performer(q, k, v, omega, **options) and _supported(q, k, v, omega.shape[-2])


@kernel(covers_performer)
def performer(q, k, v, omega, **options):
    """`attention.mechanisms.performer.performer`."""
    return _attend(q, k, v, upcast(omega).expand(q.shape[0], -1, -1, -1))


def covers_lara(q, k, v, q_bar, k_bar, noise, uniform=None, *, weighting="decoupled", **options) -> bool:
    """Returns whether `fused.lara` covers the arguments, in bfloat16 and with at most `MOST` samples and landmarks."""
    samples = q_bar.shape[2] * (noise.shape[-2] if noise.dim() > 3 else 1)
    held = samples + (q_bar.shape[2] if weighting == "decoupled" else 0)
    options["weighting"] = weighting
    return fused.covers_lara(q, k, v, q_bar, k_bar, noise, uniform, **options) and _supported(q, k, v, held)


@kernel(covers_lara)
def lara(q, k, v, q_bar, k_bar, noise, uniform=None, *, features="positive", **options):
    """`attention.mechanisms.lara.lara`."""
    return _attend(q, k, v, *fused.lara_samples(q_bar, k_bar, noise, **options))


def _attend(q, k, v, omega, prior=None, q_bar=None, balance=None, beta=0.0):
    q, k, v, omega, q_bar = map(dense, (q, k, v, omega, q_bar))
    u, mass = _feature_values(k, v, omega)
    mass = mass if prior is None else mass + prior
    log_total = None if q_bar is None else _feature_values(q, None, q_bar)[1]
    balance = balance if balance is None else balance.contiguous()
    return _mix_values(q, omega, mass, u, q_bar, log_total, balance, beta)[0]
