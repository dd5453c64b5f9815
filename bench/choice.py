"""Choice of an attention layer: measured layers within budgets, sorted by their stored quality."""

import itertools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from attention.options import OptionError, nearest
from bench.quality import MEANING, read_quality
from bench.results import SETTINGS, quartiles_text
from bench.workload import factory_of
from engine.reporting.tables import markdown_table

BUDGETS = {
    "ms": "milliseconds of a call",
    "memory": "MiB that a call allocates at its peak",
    "macs": "multiply-accumulates relative to softmax attention's layer",
}
"""Key of a budget -> what it limits."""


def parse_budget(text: str, meanings: Mapping[str, str] = BUDGETS) -> tuple[str, float]:
    """Parses ``"ms=5"`` as a key and a limit.

    Args:
        meanings: key -> what a budget of it limits.

    Raises:
        OptionError: an unknown key, or a limit that is not a number above 0.
    """
    key, _, value = text.partition("=")
    if key not in meanings:
        raise OptionError("--budget", f"{text!r}: unknown budget{nearest(key, meanings)}; write ms=5")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise OptionError("--budget", f"{text!r}: {value!r} is not a number above 0; {key} is {meanings[key]}")
    return key, limit


def parse_budgets(texts: Sequence[str]) -> dict[str, float]:
    """Parses ``["ms=5", "macs=0.5"]``.

    Raises:
        OptionError: a budget that `parse_budget` refuses, or a repeated key.
    """
    budgets: dict[str, float] = {}
    for text in texts:
        key, limit = parse_budget(text)
        if key in budgets:
            raise OptionError("--budget", f"{text!r}: {key} is given twice; give it once")
        budgets[key] = limit
    return budgets


def format_choices(rows: Sequence[Mapping[str, Any]], budgets: Mapping[str, float]) -> str:
    """Formats, for each setting, the layers within all budgets: the least stored loss first, then the least time.

    Args:
        rows: measured layers, softmax attention's among them, as in results.csv.
    """
    stored = {each.factory: each for each in read_quality()}
    lines = [f"Budgets: {' '.join(f'{key}={limit:g}' for key, limit in budgets.items())}. {MEANING}"]
    for setting, group in itertools.groupby(rows, key=itemgetter(*SETTINGS)):
        layers = list(group)
        softmax = next(row["macs"] for row in layers if row["name"] == "softmax")
        ranked = []
        for row in layers:
            quality, costs = stored.get(factory_of(row["name"])), costs_of(row, softmax)
            excess = max(costs[key] / limit for key, limit in budgets.items())
            ranked.append((quality.loss if quality else math.inf, costs["ms"], excess, row, quality))
        within = sorted((each for each in ranked if each[2] <= 1), key=itemgetter(0, 1))
        lines += ["", ", ".join(f"{name} {value}" for name, value in zip(SETTINGS, setting, strict=True)), ""]
        if not within:
            *_, excess, row, _ = min(ranked, key=itemgetter(2))
            remedy = "raise a limit, or give other --attention"
            lines += [
                f"No layer meets the budgets. The nearest, {row['name']}, exceeds one {excess:.3g} times; {remedy}."
            ]
            continue
        table = []
        for *_, row, quality in within:
            std = f" ± {quality.std:.2g}" if quality and quality.std is not None else ""
            table.append(
                [
                    row["name"],
                    f"{quality.loss:.3g}{std} (n={quality.n})" if quality else "not stored",
                    quartiles_text(row, "seconds", 1e-3, ".4g"),
                    quartiles_text(row, "speedup", 1, ".2f"),
                    f"{softmax / row['macs']:.2f}",
                    f"{row['peak_bytes'] / 2**20:.1f}",
                ]
            )
        titles = ["name", "points lost", "ms", "speed-up over softmax", "ratio of MACs", "peak (MiB)"]
        lines += [
            markdown_table(titles, table),
            "",
            f"{len(layers) - len(within)} of {len(layers)} layers exceed a budget.",
        ]
    given = {factory_of(row["name"]) for row in rows}
    names = {factory.name for factory in given - stored.keys()}
    if others := [each.entry for factory, each in stored.items() if factory.name in names and factory not in given]:
        lines += ["", f"Stored with other options, which --attention takes: {' '.join(others)}"]
    return "\n".join(lines) + "\n"


def costs_of(row: Mapping[str, Any], softmax_macs: int) -> dict[str, float]:
    """Returns the costs of a measured layer in the units of `BUDGETS`; infinite for one that exceeds the memory."""
    if row["seconds"] is None:
        return dict.fromkeys(BUDGETS, math.inf)
    return {"ms": 1e3 * row["seconds"], "memory": row["peak_bytes"] / 2**20, "macs": row["macs"] / softmax_macs}
