"""Classification of sequences of tokens: grey images of any data set, whose pixels are numbers of a vocabulary."""

from collections.abc import Mapping
from typing import Any

from attention import ATTENTION
from attention.options import OptionError
from engine.config.schema import Augment, Data, Distill, Run
from engine.objectives.classification import Classification
from models.assignment import factories_of

NO_AUGMENTATION: dict[str, Any] = {
    **dict.fromkeys(("scale", "ratio"), (1.0, 1.0)),
    **dict.fromkeys(("hflip", "color_jitter", "reprob", "mixup", "cutmix", "smoothing"), 0.0),
    "auto_augment": None,
}
"""Options of the section `augment` that leave images unchanged."""


def refuse_options(run: Run, neutral: Mapping[str, Mapping[str, Any]], why: str) -> None:
    """Refuses options that do not have their neutral value: section -> option -> value.

    Raises:
        OptionError: the first of them; `why` and the remedy follow its value.
    """
    for section, options in neutral.items():
        for name, value in options.items():
            if (given := getattr(getattr(run, section), name)) != value:
                remedy = f"set it to {'null' if value is None else value}"
                raise OptionError(f"{section}.{name}", f" = {given}: {why}; {remedy}")


class SequenceClassification(Classification):
    """The objective of a run on the classes of sequences: `model.vocab_size` is set."""

    inputs = "tokens"

    @staticmethod
    def applies(run: Run) -> bool:
        return bool(run.model.get("vocab_size")) and run.data.dataset != "copy"

    @staticmethod
    def check(run: Run) -> None:
        """Refuses augmentation and a teacher, which take pixels, and what cannot leave out padding."""
        if not SequenceClassification.applies(run):
            return
        neutral = {
            "augment": vars(Augment(**NO_AUGMENTATION)),
            "data": {"crop_mode": Data.crop_mode},
            "distill": vars(Distill()),
        }
        refuse_options(run, neutral, "with model.vocab_size, pixels are numbers of tokens")
        if run.model["pad_token"] is None:
            return
        for factory in factories_of(run.attention):
            if refusal := ATTENTION[factory.name].refuses_key_mask(factory.config):
                problem = f" = {run.model['pad_token']}: attention({factory.name}) takes no key_mask: {refusal}"
                raise OptionError("model.pad_token", f"{problem}; set it to null, or choose another mechanism")
        if run.train.compile is True:
            raise OptionError(
                "train.compile", " = true: with model.pad_token, blocks are not compiled; set it to false"
            )

    @staticmethod
    def prediction_refusal(source: str, of_metrics: bool) -> str:
        return "" if of_metrics else "trained on sequences of tokens, it does not take images; name a run of images"
