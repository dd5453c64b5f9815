"""Classes of different size: weights in the loss, and recall and balanced accuracy in evaluations."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from attention.options import OptionError
from engine.checkpoints.progress import Progress
from engine.config.load import load_run
from engine.config.schema import Augment, Run, Train
from engine.data.arrays import ArrayReader
from engine.data.loaders import ImageLoader
from engine.data.splits import Images
from engine.evaluation.evaluate import evaluate
from engine.objectives.classification import create_loss
from engine.objectives.copying import NO_AUGMENTATION
from engine.reporting.console import format_values
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError
from engine.training.objective import weigh_classes

ROOT = Path(__file__).parents[2]
CPU = World(torch.device("cpu"))
UNCHANGED = Augment(**NO_AUGMENTATION)
RUN = Run(model={}, attention="softmax", train=Train(class_weights="balanced"))


def test_class_weights_are_torchs():
    """The loss is a mean over images, for class indices and soft targets, so that the parts of a batch add up to it."""
    generator = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(12, 4, generator=generator), torch.arange(12) % 4
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    for smoothing in (0.0, 0.1):
        loss = create_loss(dataclasses.replace(UNCHANGED, smoothing=smoothing), weights.tolist())
        expected = F.cross_entropy(logits, F.one_hot(labels).float(), weights, label_smoothing=smoothing)
        torch.testing.assert_close(loss(logits, labels), expected)
        parts = [loss(*part) for part in zip(logits.split(3), labels.split(3), strict=True)]
        torch.testing.assert_close(torch.stack(parts).mean(), expected)
    loss = create_loss(UNCHANGED, weights.tolist())
    torch.testing.assert_close(loss(logits, labels), F.cross_entropy(logits, labels, weights) * weights.mean())
    mixed, soft = create_loss(Augment(), weights.tolist()), torch.softmax(logits.flip(0), 1)
    torch.testing.assert_close(mixed(logits, soft), F.cross_entropy(logits, soft, weights))
    ones = create_loss(UNCHANGED, [1.0] * 4)
    torch.testing.assert_close(ones(logits, labels), create_loss(UNCHANGED)(logits, labels))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(logits.bfloat16(), labels).dtype == torch.float32


def test_balanced_class_weights_are_scikit_learns():
    """n / (K n_c): 1 on average over the images, and the same total for every class."""
    labels = np.repeat(range(3), [60, 30, 10])
    images = Images(ArrayReader(np.zeros((100, 4, 4), np.uint8), labels, "abc"))
    weights = np.array(weigh_classes(RUN, images, CPU).train.class_weights)
    np.testing.assert_allclose(weights, [100 / 180, 100 / 90, 100 / 30])
    assert weights[labels].mean() == pytest.approx(1)
    plain = dataclasses.replace(RUN, train=Train())
    assert weigh_classes(plain, images, CPU) == plain
    images.reader.class_to_idx["d"] = 3
    with pytest.raises(OptionError, match=r"train.class_weights: the class 'd' has no training image to balance; l"):
        weigh_classes(RUN, images, CPU)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.class_weights=[1, 2]"], "train.class_weights has 2 factors, but model.num_classes = 10; give one for"),
        (["train.class_weights=even"], "train.class_weights: "),
        (["train.class_weights=balanced", "train.balanced_sampling=true"], "= balanced, and train.balanced_sampling ="),
        (
            ["train.class_weights=balanced", "distill.teacher=x", "distill.type=attention", "init.weights=x"],
            "train.class_weights is given, but no labels have a part in the loss of this run",
        ),
    ],
)
def test_class_weights_without_a_meaning_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_run(ROOT / "configs/quickstart.yaml", overrides)


def evaluate_levels(predicted, labels, names) -> dict:
    """Metrics of a model that predicts the grey level of an image."""
    images = Images(
        ArrayReader(np.array(predicted, np.uint8)[:, None, None], np.array(labels), names),
        lambda image: F.one_hot(torch.tensor(image.getpixel((0, 0))[0]), len(names)).float(),
    )
    loader = ImageLoader(images, 4, stack=default_collate, limit=0, remedy="", sampler=range(len(labels)))
    return evaluate(nn.Identity(), loader, CPU, None)


def test_recalls_and_balanced_accuracy_by_hand():
    """The model finds 2 of 3 images of class a, 2 of 2 of b, and 0 of 1 of c. Class d has no image."""
    found = evaluate_levels([0, 0, 1, 2, 0, 1], [0, 0, 1, 0, 2, 1], "abcd")
    expected = {"top1": 400 / 6, "balanced_accuracy": 500 / 9, "images": 6}
    expected |= {"recall/a": 200 / 3, "recall/b": 100.0, "recall/c": 0.0}
    assert {name: value for name, value in found.items() if name != "loss"} == pytest.approx(expected)
    assert "top5" not in found  # of four classes it is 100
    text = format_values(found)
    assert text.startswith("top-1 66.67 %  balanced 55.56 %  loss ")
    assert text.endswith("  lowest recall 0.00 % (c)")


@pytest.mark.parametrize(
    ("num_classes", "has_recalls", "has_top5"), [(5, True, False), (20, True, True), (21, False, True)]
)
def test_of_many_classes_the_balanced_accuracy_alone_is_kept(num_classes, has_recalls, has_top5):
    found = evaluate_levels([0] * num_classes, range(num_classes), [f"n{i}" for i in range(num_classes)])
    assert found["balanced_accuracy"] == pytest.approx(found["top1"]) == pytest.approx(100 / num_classes)
    assert sum(name.startswith("recall/") for name in found) == num_classes * has_recalls
    assert ("top5" in found) == has_top5


def test_epochs_are_ranked_by_the_chosen_metric():
    progress, names = Progress(), ("top1", "balanced_accuracy", "loss")
    rows = [(90.0, 50.0, 0.3), (80.0, 70.0, 0.9), (85.0, 60.0, 0.1)]

    def rank(best_by: str | None) -> tuple[list[int], dict]:
        for epoch, row in enumerate(rows, start=1):
            progress.metrics = {
                f"{kind}{name}": value for name, value in zip(names, row, strict=True) for kind in ("", "ema_")
            }
            progress.rank(epoch, 3, best_by)
        assert progress.ema_ranking == progress.ranking
        return [epoch for _, epoch in progress.ranking], progress.best()

    assert rank(None) == ([1, 3, 2], {"best_top1": 90.0, "best_ema_top1": 90.0})
    assert rank("balanced_accuracy") == (
        [2, 3, 1],
        {"best_balanced_accuracy": 70.0, "best_ema_balanced_accuracy": 70.0},
    )
    assert rank("loss") == ([3, 1, 2], {"best_loss": 0.1, "best_ema_loss": 0.1})


def test_a_metric_that_is_not_measured_cannot_rank():
    simmim = [
        "model.mask_token=true",
        "model.num_classes=0",
        "model.stem=linear",
        "augment.mixup=0",
        "augment.cutmix=0",
        "simmim.mask_size=28",
    ]
    with pytest.raises(
        ConfigError, match=r"train.best_by = top1, which the evaluations of this run do not measure; know"
    ):
        load_run(ROOT / "configs/quickstart.yaml", [*simmim, "train.best_by=top1"])
