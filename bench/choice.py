"""Choice of an attention layer: measured layers within budgets, sorted by their stored quality."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from attention.options import OptionError, nearest
from attention.registry import ATTENTION
from bench.arguments import BUDGETS
from bench.results import SETTINGS, readable
from bench.workload import factory_of
from engine.reporting.tables import Spread, compact_table, plus_minus
from engine.runtime.reading import parsing, read_csv

QUALITY = Path(__file__).with_name("quality.csv")
"""Entry of ``benchmark.py --attention`` -> points lost, from docs/data/transfer.csv; installed with the package."""
MEANING = (
    "Points lost: top-1 that a small model (196 tokens, Fashion-MNIST) loses when its attention is replaced, and "
    "aligned to the former attention without labels; bench/quality.csv. It does not show the accuracy of another model."
)


def parse_budget(text: str, meanings: Mapping[str, str]) -> tuple[str, float]:
    """Parses ``"ms=5"`` as a key and a limit.

    Args:
        meanings: key -> what a budget of it limits.

    Raises:
        OptionError: an unknown key, or a limit that is not a number above 0.
    """
    key, _, value = text.partition("=")
    if key not in meanings:
        raise OptionError("--budget", f"{text!r}: unknown budget{nearest(key, meanings)}")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise OptionError("--budget", f"{text!r}: {value!r} is not a number above 0; {key} is {meanings[key]}")
    return key, limit


def read_quality(path: Path = QUALITY) -> dict[str, Spread]:
    """Reads the points lost by each stored layer. UserError: the file is damaged."""
    remedy = "install the package again"
    rows = read_csv(path, remedy=remedy)
    with parsing(path, remedy):
        return {row["layer"]: Spread(float(row["loss"]), float(row["std"]), int(row["n"])) for row in rows}


def every_mechanism(entries: Iterable[str]) -> list[str]:
    """Returns entries of ``--attention``, with all mechanisms, as they are stored, in the place of ``"all[@PATH]"``."""
    names = {layer: layer.partition(":")[0] for layer in read_quality()}
    stored = {name: layer for layer, name in names.items() if factory_of(layer) != factory_of(name)}
    found = []
    for entry in entries:
        is_all, path = entry.partition("@")[0] == "all", entry.removeprefix("all")
        found += [stored.get(x, x).replace(x, x + path, 1) for x in ATTENTION] if is_all else [entry]
    return found


def format_choices(rows: Sequence[Mapping[str, Any]], budgets: Sequence[tuple[str, float]]) -> str:
    """Formats, for each setting, the layers within all budgets: the least stored loss first, then the least time.

    Args:
        rows: measured layers, softmax attention's among them, as in results.csv.
        budgets: keys of `BUDGETS` and their limits.
    """
    stored = {factory_of(layer): loss for layer, loss in read_quality().items()}
    lines = [f"Budgets: {' '.join(f'{key}={limit:g}' for key, limit in budgets)}. {MEANING}"]
    for setting, group in itertools.groupby(rows, key=itemgetter(*SETTINGS)):
        layers, ranked = list(group), []
        softmax = next(row["macs"] for row in layers if row["name"] == "softmax")
        for row in layers:
            loss, costs = stored.get(factory_of(row["name"])), costs_of(row, softmax)
            shown = readable(row) | {"MACs, relative": f"{costs['macs']:.2f}"}
            shown["points lost"] = plus_minus(loss, ".2f") or "not stored"
            titles = ("name", "points lost", f"speed-up over {row['baseline']}", "ms", "peak (MiB)", "MACs, relative")
            line = {title: shown[title] for title in titles}
            excess = max(costs[key] / limit for key, limit in budgets)
            ranked.append((excess, loss.mean if loss else math.inf, costs["ms"], line))
        within = [line for excess, _, _, line in sorted(ranked, key=itemgetter(1, 2)) if excess <= 1]
        excess, _, _, line = min(ranked, key=itemgetter(0))
        lines += ["", ", ".join(f"{name} {value}" for name, value in zip(SETTINGS, setting, strict=True)), ""]
        if within:
            lines += [compact_table(within), ""]
            lines += [f"{len(layers) - len(within)} of {len(layers)} layers exceed a budget."]
        else:
            least = f"The nearest, {line['name']}, exceeds one {excess:.3g} times"
            lines += [f"No layer meets the budgets. {least}; raise a limit, or give other --attention."]
    return "\n".join(lines)


def costs_of(row: Mapping[str, Any], softmax_macs: int) -> dict[str, float]:
    """Returns the costs of a measured layer in the units of `BUDGETS`; infinite for one that exceeds the memory."""
    if row["seconds"] is None:
        return dict.fromkeys(BUDGETS, math.inf)
    return {"ms": 1e3 * row["seconds"], "memory": row["peak_bytes"] / 2**20, "macs": row["macs"] / softmax_macs}
