"""Stored quality of mechanisms, derived from docs/data/transfer.csv: python -m bench.quality

The command writes bench/quality.csv, which is installed with the package.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from attention import AttentionFactory
from bench.workload import read_options
from engine.reporting.tables import spread
from engine.runtime.files import to_csv, write_file
from engine.runtime.reading import parsing, read_csv

STORED = Path(__file__).with_name("quality.csv")
MEASURED = Path(__file__).parents[1] / "docs/data/transfer.csv"
REMEDY = "python -m bench.quality writes it"
MEANING = (
    "Points lost: top-1 that a small model (196 tokens, Fashion-MNIST) loses when its attention is replaced, and "
    "aligned to the former attention without labels; bench/quality.csv. It does not show the accuracy of another model."
)


class Quality(NamedTuple):
    """A stored quality.

    Attributes:
        options: ``"window_size=7,num_landmarks=49"``; others have their defaults. loss: top-1 points, less is better.
        std: standard deviation of n values, None for one value.
    """

    mechanism: str
    options: str
    loss: float
    std: float | None
    n: int

    @property
    def entry(self) -> str:
        """The layer as an entry of ``benchmark.py --attention``."""
        return f"{self.mechanism}:{self.options}" if self.options else self.mechanism

    @property
    def factory(self) -> AttentionFactory:
        """The mechanism with its checked options."""
        return AttentionFactory.from_options({"name": self.mechanism, **read_options(self.entry, self.options)})


def read_quality(path: Path = STORED) -> list[Quality]:
    """Reads the stored quality. UserError: the file is damaged."""
    rows = read_csv(path, remedy=REMEDY)
    with parsing(path, REMEDY):
        return [
            Quality(
                row["mechanism"],
                row["options"],
                float(row["loss"]),
                float(row["std"]) if row["std"] else None,
                int(row["n"]),
            )
            for row in rows
        ]


def derive(path: Path = MEASURED) -> list[Quality]:
    """Derives losses from a table of aligned models with a row for each seed, relative to the mean of softmax's row.

    Softmax attention is the trained model's own, so its loss is 0.
    """
    rows = [row for row in read_csv(path) if row["mode"] in ("", "evaluation")]
    trained = mean(float(row["top1"]) for row in rows if row["attention"] == "softmax" and row["top1"])
    losses: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        of_layer = losses.setdefault((row["attention"], row["options"].replace(" ", "")), [])
        if row["attention"] == "softmax":
            of_layer.append(0.0)
        elif row["aligned_top1"]:
            of_layer.append(trained - float(row["aligned_top1"]))
    found: Sequence = [(*layer, spread(values)) for layer, values in losses.items() if values]
    return [Quality(*layer, round(s.mean, 5), None if s.std is None else round(s.std, 5), s.n) for *layer, s in found]


def main() -> None:
    write_file(STORED, to_csv(Quality._fields, derive()))


if __name__ == "__main__":
    main()
