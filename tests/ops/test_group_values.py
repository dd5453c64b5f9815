"""Which groups a query of causal attention attends to."""

import pytest
import torch

from attention.ops.group_values.op import attended_groups
from attention.parts.geometry import Windows
from attention.parts.groups import bins

N = 35


@pytest.mark.parametrize("overlap", [0, 3])
def test_groups_attended_to_by_the_paper_and_by_the_released_code(overlap):
    groups, windows = bins((1, N), (1, 9), torch.device("cpu")), Windows((1, N), (1, 8), (0, overlap), causal=True)
    members = [set(index[valid].tolist()) for index, valid in zip(groups.index[0], groups.valid[0], strict=True)]
    paper, released = (attended_groups(groups, rule, windows).flatten(0, 1) for rule in ("paper", "released"))
    for n in range(N):
        window = windows.attended(n)[0]
        assert paper[n].tolist() == [max(group) < min(window) for group in members]  # disjoint from E, and before it
        assert released[n].tolist() == [max(group) < n for group in members]  # E's own tokens count twice
    assert (released & ~paper).any()
