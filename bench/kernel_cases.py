"""Cases of the Triton kernels, the functions that they check, and errors relative to the literal twins.

Tests and `bench.check_kernels` go through them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from attention import kernels
from attention.mechanisms.lara import lara, lara_reference
from attention.mechanisms.performer import performer, performer_reference
from attention.ops.group_values import triton_tiles
from attention.ops.group_values.op import group_values, group_values_reference
from attention.ops.joint_softmax import triton_joint
from attention.ops.joint_softmax.op import joint_softmax, joint_softmax_reference
from attention.ops.random_features import triton_features
from attention.parts.features import upcast
from attention.parts.geometry import Grid, Windows, split_heads
from attention.parts.groups import bins

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


class GroupCase(NamedTuple):
    """Values of groups that are equal tiles; `bins` is the number of rows and columns of tiles."""

    grid: Grid
    bins: Grid
    d: int = 16
    B: int = 1
    h: int = 2
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


HALF = torch.bfloat16, torch.float16
CASES = [
    Case((5, 7), (3, 4)),
    Case((4, 6), (2, 3), B=2, h=1, d=20, log_count=True),
    Case((5, 3), (3, 3), B=2, h=3, c=1, d=1, bias=False),
    Case((5, 7), (3, 4), P=1, h=1, leave_one_out=True),
    Case((5, 4), (3, 4), P=2, h=1, log_count=True),
    Case((3, 5), (4, 6), c=5, d=12, h=1),
    Case((4, 5), (4, 5), c=0, d=40),
    Case((4, 5), (2, 3), c=0, P=1, bias=False),
    Case((1, 20), (1, 6), d=33, h=1),
    Case((7, 8), (7, 7), c=40, h=1),
    Case((4, 6), (3, 3), d=64),
    *(Case((9, 8), window, c=49, d=40, h=1, dtype=dtype) for window in ((7, 7), (9, 8)) for dtype in HALF),
    GroupCase((6, 8), (2, 4), d=20, B=2, h=3),
    GroupCase((6, 10), (6, 5), d=64, B=2),
    GroupCase((4, 6), (4, 6), d=1, h=1),
    GroupCase((16, 16), (1, 1), h=1),
    *(GroupCase((9, 6), (3, 2), d=40, h=1, dtype=dtype) for dtype in HALF),
    FeatureCase(35, 6, B=2),
    FeatureCase(70, 17, d=20, P=1, h=3),
    FeatureCase(20, 2, d=1),
    FeatureCase(35, 6, "decoupled", B=2),
    FeatureCase(70, 17, "decoupled", d=20, P=1, h=1),
    FeatureCase(35, 6, "balance", d=33),
    FeatureCase(150, 128, d=64, h=1, dtype=torch.bfloat16),
    FeatureCase(100, 49, "decoupled", d=40, h=1, dtype=torch.bfloat16),
]


def example(case: Case, device: torch.device) -> tuple[list[Tensor | None], dict[str, Windows]]:
    """Returns arguments and keywords of `joint_softmax`. Tensors that autocast keeps in fp32 are in fp32."""
    B, h, c, d, P = case.B, case.h, case.c, case.d, case.P
    generator, windows = torch.Generator().manual_seed(0), Windows(case.grid, case.window)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

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


def group_example(case: GroupCase, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments of `group_values`."""
    generator, c = torch.Generator().manual_seed(0), case.bins[0] * case.bins[1]
    tokens = torch.randn(case.B, case.grid[0] * case.grid[1], 2 * case.h * case.d, generator=generator)
    omega = torch.randn(case.B, case.h, 1, c, 1, case.d, generator=generator)
    tokens, omega = tokens.to(device, case.dtype), omega.to(device)
    return [*split_heads(tokens, 2, case.h), omega, bins(case.grid, case.bins, device)], {}


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


class Checked(NamedTuple):
    """Functions of one signature that a kind of case checks, and names of the first arguments, which get gradients.

    plain: PyTorch's version, without autocast in half precision.
    """

    example: Callable
    names: tuple[str, ...]
    kernels: Callable
    plain: Callable
    reference: Callable


CHECKED = {
    Case: Checked(
        example, ("q", "k", "v", "bias", "keys", "values"), triton_joint.joint_softmax, plain, joint_softmax_reference
    ),
    GroupCase: Checked(
        group_example, ("k", "v", "omega"), triton_tiles.group_values, group_values, group_values_reference
    ),
}
PERFORMER = Checked(
    feature_example, ("q", "k", "v", "omega"), triton_features.performer, performer, performer_reference
)
OF_LARA = "q", "k", "v", "q_bar", "k_bar", "noise"
LARA = Checked(feature_example, OF_LARA, triton_features.lara, lara, lara_reference)


def checked_by(case: NamedTuple) -> Checked:
    """Returns the functions that a case checks."""
    if isinstance(case, FeatureCase):
        return PERFORMER if case.weighting is None else LARA
    return CHECKED[type(case)]


def outputs_and_gradients(function: Callable, names: Sequence[str], inputs: list, options: dict) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the named inputs."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs[: len(names)]]
    outputs = function(*leaves, *inputs[len(names) :], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(y.shape, generator=generator).to(y) for y in outputs])
    gradients = {f"d{name}": x.grad for name, x in zip(names, leaves, strict=True) if x is not None}
    return dict(zip(("y", "log_mass"), outputs, strict=False)) | gradients


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
