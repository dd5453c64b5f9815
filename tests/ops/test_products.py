"""Products of factors in half precision, with sums in float32."""

import pytest
import torch

from attention.ops.products import factor_dtype, full_product
from bench.operators import OperatorCounter, off_cpu
from tests.support.inputs import draw


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("beta", "alpha"), [(1.0, 1.0), (-0.5, 3.0)])
def test_a_product_is_that_of_its_rounded_factors(dtype, beta, alpha):
    a, b, offset = draw(2, 3, 8).to(dtype), draw(2, 8, 5, seed=1).to(dtype), draw(2, 3, 1, seed=2)
    full = torch.float64 if dtype == torch.float64 else torch.float32
    exact = alpha * (a.double() @ b.double())
    with off_cpu():
        y = full_product(a, b, alpha=alpha)
        assert y.dtype == full
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)
        y = full_product(a, b, offset.to(full), beta=beta, alpha=alpha)
    torch.testing.assert_close(y.double(), exact + beta * offset, rtol=1e-5, atol=1e-6)


def test_only_bfloat16_off_a_cpu_is_multiplied_as_it_is():
    full = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
    for dtype, expected in full.items():
        assert factor_dtype(torch.empty(1, dtype=dtype)) == expected
    with off_cpu():
        full[torch.bfloat16] = torch.bfloat16
        for dtype, expected in full.items():
            assert factor_dtype(torch.empty(1, dtype=dtype)) == expected


def test_a_product_of_bfloat16_is_one_operator_on_a_gpu():
    """On fake tensors, which take operators that a CPU has not."""
    with torch._subclasses.FakeTensorMode():
        a, b = torch.empty(2, 3, 8, dtype=torch.bfloat16), torch.empty(2, 8, 5, dtype=torch.bfloat16)
        with OperatorCounter() as counter:
            assert full_product(a, b).dtype == torch.float32
    assert counter.found == ["bmm"]
