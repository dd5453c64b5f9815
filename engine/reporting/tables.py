"""Numbers as text: means with standard deviations, Markdown tables, aligned columns."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from attention.option_tables import markdown_table
from engine.runtime.text import one_line


def student(t: float, freedom: int) -> float:
    """Returns the probability beyond ±t under Student's t (Abramowitz and Stegun, 26.7.3 and 4); 1 for freedom = 0."""
    angle, odd = math.atan2(t, math.sqrt(freedom)), freedom % 2
    total, term = 0.0, math.cos(angle) ** odd
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (1 - 1 / k) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


class Spread(NamedTuple):
    """Mean and standard deviation (over n - 1) of n values; a single value has no standard deviation (None).

    `step` is the least difference of two unequal values, 0 if they are continuous. The level of a test of the mean is
    5 % divided by `comparisons`, see `holm`.
    """

    mean: float
    std: float | None
    n: int
    step: float = 0.0
    comparisons: int = 1

    @property
    def error(self) -> float:
        """Standard error of the mean, by at least one step: few rounded values may be equal; infinite for n = 1."""
        return math.inf if self.std is None else max(self.std, self.step) / math.sqrt(self.n)

    @property
    def half_width(self) -> float:
        """Half width of the 95 % interval of Student's t around the mean, uncorrected; infinite for n = 1."""
        return self.error * bisect_left(range(13_000_000), -0.05, key=lambda t: -student(t / 1e6, self.n - 1)) / 1e6

    @property
    def p(self) -> float:
        """Probability of a mean as far from 0 without an effect; 1 for n = 1, NaN if a value is not finite."""
        return student(abs(self.mean) / (self.error or math.ulp(0)), self.n - 1)

    @property
    def is_noise(self) -> bool:
        """Whether Student's t does not tell the mean from 0."""
        return not self.p * self.comparisons < 0.05


def holm(differences: Mapping[Any, Spread | None]) -> dict[Any, Spread | None]:
    """Returns a table's differences with Holm's correction (Scand. J. Stat., 1979); those of one run are not tested."""
    found = dict(differences)
    tested = [(name, x) for name, x in found.items() if x is not None and x.n > 1]
    comparisons = len(tested)
    for name, x in sorted(tested, key=lambda item: (math.isnan(item[1].p), item[1].p)):
        found[name] = x = x._replace(comparisons=comparisons)
        comparisons -= not x.is_noise
    return found


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


def compact_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows, title of a column -> text, as a table in Markdown without columns that are empty in every row."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    return markdown_table(titles, ([row[title] for title in titles] for row in rows))


def as_cells(row: Mapping[str, Any], top1: str = "top-1 (%)") -> dict[str, str]:
    """Returns title -> text of a row of `analyze.py convert`, or of its file; `top1` is the title of the top-1."""
    change, noisy = row["model"] != "original", "~" * (str(row["is_noisy"]) == "True")
    x = {key: float(row[key]) for key in row.keys() - {"budget", "model", "is_noisy", "layers"}}
    return {
        "model": row["model"],
        top1: f"{x['top1']:.2f}",
        "difference": f"{x['difference']:+.2f} ± {x['standard_error']:.2f}" * change,
        "MACs (M)": f"{x['macs'] / 1e6:.1f}",
        "ms": f"{noisy}{x['ms']:.3g}",
        "images/s": f"{noisy}{x['images_per_second']:.0f}",
        "peak (MiB)": f"{x['peak_mib']:.1f}",
        "layers": row["layers"],
    }


def align(lines: Sequence[Sequence[str]]) -> str:
    """Formats lines of cells as columns of text, with escapes for characters that cannot be printed."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
