"""The copy task (Katharopoulos et al., 2020, section 4.1; Scatterbrain, Table 2): what was said is said again.

A sequence is `0 w 0 w`, with w uniform over the other tokens. A causal model predicts every token from those before it,
and learns the second w alone, as nothing tells the first.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from engine.evaluate import CLASSES, Measure
from engine.records import TOP
from engine.schema import Run


class Copying:
    """The objective of a run on the copy task.

    Attributes:
        identity: metadata of checkpoints: none. measure: what an evaluation looks for.
    """

    def __init__(self) -> None:
        self.identity: dict[str, str] = {}
        self.measure = COPIES

    def __call__(self, network: Callable[[Tensor], Tensor], sequences: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, a scalar: mean cross-entropy of the tokens of the second w, nats."""
        logits, copied = predict_copies(network, sequences)
        return F.cross_entropy(logits.mT, copied)

    def pictures(self, rows: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Of every evaluation: none."""
        return {}


def predict_copies(network: Callable[[Tensor], Tensor], sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (B, 1, 1, N) -> logits (B, n, tokens) of the second w, each from what is before it, and that w, (B, n).

    n is N / 2 - 1.
    """
    tokens = sequences.flatten(1).long()
    second = tokens.shape[1] // 2
    return network(sequences)[:, second:-1], tokens[:, second + 1 :]


def sum_copies(model: nn.Module, sequences: Tensor, targets: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """The sums of `COPIES`."""
    logits, copied = predict_copies(model, sequences)
    hits = (logits.topk(min(TOP, logits.shape[-1])).indices == copied[..., None]).double()
    losses = F.cross_entropy(logits.mT.float(), copied, reduction="none").double()
    return [100 * hits[..., 0].mean(1).sum(), 100 * hits.sum(2).mean(1).sum(), losses.mean(1).sum()]


COPIES = Measure(("top1", "top5", "loss"), sum_copies)
"""Means over the tokens of the second w; top1, top5: percent of them that have the highest / one of the five highest
logits. loss: cross-entropy, nats; its exponential is the perplexity."""


def measure_of(run: Run) -> Measure:
    """What the validation of a run on classes or copies looks for."""
    return COPIES if run.data.dataset == "copy" else CLASSES
