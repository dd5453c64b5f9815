"""Numbers as text: spreads, options, Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

Spread = tuple[float, float | None]
"""Mean and standard deviation; None: of a single value."""


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return mean(values), stdev(values) if len(values) > 1 else None


def quote(values: Spread | None, form: str) -> str:
    """``"1.20 ± 0.10"``; without values empty."""
    if values is None:
        return ""
    mean, deviation = values
    return f"{mean:{form}}" if deviation is None else f"{mean:{form}} ± {deviation:{form}}"


def describe(attention: Mapping[str, Any]) -> str:
    """The options of a mechanism."""
    return ", ".join(f"{name}={value}" for name, value in attention.items() if name != "name")


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of rows, title of a column -> text; columns that are empty are left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
