"""Recommendation of an attention layer: predicted time and memory, budgets, and stored quality.

The candidates (`bench.choices`) that meet the budgets are ranked by a stored quality (`bench.quality`), then by
predicted time. Where a prediction is extrapolated, the upper end of its interval counts.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.agreement import Agreement
from bench.calibration import Calibration, Measure, Point
from bench.candidates import Shape
from bench.choices import RECOMMENDATION_FILE, VERIFICATION_FILE, Choice, Request, choices, cost_by_budget
from bench.devices import Roofline
from bench.quality import MEASURES
from engine.reporting.tables import compact_table
from engine.runtime.files import dicts_to_csv, to_csv, write_file

COLUMNS = (
    *("rank", "mechanism", "options", "entry", "meets_budgets", "seconds", "seconds_low", "seconds_high"),
    *("extrapolated", "seconds_counted", "peak_bytes", "peak_bytes_counted", "macs", "macs_ratio", "measure"),
    *("quality", "quality_std", "quality_n", "quality_options", "quality_tokens", "source", "remarks"),
)
"""Columns of `RECOMMENDATION_FILE`.

extrapolated: factor outside of the calibrated range. seconds_counted, peak_bytes_counted: see `Prediction.counted`.
"""
VERIFIED_COLUMNS = (
    *("tokens", "entry", "seconds_predicted", "seconds_low", "seconds_high", "seconds"),
    *("peak_bytes_predicted", "peak_bytes"),
)
"""Columns of `VERIFICATION_FILE`, the measured candidates of held-out grids."""


def rows_of(ranked: Sequence[Choice], request: Request) -> list[dict[str, Any]]:
    """Returns the rows of the table: ranked candidates, those without a quality, and those that exceed a budget."""
    within = [choice for choice in ranked if choice.excess(request.budgets) <= 1]
    exceeding = sorted((c for c in ranked if c not in within), key=lambda c: c.excess(request.budgets))
    rows = []
    for number, choice in enumerate([*within, *exceeding], 1):
        candidate, quality, meets = choice.candidate, choice.match and choice.match.quality, number <= len(within)
        of_quality = ("value", "std", "n", "options", "tokens", "source")
        values = [getattr(quality, name) if quality else None for name in of_quality]
        cells = [number if meets and quality else None, candidate.name, candidate.options_text, candidate.entry, meets]
        cells += [*choice.seconds, choice.seconds.counted, round(choice.peak_bytes.value)]
        cells += [round(choice.peak_bytes.counted), choice.macs, choice.macs_ratio, request.measure]
        rows.append(dict(zip(COLUMNS, [*cells, *values, choice.remarks(request.budgets)], strict=True)))
    return rows


def readable(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns title of a column -> its text in a row."""
    milliseconds = [f"{1e3 * row[name]:.3g}" for name in ("seconds", "seconds_low", "seconds_high")]
    std = "" if row["quality_std"] is None else f" ± {row['quality_std']:.2g}"
    known = row["quality"] is not None
    return {
        "rank": str(row["rank"] or "–"),
        "mechanism": row["mechanism"],
        "options": row["options"],
        "ms (interval)": f"{milliseconds[0]} ({milliseconds[1]}–{milliseconds[2]})",
        "peak (MiB)": f"{row['peak_bytes'] / 2**20:.1f}",
        "MACs (G)": f"{row['macs'] / 1e9:.3f}",
        "of softmax": f"{row['macs_ratio']:.2f}",
        row["measure"]: f"{row['quality']:.3g}{std} (n={row['quality_n']})" if known else "not stored",
        "source": (row["source"] or "").partition(":")[0],
        "remarks": row["remarks"],
    }


