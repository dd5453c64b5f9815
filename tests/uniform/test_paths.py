"""The paths that avoid a mechanism's kernels, or save its memory, agree with the path "auto"."""

import pytest

from tests.support.calls import assert_paths_agree
from tests.support.facts import CASES


@pytest.mark.parametrize("path", ["plain", "lean"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_agree_in_value_and_all_gradients(case, path):
    assert_paths_agree(case, path)
