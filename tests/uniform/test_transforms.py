"""Transforms of torch.func and forward differentiation: values and slopes of ordinary autograd, on every path."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from attention import kernels
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.facts import CASES, light

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated",  # jvp's own
    "ignore:There is a performance drop",  # operators that vmap runs one by one
)
every_case = pytest.mark.parametrize("case", light(CASES))


def near(results, expected, bound: float = FP64_GRADIENT):
    torch.testing.assert_close(results, expected, rtol=bound, atol=bound)


@every_case
def test_transforms_agree_with_autograd(case):
    attn, x = case.build().eval(), case.tokens()
    parameters = {name: parameter.detach() for name, parameter in attn.named_parameters()}
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)

    def output(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(attn, parameters, (x, case.grid))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (output(parameters, x) * weights).sum()

    tokens = x.clone().requires_grad_()
    y = attn(tokens, case.grid)
    gradients = torch.autograd.grad((y * weights).sum(), [tokens, *attn.parameters()])
    of_parameters = dict(zip(parameters, gradients[1:], strict=True))
    transformed, of_tokens = grad(loss, (0, 1))(parameters, x)
    near((transformed, of_tokens), (of_parameters, gradients[0]))

    stacked = {name: torch.stack([value, 1.5 * value]) for name, value in parameters.items()}
    one_by_one = [output({name: value[i] for name, value in stacked.items()}, x) for i in range(2)]
    near(vmap(output, (0, None))(stacked, x), torch.stack(one_by_one), FP64)
    near(vmap(grad(loss), (0, None))(stacked, x)["qkv.weight"][0], of_parameters["qkv.weight"])

    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    value, slope = jvp(lambda x: output(parameters, x), (x,), (direction,))
    near(value, y.detach())
    near((slope * weights).sum(), (gradients[0] * direction).sum())  # <w, J u> = <J^T w, u>
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(attn(forward_ad.make_dual(x, direction), case.grid))
    near(dual.tangent.detach(), slope.detach())


@pytest.mark.parametrize("name", ["local", "eva", "lara", "performer", "ra"])
def test_fast_paths_give_way_to_the_definition(name):
    case = next(case for case in CASES if case.name == name)
    attn, x = case.build().eval(), case.tokens()
    with kernels.use("plain"):
        expected = torch.func.hessian(lambda scale: attn(scale * x, case.grid).square().sum())(torch.tensor(1.0))
    slope = torch.func.hessian(lambda scale: attn(scale * x, case.grid).square().sum())(torch.tensor(1.0))
    assert torch.equal(slope, expected)
