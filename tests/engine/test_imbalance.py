"""Classes of different size: weights in the loss, and recall and balanced accuracy in evaluations."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attention.options import OptionError
from engine.config.load import load_run
from engine.config.schema import Augment, Run, Train
from engine.data.arrays import ArrayReader
from engine.data.splits import Images
from engine.objectives.classification import create_loss
from engine.objectives.copying import NO_AUGMENTATION
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError
from engine.training.objective import weigh_classes

ROOT = Path(__file__).parents[2]
CPU = World(torch.device("cpu"))
UNCHANGED = Augment(**NO_AUGMENTATION)
RUN = Run(model={}, attention="softmax", train=Train(class_weights="balanced"))


def test_class_weights_are_torchs():
    """Of class indices and of soft targets, the mean over images, so that the parts of a batch add up to it."""
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
    with pytest.raises(OptionError, match=r"train.class_weights: the class 'd' has no training image to balance; leave"):
        weigh_classes(RUN, images, CPU)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.class_weights=[1, 2]"], "train.class_weights has 2 factors, but model.num_classes = 10; give one for"),
        (["train.class_weights=even"], "train.class_weights: "),
        (["train.class_weights=balanced", "train.balanced_sampling=true"], "= balanced, and train.balanced_sampling ="),
        (
            ["train.class_weights=balanced", "distill.teacher=x", "distill.type=features", "init.weights=x"],
            "train.class_weights is given, but no labels have a part in the loss of this run",
        ),
    ],
)
def test_class_weights_without_a_meaning_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_run(ROOT / "configs/quickstart.yaml", overrides)