def report(rows: Sequence[Mapping[str, Any]], request: Request, predictor: Calibration | Roofline) -> str:
    """Formats the recommendation: conditions, the best size of each mechanism, the first choice."""
    limits = ", ".join(f"{key}={limit:g}" for key, limit in request.budgets.items()) or "none"
    lines = [
        f"{request.shape}, images in a call: {request.shape.batch}. Budgets: {limits}.",
        str(predictor),
        f"Quality: {request.measure}, {MEASURES[request.measure]}. Less is better.",
    ]
    predicted = {row["mechanism"] for row in rows}
    missing = dict.fromkeys(family.name for family in request.families if family.name not in predicted)
    if missing:
        lines += [f"Not predicted, for lack of measurements or of options that the grid allows: {', '.join(missing)}."]
    within = [row for row in rows if row["meets_budgets"]]
    best = list({row["mechanism"]: row for row in reversed(within)}.values())[::-1]
    if best:
        exceeding = f"{len(rows) - len(within)} of {len(rows)} candidates exceed a budget"
        lines += ["", compact_table([readable(row) for row in sorted(best, key=within.index)])]
        lines += ["", f"The best size of each mechanism; {exceeding}."]
    return "\n".join([*lines, "", sentence(rows, request), ""])


def sentence(rows: Sequence[Mapping[str, Any]], request: Request) -> str:
    """Formats the first choice with its limits, or the candidate nearest to the budgets."""
    if not rows:
        return (
            "No candidate was calibrated: give --calibrate more seconds, or ask for fewer tokens if memory was short."
        )
    first = rows[0]
    predicted = f"predicted {1e3 * first['seconds']:.3g} ms"
    extrapolated = ""
    if first["extrapolated"] > 1:
        extrapolated = f", extrapolated by a factor of {first['extrapolated']:.3g}"
        predicted += f"{extrapolated} to at most {1e3 * first['seconds_high']:.3g} ms"
    if not first["meets_budgets"]:
        costs = cost_by_budget(first["seconds_counted"], first["peak_bytes_counted"], first["macs_ratio"])
        found = ", ".join(f"{key} {costs[key]:.3g} of {limit:g}" for key, limit in request.budgets.items())
        remedy = "raise the limit, or ask for fewer tokens"
        return f"No candidate meets the budgets. Nearest: {first['entry']} ({found}{extrapolated}); {remedy}."
    if first["rank"] is None:
        return (
            f"First choice by time alone: {first['entry']}, {predicted}."
            " No candidate that meets the budgets has a stored quality."
        )
    alike = indistinct(rows)
    return (
        f"First choice: {first['entry']}, {predicted}, with the least stored"
        f" {request.measure} ({first['quality']:.3g}, measured at {first['quality_tokens']} tokens)"
        + (f"; two standard errors do not tell it from {', '.join(alike)}" if alike else "")
        + ". It does not show the accuracy of your model on your images, nor at other tokens than those measured."
    )


