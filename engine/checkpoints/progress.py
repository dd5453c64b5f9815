"""Progress of a run, and the ranking of its epochs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attention.options import parse_options
from engine.config.schema import Run
from engine.runtime.text import one_line

Weights = Literal["plain", "ema"]

WEIGHTS: dict[Weights, str] = {"plain": "model", "ema": "model_ema"}
"""Kind of weights, as trained or averaged -> its state dict in a checkpoint."""


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        epoch: finished epochs, evaluation included. step: finished updates, over all epochs.
        images: position in the order of the current epoch, over all ranks. broken: images left out before it.
        loss_sum, num_summed: losses of the updates since the last log line.
        num_overflows: updates skipped by loss scaling (fp16) since the last that was not.
        stopped_early: whether the last evaluation ended the run, see `is_overdue`.
        metrics: metrics of the last evaluation. ranking, ema_ranking: [score, epoch] of the best epochs, best first,
            by the plain and by the averaged weights. ranked_by: the metric that is the score, a loss negated; "": see
            `default_ranking`.
        kernels: GPU -> signature of a call -> speed-up by Triton's kernel, see `attention.kernels.use`.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    broken: int = 0
    loss_sum: float = 0.0
    num_summed: int = 0
    num_overflows: int = 0
    stopped_early: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    ranking: list[list] = field(default_factory=list)
    ema_ranking: list[list] = field(default_factory=list)
    ranked_by: str = ""
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)

    def total_steps(self, run: Run, updates_per_epoch: int) -> int:
        """Returns the updates of the whole run: the finished ones and the rest of its epochs."""
        done = self.epoch * updates_per_epoch + self.images // run.train.total_batch_size
        return self.step + run.schedule.epochs * updates_per_epoch - done

    def ends_in_evaluation(self, run: Run) -> bool:
        """Returns whether an evaluation follows the updates of the current epoch."""
        return (self.epoch + 1) % run.train.eval_every == 0 or self.epoch + 1 == run.schedule.epochs

    def best_epoch(self) -> int:
        """Returns the latest epoch that is the best by a kind of weights; 0: none has a score."""
        return max((ranking[0][1] for ranking in (self.ranking, self.ema_ranking) if ranking), default=0)

    def is_overdue(self, run: Run) -> bool:
        """Returns whether the best epoch is `train.early_stop` epochs old."""
        return run.train.early_stop is not None and self.epoch - self.best_epoch() >= run.train.early_stop

    def is_finished(self, run: Run) -> bool:
        """Returns whether `run` has all its epochs, or has stopped early, and may not go on now."""
        return self.epoch >= run.schedule.epochs or (self.stopped_early and self.is_overdue(run))

    def take_loss(self) -> float:
        """Returns the mean loss of the updates since the last log line, and counts from here."""
        loss, self.loss_sum, self.num_summed = self.loss_sum / self.num_summed, 0.0, 0
        return loss

    def rank(self, epoch: int, keep: int, best_by: str | None = None) -> None:
        """Ranks `epoch` by `best_by`, None: `default_ranking`; keeps the `keep` best by each kind of weights.

        Epochs that were ranked by another metric, or by averaged weights that are kept no more, are forgotten.
        """
        default = default_ranking(self.metrics)
        name = best_by or default
        if name != (self.ranked_by or default):
            self.ranking, self.ema_ranking = [], []
        self.ranked_by, sign = name, sign_of(name)
        self.ranking = rank_epoch(self.ranking, epoch, sign * self.metrics[name], keep)
        averaged = self.metrics.get(f"ema_{name}")
        self.ema_ranking = [] if averaged is None else rank_epoch(self.ema_ranking, epoch, sign * averaged, keep)

    def unranked(self) -> dict[str, float]:
        """Returns the metrics that cannot rank the last evaluation, see `is_score`."""
        name = self.ranked_by or default_ranking(self.metrics)
        found = {key: self.metrics[key] for key in (name, f"ema_{name}") if key in self.metrics}
        return {key: value for key, value in found.items() if not is_score(value)}

    def best(self) -> dict[str, float]:
        """Returns the best metric of each kind of weights, under the names of a record."""
        name = self.ranked_by or default_ranking(self.metrics)
        sign = sign_of(name)
        rankings = {f"best_{name}": self.ranking, f"best_ema_{name}": self.ema_ranking}
        return {name: sign * ranking[0][0] for name, ranking in rankings.items() if ranking}


def default_ranking(metrics: Mapping[str, float]) -> str:
    """Returns the metric that ranks epochs where no other is chosen."""
    return "top1" if "top1" in metrics else "loss"


def sign_of(name: str) -> int:
    """Returns 1 if the highest value of a metric is best, -1 if the lowest is."""
    return -1 if name == "loss" else 1


def describe_place(run: Run, epoch: int, step: int, total_steps: int) -> str:
    """Returns where `run` is, after `epoch` epochs and `step` of its updates."""
    return f"epoch {epoch}/{run.schedule.epochs}  step {step}/{total_steps}"


class Resumption(NamedTuple):
    """Checkpoint that a run resumes from, and options, or names in its metadata, that differ: values before and now.

    `changes` are those of the `differences` that have an effect, and were allowed.
    """

    checkpoint: Path | None = None
    differences: Mapping[str, tuple[Any, Any]] = {}
    changes: Mapping[str, tuple[Any, Any]] = {}

    def describe(self, where: str, others: Mapping[str, tuple[Any, Any]] = {}) -> str:
        """Returns the name of the checkpoint, `where` that is in the run, and what differs, a line each.

        `others` are further values before and now; equal ones are left out.
        """
        pairs = {**self.differences, **{name: pair for name, pair in others.items() if pair[0] != pair[1]}}
        lines = [
            f"  {name}: {one_line(f'{was}', 60)} -> {one_line(f'{now}', 60)}" for name, (was, now) in pairs.items()
        ]
        end = "differences:" if lines else "nothing differs"
        return "\n".join([f"{self.checkpoint}  {where}; {end}", *lines])


def is_score(value: float | None) -> bool:
    """Returns whether a metric can be compared: NaN, infinity and None, which records have for both, are never best."""
    return value is not None and math.isfinite(value)


def rank_epoch(ranking: list[list], epoch: int, score: float, keep: int) -> list[list]:
    """Returns the `keep` best [score, epoch] of `ranking` and the new epoch, best first; ties go to the earlier one."""
    entries = [entry for entry in [*ranking, [score, epoch]] if is_score(entry[0])]
    return sorted(entries, key=lambda entry: (-entry[0], entry[1]))[:keep]


def check_progress(progress: Any) -> None:
    """Checks types and ranges of the fields of `Progress`. ValueError: a value that no run has."""
    fields = vars(parse_options(Progress, progress, "progress"))
    if not {"epoch", "step"} <= progress.keys():
        raise ValueError(f"progress without epoch and step: {progress}")
    rankings = [value for value in fields.values() if isinstance(value, list)]
    numbers = [*fields["metrics"].values(), *(number for ranking in rankings for pair in ranking for number in pair)]
    tables = [*fields["kernels"].values()]
    counts = [value for value in fields.values() if isinstance(value, int)]
    if (
        not all(isinstance(number, float) or (isinstance(number, int) and abs(number) < 2**63) for number in numbers)
        or not all(isinstance(x, float) for table in tables for x in (dict(table).values()))
        or any(len(pair) != 2 for ranking in rankings for pair in ranking)
        or not all(0 <= count < 2**53 for count in counts)
    ):
        raise ValueError(f"progress that no run makes: {progress}")
