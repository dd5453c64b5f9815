"""Script of test_triton.py, run with TRITON_INTERPRET=1, which must be set before Triton is imported: prints results of
the kernels in Triton's interpreter as JSON.
"""

import functools
import json
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import create_attention, kernels
from attention.ops import memory
from attention.ops.packed import triton_packed
from attention.ops.random_features import triton_features
from tests.support.kernel_cases import CASES, Case, FeatureCase, PackedCase, checked_by, errors, outputs_and_gradients

torch.use_deterministic_algorithms(True)  # fills memory with NaN before a kernel writes it
triton_features.PROGRAMS = 2  # sums of several blocks in one program
triton_packed.RESIDENT, triton_packed.PART = 6, 3  # programs of several parts, images of several programs
CPU, CALLS = torch.device("cpu"), []
FEATURES, PROPOSALS = FeatureCase(35, 6), FeatureCase(35, 6, "decoupled", B=3)
JOINT = Case((3, 4), (2, 3), h=1, c=2)
PACKED = PackedCase((4, 6), (2, 3), (2, 2), P=1, h=1, bias=False)
EVA = {"name": "eva", "window_size": 3, "num_landmarks": 6}
LARA = {"name": "lara", "num_landmarks": 4}
LAYERS = {
    "eva": EVA,
    "eva of one group": EVA | {"num_landmarks": 1},
    "eva without images": EVA | {"B": 0},
    "eva of 80 channels a head": EVA | {"dim": 160},
    "eva of windows that overlap": EVA | {"overlap": 1},
    "eva of bins that differ": EVA | {"grid": (5, 7)},
    "eva of released options": EVA | {"released": True, "log_count": True},
    "eva of groups in raster order": EVA | {"partition": "all_1d"},
    "eva of groups outside windows": EVA | {"partition": "mask"},
    "eva of two samples": EVA | {"num_samples": 2},
    "eva with a local term": EVA | {"local": True},
    "eva with a class token": EVA | {"num_prefix_tokens": 1},
    "eva with dropout": EVA | {"attn_drop": 0.1},
    "shifted windows": {"name": "shifted_window", "window_size": 3, "layer": 1},
    "local beyond the grid": {"name": "local", "window_size": 5, "grid": (5, 3)},
    "combiner": {"name": "combiner", "window_size": 2},
    "transformer_ls": {"name": "transformer_ls", "window_size": 3, "num_landmarks": 4},
    "local with registers and a local term": {"name": "local", "window_size": 3, "num_prefix_tokens": 5, "local": True},
    "lara": LARA | {"dtype": torch.bfloat16},
    "lara of float32": LARA,
    "lara of 70 landmarks": LARA | {"num_landmarks": 70, "grid": (14, 10), "dtype": torch.bfloat16},
    "lara of balanced weights": LARA | {"weighting": "balance", "dtype": torch.bfloat16},
    "performer": {"name": "performer", "num_samples": 4, "dtype": torch.bfloat16},
    "performer of 129 samples": {"name": "performer", "num_samples": 129, "dtype": torch.bfloat16},
    "performer of relu": {"name": "performer", "num_samples": 4, "features": "relu", "dtype": torch.bfloat16},
}


def twice(kernel, *inputs, **options):
    return (kernel(*inputs, **options) + kernel(*inputs, **options)) / 2


def checkpointed(kernel, *inputs, **options):
    return checkpoint(kernel, *inputs, use_reentrant=False, **options)


def contiguous(kernel, q, k, v, *others, **options):
    return kernel(*(x.contiguous() for x in (q, k, v)), *others, **options)


def channels_apart(kernel, q, k, v, *others, **options):
    return kernel(*(x.mT.contiguous().mT for x in (q, k, v)), *others, **options)


def compiled(kernel, *inputs, **options):
    return torch.compile(kernel, fullgraph=True, backend="aot_eager")(*inputs, **options)


def frozen(kernel, q, k, v, *others, **options):
    """Calls the kernel with frozen inputs, except for the values."""
    return kernel(q.detach(), k.detach(), v, *(x if x is None else x.detach() for x in others), **options)


def largest_difference(case, use) -> float:
    """Largest difference of the output and all gradients from those of a plain call of the kernels."""
    checked = checked_by(case)
    inputs, options = checked.example(case, CPU)
    functions = functools.partial(use, checked.kernels), checked.kernels
    found, expected = (outputs_and_gradients(f, checked.names, inputs, options) for f in functions)
    given = {name for name, x in found.items() if x is not None}
    assert given == ({"y", "dv"} if use is frozen else set(expected))
    return max((found[name] - expected[name]).abs().max().item() for name in given)


