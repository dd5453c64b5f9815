"""The weights that are taken where the user names no kind: averaged ones, unless plain ones were measured as better."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.checkpoints.files import Weights, find_weights
from engine.checkpoints.identify import Found

NOISE = 2.0
"""Standard errors of a difference of accuracies that count as noise."""


class Choice(NamedTuple):
    """Weights of a source: their checkpoint, its content, their kind, and why they are not the averaged ones ("")."""

    path: Path
    checkpoint: dict[str, Any]
    weights: Weights
    note: str


def choose_weights(
    source: Path | Found, which: Literal["best", "last"] = "best", weights: Weights | None = None
) -> Choice:
    """Chooses among the kinds of weights of `find_weights`, by the last evaluations that their checkpoints record.

    UserError: see `find_weights`.
    """
    listed = find_weights(source, which, weights)
    kinds = {kind: (path, checkpoint) for path, checkpoint, each in listed for kind in each}
    chosen, note = prefer({kind: _recorded(checkpoint, kind) for kind, (_, checkpoint) in kinds.items()})
    return Choice(*kinds[chosen], chosen, note)


def prefer(metrics: Mapping[Weights, Mapping[str, Any]]) -> tuple[Weights, str]:
    """Chooses a kind of weights by its metrics, and says why if both are there and it is not the averaged one.

    Plain weights are better if their top-1 is higher by more than `NOISE` standard errors of the difference of two
    proportions. A loss has no such bound: plain weights are better only where theirs alone is finite.

    Args:
        metrics: kind -> `top1` (percent), `images` and `loss`, as far as they were measured.
    """
    if len(metrics) < 2:
        return next(iter(metrics)), ""
    plain, averaged = metrics["plain"], metrics["ema"]
    rates = [each.get("top1", math.nan) / 100 for each in (plain, averaged)]
    if all(0 <= rate <= 1 for rate in rates):
        error = math.sqrt(sum(rate * (1 - rate) for rate in rates) / max(1, plain.get("images", 1)))
        if rates[0] - rates[1] > NOISE * error:
            found = f"top-1 {plain['top1']:.2f} %, that of the averaged ones {averaged['top1']:.2f} %"
            return "plain", f"the plain weights, which were measured as better: {found}"
    elif math.isfinite(plain.get("loss", math.nan)) and not math.isfinite(averaged.get("loss", 0.0)):
        return "plain", "the plain weights, as the loss of the averaged ones is not finite"
    return "ema", ""


def _recorded(checkpoint: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Returns the metrics of one kind of weights in a checkpoint."""
    metrics, prefix = checkpoint["progress"].get("metrics", {}), "ema_" if weights == "ema" else ""
    names = {"top1": f"{prefix}top1", "loss": f"{prefix}loss", "images": "images"}
    return {name: metrics[key] for name, key in names.items() if key in metrics}
