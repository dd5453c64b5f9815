"""The copy task (Katharopoulos et al., 2020, section 4.1; Scatterbrain, Table 2): the model repeats a sequence.

A sequence is `0 w 0 w`, with w uniform over the other tokens. A causal model predicts every token from the earlier
ones. It learns the second w alone, because the first cannot be predicted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from attention.options import OptionError
from engine.config.schema import Augment, Data, Distill, Run
from engine.objectives.classification import rank_classes
from engine.objectives.objective import Measure, Objective
from engine.objectives.sequences import NO_AUGMENTATION, refuse_options
from models.assignment import mechanisms_of

MAX_DRAWN = 2**27
"""Largest number of tokens of a split, which is held in memory."""


def predict_copies(network: Callable[[Tensor], Tensor], sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits for the second copy, (B, n, tokens), and its targets, (B, n); n = N / 2 - 1.

    Args:
        sequences: (B, 1, 1, N).
    """
    tokens = sequences.flatten(1).long()
    second = tokens.shape[1] // 2
    return network(sequences)[:, second:-1], tokens[:, second + 1 :]


def rate_copies(model: nn.Module, sequences: Tensor, targets: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """Computes the metrics `COPIES` of every sequence of a batch."""
    logits, copied = predict_copies(model, sequences)
    hits = (rank_classes(logits) == copied[..., None]).double()
    losses = F.cross_entropy(logits.mT.float(), copied, reduction="none").double()
    return [100 * hits[..., 0].mean(1), 100 * hits.sum(2).mean(1), losses.mean(1)]


COPIES = Measure(("top1", "top5", "loss"), rate_copies)
"""Means over the tokens of the second w. top1, top5: percent of them with the highest, or one of the five highest
logits. loss: cross-entropy, nats; its exponential is the perplexity."""


class Copying(Objective):
    """The objective of a run on the copy task."""

    measure, inputs = COPIES, "tokens"

    @staticmethod
    def applies(run: Run) -> bool:
        return run.data.dataset == "copy"

    @staticmethod
    def learns_labels(run: Run) -> bool:
        return False

    @staticmethod
    def check(run: Run) -> None:
        """Refuses options that the copy task cannot use."""
        data, model = run.data, run.model
        if data.dataset != "copy":
            if data.num_sequences != Data.num_sequences:
                raise OptionError("data.num_sequences", f"acts on data.dataset=copy, not {data.dataset}; leave it out")
            return

        def refuse(key: str, value: Any, remedy: str) -> NoReturn:
            raise OptionError(key, f" = {value}: the copy task has sequences of tokens; {remedy}")

        if model.get("vocab_size", 0) < 2:
            refuse("model.vocab_size", model.get("vocab_size"), "set it to their number, of a DeiT, at least 2")
        height, length = to_2tuple(model["img_size"])
        if height != 1 or length % 2 or length < 4:
            refuse("model.img_size", [height, length], "set it to [1, N] with N even, at least 4")
        if (total := max(data.num_sequences) * length) > MAX_DRAWN:
            refuse("data.num_sequences", [*data.num_sequences], f"lower it: {total:,} tokens are above {MAX_DRAWN:,}")
        for name, value in {"global_pool": "", "num_classes": model["vocab_size"]}.items():
            if model[name] != value:
                refuse(f"model.{name}", model[name], f"set it to {value!r}, to predict one at every place")
        for mechanism in mechanisms_of(run.attention):
            if not mechanism.get("causal"):
                remedy = "set it to true, or choose a mechanism that has it"
                refuse(f"attention({mechanism['name']}).causal", False, remedy)
        neutral = {
            "augment": vars(Augment(**NO_AUGMENTATION)),
            "data": {
                name: getattr(Data, name)
                for name in ("root", "classes", "subset", "val_fraction", "folds", "crop_mode")
            },
            "distill": vars(Distill()),
        }
        refuse_options(run, neutral, "the copy task has sequences of tokens")

    @staticmethod
    def prediction_refusal(source: str, of_metrics: bool) -> str:
        return "" if of_metrics else "trained to copy sequences, it does not take images; name a run of images"

    @staticmethod
    def draw(run: Run, is_training: bool) -> tuple[np.ndarray, np.ndarray, Sequence[str]]:
        """Draws the sequences, each an image of one row, (n, 1, length); the label of a sequence is the first of w.

        Sequence i of a split is always the same.
        """
        number, (_, length) = run.data.num_sequences[not is_training], to_2tuple(run.model["img_size"])
        rng, vocab_size = np.random.default_rng(int(not is_training)), run.model["vocab_size"]
        w = np.zeros((number, 1, length // 2), np.uint8)
        w[..., 1:] = rng.integers(1, vocab_size, (number, 1, length // 2 - 1))
        return np.tile(w, 2), w[:, 0, 1].astype(int), [*map(str, range(vocab_size))]

    def __call__(self, network: Callable[[Tensor], Tensor], sequences: Tensor, targets: Tensor, /) -> Tensor:
        """Computes the mean cross-entropy of the tokens of the second w, a scalar in nats."""
        logits, copied = predict_copies(network, sequences)
        return F.cross_entropy(logits.mT, copied)
