"""Recording of the operators that a program launches on a device."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}
"""Views that their schema does not declare as views."""


class Launches(TorchDispatchMode):
    """Context that records the operators run inside it.

    Attributes:
        operators: name -> number of runs, without views. An operator is a view if its schema returns an alias of an
            argument that it does not write to, or if it is one of `HIDDEN_VIEWS`.
        waits: operators in which a host would wait for `device`: copies to and from it, and operators whose result's
            shape, or the program's control flow, depends on values of tensors.
    """

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device, self.operators, self.views, self.waits = device, Counter(), Counter(), []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        (self.views if is_view(operator) else self.operators)[str(operator)] += 1
        if waits(operator, args, result, self.device):
            self.waits.append(str(operator))
        return result


def is_view(operator: torch._ops.OpOverload) -> bool:
    """Returns whether the operator launches nothing."""
    aliases = [x.alias_info for x in operator._schema.returns if x.alias_info is not None]
    return operator in HIDDEN_VIEWS or (bool(aliases) and not any(alias.is_write for alias in aliases))


def waits(operator: torch._ops.OpOverload, args: tuple, result: object, device: str) -> bool:
    """Returns whether the host waits for `device` in the operator; operators on the host alone do not count."""
    tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
    places = {x.device.type for x in tensors if x.ndim or operator.name().startswith(("aten::_to_copy", "aten::copy_"))}
    if operator in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        return device in places and len(places) > 1
    if device not in {x.device.type for x in tensors}:
        return False
    if operator.name().startswith(("aten::index.", "aten::index_put", "aten::_unsafe_index")):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])  # numbers, not a mask
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags))
