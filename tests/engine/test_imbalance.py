"""Classes of different size: weights in the loss, and recall and balanced accuracy in evaluations."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from torch import nn
from torch.utils.data import default_collate

from attention.options import OptionError
from engine.checkpoints.progress import Progress
from engine.config.schema import Augment, Run, Train
from engine.data.arrays import ArrayReader
from engine.data.loaders import ImageLoader
from engine.data.splits import Images
from engine.evaluation.evaluate import evaluate
from engine.objectives.classification import create_loss
from engine.objectives.copying import NO_AUGMENTATION
from engine.reporting.console import format_values
from engine.run.load import load_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError
from engine.training.objective import weigh_classes

ROOT = Path(__file__).parents[2]
CPU = World(torch.device("cpu"))
UNCHANGED = Augment(**NO_AUGMENTATION)
RUN = Run(model={}, attention="softmax", train=Train(class_weights="balanced"))

LABELS, PARTNERS, SHARE = torch.arange(12) % 4, torch.arange(11, -1, -1) % 4, 0.7
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 7.0], dtype=torch.float64)


def smooth(targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    return (1 - smoothing) * targets + smoothing / targets.shape[1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("kind", ["indices", "mixed"])
def test_a_class_weight_is_the_factor_of_the_whole_loss_of_an_image(kind: str, smoothing: float):
    """So that the best prediction is the smoothed target: with other factors, the gradient is not zero there.

    The gradient of a mean of weighted cross-entropies is weight x (prediction - target) / images. timm makes the mixed
    targets: a share of each image, and of the last image first.
    """
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    own, other = (F.one_hot(labels).double() for labels in (LABELS, PARTNERS))
    if kind == "indices":
        augment, given, plain = UNCHANGED, LABELS, own
    else:
        augment, plain = Augment(), SHARE * own + (1 - SHARE) * other
        given = mixup_target(LABELS, 4, SHARE, smoothing).double()
    loss = create_loss(dataclasses.replace(augment, smoothing=smoothing), WEIGHTS.tolist()).double()
    weights, target = plain @ WEIGHTS, smooth(plain, smoothing)
    found, log_p = loss(logits, given), logits.log_softmax(1)
    torch.testing.assert_close(found, -(weights * (target * log_p).sum(1)).mean(), rtol=1e-6, atol=0)  # targets: fp32
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, weights[:, None] * (log_p.exp() - target) / 12, rtol=1e-5, atol=1e-7)
    parts = [loss(*part) for part in zip(logits.split(3), given.split(3), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), found)
    augment = dataclasses.replace(augment, smoothing=smoothing)
    plain, equal = create_loss(augment)(logits, given), create_loss(augment, [1.0] * 4).double()(logits, given)
    torch.testing.assert_close(equal, plain, rtol=1e-6, atol=0)


def test_class_weights_on_paper():
    """Two classes, an image of each, weights 1 and 19, smoothing 0.1: targets (0.95, 0.05) and (0.05, 0.95).

    Equal logits cost ln 2 each, in the mean (1 + 19) / 2 ln 2. torch's own weights make these logits the best for the
    first image: 0.95 x 1 = 0.05 x 19.
    """
    loss = create_loss(dataclasses.replace(UNCHANGED, smoothing=0.1), [1.0, 19.0])
    assert loss(torch.zeros(2, 2), torch.tensor([0, 1])).item() == pytest.approx(10 * np.log(2))
    logits = torch.tensor([[np.log(19.0), 0.0]], dtype=torch.float32, requires_grad=True)  # (0.95, 0.05)
    loss(logits, torch.tensor([0])).backward()
    torch.testing.assert_close(logits.grad, torch.zeros(1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(logits.bfloat16(), torch.tensor([0])).dtype == torch.float32


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
            pairs = [*zip(names, row, strict=True)]
            progress.metrics = {f"{kind}{name}": value for name, value in pairs for kind in ("", "ema_")}
            progress.rank(epoch, 3, best_by)
        assert progress.ema_ranking == progress.ranking
        return [epoch for _, epoch in progress.ranking], progress.best()

    assert rank(None) == ([1, 3, 2], {"best_top1": 90.0, "best_ema_top1": 90.0})
    best = {"best_balanced_accuracy": 70.0, "best_ema_balanced_accuracy": 70.0}
    assert rank("balanced_accuracy") == ([2, 3, 1], best)
    assert rank("loss") == ([3, 1, 2], {"best_loss": 0.1, "best_ema_loss": 0.1})


def test_a_metric_that_is_not_measured_cannot_rank():
    options = ["model.mask_token=true", "model.num_classes=0", "model.stem=linear", "train.best_by=top1"]
    options += ["augment.mixup=0", "augment.cutmix=0", "simmim.mask_size=28"]
    problem = "train.best_by = top1, which the evaluations of this run do not measure; know"
    with pytest.raises(ConfigError, match=problem):
        load_run(ROOT / "configs/quickstart.yaml", options)
