"""The learning rate of a setting, chosen on held-out training images, by the same rule for every setting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ablation.cases import Case
from attention.options import OptionError
from engine.checkpoints.progress import is_score


@dataclass(frozen=True)
class Tuning:
    """The runs of a setting that choose its learning rate.

    Attributes:
        cases: learning rate, ascending -> its run, whose validation images are held-out training images.
    """

    cases: Mapping[float, Case]
    _chosen: list[float] = field(default_factory=list, compare=False)

    def choose(self) -> float | None:
        """Returns the learning rate with the best top-1; of equal ones the one with the lower loss, then the smaller. A
        loss that is not finite is the highest.

        Runs that have diverged take no part. None: a run is not finished yet, or all have diverged.
        """
        if not self._chosen:
            results = self.results()
            if len(results) + len(self.diverged()) < len(self.cases) or not results:
                return None
            losses = {lr: loss if is_score(loss := result["loss"]) else math.inf for lr, result in results.items()}
            self._chosen.append(min(results, key=lambda lr: (-results[lr]["top1"], losses[lr], lr)))
        return self._chosen[0]

    def results(self) -> dict[float, dict[str, Any]]:
        """Returns learning rate -> final record of train.py for the finished runs."""
        found = {lr: case.result() for lr, case in self.cases.items()}
        return {lr: result for lr, result in found.items() if result}

    def diverged(self) -> list[float]:
        """Returns the learning rates whose runs have ended because a loss, gradient or weight was not finite."""
        return [lr for lr, case in self.cases.items() if case.has_diverged()]

    def edge(self) -> str:
        """Returns "lowest" or "highest" if the chosen learning rate is that of all; otherwise ""."""
        lr, all_of_them = self.choose(), [*self.cases]
        return {all_of_them[0]: "lowest", all_of_them[-1]: "highest"}.get(lr, "") if lr is not None else ""


def check_rates(rates: Sequence[float] | None) -> list[float]:
    """Returns the option `lr` of a sweep, ascending; empty for null.

    Raises:
        OptionError: there are less than two different learning rates.
    """
    if rates is not None and (len(rates) < 2 or len(set(rates)) < len(rates)):
        raise OptionError("lr", f"expected two or more different learning rates to choose from, got {[*rates]}")
    return sorted(rates or ())
