"""Certificate of a converted model: how far its top-1 can have fallen, without labels.

An image whose prediction is unchanged is right in both models, or wrong in both. Top-1 thus falls by at most the rate of
changed predictions on all images of the kind, and this rate is at most the upper bound of Clopper and Pearson (The use
of confidence or fiducial limits illustrated in the case of the binomial, Biometrika 26, 1934) with 95 % confidence. It
is an upper bound from disagreement: a changed prediction may as well be a better one, and top-1 may have risen.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

CONFIDENCE = 0.95

NOTE = (
    "Upper bounds from disagreement with the model's own attention, without labels: an image whose prediction is "
    "unchanged is right in both models or wrong in both. 'Images like these' are those of which these are a random "
    "sample, on which neither model was fitted or chosen. "
)
"""What is to be said about all certificates of a command; see also `ALONE`."""

ALONE = "The 95 % hold for each line alone; the lowest of several bounds is optimistic."
"""What is to be said about several certificates that are not corrected for a choice."""


def upper_bound(images: int, changed: int, confidence: float = CONFIDENCE, choices: int = 1) -> float:
    """Returns the one-sided upper bound of Clopper and Pearson for the rate of changed predictions.

    It is the rate at which so few of the images change with a probability of just 1 - confidence.

    Args:
        choices: number of converted models that the model may have been chosen from by means of these images. The bound
            holds for all of them at once (Bonferroni).
    """
    if changed >= images:
        return 1.0
    few = torch.arange(changed + 1, dtype=torch.float64)
    ways = math.lgamma(images + 1) - torch.lgamma(few + 1) - torch.lgamma(images - few + 1)
    limit = math.log1p(-confidence) - math.log(choices)
    low, high = changed / images, 1.0
    while low < (middle := (low + high) / 2) < high:
        terms = ways + few * math.log(middle) + (images - few) * math.log1p(-middle)
        low, high = (middle, high) if terms.logsumexp(0) > limit else (low, middle)
    return high


def count_changed(own: Tensor, converted: Tensor) -> int:
    """Counts the images whose predictions (n,) differ; those of `rank_classes` without finite logits, -1, always do."""
    return int(((own != converted) | (own < 0) | (converted < 0)).sum())


class Certificate(NamedTuple):
    """Number of images, and of those whose prediction changed; choices: see `upper_bound`."""

    images: int
    changed: int
    choices: int = 1

    @property
    def rate(self) -> float:
        """Percentage of changed predictions."""
        return 100 * self.changed / self.images

    @property
    def bound(self) -> float:
        """Points by which top-1 can have fallen."""
        return 100 * upper_bound(self.images, self.changed, choices=self.choices)

    def values(self, prefix: str = "") -> dict[str, float]:
        """Returns the columns of a CSV file beside the number of images."""
        return {
            f"{prefix}changed": self.changed,
            f"{prefix}changed_rate": round(self.rate, 4),
            f"{prefix}fall_bound": round(self.bound, 4),
        }

    def __str__(self) -> str:
        chosen = f", whichever of {self.choices:,} assignments is chosen" * (self.choices > 1)
        text = f"top-1 can have fallen by at most {math.ceil(10 * self.bound) / 10:.1f} points on images like these"
        return f"{text} (95 %{chosen}): {self.changed:,} of {self.images:,} predictions changed ({self.rate:.2f} %)"
