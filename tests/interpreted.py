"""Run by test_triton.py with TRITON_INTERPRET=1, which must be set before Triton is imported: prints what the kernels
compute in Triton's interpreter as JSON.
"""

import json

import torch
from torch.utils.checkpoint import checkpoint

from attention import create_attention, kernels
from attention.kernels import triton_groups, triton_joint
from attention.kernels.check import CASES, CHECKED, GROUP_CASES, Case, errors, example, outputs_and_gradients

triton_groups.PROGRAMS = triton_joint.PROGRAMS = 2  # sums of several windows in one program
CPU = torch.device("cpu")
NAMES, KERNELS = CHECKED[Case].names, CHECKED[Case].kernels
SMALL = Case((3, 4), (2, 3), h=1, c=2)


def largest_difference(function) -> float:
    """Of the output and all gradients, from those of the kernels called plainly."""
    inputs, windows = example(SMALL, CPU)
    found, expected = (outputs_and_gradients(f, NAMES, inputs, windows) for f in (function, KERNELS))
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def twice(*inputs, **windows):
    return (KERNELS(*inputs, **windows) + KERNELS(*inputs, **windows)) / 2


def checkpointed(*inputs, **windows):
    return checkpoint(KERNELS, *inputs, use_reentrant=False, **windows)


def contiguous(q, k, v, *others, **windows):
    return KERNELS(*(x.contiguous() for x in (q, k, v)), *others, **windows)


def channels_apart(q, k, v, *others, **windows):
    return KERNELS(*(x.mT.contiguous().mT for x in (q, k, v)), *others, **windows)


def gradient_of_values_alone() -> float:
    """Its difference from that among all gradients: all else is frozen."""
    inputs, windows = example(SMALL, CPU)
    expected = outputs_and_gradients(KERNELS, NAMES, inputs, windows)["dv"]
    v = inputs[2].detach().requires_grad_()
    y = KERNELS(*inputs[:2], v, *inputs[3:], **windows)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return (v.grad - expected).abs().max().item()


def layer_on_the_path() -> float:
    """The largest difference of a layer's output and gradients on the path "triton" from the plain ones."""
    torch.manual_seed(0)
    attn = create_attention("eva", dim=32, num_heads=2, grid=(6, 4), window_size=3, num_landmarks=6)
    x, found, calls = torch.randn(1, 24, 32), {}, []
    for module in (triton_joint, triton_groups):
        for name in ("joint_softmax", "group_values"):
            if kernel := getattr(module, name, None):
                setattr(module, name, lambda *args, f=kernel, **kwargs: (calls.append(f), f(*args, **kwargs))[1])
    for path in ("plain", "triton"):
        torch.manual_seed(1)
        with kernels.use(path):
            y = attn(x, (6, 4))
        found[path] = [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))]
    assert len(calls) == 2, calls
    return max((a - b).abs().max().item() for a, b in zip(*found.values(), strict=True))


def main() -> None:
    compiled = torch.compile(KERNELS, fullgraph=True, backend="aot_eager")
    uses = {f.__name__: largest_difference(f) for f in (twice, checkpointed, contiguous, channels_apart)}
    uses |= {"compiled": largest_difference(compiled), "frozen": gradient_of_values_alone()}
    uses["layer"] = layer_on_the_path()
    print(json.dumps({"errors": {str(case): errors(case, CPU) for case in (*CASES, *GROUP_CASES)}, "uses": uses}))


if __name__ == "__main__":
    main()
