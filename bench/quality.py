"""Stored quality of mechanisms, derived from the measurements in docs/data: python -m bench.quality

The command writes bench/quality.csv, which is installed with the package. Every value is a loss: less is better.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from attention import ATTENTION
from bench.candidates import Candidate, Shape
from bench.workload import read_options
from engine.config.yaml_files import parse_yaml
from engine.reporting.tables import spread
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv, write_file
from engine.runtime.reading import read_csv

STORED = Path(__file__).with_name("quality.csv")
MEASURED = Path(__file__).parents[1] / "docs/data"
MEASURES = {
    "aligned_loss": "top-1 points lost by a trained model's own attention replaced, then aligned to it without labels",
    "replaced_loss": "top-1 points lost by a trained model's own attention replaced, without any training",
    "tuned_loss": "top-1 points behind softmax attention, replaced, aligned and fine-tuned, both alike",
    "scratch_loss": "top-1 points behind softmax attention, trained alike from scratch",
    "aligned_error": "mean squared error of attention layers' outputs relative to zeros, replaced and aligned",
    "replaced_error": "mean squared error of attended values relative to zeros, replaced without any training",
}
"""Measure -> its meaning. The first one with stored values is the default."""
TOKENS = 196
"""Tokens of the models in docs/data that quality is taken from."""


class Quality(NamedTuple):
    """A stored quality.

    Attributes:
        options: ``"window_size=7,num_landmarks=49"``; others have their defaults. tokens: of the measured model.
        measure: key of `MEASURES`. std: standard deviation of n values, None for one value. source: file and command.
    """

    mechanism: str
    options: str
    tokens: int
    measure: str
    value: float
    std: float | None
    n: int
    source: str

    @property
    def candidate(self) -> Candidate:
        """The mechanism with the options that were measured."""
        return _candidate(self.mechanism, self.options)


@cache
def _candidate(mechanism: str, options: str) -> Candidate:
    return Candidate(mechanism, read_options(options, options))


def read_quality(path: Path = STORED) -> list[Quality]:
    """Reads the stored quality.

    Raises:
        UserError: the file is missing, or a row is malformed.
    """
    found = []
    for number, row in enumerate(read_csv(path, remedy="python -m bench.quality writes it"), 2):
        try:
            std = float(row["std"]) if row["std"] else None
            numbers = int(row["tokens"]), row["measure"], float(row["value"]), std, int(row["n"])
            found.append(Quality(row["mechanism"], row["options"], *numbers, row["source"]))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{path}, line {number}: {error!r} in a row of {', '.join(Quality._fields)}"
            raise UserError(f"{problem}; python -m bench.quality writes it anew") from None
    return found


def derive(directory: Path = MEASURED) -> list[Quality]:
    """Derives the stored quality from the measurements in a directory; a missing file gives no rows."""
    found = []
    for name, (reader, command) in READERS.items():
        path = directory / name
        if path.exists():
            found += [Quality(*fields, f"docs/data/{name}: {command}") for fields in reader(read_csv(path))]
    return found


Fields = tuple[str, str, int, str, float, float | None, int]


def of_values(mechanism: str, options: str, measure: str, values: Iterable[float]) -> Iterator[Fields]:
    """Yields mean, standard deviation and number of values, if there are any."""
    if found := spread(values):
        std = None if found.std is None else round(found.std, 5)
        yield mechanism, options, TOKENS, measure, round(found.mean, 5), std, found.n


def read_replaced(rows: Sequence[dict[str, str]]) -> Iterator[Fields]:
    """Yields losses and errors of replace.csv, which has means and standard deviations."""
    for row in rows:
        if row["mode"] != "evaluation" or row["problem"]:
            continue
        start, n = (row["attention"], row["options"].replace(" ", ""), TOKENS), int(row["draws"])
        yield *start, "replaced_loss", 0.0 - float(row["change"]), float(row["top1_std"]), n
        yield *start, "replaced_error", float(row["error"]), float(row["error_std"]), n


def read_aligned(rows: Sequence[dict[str, str]]) -> Iterator[Fields]:
    """Yields losses and errors of transfer.csv, which has a row for each seed.

    The loss after alignment is relative to the trained model, which is softmax's row; that after tuning is relative to
    softmax attention tuned with the same seed.
    """
    rows = [row for row in rows if row["mode"] in ("", "evaluation")]
    of_softmax = [row for row in rows if row["attention"] == "softmax"]
    trained = [float(row["top1"]) for row in of_softmax if row["top1"]]
    tuned = {row["seed"]: float(row["tuned_top1"]) for row in of_softmax if row["tuned_top1"]}
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["attention"], row["options"].replace(" ", "")), []).append(row)
    for (name, options), group in groups.items():
        own = name == "softmax"  # it is aligned to itself
        after = [0.0 if own else mean(trained) - float(r["aligned_top1"]) for r in group if own or r["aligned_top1"]]
        yield from of_values(name, options, "aligned_loss", after if trained else [])
        errors = [0.0 if own else float(r["aligned_output_error"]) for r in group if own or r["aligned_output_error"]]
        yield from of_values(name, options, "aligned_error", errors)
        pairs = [(r["seed"], float(r["tuned_top1"])) for r in group if r["tuned_top1"]]
        yield from of_values(name, options, "tuned_loss", [tuned[s] - top1 for s, top1 in pairs if s in tuned])


def read_trained(rows: Sequence[dict[str, str]]) -> Iterator[Fields]:
    """Yields losses of fashion_mnist.csv, which has top-1 for each seed: paired differences to softmax."""
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        runs.setdefault(row["attention"], {})[row["train.seed"]] = float(row["top1"])
    softmax = runs.get("{name: softmax}", {})
    for text, by_seed in runs.items():
        options = parse_yaml(text, lambda line, text=text: text).values
        candidate = Candidate(options.pop("name"), options)
        losses = [softmax[seed] - top1 for seed, top1 in by_seed.items() if seed in softmax]
        yield from of_values(candidate.name, candidate.options_text, "scratch_loss", losses)


READERS: dict[str, tuple[Callable[[Sequence[dict[str, str]]], Iterator[Fields]], str]] = {
    "transfer.csv": (read_aligned, "python analyze.py replace reference/fashion_mnist.safetensors --align"),
    "replace.csv": (read_replaced, "python analyze.py replace reference/fashion_mnist.safetensors --images 2000"),
    "fashion_mnist.csv": (read_trained, "python ablate.py configs/ablation/fashion_mnist.yaml"),
}
"""File in docs/data -> function of its rows, and the command that measured them."""


def default_measure(stored: Sequence[Quality]) -> str:
    """Returns the first of `MEASURES` with a stored value."""
    return next(name for name in MEASURES if any(each.measure == name for each in stored))


class Match(NamedTuple):
    """A stored quality that stands for a candidate, and what is extrapolated."""

    quality: Quality
    extrapolated: str


def find_quality(candidate: Candidate, shape: Shape, stored: Sequence[Quality]) -> Match | None:
    """Returns the stored quality for a candidate: of its own options, or of a smaller size of the same mechanism.

    A size is smaller if the layer has fewer MACs at this shape. The quality of a larger size is not taken: a candidate
    that is cheaper than everything measured has an unknown quality.

    Args:
        stored: values of one measure.
    """
    size, macs = ATTENTION[candidate.name].size_option, candidate.costs(shape).macs
    nearest: tuple[Any, ...] | None = None
    for each in stored:
        if each.mechanism != candidate.name:
            continue
        measured = each.candidate
        same = measured.factory == candidate.factory
        if not (same or (size and measured.family.factory == candidate.family.factory)):
            continue
        cost = measured.costs(shape).macs if same or measured.is_valid(shape) else None
        if cost is None or (not same and cost >= macs):
            continue
        rank = same, cost, -abs(each.tokens - shape.num_tokens)
        if nearest is None or rank > nearest[0]:
            nearest = rank, each
    if nearest is None:
        return None
    same, each = nearest[0][0], nearest[1]
    remarks = [] if same else [f"measured with {each.options or 'default options'}, asked {candidate.options_text}"]
    if each.tokens != shape.num_tokens:
        remarks.append(f"measured at {each.tokens} tokens, asked {shape.num_tokens}")
    return Match(each, f"quality extrapolated: {', '.join(remarks)}" if remarks else "")


def main() -> None:
    write_file(STORED, to_csv(Quality._fields, derive()))


if __name__ == "__main__":
    main()
