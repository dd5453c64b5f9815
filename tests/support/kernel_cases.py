"""Cases of the Triton kernels, the functions that they check, and errors relative to the literal twins."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import kernels
from attention.mechanisms.eva import eva, eva_reference
from attention.mechanisms.lara import lara, lara_reference
from attention.mechanisms.performer import performer, performer_reference
from attention.mechanisms.shifted_window import shifted_window, shifted_window_reference
from attention.ops.group_values.op import group_mean
from attention.ops.joint_softmax.op import joint_softmax, joint_softmax_reference
from attention.ops.packed import triton_packed
from attention.ops.random_features import triton_features
from attention.parts.features import upcast
from attention.parts.geometry import Grid, Windows, split_heads, split_prefix
from attention.parts.groups import Groups, bins

FP32_ERROR, BEYOND_PLAIN, ROUNDINGS = 1e-5, 1.15, 2
"""Largest RMS error relative to float64: absolute for fp32; in half precision a multiple of PyTorch's error, or for
random features, which PyTorch computes in fp32 on a CPU, a number of roundings.
"""


def changed(case: NamedTuple) -> str:
    """Formats the fields of a case that differ from their defaults."""
    given = {name: value for name, value in case._asdict().items() if value != case._field_defaults.get(name)}
    return ", ".join(f"{name} {value}" for name, value in given.items())


class Case(NamedTuple):
    """A joint softmax: B images, h heads of width d, c landmarks, P prefix tokens.

    log_count: the landmarks' logits differ. leave_one_out: every window attends to all landmarks but one of its own.
    """

    grid: Grid
    window: Grid
    c: int = 6
    d: int = 16
    P: int = 0
    B: int = 1
    h: int = 2
    bias: bool = True
    log_count: bool = False
    leave_one_out: bool = False
    dtype: torch.dtype = torch.float32
    __str__ = changed


class FeatureCase(NamedTuple):
    """Random features: N tokens, P prefix tokens among the keys, s samples; c of them are of LARA's proposals.

    weighting: of LARA's proposals; None for Performer.
    """

    N: int
    s: int
    weighting: str | None = None
    d: int = 16
    P: int = 0
    B: int = 1
    h: int = 2
    dtype: torch.dtype = torch.float32
    __str__ = changed


class PackedCase(NamedTuple):
    """Attention on the packed projection; `bins` is the number of rows and columns of groups, None: windows alone.

    P: prefix tokens. shift: row and column at which windows begin.
    """

    grid: Grid
    window: Grid
    bins: Grid | None = None
    P: int = 0
    d: int = 16
    B: int = 1
    h: int = 2
    shift: Grid = (0, 0)
    bias: bool = True
    noise: bool = True
    log_count: bool = False
    dtype: torch.dtype = torch.float32
    __str__ = changed


HALF = torch.bfloat16, torch.float16
CASES = [
    Case((5, 7), (3, 4)),
    Case((4, 6), (2, 3), B=2, h=1, d=32, log_count=True),
    Case((5, 3), (3, 3), B=2, h=3, c=1, bias=False),
    Case((5, 7), (3, 4), P=1, h=1, c=9, leave_one_out=True),
    Case((5, 4), (3, 4), P=2, h=1, log_count=True),
    Case((4, 5), (2, 3), c=0, P=1, bias=False),
    Case((1, 20), (1, 6), c=0, d=64, h=1),
    *(Case((9, 8), (7, 7), c=49, d=32, dtype=dtype) for dtype in HALF),
    FeatureCase(35, 6, B=2),
    FeatureCase(70, 17, d=20, P=1, h=3),
    FeatureCase(20, 2, d=1),
    FeatureCase(35, 6, "decoupled", B=2),
    FeatureCase(70, 17, "decoupled", d=20, P=1, h=1),
    FeatureCase(35, 6, "balance", d=33),
    FeatureCase(150, 128, d=64, h=1, dtype=torch.bfloat16),
    FeatureCase(100, 49, "decoupled", d=40, h=1, dtype=torch.bfloat16),
    PackedCase((6, 8), (3, 4), (2, 4), B=2, h=3),
    PackedCase((10, 9), (7, 7), (5, 3), h=1, d=32, log_count=True),
    PackedCase((4, 6), (2, 3), (2, 3), d=64, bias=False, noise=False),
    PackedCase((8, 8), (8, 8), (1, 1), h=1, noise=False),
    PackedCase((5, 7), (3, 4), B=2),
    PackedCase((6, 8), (3, 4), h=3, shift=(1, 2)),
    PackedCase((5, 7), (4, 4), shift=(2, 2), bias=False),
    PackedCase((6, 8), (3, 4), (2, 4), P=1, B=2, h=3, log_count=True),
    PackedCase((10, 9), (7, 7), (5, 3), P=5, h=1, d=32, noise=False),
    PackedCase((4, 6), (4, 6), (1, 1), P=2, d=64, bias=False),
    PackedCase((5, 7), (3, 4), P=1, B=2),
    PackedCase((6, 8), (3, 4), P=4, h=3, shift=(1, 2), bias=False),
    *(PackedCase((14, 7), (7, 7), (2, 7), d=32, h=1, dtype=dtype) for dtype in HALF),
    *(PackedCase((14, 7), (7, 7), (2, 7), P=1, d=32, B=2, h=2, dtype=dtype) for dtype in HALF),
]


def seeded(device: torch.device) -> Callable[..., Tensor]:
    """Function of a shape that draws the same normal numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def example(case: Case, device: torch.device) -> tuple[list[Tensor | None], dict[str, Windows]]:
    """Returns arguments and keywords of `joint_softmax`. Tensors that autocast keeps in fp32 are in fp32."""
    B, h, c, d, P = case.B, case.h, case.c, case.d, case.P
    normal, windows = seeded(device), Windows(case.grid, case.window)
    q, k, v = split_heads(normal(B, P + math.prod(case.grid), 3 * h * d).to(case.dtype), 3, h)
    bias = normal(h, windows.num_queries, windows.num_keys) if case.bias else None
    keys, values = normal(2, B, h, 1, c, d) if c else (None, None)
    logits, landmark = None, torch.arange(c, device=device)
    if case.log_count or case.leave_one_out:
        logits = (landmark + 1.0).log()[None, None] * case.log_count
    if case.leave_one_out:
        window = torch.arange(windows.num_windows, device=device)[:, None, None]
        logits = logits.masked_fill(window % c == landmark, -torch.inf)
    return [q[:, :, P:], k, v, bias, keys, values, logits], {"windows": windows}


