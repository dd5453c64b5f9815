"""Measurements of a trained model with other attention, in single draws: rows of a table, and lines of a CSV file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.certificate import Certificate
from engine.reporting.tables import Spread, spread


class Score(NamedTuple):
    """Top-1 in percent, mean cross-entropy in nats, number of predictions that are not the trained model's, and the
    standard error of the loss less the trained model's; see `analysis.laboratory.score`.
    """

    top1: float
    loss: float
    changed: int
    error: float = 0.0


class Stage(NamedTuple):
    """Measurements of a model with another mechanism.

    Attributes:
        top1, loss, changed: see `Score`. attended, outputs: `relative_error` of attended values, and of outputs, on
            the inputs of the trained model's layers; mean over the layers that get another mechanism or other options.
    """

    top1: float
    loss: float
    attended: float
    outputs: float
    changed: int | None = None


class Tuned(NamedTuple):
    """Result of further training.

    Attributes:
        top1: in percent of all validation images. minutes: from its start to its end. run: directory. changed: see
            `Score`, after the last epoch.
    """

    top1: float
    minutes: float
    run: Path = Path()
    changed: int | None = None


class Draw(NamedTuple):
    """Measurements of a mechanism with one seed.

    Attributes:
        replaced, aligned, tuned: stages; None: none. seconds: time of the alignment; on a CPU, processor time.
        untrained: number of untrained parameters. weights: export of the aligned model, or file of the trained one.
    """

    replaced: Stage
    aligned: Stage | None = None
    seconds: float | None = None
    untrained: int = 0
    weights: Path | None = None
    tuned: Tuned | None = None


def to_draw(values: Any, weights: Path) -> Draw:
    """Returns the values of a kept measurement, which may have been changed, as numbers.

    Raises:
        LookupError, TypeError, ValueError and others: they are no measurement.
    """
    stages = (values["replaced"], values["aligned"])
    replaced, aligned = (x if x is None else Stage(*map(float, x[:4]), int(x[4])) for x in stages)
    seconds = values["seconds"]
    times = None if seconds is None else float(seconds)
    return Draw(replaced, aligned, times, int(values["untrained"]), weights)


@dataclass(frozen=True, eq=False)
class Row:
    """Measurements of a mechanism.

    Attributes:
        name: the mechanism on the command line. options: its options. attention: attention of the whole model.
        draws: results by seed, from 0 on. macs: MACs of one image. problem: why there is no result.
    """

    name: str
    options: str
    attention: Any = None
    draws: tuple[Draw, ...] = ()
    macs: int | None = None
    problem: str = ""

    @property
    def untrained(self) -> int:
        return self.draws[0].untrained if self.draws else 0

    def spread(self, stage: str, name: str) -> Spread | None:
        """Returns the mean and the standard deviation over draws of a measurement; None if there are none."""
        found = [getattr(draw, stage) for draw in self.draws]
        return spread(getattr(values, name) for values in found if values is not None)

    def certificate(self, stage: str, images: int) -> Certificate | None:
        """Returns the certificate of the draw of a stage that changed most of the images; None if there is none."""
        found = [getattr(draw, stage) for draw in self.draws]
        counts = [values.changed for values in found if values and values.changed is not None]
        return Certificate(images, max(counts)) if counts else None

    def seconds(self) -> Spread | None:
        return spread(draw.seconds for draw in self.draws if draw.seconds is not None)


def is_own(row: Row) -> bool:
    """Returns whether a mechanism has no untrained parameters, and the outputs of the trained model's attention."""
    return bool(row.draws) and not row.untrained and all(draw.replaced.outputs == 0 for draw in row.draws)


def paired(row: Row, control: Row, step: float) -> Spread | None:
    """Returns the spread over seeds of the tuned top-1 minus `control`'s; `step` is one image's share of top-1."""
    pairs = [(a.tuned, b.tuned) for a, b in zip(row.draws, control.draws, strict=False)]
    if row is control:
        return None
    return spread((a.top1 - b.top1 for a, b in pairs if a is not None and b is not None), step)


def to_lines(row: Row) -> list[dict[str, Any]]:
    """Returns the lines of a row in the CSV file of single draws, column -> value."""
    lines = []
    for seed, found in enumerate(row.draws):
        line: dict[str, Any] = {"attention": row.name, "options": row.options, "seed": seed}
        for prefix, stage in (("", found.replaced), ("aligned_", found.aligned)):
            top1, loss, attended, output, changed = (None,) * 5 if stage is None else stage
            line |= {f"{prefix}top1": top1, f"{prefix}loss": loss, f"{prefix}error": attended}
            line |= {f"{prefix}output_error": output, f"{prefix}changed": changed}
        line |= {"aligned_seconds": found.seconds}
        tuned = found.tuned
        line |= {"tuned_top1": tuned and tuned.top1, "tuned_minutes": tuned and round(tuned.minutes, 2)}
        line |= {"tuned_changed": tuned and tuned.changed}
        lines.append(line)
    return lines
