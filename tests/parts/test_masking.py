"""Key masks of tokens, by numbers that one can check on paper."""

import torch

from attention.parts.groups import Groups, group_mean
from attention.parts.masking import masked_mean, stand_in

MASK = torch.tensor([[False, True, True], [False, False, False]])


def test_masked_tokens_become_copies_of_one_that_counts():
    x = torch.tensor([[torch.nan, 2.0, 3.0], [4.0, torch.inf, 6.0]])[..., None].requires_grad_()
    y = stand_in(x, MASK)
    assert y.squeeze().tolist() == [[2.0, 2.0, 3.0], [0.0, 0.0, 0.0]]
    y.sum().backward()
    assert x.grad.squeeze().tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_means_are_those_of_the_tokens_that_count():
    x = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])[:, None, :, None]
    assert masked_mean(x, MASK).flatten().tolist() == [3.0, 0.0]
    groups = Groups(torch.tensor([[[0, 1], [2, 2]]]), torch.tensor([[[True, True], [True, False]]])).masked(MASK)
    assert groups.num_members().flatten(1).tolist() == [[1, 1], [0, 0]]
    assert group_mean(x, groups).flatten(1).tolist() == [[2.0, 4.0], [0.0, 0.0]]