def kernels_of_layer(
    name: str, B: int = 1, dim: int = 32, grid: tuple[int, int] = (6, 4), dtype: torch.dtype | None = None, **options
) -> list[str]:
    """Kernels that a layer calls on the path "triton"; asserts that output and gradients equal the plain ones.

    dtype: of autocast, for which values and gradients are close instead.
    """
    torch.manual_seed(0)
    attn = create_attention(name, dim=dim, num_heads=2, grid=grid, **options)
    x, found = torch.randn(B, attn.num_prefix_tokens + grid[0] * grid[1], dim), {}
    CALLS.clear()
    for path in ("plain", "triton"):
        torch.manual_seed(1)
        with kernels.use(path), torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = attn(x, grid)
        found[path] = [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))]
    for plain, other in zip(*found.values(), strict=True):
        if dtype is None:
            torch.testing.assert_close(other, plain, rtol=0, atol=1e-5)  # gradients are sums over all tokens
        elif plain.norm() > 1e-3:  # others are 0 but for roundings
            assert (other - plain).norm() < 0.03 * plain.norm(), (name, (other - plain).norm() / plain.norm())
    return list(CALLS)


def kernels_by_default() -> dict[str, list[str]]:
    """Kernels that a layer calls on several paths, by the GPU's compute capability, eager and compiled."""
    found = {}
    for capability in (8, 0), (7, 5):
        kernels.refusal_of.cache_clear()
        torch.compiler.reset()
        with (
            patch.object(memory, "on_gpu", lambda x: True),
            patch.object(torch.cuda, "get_device_capability", lambda gpu, found=capability: found),
        ):
            attn, x = create_attention(**EVA, dim=32, num_heads=2, grid=(6, 4)), torch.randn(1, 24, 32)
            for way, layer in ("eager", attn), ("compiled", torch.compile(attn, fullgraph=True, backend="aot_eager")):
                for path, half in ("auto", True), ("torch", True), ("auto", False):
                    CALLS.clear()
                    with kernels.use(path), torch.autocast("cpu", torch.bfloat16, enabled=half):
                        layer(x, (6, 4)).sum().backward()
                    found[f"{capability} {way} {path}{'' if half else ' in float32'}"] = list(CALLS)
    return found


def kernels_by_times() -> dict[str, Any]:
    """Kernels that layers call after a pass in which LARA's kernel was the faster path and EVA's was not."""

    def clock(call) -> float:
        CALLS.clear()
        call()
        return (1.0 if CALLS[0] == "lara" else 3.0) if CALLS else 2.0

    kernels.refusal_of.cache_clear()
    torch.compiler.reset()
    with (
        patch.object(memory, "on_gpu", lambda x: True),
        patch.object(torch.cuda, "get_device_capability", lambda gpu: (8, 0)),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layers = [create_attention(**each, dim=32, num_heads=2, grid=(6, 4)) for each in (EVA, LARA)]
        attn, x, speedups = nn.Sequential(*layers), torch.randn(2, 24, 32), {}
        with kernels.use("auto", speedups, clock):
            attn(x).sum().backward()
        found: dict[str, Any] = dict(speedups)
        for way, layer in ("eager", attn), ("compiled", torch.compile(attn, fullgraph=True, backend="aot_eager")):
            CALLS.clear()
            with kernels.use("auto", speedups):
                layer(x)
            found[way] = list(CALLS)
    return found


def second_derivatives(case) -> str:
    """The message of the error that a kernel raises when its gradients are differentiated; "" without an error."""
    checked = checked_by(case)
    (x, *others), options = checked.example(case, CPU)
    y = checked.kernels(x.requires_grad_(), *others, **options)
    try:
        torch.autograd.grad(y[0].sum(), x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    kernels.import_kernels()
    for op, (run, covers) in kernels._triton.items():
        kernels._triton[op] = kernels.Kernel(
            lambda *args, f=run, **options: (CALLS.append(f.__name__), f(*args, **options))[1], covers
        )
    ways = twice, checkpointed, compiled
    uses = {f"{use.__name__} packed": largest_difference(PACKED, use) for use in ways}
    for case in (FEATURES, PROPOSALS, JOINT):
        every_way = *ways, contiguous, channels_apart, frozen
        uses |= {f"{use.__name__} {case}": largest_difference(case, use) for use in every_way}
    layers = {name: kernels_of_layer(**options) for name, options in LAYERS.items()}
    found = {"errors": {str(case): errors(case, CPU) for case in CASES}, "uses": uses, "layers": layers}
    refusals = [second_derivatives(case) for case in (FEATURES, PROPOSALS, PACKED, JOINT)]
    found |= {"default": kernels_by_default(), "timed": kernels_by_times(), "refusals": refusals}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