def plain(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows) -> Tensor:
    """Computes the op that the kernels replace, with landmarks' logits in fp32, which autocast would round.

    Logits of windows are products as PyTorch rounds them in half types, also in float16, where the op itself has them
    in fp32 because they may overflow: the error of the kernels is a multiple of PyTorch's.
    """
    if keys is not None:
        on_keys = upcast(windows.partition(q)) * q.shape[-1] ** -0.5 @ keys.mT
        logits = on_keys if logits is None else on_keys + logits
    with patch("attention.ops.joint_softmax.op.product", lambda x, y: upcast(x @ y)):
        return joint_softmax(q, k, v, bias, values=values, logits=logits, windows=windows)


def feature_example(case: FeatureCase, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments and keywords of `performer` or `lara`."""
    B, h, s, d, P = case.B, case.h, case.s, case.d, case.P
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(B, P + case.N, 3 * h * d, generator=generator)
    samples = torch.randn(h, s, d, generator=generator)
    landmarks = torch.randn(2, B, h, s, d, generator=generator) / 2
    q, k, v = split_heads(tokens.to(device, case.dtype), 3, h)
    q, samples, landmarks = q[:, :, P:], samples.to(device), landmarks.to(device)
    if case.weighting is None:
        return [q, k, v, samples], {}
    return [q, k, v, *landmarks, samples[:, :, None]], {"weighting": case.weighting}


WEIGHTS = *("q_matrix", "q_bias", "q_gain", "q_shift"), *("k_matrix", "k_bias", "k_gain", "k_shift")
"""Weights of both landmark transforms: LayerNorm(Linear(mean))."""


def packed_example(case: PackedCase, device: torch.device) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Returns arguments and keywords of `packed`."""
    B, h, d, (H, W), w = case.B, case.h, case.d, case.grid, math.prod(case.window)
    normal = seeded(device)
    qkv, bias = normal(B, case.P + H * W, 3, h, d).to(case.dtype), normal(h, w, w) if case.bias else None
    tiles, noise, weights = None, None, [None] * 8
    if case.bins:
        tiles = Windows(case.grid, (H // case.bins[0], W // case.bins[1]))
        noise = normal(B, h, math.prod(case.bins), d) if case.noise else None
        weights = [x for _ in "qk" for x in (normal(d, d) * d**-0.5, normal(d) / 4, 1 + normal(d) / 4, normal(d) / 4)]
    windows = Windows(case.grid, case.window)
    options = {"windows": windows, "shift": case.shift, "tiles": tiles, "noise": noise, "log_count": case.log_count}
    return [qkv, bias, *weights], options


def packed_kernels(qkv, bias, *weights, windows, shift, tiles, noise, log_count) -> Tensor:
    """The kernels of attention on the packed projection, on modules with these weights."""
    first, second = (step - side if step else 0 for step, side in zip(shift, windows.size, strict=True))
    keys, values, prior = None, None, None
    if num_prefix := qkv.shape[1] - math.prod(windows.grid):
        keys, values = (x[:, :num_prefix].transpose(1, 2) for x in qkv.unbind(2)[1:])
    options = {"origin": (first, second), "tiles": tiles, "noise": noise}
    options |= {"weights": weights} if tiles else {}
    if log_count:
        prior = torch.full((1, tiles.num_windows), math.log2(tiles.num_queries), device=qkv.device)
    return triton_packed.attend_on(qkv, bias, windows, keys, values, prior, **options)


def packed_parts(
    attention: Mapping[str, Callable], mean: Callable, qkv, bias, *weights, windows, shift, tiles, noise, log_count
) -> Tensor:
    """`packed_kernels` by functions of mechanisms, and a function of tokens and groups that returns their means."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    q = split_prefix(q, math.prod(windows.grid))[1]
    if tiles is None:
        function = attention["shifted_window"]
        return function(q, k, v, bias, windows=windows, shift=shift).transpose(1, 2)
    counts = tuple(side // size for side, size in zip(tiles.grid, tiles.size, strict=True))
    groups, tilde = bins(tiles.grid, counts, qkv.device), []
    for x, (matrix, vector, gain, other) in ((q, weights[:4]), (split_prefix(k, q.shape[2])[1], weights[4:])):
        linear = F.linear(mean(x, groups), matrix, vector)
        tilde.append(F.layer_norm(linear, linear.shape[-1:], gain, other))
    mu = sum(tilde) * qkv.shape[-1] ** -0.25
    omega = (mu if noise is None else mu + noise[:, :, None])[..., None, :]
    options = {"groups": groups, "windows": windows, "log_count": log_count}
    return attention["eva"](q, k, v, tilde[1], mu, omega, bias, **options).transpose(1, 2)


def literal_mean(x: Tensor, groups: Groups) -> Tensor:
    """Means of groups, group by group."""
    return torch.stack([x[:, :, members].mean(2) for members in groups.members[0]], 2)[:, :, None]


def packed_plain(qkv, *weights, **options) -> Tensor:
    """`packed_kernels` by PyTorch's operators, as autocast runs them in half precision."""
    with torch.autocast(qkv.device.type, qkv.dtype, enabled=qkv.element_size() == 2):
        functions = {"eva": eva, "shifted_window": shifted_window}
        return packed_parts(functions, group_mean, qkv, *weights, **options)


def packed_reference(*arguments, **options) -> Tensor:
    """`packed_kernels` by the mechanisms' literal twins."""
    twins = {"eva": eva_reference, "shifted_window": shifted_window_reference}
    return packed_parts(twins, literal_mean, *arguments, **options)


class Checked(NamedTuple):
    """Functions of one signature that a kind of case checks, and names of the first arguments, which get gradients.

    plain: PyTorch's version, without autocast in half precision.
    """

    example: Callable
    names: tuple[str, ...]
    kernels: Callable
    plain: Callable
    reference: Callable


JOINT = Checked(
    example, ("q", "k", "v", "bias", "keys", "values"), triton_packed.joint_softmax, plain, joint_softmax_reference
)
PACKED = Checked(packed_example, ("qkv", "bias", *WEIGHTS), packed_kernels, packed_plain, packed_reference)
PERFORMER = Checked(
    feature_example, ("q", "k", "v", "omega"), triton_features.performer, performer, performer_reference
)
OF_LARA = "q", "k", "v", "q_bar", "k_bar", "noise"
LARA = Checked(feature_example, OF_LARA, triton_features.lara, lara, lara_reference)


def checked_by(case: NamedTuple) -> Checked:
    """Returns the functions that a case checks."""
    if not isinstance(case, FeatureCase):
        return JOINT if isinstance(case, Case) else PACKED
    return PERFORMER if case.weighting is None else LARA


def outputs_and_gradients(function: Callable, names: Sequence[str], inputs: list, options: dict) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the named inputs."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs[: len(names)]]
    y = function(*leaves, *inputs[len(names) :], **options)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    gradients = {f"d{name}": x.grad for name, x in zip(names, leaves, strict=True) if x is not None}
    return {"y": y} | gradients


def errors(case: NamedTuple, device: torch.device) -> dict[str, tuple[float, float]]:
    """Returns RMS errors of the kernels and of plain PyTorch, relative to the literal twin in float64."""
    checked = checked_by(case)
    inputs, options = checked.example(case, device)
    exact = [x.double() if isinstance(x, Tensor) else x for x in inputs]
    truth = outputs_and_gradients(checked.reference, checked.names, exact, options)
    functions = checked.kernels, checked.plain
    with kernels.use("torch"):
        found = [outputs_and_gradients(function, checked.names, inputs, options) for function in functions]
    return {
        name: tuple(((x[name] - y).square().mean() / y.square().mean()).sqrt().item() for x in found)
        for name, y in truth.items()
    }


def excess(case: NamedTuple, error: float, plain_error: float) -> float:
    """Returns an error as a multiple of the allowed error."""
    if case.dtype == torch.float32:
        return error / FP32_ERROR
    roundings = ROUNDINGS * torch.finfo(case.dtype).eps if isinstance(case, FeatureCase) else 0.0
    return error / max(FP32_ERROR, BEYOND_PLAIN * plain_error, roundings)
