"""Softmax over windows and landmarks on the packed projection, in Triton kernels, as an operator of PyTorch.

One operator has means, landmarks, samples, group values and the joint softmax of EVA, or the windows alone of local
attention; another has all gradients. Without prefix tokens nothing else is read or written of the size of the tokens,
and no gradient of a token is added to another. Prefix tokens, and summaries that a mechanism computes, are landmarks
that are given; queries of prefix tokens attend by torch's softmax attention. `_covers` states the conditions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ...parts.geometry import Grid, Windows, split_prefix
from ...parts.transforms import softmax_attention
from ..kernels import NAMESPACE, first_order, kernel
from ..triton_tokens import INTERPRETED, block_length, launch, supported
from . import triton_kernels
from .op import Packing

LOG2E = 1 / math.log(2)
LARGEST = 64
"""Largest number of tokens of a window, and of groups."""
RESIDENT = 264
"""Programs that an H100 runs at once, two on each of its multiprocessors."""
PART = 8
"""Windows of a part of an image, between whose loads of landmarks `token_gradient` works."""
LAUNCHED = {"landmark_gradient": (32, 3), "transform_gradient": (64, 1), "token_gradient": (64, 1)}
"""Name of a kernel -> tokens or groups of a block, and stages of loads; (64, 2) for the other kernels."""
GROUPS = 16
"""Groups of a program of `summarise` and `group_gradient`, which compute a product for every group and token."""


class Geometry:
    """Sizes of a call, and launches of its kernels.

    sides: rows and columns of the grid, of windows, where the first window begins, and of groups.
    """

    def __init__(self, qkv: Tensor, keys: Tensor | None, weights: list[Tensor], sides: list[int]):
        self.B, length, _, self.h, self.d = qkv.shape
        grid, window, origin, tile = zip(sides[::2], sides[1::2], strict=True)
        self.grid, self.window, self.origin, self.tile, self.across = grid, window, origin, tile, grid[1] // tile[1]
        self.N, self.m = math.prod(grid), 0 if keys is None else keys.shape[2]
        self.P, self.c = length - self.N, self.m + (grid[0] // tile[0] * self.across if weights else 0)
        axes = zip(grid, window, origin, strict=True)
        self.num_windows = math.prod(triton.cdiv(side - first, size) for side, size, first in axes)
        self.parts = triton.cdiv(self.num_windows, PART)

    def splits(self, length: int) -> int:
        """Parts of an image's work of this length, so that there are programs enough for all multiprocessors."""
        return max(min(length, triton.cdiv(RESIDENT, self.B * self.h)), 1)

    def launch(self, name: str, programs: tuple[int, ...], *arguments, bands: int | None = None) -> None:
        groups = bands * self.across if bands else self.c
        blocks = (block_length(size, LARGEST) for size in (math.prod(self.window), groups, self.c))
        sides = *self.grid, *self.window, *self.origin, self.num_windows, *self.tile
        sizes = self.h, self.d, self.P, *sides, self.m, self.c, bands or 1, *blocks, *LAUNCHED.get(name, (64, 2))
        launch(getattr(triton_kernels, name), programs, *arguments, triton_kernels.Sizes(*sizes))

    def on_bands(self, name: str, *arguments) -> None:
        """Launches a kernel of the groups, whose programs have some rows of groups each."""
        rows, bands = self.grid[0] // self.tile[0], max(GROUPS // self.across, 1)
        self.launch(name, (self.B * self.h, triton.cdiv(rows, bands)), *arguments, bands=bands)


