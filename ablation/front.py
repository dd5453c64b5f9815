"""The front of a sweep, accuracy against cost: settings on it, and how sure that is over seeds."""

from collections.abc import Sequence

import torch

RESAMPLES = 10_000
"""Resamples of the bootstrap."""

CHUNK = 500
"""Resamples that are compared at once."""


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Returns for each (cost, top-1) whether no other point is at least as good in both and better in one."""
    return [
        not any(cost <= own_cost and top1 >= own_top1 and (cost, top1) != (own_cost, own_top1) for cost, top1 in points)
        for own_cost, own_top1 in points
    ]


def front_probabilities(costs: Sequence[float | None], values: Sequence[Sequence[float]]) -> list[float | None]:
    """Returns for each setting the probability that it is on the front of mean top-1 against cost.

    It is the share of `RESAMPLES` in which `non_dominated` holds. A resample draws the seeds of every setting anew,
    with replacement and independently of other settings (the bootstrap of Efron, 1979); costs are not resampled. The
    generator has seed 0.

    Args:
        costs: cost of each setting; None: not known. values: top-1 of its seeds.
    Returns:
        None for settings without a cost or with less than two seeds; they do not count for the others.
    """
    known = [i for i, (cost, own) in enumerate(zip(costs, values, strict=True)) if cost is not None and len(own) > 1]
    found: list[float | None] = [None] * len(costs)
    if not known:
        return found
    generator = torch.Generator().manual_seed(0)
    cost = torch.tensor([costs[i] for i in known], dtype=torch.float64)
    means = []
    for i in known:
        own = torch.tensor(values[i], dtype=torch.float64)
        means.append(own[torch.randint(len(own), (RESAMPLES, len(own)), generator=generator)].mean(1))
    count = torch.zeros(len(known))
    for top1 in torch.stack(means, 1).round(decimals=9).split(CHUNK):  # equal means are equal in any order of the sum
        mine, other = top1[:, :, None], top1[:, None]
        is_better = (cost < cost[:, None]) & (other >= mine) | (cost <= cost[:, None]) & (other > mine)
        count += (~is_better.any(2)).sum(0)
    for i, share in zip(known, (count / RESAMPLES).tolist(), strict=True):
        found[i] = share
    return found
