"""Linear spatial-reduction attention."""

from functools import partial

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
