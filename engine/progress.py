"""How far a run has come, and which of its epochs were best."""

from dataclasses import dataclass, field
from typing import Any

from attention.options import parse_options
from engine.schema import Run


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: finished epochs, evaluation included. step: finished updates, over all epochs.
        images: position in the order of the current epoch, over all ranks. broken: images before it that were left out.
        loss_sum, num_summed: of the updates since the last log line. num_skipped: updates that were not finite.
        num_overflows: updates skipped by loss scaling (fp16) since the last that was not.
        metrics: of the last evaluation. ranking, ema_ranking: [top-1, epoch] of the best epochs, best first, by the
            plain and by the averaged weights.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    broken: int = 0
    loss_sum: float = 0.0
    num_summed: int = 0
    num_skipped: int = 0
    num_overflows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    ranking: list[list] = field(default_factory=list)
    ema_ranking: list[list] = field(default_factory=list)

    def total_steps(self, run: Run, updates_per_epoch: int) -> int:
        """The updates of the whole run: those done, and those that are left of its epochs."""
        done = self.epoch * updates_per_epoch + self.images // run.train.total_batch_size
        return self.step + run.schedule.epochs * updates_per_epoch - done

    def rank(self, epoch: int, keep: int) -> None:
        """Ranks `epoch` by its `metrics`, and forgets all but the `keep` best of each kind of weights."""
        self.ranking = rank_epoch(self.ranking, epoch, self.metrics["top1"], keep)
        if "ema_top1" in self.metrics:
            self.ema_ranking = rank_epoch(self.ema_ranking, epoch, self.metrics["ema_top1"], keep)

    def best(self) -> dict[str, float]:
        """The highest top-1 of each kind of weights, as `engine.report` names it."""
        rankings = {"best_top1": self.ranking, "best_ema_top1": self.ema_ranking}
        return {name: ranking[0][0] for name, ranking in rankings.items() if ranking}


def rank_epoch(ranking: list[list], epoch: int, top1: float, keep: int) -> list[list]:
    """The `keep` best [top-1, epoch] of `ranking` and the new epoch, best first, the earlier of equals first."""
    return sorted([*ranking, [top1, epoch]], key=lambda entry: (-entry[0], entry[1]))[:keep]


def check_progress(progress: Any) -> None:
    """Checks types and ranges of the fields of `Progress`.

    Raises:
        ValueError: of the first that no run has.
    """
    fields = vars(parse_options(Progress, progress, "progress"))
    rankings = [value for value in fields.values() if isinstance(value, list)]
    numbers = [*fields["metrics"].values(), *(number for ranking in rankings for pair in ranking for number in pair)]
    counts = [value for value in fields.values() if isinstance(value, int)]
    if (
        not all(isinstance(number, int | float) for number in numbers)
        or any(len(pair) != 2 for ranking in rankings for pair in ranking)
        or not all(0 <= count < 2**53 for count in counts)
    ):
        raise ValueError(f"progress that no run makes: {progress}")
