"""The path that avoids a mechanism's kernels, and those off a CPU agree with the path "auto"."""

import pytest
import torch

from bench.operators import off_cpu
from tests.support.calls import assert_paths_agree, value_and_gradients
from tests.support.comparisons import BF16_RMS, FP64_GRADIENT
from tests.support.facts import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_agree_in_value_and_all_gradients(case):
    assert_paths_agree(case, "plain")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_off_a_cpu_have_the_same_values_and_gradients(case):
    attn, x = case.build(), case.tokens()
    expected = value_and_gradients(attn, x, case.grid)
    with off_cpu():
        found = value_and_gradients(attn, x, case.grid)
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@pytest.mark.parametrize("case", [case for case in CASES if case.well_conditioned], ids=str)
def test_layers_off_a_cpu_lose_no_more_to_bfloat16(case):
    """Off a CPU, factors of products keep the type of queries, keys and values; sums and logarithms do not."""

    def results(amp: bool, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return value_and_gradients(attn, x, case.grid)

    attn, x = case.build().float(), case.tokens().float()
    exact, on_cpu = results(False, x), results(True, x)
    with off_cpu():
        off = results(True, x)
    for expected, rounded, other in zip(exact, on_cpu, off, strict=True):
        assert (other - expected).norm() <= 1.5 * (rounded - expected).norm() + BF16_RMS * expected.norm()
