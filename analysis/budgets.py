"""Budgets: each mechanism's option of size, its value for a common budget, and the split of Scatterbrain's budget."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from attention import ATTENTION, Grid, OptionError


def side(budget: int, num_tokens: int) -> int:
    """Returns the side of a square of `budget` tokens."""
    root = math.isqrt(budget)
    if root**2 != budget:
        raise OptionError(f"--budgets {budget}", f"no square; nearest: {root**2}, {(root + 1) ** 2}")
    return root


def ratio(budget: int, num_tokens: int) -> int:
    """Returns the reduction ratio of sides that leaves `budget` tokens."""
    root = max(1, math.isqrt(num_tokens // budget))
    if root**2 * budget != num_tokens:
        raise OptionError(f"--budgets {budget}", f"no square ratio leaves so many of {num_tokens} tokens")
    return root


SIZES = {
    **dict.fromkeys(("num_landmarks", "num_samples", "num_features", "num_clusters"), lambda budget, _: budget),
    **dict.fromkeys(("cluster_size", "chunk_size", "block_size", "rank"), lambda budget, _: budget),
    "radius": lambda budget, _: budget // 2,  # of a band of `budget` tokens besides the token itself
    **dict.fromkeys(("window_size", "pool_size", "kernel_size"), side),
    "reduction": ratio,
}
"""Option for the size of an approximation -> its value for a budget."""


def options_text(attention: Mapping[str, Any]) -> str:
    """Formats the options of a mechanism as ``"window_size=7, num_landmarks=49"``."""
    return ", ".join(f"{name}={value}" for name, value in attention.items() if name != "name")


def size_option(attention: Mapping[str, Any]) -> str | None:
    """Returns the option that a budget sets; None if there is none."""
    name = ATTENTION[attention["name"]].size_option
    return name if name in SIZES else None


def with_budget(attention: Mapping[str, Any], budget: int, num_tokens: Collection[int]) -> dict[str, Any]:
    """Returns the options of a mechanism with the size `budget`.

    Args:
        num_tokens: numbers of tokens of the layers.
    Raises:
        OptionError: the mechanism has no such size, or layers need different values of its option.
    """
    name = size_option(attention)
    first, *others = {SIZES[name](budget, number) for number in sorted(num_tokens)}
    if others:
        sizes = " and ".join(map(str, sorted(num_tokens)))
        raise OptionError(f"--budgets {budget}", f"layers of {sizes} tokens need different values of {name}")
    changed = {name: first}
    if attention["name"] == "ra":
        changed["num_eval_samples"] = budget
    return {**attention, **changed}


def split_budget(budget: int, share: float, grid: Grid) -> dict[str, Any]:
    """Returns options of `scatterbrain` for a budget of numbers per row.

    A sample costs two numbers, at queries and keys, and a token of the window one, as in the released configurations.

    Args:
        budget: at least 3. share: share of the budget for samples; each part gets at least one. grid: windows are
            squares of the grid, or blocks of a sequence (1, N).
    """
    room, is_sequence = min(max(budget - 2 * int(share * budget / 2), 1), budget - 2), grid[0] == 1
    side = min(room, grid[1]) if is_sequence else min(math.isqrt(room), *grid)
    options = {"num_samples": (budget - (side if is_sequence else side**2)) // 2, "window_size": side}
    return {**options, "layout": "1d"} if is_sequence else options