def indistinct(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns other ranked mechanisms whose quality differs from the first row's by at most two standard errors."""
    first, found = rows[0], []
    for row in rows[1:]:
        if row["rank"] is not None and row["mechanism"] != first["mechanism"]:
            errors = [(each["quality_std"] or 0.0) ** 2 / each["quality_n"] for each in (first, row)]
            if row["quality"] - first["quality"] <= 2 * math.sqrt(sum(errors)):
                found.append(row["mechanism"])
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Verification:
    """Comparison of predicted with measured times and peak memory of all candidates at one held-out shape.

    Attributes:
        seconds, peak_bytes: agreement of both. covered: share of times within their intervals. fastest: measured time
            of the candidate that was predicted to be the fastest, relative to that of the fastest one.
        text: measured outcome of the first choice.
    """

    shape: Shape
    seconds: Agreement
    peak_bytes: Agreement
    covered: float
    fastest: float
    text: str

    @classmethod
    def of(
        cls, ranked: Sequence[Choice], points: Sequence[Point], shape: Shape, budgets: Mapping[str, float]
    ) -> "Verification":
        """Compares ranked choices with measured points; choices that were not measured are left out."""
        measured = {point.candidate.entry: point for point in points}
        pairs = [(choice, measured[choice.candidate.entry]) for choice in ranked if choice.candidate.entry in measured]
        predicted, found = [choice.seconds.value for choice, _ in pairs], [point.seconds for _, point in pairs]
        peaks = [choice.peak_bytes.value for choice, _ in pairs], [point.peak_bytes for _, point in pairs]
        within = [choice.seconds.low <= point.seconds <= choice.seconds.high for choice, point in pairs]
        return cls(
            shape,
            Agreement.of(predicted, found),
            Agreement.of(*peaks),
            sum(within) / len(within),
            found[int(np.argmin(predicted))] / min(found),
            first_choice(pairs, budgets),
        )

    def __str__(self) -> str:
        return (
            f"{self.shape}: {self.seconds.count} candidates. Predicted and measured times: {self.seconds},"
            f" {self.covered:.0%} in their intervals. Peak memory: {self.peak_bytes}."
            f" Predicted fastest: {self.fastest:.2f} x the time of the fastest. {self.text}"
        )


def first_choice(pairs: Sequence[tuple[Choice, Point]], budgets: Mapping[str, float]) -> str:
    """Formats the regret of the first choice in quality and in time.

    It is relative to the best candidates that truly meet the budgets: in quality to the best one, in time to the
    fastest one that is as good as the first choice.

    Args:
        pairs: choices with their measurements.
    """

    def excess(choice: Choice, point: Point) -> float:
        costs = cost_by_budget(point.seconds, point.peak_bytes, choice.macs_ratio)
        return max((costs[key] / limit for key, limit in budgets.items()), default=0.0)

    ranked = [pair for pair in pairs if pair[0].match]
    expected = [pair for pair in ranked if pair[0].excess(budgets) <= 1]
    truly = [pair for pair in ranked if excess(*pair) <= 1]
    if not expected or not truly:
        return f"Candidates with a quality that meet the budgets: predicted {len(expected)}, measured {len(truly)}."
    first, point = expected[0]
    regret = first.loss - min(choice.loss for choice, _ in truly)
    peers = [other.seconds for choice, other in truly if choice.loss <= first.loss]
    used = excess(first, point)
    return (
        f"First choice: {first.candidate.entry}, {1e3 * point.seconds:.3g} ms measured"
        + (f", {used:.2f} of its tightest budget" if budgets else "")
        + f"; regret in quality {regret:.3g}, in time "
        + (f"{max(0.0, point.seconds / min(peers) - 1):.0%}." if peers else "none to compare with.")
    )


def recommend(args: argparse.Namespace, request: Request, measure: Measure) -> None:
    """Prints the recommendation, verifies it at held-out grids, and writes the files of both.

    Calibrates this device; for a device that `args.on` names, the roofline predicts.
    """
    if args.on:
        predictor = Roofline(args.on, args.modes[0], args.dtypes[0])
    else:
        predictor = Calibration.run(request.families, request.shape, measure, args.calibrate, time.monotonic)
    rows = rows_of(choices(request, request.shape, predictor), request)
    print(report(rows, request, predictor), flush=True)
    if args.output:
        write_file(args.output / RECOMMENDATION_FILE, dicts_to_csv(rows, COLUMNS))
    verified = []
    for grid in request.held_out:
        shape = request.shape._replace(grid=grid)
        ranked = choices(request, shape, predictor)
        points = measure([choice.candidate for choice in ranked], shape) if ranked else []
        if not points:
            print(f"{shape}: no candidate was both predicted and measured.", flush=True)
            continue
        print(Verification.of(ranked, points, shape, request.budgets), flush=True)
        predicted = {choice.candidate.entry: choice for choice in ranked}
        for point in points:
            choice = predicted[point.candidate.entry]
            costs = *choice.seconds[:3], point.seconds, round(choice.peak_bytes.value), point.peak_bytes
            verified.append([f"{grid[0]}x{grid[1]}", point.candidate.entry, *costs])
    if args.output and verified:
        write_file(args.output / VERIFICATION_FILE, to_csv(VERIFIED_COLUMNS, verified))
