"""How often certificates of small samples hold for conversions whose fall of top-1 is known on many labelled images.

python -m tests.support.coverage runs/fashion_mnist/replace_draws.csv runs/six_layers/replace_draws.csv \
  docs/data/certificate.csv --images 10000

The fall on all images of `analyze.py replace` counts as the true one. Samples are drawn from them with replacement:
without it, samples of a finite set cover more than those of an unlimited one.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from analysis.certificate import Certificate
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.files import check_output, dicts_to_csv, write_file
from engine.runtime.reading import read_csv

SIZES, SAMPLES = (100, 300, 1000), 1000
"""Numbers of images of a sample, and number of samples of each."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m tests.support.coverage", description="Measure the coverage of certificates."
    )
    parser.add_argument("draws", nargs="+", type=Path, help="replace_draws.csv of analyze.py replace, for each model")
    parser.add_argument("output", type=Path, help="table: .csv")
    parser.add_argument("--images", type=Count(), required=True, help="number of images that top-1 is measured on")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        check_output(args.output, "output", [".csv"])
        found = [line for path in args.draws for line in read_conversions(path, args.images)]
        generator = torch.Generator().manual_seed(0)
        write_file(args.output, dicts_to_csv([line | cover(line, args.images, generator) for line in found]))


def read_conversions(path: Path, images: int) -> list[dict[str, Any]]:
    """Returns changed predictions and fall of top-1, in points, of every conversion; equal ones of a mechanism once."""
    rows, found = read_csv(path), {}
    own = [float(row["top1"]) for row in rows if row.get("changed") == "0"]
    if not own:
        raise UserError(f"{path}: no row of the model's own attention, whose column changed is 0; measure it too")
    for row in rows:
        for stage, prefix in (("replaced", ""), ("aligned", "aligned_")):
            if (count := row[f"{prefix}changed"]) not in ("", "0"):
                fall = round(own[0] - float(row[f"{prefix}top1"]), 4)
                line = {"model": path.absolute().parent.name, "attention": row["attention"], "seed": row["seed"]}
                line |= {"stage": stage, "changed": int(count), "rate": 100 * int(count) / images, "fall": fall}
                found.setdefault((row["attention"], stage, count, fall), line)
    return list(found.values())


def cover(line: dict[str, Any], images: int, generator: torch.Generator) -> dict[str, float]:
    """Returns how many samples of each size bound the fall, and the rate, of a conversion, and the median bound.

    covered: the least number that bound the fall.
    """
    found: dict[str, float] = {}
    for size in SIZES:
        changed = torch.randint(images, (SAMPLES, size), generator=generator) < line["changed"]  # those stand first
        bounds = [Certificate(size, count).bound for count in changed.sum(1).tolist()]
        found[f"covered_{size}"] = sum(bound >= line["fall"] for bound in bounds)
        found[f"rate_covered_{size}"] = sum(bound >= line["rate"] for bound in bounds)
        found[f"bound_{size}"] = round(median(bounds), 3)
    return {"covered": min(found[f"covered_{size}"] for size in SIZES), **found}


if __name__ == "__main__":
    main()