@torch.library.custom_op(f"{NAMESPACE}::packed_attention", mutates_args=())
def _packed(
    qkv: Tensor, bias: Tensor | None, keys: Tensor | None, values: Tensor | None, prior: Tensor | None,
    noise: Tensor | None, weights: list[Tensor], sides: list[int], mu_scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs that `_empty_outputs` lists.

    bias: (h, w, block) in units of log 2, padded by -inf. keys, values: landmarks that are given, (B, h, m, d). prior:
    term of the logits on all landmarks, (windows, c), in units of log 2. weights: W, b, gain and shift of the
    transforms of means of queries and keys; none without groups.
    """
    G = Geometry(qkv, keys, weights, sides)
    y, lse, *summaries = _empty_outputs(G, qkv)
    if keys is not None:
        for table, x in zip(summaries[3:5], (keys, values), strict=True):
            table[:, :, : G.m] = x
    if weights:
        transforms = tuple(weights[:4]), tuple(weights[4:])
        G.on_bands("summarise", qkv, *transforms, noise, *summaries, mu_scale * G.d**-0.25, eps)
    of_landmarks = summaries[3:5] if G.c else (None, None)
    programs = G.B * G.h, max(G.splits(G.num_windows), G.parts)
    G.launch("attend", programs, qkv, bias, *of_landmarks, prior, y, lse)
    return y, lse, *summaries


def _empty_outputs(G: Geometry, qkv: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors of the tokens of the grid and of landmarks: outputs (B, N, h, d), log-sum-exps (B, h, N); (B, h, c,
    ...) means of queries and keys, samples, keys, values and log masses, of given landmarks only keys and values.
    """
    B, N, h, d, c = G.B, G.N, G.h, G.d, G.c
    q_bar, k_bar, k_tilde = (qkv.new_empty(B, h, c, d) for _ in range(3))
    omega, beta, mass, lse = (qkv.new_empty(B, h, *x, dtype=torch.float32) for x in ((c, d), (c, d), (c,), (N,)))
    return qkv.new_empty(B, N, h, d), lse, q_bar, k_bar, omega, k_tilde, beta, mass


@_packed.register_fake
def _(qkv, bias, keys, values, prior, noise, weights, sides, mu_scale, eps):
    return _empty_outputs(Geometry(qkv, keys, weights, sides), qkv)


@torch.library.custom_op(f"{NAMESPACE}::packed_attention_backward", mutates_args=())
def _packed_backward(
    dy: Tensor, saved: list[Tensor], qkv: Tensor, bias: Tensor | None, keys: Tensor | None, prior: Tensor | None,
    weights: list[Tensor], sides: list[int], mu_scale: float, eps: float, of_bias: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradient of qkv, and shares (programs, ...): with `of_bias` in that of the bias, with groups in that of weights,
    and (1, B, h, m, d) gradients of keys and values that are given.

    saved: the outputs of the forward pass.
    """
    G, (y, lse, *summaries) = Geometry(qkv, keys, weights, sides), saved
    dqkv, *shares = _empty_gradients(G, qkv, bias if of_bias else None, weights)
    dqkv[:, : G.P] = 0  # prefix tokens are landmarks, and their queries are not the kernels'
    of_landmarks, of_groups, of_tokens, delta = (None,) * 2, (None,) * 4, (None,) * 3, None
    if G.c:
        q_bar, k_bar, omega, k_tilde, beta, mass = summaries
        splits, total = G.splits(triton.cdiv(G.N, 64)), G.B * G.h * G.c
        delta, of_landmarks = torch.empty_like(lse), (k_tilde, beta)
        of_each = dk_tilde, of_values = [lse.new_empty(splits, *k_tilde.shape) for _ in range(2)]
        inputs = qkv, k_tilde, beta, prior, y, dy, lse
        G.launch("landmark_gradient", (G.B * G.h, splits), *inputs, delta, dk_tilde, of_values, G.B)
        for share, of_splits in zip(shares[-2:], of_each, strict=True) if G.m else ():
            torch.sum(of_splits[..., : G.m, :], 0, keepdim=True, out=share)
    if weights:
        of_tokens = [torch.empty_like(lse) for _ in range(2)]
        of_tokens.append(qkv.new_empty(G.N, block_length(G.c, LARGEST)))  # the members of groups
        d_omega, dbeta, dq_bar, dk_bar = map(torch.empty_like, (beta, q_bar, q_bar, k_bar))
        inputs = qkv, omega, beta, mass, of_values
        G.on_bands("group_gradient", *inputs, d_omega, dbeta, *of_tokens, G.B, splits)
        inputs = tuple(weights[:4]), tuple(weights[4:]), q_bar, k_bar, d_omega, dk_tilde
        outputs, numbers = (dq_bar, dk_bar, shares[of_bias]), (total, splits, mu_scale * G.d**-0.25, eps)
        G.launch("transform_gradient", (len(shares[of_bias]), 2), *inputs, *outputs, *numbers)
        of_groups = omega, dbeta, dq_bar, dk_bar
    inputs = qkv, bias, *of_landmarks, prior, *of_groups, *of_tokens, y, dy, lse, delta
    programs = _programs(G.B * G.parts, G.h) * G.h
    G.launch("token_gradient", (programs,), *inputs, dqkv, shares[0] if of_bias else None, G.B, G.parts)
    return [dqkv, *shares]


def _programs(length: int, each: int) -> int:
    """Programs of work of a length, `each` of which run at once: equal numbers of rounds, few shares of sums."""
    most = max(RESIDENT // each, 1)
    return triton.cdiv(length, triton.cdiv(length, most))


def _empty_gradients(G: Geometry, qkv: Tensor, bias: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
    gradients = [torch.empty_like(qkv)]
    if bias is not None:
        programs = _programs(G.B * G.parts, G.h)
        gradients.append(qkv.new_empty(programs, *bias.shape, dtype=torch.float32))
    if weights:
        programs = _programs(triton.cdiv(G.B * G.h * G.c, LAUNCHED["transform_gradient"][0]), 2)
        gradients.append(qkv.new_empty(programs, 2, G.d * (G.d + 3), dtype=torch.float32))
    if G.m:
        gradients += [qkv.new_empty(1, G.B, G.h, G.m, G.d, dtype=torch.float32) for _ in range(2)]
    return gradients


@_packed_backward.register_fake
def _(dy, saved, qkv, bias, keys, prior, weights, sides, mu_scale, eps, of_bias):
    return _empty_gradients(Geometry(qkv, keys, weights, sides), qkv, bias if of_bias else None, weights)


def _save(ctx, inputs, output):
    qkv, bias, keys, values, prior, _, weights, *ctx.geometry = inputs
    ctx.save_for_backward(qkv, bias, keys, prior, *weights, *output)
    ctx.num_weights, ctx.type_of_values = len(weights), None if values is None else values.dtype
    ctx.set_materialize_grads(False)


@first_order
def _backward(ctx, dy, *_):
    qkv, bias, keys, prior, *tensors = ctx.saved_tensors
    weights, saved = tensors[: ctx.num_weights], tensors[ctx.num_weights :]
    of_bias = ctx.needs_input_grad[1]
    tensors = dy.contiguous(), saved, qkv, bias, keys, prior
    dqkv, *shares = _packed_backward(*tensors, weights, *ctx.geometry, of_bias)
    sums = [share.sum(0) for share in shares]
    dbias = sums.pop(0) if of_bias else None
    of_given = (None, None) if keys is None else (sums[-2].to(keys.dtype), sums[-1].to(ctx.type_of_values))
    of_weights = []
    for transform in sums[0] if weights else ():
        d = qkv.shape[-1]
        matrix, *rows = transform.split([d * d, d, d, d])
        of_weights += [matrix.view(d, d), *rows]
    of_weights = [x.to(w.dtype) for x, w in zip(of_weights, weights, strict=True)]
    return dqkv, dbias, *of_given, None, None, of_weights, *[None] * len(ctx.geometry)


_packed.register_autograd(_backward, setup_context=_save)


def covers_packed(qkv: Tensor, packing: Packing) -> bool:
    """Returns whether the kernels can compute attention on qkv (B, P + N, 3, h, d): see `_covers`; groups have plain
    transforms.
    """
    windows, tiles, landmarks = packing.windows, packing.tiles, packing.landmarks
    num_landmarks = qkv.shape[1] - math.prod(windows.grid) + (tiles.num_windows if tiles else 0)
    return _covers(qkv, windows, num_landmarks) and (landmarks is None or landmarks.plain_transforms() is not None)


def _covers(x: Tensor, windows: Windows, num_landmarks: int) -> bool:
    """Kernels run on a GPU, in half precision, for heads of 16, 32 or 64 channels, windows of at most `LARGEST` tokens
    that do not overlap and are not causal, and at most `LARGEST` landmarks, which all queries share.
    """
    apart = windows.overlap == (0, 0) and not windows.causal and windows.key_mask is None
    fit = 0 < windows.num_queries <= LARGEST and num_landmarks <= LARGEST
    half = x.dtype in (torch.bfloat16, torch.float16) or (INTERPRETED.value and x.dtype == torch.float32)
    return apart and fit and half and x.shape[-1] in (16, 32, 64) and supported(x)


def covers_joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0) -> bool:
    """Returns whether the kernels can compute a joint softmax: see `_covers`; without dropout, and added logits are
    constants that do not differ within a window.
    """
    shared = values is None or (keys is not None and keys.shape[2] == 1)
    of_windows = logits is None or (set(logits.shape[:-3] + logits.shape[-2:-1]) <= {1} and not logits.requires_grad)
    num_landmarks = k.shape[2] - q.shape[2] + (values.shape[3] if shared and values is not None else 0)
    return attn_drop == 0 and shared and of_windows and _covers(q, windows, num_landmarks)


@kernel(covers_joint_softmax)
def joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0):
    """`attention.ops.joint_softmax.op.joint_softmax`, for covered arguments; in memory (B, N, h, d)."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    qkv = torch.stack([x.transpose(1, 2).to(q.dtype) for x in (q, k, v)], 2)
    prior = None if logits is None else logits.reshape(-1, logits.shape[-1]).float() * LOG2E
    keys, values = ([x] if y is None else [x, y[:, :, 0]] for x, y in ((k_prefix, keys), (v_prefix, values)))
    keys, values = (torch.cat(parts, 2) for parts in (keys, values))
    given = (None, None) if keys.shape[2] == 0 else (keys, values)
    return attend_on(qkv, bias, windows, *given, prior).transpose(1, 2)


@kernel(covers_packed)
def packed_attention(qkv: Tensor, packing: Packing) -> Tensor:
    """Attended values (B, h, P + N, d) of qkv (B, P + N, 3, h, d), laid out in memory as (B, P + N, h, d)."""
    windows, tiles, landmarks, bias = packing.windows, packing.tiles, packing.landmarks, packing.bias()
    prior, noise = None, None
    options: dict[str, Any] = {}
    if landmarks is not None:
        transforms = landmarks.plain_transforms()
        weights = [x for each in transforms for module in (each.linear, each.norm) for x in module.parameters()]
        options = {"weights": weights, "mu_scale": landmarks.config.mu_scale, "eps": transforms[0].norm.eps}
        if landmarks.training:
            in_full = qkv.is_cuda and torch.is_autocast_enabled("cuda")  # norms are then in float32
            shape, dtype = (len(qkv), qkv.shape[3], 1, tiles.num_windows), torch.float32 if in_full else qkv.dtype
            noise = landmarks.noise(qkv.new_empty(*shape, qkv.shape[4], dtype=dtype))[:, :, 0, :, 0]
        if packing.log_count:
            prior = qkv.new_full((1, tiles.num_windows), math.log2(tiles.num_queries), dtype=torch.float32)
    options |= {"origin": packing.origin, "tiles": tiles, "noise": noise}
    if (num_prefix := qkv.shape[1] - math.prod(windows.grid)) == 0:
        return attend_on(qkv, bias, windows, prior=prior, **options).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    y = attend_on(qkv, bias, windows, k[:, :, :num_prefix], v[:, :, :num_prefix], prior, **options)
    return torch.cat([softmax_attention(q[:, :, :num_prefix], k, v).transpose(1, 2), y], 1).transpose(1, 2)


def attend_on(
    qkv: Tensor, bias: Tensor | None, windows: Windows, keys: Tensor | None = None, values: Tensor | None = None,
    prior: Tensor | None = None, origin: Grid = (0, 0), tiles: Windows | None = None, noise: Tensor | None = None,
    weights: Sequence[Tensor] = (), mu_scale: float = 1.0, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Attended values (B, N, h, d) of the grid's tokens of qkv (B, P + N, 3, h, d). See `Packing`.

    bias: (h, w, w). keys, values: given landmarks (B, h, m, d). prior: term of the logits on the last landmarks, in
    units of log 2, (1 or windows, ...). noise: of groups, (B, h, c, d).
    """
    if bias is not None:
        width = block_length(windows.num_queries, LARGEST) - windows.num_queries
        bias = F.pad(bias.float() * LOG2E, (0, width), value=-math.inf).contiguous()
    if prior is not None:
        num_landmarks = (0 if keys is None else keys.shape[2]) + (tiles.num_windows if tiles else 0)
        prior = F.pad(prior, (num_landmarks - prior.shape[1], 0)).expand(windows.num_windows, -1).contiguous()
    sides = [*windows.grid, *windows.size, *origin, *(tiles.size if tiles else (1, 1))]
    weights = [x.contiguous() for x in weights]
    return _packed(qkv.contiguous(), bias, keys, values, prior, noise, weights, sides, mu_scale, eps)[0]
