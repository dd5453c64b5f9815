"""Script of test_triton.py, run with TRITON_INTERPRET=1, which must be set before Triton is imported: prints results of
the kernels in Triton's interpreter as JSON.
"""

import functools
import importlib
import json

import torch
from torch.utils.checkpoint import checkpoint

from attention import create_attention, kernels
from attention.ops.joint_softmax import triton_joint
from bench.check_kernels import CASES, CHECKED, Case, GroupCase, errors, outputs_and_gradients

torch.use_deterministic_algorithms(True)  # fills memory with NaN before a kernel writes it
triton_joint.PROGRAMS = 2  # sums of several blocks in one program
CPU, CALLS = torch.device("cpu"), []
SMALL, TILES = Case((3, 4), (2, 3), h=1, c=2), GroupCase((4, 6), (2, 3))
EVA = {"name": "eva", "window_size": 3, "num_landmarks": 6}
LAYERS = {
    "eva": EVA,
    "eva of one group": EVA | {"num_landmarks": 1},
    "eva without images": EVA | {"B": 0},
    "eva of 80 channels a head": EVA | {"dim": 160},
    "eva of windows that overlap": EVA | {"overlap": 1},
    "eva of bins that differ": EVA | {"grid": (5, 7)},
    "local beyond the grid": {"name": "local", "window_size": 5, "grid": (5, 3)},
    "combiner": {"name": "combiner", "window_size": 2},
    "transformer_ls": {"name": "transformer_ls", "window_size": 3, "num_landmarks": 4},
    "lara": {"name": "lara", "num_landmarks": 4},
    "performer": {"name": "performer", "num_samples": 4},
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


def apart_in_memory(kernel, q, k, v, bias, keys, values, logits, **options):
    """Calls the kernel with images that share memory and logits with strides."""
    q, k, v, keys, values = (x.expand(2, *x.shape[1:]) for x in (q, k, v, keys, values))
    return kernel(q, k, v, bias, keys, values, torch.stack([logits] * 2, -1)[..., 0], **options)[:1]


def mixed_types(kernel, q, k, v, *others, **options):
    """Calls the kernel with the types that autocast leaves if keys and values are normalised."""
    return kernel(q, k.float(), v.float(), *others, **options)


def largest_difference(case, use) -> float:
    """Largest difference of the output and all gradients from those of a plain call of the kernels."""
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case, CPU)
    functions = functools.partial(use, checked.kernels), checked.kernels
    found, expected = (outputs_and_gradients(f, checked.names, inputs, options) for f in functions)
    given = {name for name, x in found.items() if x is not None}
    assert given == ({"y", "dv"} if use is frozen else set(expected))
    return max((found[name] - expected[name]).abs().max().item() for name in given)


def kernels_of_layer(name: str, B: int = 1, dim: int = 32, grid: tuple[int, int] = (6, 4), **options) -> list[str]:
    """Kernels that a layer calls on the path "triton"; asserts that output and gradients equal the plain ones."""
    torch.manual_seed(0)
    attn = create_attention(name, dim=dim, num_heads=2, grid=grid, **options)
    x, found = torch.randn(B, grid[0] * grid[1], dim), {}
    CALLS.clear()
    for path in ("plain", "triton"):
        torch.manual_seed(1)
        with kernels.use(path):
            y = attn(x, grid)
        found[path] = [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))]
    for plain, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-5)  # gradients are sums over all tokens
    return list(CALLS)


def main() -> None:
    for op, name in kernels.TRITON_MODULES.items():
        module = importlib.import_module(name)
        function = getattr(module, op)
        setattr(module, op, lambda *args, f=function, **options: (CALLS.append(f.__name__), f(*args, **options))[1])
    ways = twice, checkpointed, contiguous, channels_apart, compiled, frozen
    uses = {use.__name__: largest_difference(SMALL, use) for use in ways}
    uses |= {f"{use.__name__} tiles": largest_difference(TILES, use) for use in ways[1:5]}
    of_windows = {apart_in_memory: {"log_count": True}, mixed_types: {"dtype": torch.bfloat16}}
    uses |= {use.__name__: largest_difference(SMALL._replace(**fields), use) for use, fields in of_windows.items()}
    layers = {name: kernels_of_layer(**options) for name, options in LAYERS.items()}
    print(json.dumps({"errors": {str(case): errors(case, CPU) for case in CASES}, "uses": uses, "layers": layers}))


if __name__ == "__main__":
    main()
