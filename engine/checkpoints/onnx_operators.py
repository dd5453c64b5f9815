"""Translations to ONNX of operators that torch's exporter does not translate; results are equal. Needs onnxscript.

ONNX Runtime adds up int64 in float64, and a sum over no element has no shape in it: mechanisms avoid both.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import INT64
from onnxscript import opset18 as op


def sort(x, stable=None, dim=-1, descending=False):
    """torch.sort(stable=True): TopK of all elements, which keeps the order of equal elements."""
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


def copysign(x, y):
    """Returns the magnitude of x with the sign of y, also of a negative zero."""
    zero, magnitude = op.CastLike(op.Constant(value_float=0.0), y), op.Abs(x)
    is_negative = op.Or(op.Less(y, zero), op.Less(op.Reciprocal(y), zero))
    return op.Where(is_negative, op.Neg(magnitude), magnitude)


def searchsorted(ascending, values, out_int32=False, right=False, side=None, sorter=None):
    """Counts the elements of ascending (..., M) below values (..., s), or with `right` not above them: (..., s)."""
    ascending = op.Unsqueeze(ascending, op.Constant(value_ints=[-2]))
    values = op.Unsqueeze(values, op.Constant(value_ints=[-1]))
    is_before = op.LessOrEqual(ascending, values) if right else op.Less(ascending, values)
    return op.ReduceSum(op.Cast(is_before, to=INT64.dtype), op.Constant(value_ints=[-1]), keepdims=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.sort.stable: sort,
    torch.ops.aten.copysign.Tensor: copysign,
    torch.ops.aten.searchsorted.Tensor: searchsorted,
}
"""Table for torch.onnx.export(custom_translation_table=...)."""
