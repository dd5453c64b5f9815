"""Linear layers that mechanisms learn in addition to the projections."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor


def init_linear(linear: nn.Linear) -> nn.Linear:
    """Initialises a linear layer and returns it: truncated normal of standard deviation 0.02, bias 0."""
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if `module` computes what `kind` does with its own weights: no adapter, quantised or parametrised
    layer took its place, no weight is of a tensor's subclass, as torchao quantises, and no hook watches or changes it.
    """
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    ordinary = all(type(weight) in (Tensor, nn.Parameter, FakeTensor) for weight in module.parameters(recurse=False))
    return type(module) is kind and ordinary and not hooks


def linear_part(linear: nn.Module, x: Tensor, channels: slice) -> Tensor:
    """A slice of the output channels of a linear layer, (..., C) -> (..., channels).

    Computes these channels alone if the layer is plain; otherwise it calls the layer, and slices its output.
    """
    if isinstance(linear, nn.Linear) and is_plain(linear, nn.Linear):
        return F.linear(x, linear.weight[channels], None if linear.bias is None else linear.bias[channels])
    return linear(x)[..., channels]


class LandmarkTransform(nn.Module):
    """Trainable map of group means to landmarks: LayerNorm(Linear(x)), or Linear alone (EVA paper eq. 26; LARA
    paper app. H). It has the width of one head and is shared by all heads, or the width of all heads together.
    """

    def __init__(self, width: int, norm: bool = True):
        super().__init__()
        self.width = width
        self.linear = init_linear(nn.Linear(width, width))
        self.norm = nn.LayerNorm(width, eps=1e-5) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, ..., d) -> (B, h, ..., d)."""
        tokens = x if x.shape[-1] == self.width else x.movedim(1, -2)
        y = self.norm(self.linear(tokens.reshape(-1, self.width))).view_as(tokens)
        return y if tokens is x else y.movedim(-2, 1)
