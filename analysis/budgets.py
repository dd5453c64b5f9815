"""One size for all mechanisms: the option of each that says how large its approximation is, and its value; and how a
budget of memory is split between the two parts of Scatterbrain.
"""

import math
from collections.abc import Mapping
from typing import Any

from attention import ATTENTION, Grid, OptionError


def whole(budget: int, num_tokens: int) -> int:
    """The budget itself."""
    return budget


def side(budget: int, num_tokens: int) -> int:
    """The side of a square of so many tokens."""
    root = math.isqrt(budget)
    if root**2 != budget:
        raise OptionError(f"--budgets {budget}", f"no square; nearest: {root**2}, {(root + 1) ** 2}")
    return root


def reach(budget: int, num_tokens: int) -> int:
    """The radius of a band of so many tokens, the token itself beside them."""
    return budget // 2


def ratio(budget: int, num_tokens: int) -> int:
    """The side ratio that leaves so many of the tokens."""
    root = max(1, math.isqrt(num_tokens // budget))
    if root**2 * budget != num_tokens:
        raise OptionError(f"--budgets {budget}", f"no square ratio leaves so many of {num_tokens} tokens")
    return root


SIZES = {
    "num_landmarks": whole,
    "num_samples": whole,
    "num_features": whole,
    "num_clusters": whole,
    "cluster_size": whole,
    "chunk_size": whole,
    "block_size": whole,
    "rank": whole,
    "radius": reach,
    "window_size": side,
    "pool_size": side,
    "kernel_size": side,
    "reduction": ratio,
}
"""Options that say how large an approximation is -> their value for a budget; of a mechanism, the first it has."""


def size_option(attention: Mapping[str, Any]) -> str | None:
    """The option that a budget sets."""
    options = ATTENTION[attention["name"]].Config.__dataclass_fields__
    return next((name for name in SIZES if name in options), None)


def with_budget(attention: Mapping[str, Any], budget: int, num_tokens: int) -> dict[str, Any]:
    """The options of a mechanism of the size `budget`.

    Raises:
        OptionError: none of its sizes is.
    """
    name = size_option(attention)
    changed = {name: SIZES[name](budget, num_tokens)}
    if attention["name"] == "ra":
        changed["num_eval_samples"] = budget
    return {**attention, **changed}


def low_rank_share(entropy: float, num_tokens: int) -> float:
    """The low-rank part's share of a budget by the mean entropy of rows (nats): entropy / log N, 1 for uniform rows.

    Scatterbrain's section 5.1 gives that part more memory where the entropy of observed matrices is high, and no rule
    beyond that; in proportion is ours.
    """
    return entropy / math.log(num_tokens)


def split_budget(budget: int, share: float, grid: Grid) -> dict[str, Any]:
    """Options of `scatterbrain` for a budget of numbers per row: two for a sample, at queries and keys, and one for a
    token of the window, as the released code's configurations count.

    Args:
        budget: at least 3. share: of it for samples; each part has one at least. grid: windows are squares of it; of a
            sequence, (1, N), blocks.
    """
    room, is_sequence = min(max(budget - 2 * int(share * budget / 2), 1), budget - 2), grid[0] == 1
    side = min(room, grid[1]) if is_sequence else min(math.isqrt(room), *grid)
    options = {"num_samples": (budget - (side if is_sequence else side**2)) // 2, "window_size": side}
    return {**options, "layout": "1d"} if is_sequence else options
