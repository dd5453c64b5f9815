"""Half types and large inputs: everything is finite, and close to float64 results."""

import pytest
import torch

from attention import ATTENTION, kernels
from tests.support.calls import capture_op
from tests.support.comparisons import BF16_RMS, FP32_RMS, rms_ratio
from tests.support.facts import CASES, ORDINARY, light
from tests.support.partition import chosen

every_case = pytest.mark.parametrize("case", CASES, ids=str)

PRECISIONS = [
    pytest.param(case, dtype, training, id=f"{case}-{dtype}-{'train' if training else 'eval'}")
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for training in (True, False)
]


@pytest.mark.parametrize(
    ("case", "dtype", "training"),
    chosen(PRECISIONS, lambda case, dtype, training: training and (dtype == torch.float16 or case in ORDINARY)),
)
def test_every_precision_is_finite_on_large_inputs(case, dtype, training):
    x = (30 if case.bounded else 1) * case.tokens(torch.float32)
    attn = case.build(torch.float32).train(training)
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32):
        y = attn(x, case.grid)
    assert y.dtype == dtype
    assert y.isfinite().all()
    y.float().mean().backward()  # weight gradients of a sum would overflow fp16 without a loss scaler
    weights = [weight for name, weight in attn.named_parameters() if training or not name.startswith("router")]
    assert all(weight.grad.isfinite().all() for weight in weights)  # a router that chooses gets none
    y = attn.to(dtype)(x.to(dtype), case.grid)
    assert y.dtype == dtype
    assert y.isfinite().all()


NO_SOFTMAX_OF_PRODUCTS = {"inline": "weights grow with the logits"}
NO_SOFTMAX_OF_PRODUCTS |= {name: "no queries and keys" for name, kind in ATTENTION.items() if kind.num_projections == 1}


@pytest.mark.parametrize("path", ["auto", "plain"])
@pytest.mark.parametrize("case", light([c for c in CASES if c.bounded and c.name not in NO_SOFTMAX_OF_PRODUCTS]))
def test_logits_beyond_float16_are_finite(case, path, monkeypatch):
    """Queries and keys of 1,000 are float16 numbers, and their products are not; torch's attention takes them too."""
    attn, x = case.build(torch.float16).eval(), case.tokens(torch.float16)
    project = attn.project

    def project_large(x, grid):
        q, k, *others = project(x, grid)
        return *(1000 * y / y.float().std().to(y.dtype) for y in (q, k)), *others

    monkeypatch.setattr(attn, "project", project_large)
    with kernels.use(path):
        assert attn(x, case.grid).isfinite().all()


@every_case
def test_lower_precision_stays_close(case):
    x = case.tokens()
    expected = case.build().eval()(x, case.grid)
    attn = case.build(torch.float64).float().eval()
    if case.well_conditioned:
        assert rms_ratio(attn(x.float(), case.grid).double(), expected) < FP32_RMS
        with torch.autocast("cpu", torch.bfloat16):
            y = attn(x.float(), case.grid)
        assert rms_ratio(y.double(), expected) < BF16_RMS
    else:  # no precision is lost beyond the rounding of the inputs
        op, args, options = capture_op(case, attn, x.float())
        rounded = [a.bfloat16() for a in args[:3]]
        with torch.autocast("cpu", torch.bfloat16):
            y = op(*rounded, *args[3:], **options)
        assert rms_ratio(y, op(*(a.float() for a in rounded), *args[3:], **options)) < FP32_RMS
