"""Bounds on the operators that a layer launches, and checks that training steps never wait for the device."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from attention import create_attention, kernels
from engine.training.graphs import host_state
from tests.support.cases import Case
from tests.support.facts import CASES, FACTS, ORDINARY
from tests.support.launches import Launches

BOUNDS = {"eva": (42, 102), "lara": (62, 155), "performer": (24, 54), "local": (24, 46)}
"""Largest numbers of operators, without views, of a layer of DeiT-Tiny/16 in training: in the forward pass, and in both
passes. torch 2.15 launches about 3 fewer; another version may launch about 3 more."""


@pytest.mark.parametrize("name", BOUNDS)
def test_a_layer_launches_few_operators(name: str):
    torch.manual_seed(0)
    layer, x = create_attention(name, dim=192, num_heads=3, grid=(14, 14)), torch.randn(2, 196, 192, requires_grad=True)
    layer(x, (14, 14))  # creates the tables
    with Launches() as forward:
        y = layer(x, (14, 14))
    gradient = torch.ones_like(y)
    with Launches() as backward:
        y.backward(gradient)
    counts = forward.operators.total(), (forward.operators + backward.operators).total()
    assert all(count <= most for count, most in zip(counts, BOUNDS[name], strict=True)), (counts, forward.operators)


@pytest.mark.parametrize("case", ORDINARY, ids=str)
def test_nothing_waits_for_the_device(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Meta tensors replace those of a device, because a host cannot wait for their values."""
    layer = case.build(torch.float32).train().to("meta")
    x = case.tokens(torch.float32).to("meta").requires_grad_()
    layer(x, case.grid)  # creates the tables on the device
    monkeypatch.setattr(torch, "tensor", None)  # copies numbers of the host, which meta tensors do not show
    with Launches("meta") as launches:
        layer(x, case.grid).sum().backward()
    assert launches.waits == []
    assert x.grad is not None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_changes_nothing_on_the_host(case: Case):
    """A CUDA graph would not change it again. Random numbers of a meta tensor are not those of the host."""
    layer, x = case.build(torch.float32).train().to("meta"), case.tokens(torch.float32).to("meta")
    layer(x, case.grid)
    before = host_state(layer)
    layer(x, case.grid).sum().backward()
    assert host_state(layer) == before


def on_fake_gpu(x: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = mode.from_tensor(x.detach())
    with mode:
        return fake.to("cuda")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[] if x == FACTS["eva"].CASES[0] else pytest.mark.stress) for x in CASES], ids=str
)
def test_nothing_waits_for_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Runs the forward pass on a fake GPU, on which no backward pass can run, by PyTorch's operators."""
    monkeypatch.setattr(kernels, "has_kernels", lambda x: False)
    layer, mode = case.build(torch.float32).train(), FakeTensorMode()
    for module in layer.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(on_fake_gpu(weight, mode)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, on_fake_gpu(buffer, mode))
    x = on_fake_gpu(case.tokens(torch.float32), mode)
    with mode, Launches("cuda") as launches:
        assert layer(x, case.grid).is_cuda
    assert launches.waits == []


def test_a_wait_is_noticed():
    mode = FakeTensorMode()
    x = on_fake_gpu(torch.ones(3), mode)
    for copy in (x.cpu, lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda"), lambda: x.copy_(torch.ones(3))):
        with mode, Launches("cuda") as launches:
            copy()
        assert len(launches.waits) == 1
    for act, error in (
        (x.nonzero, DynamicOutputShapeException),
        (lambda: x[x > 0], DynamicOutputShapeException),
        (lambda: x.sum().item(), DataDependentOutputException),
    ):
        with mode, Launches("cuda"), pytest.raises(error):
            act()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("case", ORDINARY, ids=str)
def test_nothing_waits_for_the_gpu_there_is(case: Case):
    layer, x = case.build(torch.float32).train().cuda(), case.tokens(torch.float32).cuda().requires_grad_()
    layer(x, case.grid).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x, case.grid).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
