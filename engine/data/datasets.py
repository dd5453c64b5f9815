"""Reader of torchvision's data sets, with the order and the rules for broken images of class folders."""

import numpy as np
from timm.data.dataset_factory import create_dataset

from engine.data.arrays import ArrayReader
from engine.data.layout import LayoutError

TORCH = "torch/"
"""Prefix of the names of torchvision's data sets, as in timm."""


class TorchReader(ArrayReader):
    """Reads a data set of torchvision from the folder `root` to which torchvision has downloaded it.

    Args:
        name: name of the data set in timm, such as torch/cifar10. split: train, or val for the test images.
    Raises:
        LayoutError: the data set is missing or damaged, or the split is neither train nor val.
    """

    def __init__(self, name: str, root: str, *, split: str):
        if split not in ("train", "val"):
            raise LayoutError(f"{split!r} is no split of torchvision's; known: train, val (its test images)")
        try:
            dataset = create_dataset(name, root, split)
            images, labels = np.asarray(dataset.data), np.asarray(dataset.targets)
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images, {len(labels)} labels")
        except Exception as error:  # torchvision may raise anything for a damaged file
            raise LayoutError("not found, or damaged; torchvision.datasets puts it there with download=True") from error
        super().__init__(images, labels, dataset.classes)
