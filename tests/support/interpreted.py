"""Run by test_triton.py with TRITON_INTERPRET=1, which must be set before Triton is imported: prints what the kernels
compute in Triton's interpreter as JSON.
"""

import functools
import importlib
import json

import torch
from torch.utils.checkpoint import checkpoint

from attention import create_attention, kernels
from attention.ops.group_values import triton_groups
from attention.ops.joint_softmax import triton_joint
from attention.ops.random_features import triton_random_features
from bench.check_kernels import CASES, CHECKED, Case, GroupCase, LaraCase, errors, outputs_and_gradients

torch.use_deterministic_algorithms(True)  # fills memory with NaN before a kernel writes it
for module in (triton_joint, triton_groups, triton_random_features):
    module.PROGRAMS = 2  # sums of several blocks in one program
CPU, CALLS = torch.device("cpu"), []
SMALL = Case((3, 4), (2, 3), h=1, c=2), LaraCase(12, 2, h=1)
LAYERS = {  # their options, and the kernels that they call
    "eva": ({"window_size": 3, "num_landmarks": 6}, ["group_values", "joint_softmax"]),
    "combiner": ({"window_size": 2}, ["joint_softmax"]),
    "lara": ({"num_landmarks": 4}, ["lara"]),
    "performer": ({"num_samples": 4}, ["performer"]),
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
    """All but the values."""
    return kernel(q.detach(), k.detach(), v, *(x if x is None else x.detach() for x in others), **options)


def apart_in_memory(kernel, q, k, v, bias, keys, values, logits, **options):
    """Images in one place, logits that do not lie side by side."""
    q, k, v, keys, values = (x.expand(2, *x.shape[1:]) for x in (q, k, v, keys, values))
    return kernel(q, k, v, bias, keys, values, torch.stack([logits] * 2, -1)[..., 0], **options)[:1]


def mixed_types(kernel, q, k, v, *others, **options):
    """As autocast leaves them where keys and values are normalised."""
    return kernel(q, k.float(), v.float(), *others, **options)


def largest_difference(case, use) -> float:
    """Of the output and all gradients, from those of the kernels called plainly."""
    checked = CHECKED[type(case)]
    inputs, options = checked.example(case, CPU)
    functions = functools.partial(use, checked.kernels), checked.kernels
    found, expected = (outputs_and_gradients(f, checked.names, inputs, options) for f in functions)
    given = {name for name, x in found.items() if x is not None}
    assert given == ({"y", "dv"} if use is frozen else set(expected))
    return max((found[name] - expected[name]).abs().max().item() for name in given)


def layer_on_the_path(name: str) -> float:
    """The largest difference of a layer's output and gradients on the path "triton" from the plain ones."""
    torch.manual_seed(0)
    options, ops = LAYERS[name]
    attn = create_attention(name, dim=32, num_heads=2, grid=(6, 4), **options)
    x, found = torch.randn(1, 24, 32), {}
    CALLS.clear()
    for path in ("plain", "triton"):
        torch.manual_seed(1)
        with kernels.use(path):
            y = attn(x, (6, 4))
        found[path] = [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))]
    assert ops == CALLS, CALLS
    return max((a - b).abs().max().item() for a, b in zip(*found.values(), strict=True))


def main() -> None:
    for op, name in kernels.TRITON_MODULES.items():
        module = importlib.import_module(name)
        function = getattr(module, op)
        setattr(module, op, lambda *args, f=function, **options: (CALLS.append(f.__name__), f(*args, **options))[1])
    ways = twice, checkpointed, contiguous, channels_apart, compiled, frozen
    uses = {f"{use.__name__} {case}": largest_difference(case, use) for case in SMALL for use in ways}
    uses |= {f"{use.__name__} tiles": largest_difference(GroupCase((4, 6), (2, 3)), use) for use in ways[1:5]}
    of_windows = {apart_in_memory: {"log_count": True}, mixed_types: {"dtype": torch.bfloat16}}
    uses |= {use.__name__: largest_difference(SMALL[0]._replace(**fields), use) for use, fields in of_windows.items()}
    layers = {name: layer_on_the_path(name) for name in LAYERS}
    print(json.dumps({"errors": {str(case): errors(case, CPU) for case in CASES}, "uses": uses, "layers": layers}))


if __name__ == "__main__":
    main()
