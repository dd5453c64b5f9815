"""Constant tables are kept, within bounds, and are ordinary tensors whoever asked first."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attention import create_attention
from attention.parts.geometry import Windows
from attention.parts.groups import bins
from attention.parts.tables import MAX_KEPT, kept_table

CPU, META = torch.device("cpu"), torch.device("meta")


@kept_table
def count_to(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


def padded_layer(**options):
    """A layer whose window mask is kept for its backward pass."""
    return create_attention("eva", dim=8, num_heads=2, grid=(5, 7), window_size=3, num_landmarks=6, **options)


def test_equal_arguments_share_a_table_on_each_device():
    assert count_to(5, CPU) is count_to(5, CPU)
    assert count_to(5, META).is_meta
    assert count_to(5, CPU).tolist() == [0, 1, 2, 3, 4]
    assert bins((4, 6), (2, 3), CPU) is bins((4, 6), (2, 3), CPU)
    windows = Windows((4, 6), (3, 3))
    assert windows.mask(CPU) is windows._replace(key_mask=None).mask(CPU)


def test_the_number_of_tables_kept_is_bounded():
    for n in range(MAX_KEPT + 9):
        count_to(n, CPU)
    assert count_to.kept().currsize == MAX_KEPT


def test_an_image_size_first_seen_in_evaluation_trains():
    """Tensors made in inference mode cannot be saved for a backward pass."""
    layer, x = padded_layer(), torch.randn(1, 66, 8)
    with torch.inference_mode():
        layer.eval()(x, (6, 11))
    layer.train()(x, (6, 11)).sum().backward()
    assert not Windows((6, 11), (3, 3)).mask(CPU).is_inference()
    assert all(weight.grad is not None for weight in layer.parameters())


def test_fake_tensors_are_not_kept():
    windows = Windows((5, 8), (3, 3))
    with FakeTensorMode():
        assert isinstance(windows.mask(CPU), FakeTensor)
    assert not isinstance(windows.mask(CPU), FakeTensor)  # made anew
    with FakeTensorMode():
        assert isinstance(windows.mask(CPU), FakeTensor)  # nor are real ones mixed with fake ones


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        return x * windows.mask(CPU)


@pytest.mark.complete
def test_exported_and_compiled_graphs_leave_nothing_behind():
    for windows in (Windows((4, 7), (3, 3)), Windows((4, 8), (3, 3))):
        x = torch.ones(windows.num_windows, 9)
        exported = torch.export.export(Masked(), (x, windows)).module()(x, windows)
        compiled = torch.compile(Masked(), backend="eager", fullgraph=True)(x, windows)
        mask = windows.mask(CPU)
        assert type(mask) is torch.Tensor
        assert torch.equal(exported, mask.float())
        assert torch.equal(compiled, mask.float())


def test_transforms_leave_nothing_behind():
    windows = Windows((5, 9), (3, 3))
    torch.func.vmap(lambda x: x * windows.mask(CPU).sum())(torch.ones(2))
    torch.func.grad(lambda x: (x * windows.mask(CPU).sum()).sum())(torch.ones(2))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(windows.mask(CPU))


def test_copies_and_pickles_of_a_layer_hold_no_table():
    layer, x = padded_layer().eval(), torch.randn(2, 35, 8)
    before = pickle.dumps(layer)
    expected = layer(x, (5, 7))
    assert len(pickle.dumps(layer)) == len(before)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, (5, 7)), expected)
