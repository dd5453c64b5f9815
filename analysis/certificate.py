"""Certificate of a converted model: how far its top-1 can have fallen, without labels.

An image whose prediction is unchanged is right in both models, or wrong in both. Top-1 thus falls by at most the rate
of changed predictions, which a random sample of images bounds with 95 % confidence (Clopper and Pearson, The use of
confidence or fiducial limits illustrated in the case of the binomial, Biometrika 26, 1934). It is an upper bound from
disagreement: a changed prediction may be a better one, and top-1 may have risen.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

NOTE = (
    "These are upper bounds from disagreement with the model's own attention, without labels: where a prediction is "
    "unchanged,\nboth models are right or both wrong. They hold for images of which these are a random sample, if no "
    "weights were fitted to\nthese (--align leaves them out). Unless a line says more, its 95 % are its own: the best "
    "of several lines is optimistic."
)


@cache
def upper_bound(images: int, changed: int, confidence: float = 0.95, choices: int = 1) -> float:
    """Returns the one-sided upper bound of Clopper and Pearson for the rate of changed predictions.

    It is the rate at which so few of the images change with a probability of just 1 - confidence.

    Args:
        choices: number of converted models from which one may have been chosen by means of these images. The bound
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
    return int(((own != converted) | (converted < 0)).sum())


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

    def __str__(self) -> str:
        bound = math.ceil(10 * self.bound) / 10  # never rounded down
        chosen = f", whichever of {self.choices:,} assignments is chosen" * (self.choices > 1)
        text = f"top-1 can have fallen by at most {bound:.1f} points on images like these (95 %{chosen})"
        return f"{text}: {self.changed:,} of {self.images:,} predictions changed ({self.rate:.2f} %)"


def columns(certificate: Certificate | None, prefix: str = "") -> dict[str, float | None]:
    """Returns the columns of a CSV file that has the number of images already."""
    found = (certificate.changed, certificate.rate, certificate.bound) if certificate else (None,) * 3
    return dict(zip((f"{prefix}changed", f"{prefix}changed_rate", f"{prefix}fall_bound"), found, strict=True))
