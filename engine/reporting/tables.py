"""Numbers as text: means with standard deviations, Markdown tables, aligned columns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from engine.runtime.text import one_line

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom."""


class Spread(NamedTuple):
    """Mean and standard deviation (over n - 1) of n values; a single value has no standard deviation (None).

    `step` is the least difference of two unequal values, 0 if they are continuous.
    """

    mean: float
    std: float | None
    n: int
    step: float = 0.0

    @property
    def half_width(self) -> float:
        """Half width of the 95 % interval of Student's t around the mean; infinite for n = 1, a bit wide above 31.

        The standard deviation counts as at least one step: few values that are rounded to steps may be equal by chance.
        """
        if self.std is None:
            return math.inf
        return T_975[min(self.n - 1, len(T_975)) - 1] * max(self.std, self.step) / math.sqrt(self.n)

    @property
    def is_noise(self) -> bool:
        """Whether that interval contains 0, or is not known because a value is not finite."""
        return not self.half_width < abs(self.mean) < math.inf


def spread(values: Iterable[float], step: float = 0.0) -> Spread | None:
    """Returns mean and standard deviation of `values`, whose least difference is `step`; None if there are none.

    The standard deviation is NaN if a value is not finite.
    """
    values = list(values)
    if not values:
        return None
    std = None if len(values) == 1 else stdev(values) if all(map(math.isfinite, values)) else math.nan
    return Spread(mean(values), std, len(values), step)


def mean_and_std(spread: Spread | None) -> tuple[float | None, float | None]:
    """Returns the mean and the standard deviation of a spread, for a file; None for both without a spread."""
    return (None, None) if spread is None else spread[:2]


def plus_minus(spread: Spread | None, form: str) -> str:
    """Formats a spread as ``"1.20 ± 0.10"``; empty for None. A sign in `form` applies to the mean only."""
    if spread is None:
        return ""
    return f"{spread.mean:{form}}" + ("" if spread.std is None else f" ± {spread.std:{form.removeprefix('+')}}")


def verdict(difference: Spread | None) -> str:
    """Returns the remark on a difference that is not significant; empty otherwise."""
    if difference is None or not difference.is_noise:
        return ""
    return " (noise)" if difference.n > 1 else " (one run)"


def over_draws(count: int) -> str:
    """Returns what numbers of a title are, over `count` draws."""
    return f"mean ± standard deviation over draws: {count}" if count > 1 else "one draw"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows))


def compact_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows, title of a column -> text, as a table in Markdown without columns that are empty in every row."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    return markdown_table(titles, ([row[title] for title in titles] for row in rows))


def align(lines: Sequence[Sequence[str]]) -> str:
    """Formats lines of cells as columns of text, with escapes for characters that cannot be printed."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
