"""Linear spatial-reduction attention."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.linear_sra import linear_sra
from attention.mechanisms.sra import sra
from attention.parts.groups import bins, group_mean
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import CPU, B, draw

case = partial(Case, "linear_sra", (5, 7), mixes_values=False, stock_keys=False)  # its keys and values are convolved

CASES = [case({"pool_size": 3}), case({"pool_size": 3, **PREFIX})]
EFFECTS = {"pool_size": ({}, 3), "attn_drop": ({}, 0.5)}
SYMMETRIES = [({"transposed"}, {"pool_size": 3})]
SYMBOLS = {"M": 49}
LEARNED = {"norm", "sr"}


def test_linear_sra_pools_to_one_size_and_agrees_with_a_convolution_that_averages():
    x, C = draw(B, 14 * 28, 6), 6
    weight, bias = draw(C, C, 1, 1, seed=1), draw(C, seed=2)
    convolution, average = partial(F.conv2d, weight=weight, bias=bias), weight.expand(C, C, 2, 2) / 4
    y = linear_sra(x, convolution, grid=(14, 28), pool_size=7)
    assert y.shape == (B, 49, C)
    bins_ = bins((14, 28), (7, 7), CPU)
    mean = group_mean(x[:, None], bins_)[:, 0, 0]
    assert_equal(y, mean @ weight[:, :, 0, 0].mT + bias)
    square = draw(B, 14 * 14, C)
    averaged = sra(square, partial(F.conv2d, weight=average, bias=bias, stride=2), grid=(14, 14), reduction=2)
    assert_equal(linear_sra(square, convolution, grid=(14, 14), pool_size=7), averaged)


@pytest.mark.complete
def test_pvt_v2_li_loads_stock_weights_and_gives_their_logits():

    import timm

    from models import create_model
    from models.convert import from_timm_pvt

    torch.manual_seed(0)
    stock = timm.create_model("pvt_v2_b2_li").eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    model = create_model("pvtv2_b2", attention=["linear_sra"] * 4, mlp_relu=True).eval()
    model.load_state_dict(from_timm_pvt(stock.state_dict()), strict=True)
    images = torch.randn(1, 3, 224, 160)
    with torch.no_grad():
        expected = stock(images)
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1  # so that 1e-5 means something
