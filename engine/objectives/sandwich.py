"""Classification at several budgets at once: the sandwich rule with in-place distillation.

An update has passes at the largest size of attention, the smallest and one between. Labels teach the largest, whose
predictions of the same images teach the others (Yu and Huang 2019, arXiv:1903.05134, sections 3.2 and 3.3).
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Run
from engine.objectives.classification import Classification
from models.budgets import Budgets


class Passes(nn.Module):
    """`model` with a list of its outputs at the sizes of `Budgets.sandwich`, the largest last."""

    def __init__(self, model: nn.Module, budgets: Budgets):
        super().__init__()
        self.model, self.budgets = model, budgets

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs = []
        for index in self.budgets.sandwich():
            self.budgets.use(index)
            outputs.append(self.model(images))
        return outputs


class Sandwich(Classification):
    """The objective of a run with `train.budget_distill`: the sum of the losses of its passes."""

    @staticmethod
    def applies(run: Run) -> bool:
        return run.train.budget_distill

    def wrap(self, model: nn.Module) -> nn.Module:
        return Passes(model, self.budgets)

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        *smaller, largest = network(images)
        loss, taught = self.loss(largest, targets), F.softmax(largest.detach(), 1)
        self.values = {"loss_largest": loss.detach()}
        return sum((F.cross_entropy(logits, taught) for logits in smaller), loss)
