"""Feature distillation: a model learns to give its teacher's token features of the same images, without labels.

Compared are the last tokens, after the final norm, or the outputs of chosen blocks. Features of another width than the
teacher's pass through a linear map that is trained with the model and thrown away, as the regressor of FitNets
(Romero et al., 2015, arXiv:1412.6550) and the projection of timm's FeatureDistillationTask.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from attention.options import OptionError
from engine.objectives.alignment import mean_relative_error
from engine.objectives.classification import CLASSES, label_loss
from engine.objectives.distillation import Distill, Teacher, combine_losses, digest_weights, train_fitted
from engine.objectives.objective import Objective, Run
from models.base import Backbone, Block

LAST = "last"
"""Name of the tokens after a model's final norm; those after a block have its number."""


def cosine_error(y: Tensor, expected: Tensor) -> Tensor:
    """1 - the cosine similarity of tokens (B, N, C), their mean, a scalar in fp32 or wider: from 0 to 2."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    return 1 - F.cosine_similarity(y.to(dtype), expected.to(dtype), dim=-1).mean()


ERRORS = {"squared": mean_relative_error, "cosine": cosine_error}
"""Value of `distill.distance` -> function of features and those of the teacher."""


def blocks_of(model: nn.Module) -> list[Block]:
    """All blocks of a model of this project, in order; of others, none."""
    return [module for module in model.modules() if isinstance(module, Block)]


@contextmanager
def record_outputs(blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
    """Context of a list that receives the outputs of `blocks`, in the order of their calls."""
    outputs: list[Tensor] = []
    handles = [block.register_forward_hook(lambda *call: outputs.append(call[2])) for block in blocks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def trained_weights(model: nn.Module, outputs: Iterable[Tensor]) -> list[nn.Parameter]:
    """Weights of `model` that are trained and that its `outputs` depend on."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    total = torch.stack([x.sum() for x in outputs]).sum()
    gradients = torch.autograd.grad(total, weights, allow_unused=True) if total.requires_grad else [None] * len(weights)
    return [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]


class FeatureModel(nn.Module):
    """A model that returns features beside its outputs.

    Args:
        layers: numbers of the blocks whose outputs are the features, ascending; empty: those after the final norm.
        skip_prefix: leave out prefix tokens. with_outputs: compute the model's outputs too.
    Attributes:
        projections: linear maps of features, by their names.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], skip_prefix: bool, with_outputs: bool):
        super().__init__()
        self.model, self.layers, self.with_outputs = cast(Backbone, model), layers, with_outputs
        self.num_skipped = cast(int, getattr(model, "num_prefix_tokens", 0)) if skip_prefix else 0
        self.projections = nn.ModuleDict()

    def forward(self, images: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Returns the features by name, each (B, N, C), and the model's outputs (or None)."""
        blocks = blocks_of(self.model)
        with record_outputs([blocks[number] for number in self.layers]) as outputs:
            final = self.model.forward_features(images)
        found = zip(map(str, self.layers), outputs, strict=True) if self.layers else [(LAST, self.as_tokens(final))]
        features = {name: x[:, self.num_skipped :] for name, x in found}
        features |= {name: project(features[name]) for name, project in self.projections.items()}
        return features, self.model.forward_head(final) if self.with_outputs else None

    def as_tokens(self, x: Tensor) -> Tensor:
        """Features of the model, tokens or a map, -> tokens (B, N, C)."""
        if x.ndim != 4:
            return x
        return x.flatten(1, 2) if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else x.flatten(2).mT


class FeatureDistillation(Objective):
    """The objective of a run whose model learns the features of a teacher, `distill.type: features`.

    The loss is that of `combine_losses`, with the mean error of the compared features (`ERRORS`). Where both models
    have as many prefix tokens, these are compared too. With alpha = 1, only weights that the features depend on are
    trained: the classifier is not. The teacher makes one forward pass for each batch.

    Args:
        loss: function of logits and targets. model: what is trained. teacher: see `engine.objectives.distillation`.
        images: any images of the run, (1, C, H, W), for a trial.
    Raises:
        OptionError: teacher and model differ in the number of tokens, or of blocks where blocks are chosen; there is no
            such block; or all weights that the features depend on are frozen.
    """

    measure = CLASSES

    def __init__(self, loss: nn.Module, distill: Distill, model: nn.Module, teacher: Teacher, images: Tensor):
        self.loss, self.distill, self.teacher, self.distance = loss, distill, teacher, ERRORS[distill.distance]
        taught, layers = teacher.model, sorted(distill.layers or [])
        self.identity = {"teacher_weights": digest_weights(taught.state_dict())}
        self.compiled = [taught] if isinstance(taught, Backbone) else []
        self.check_blocks(len(blocks_of(taught)), len(blocks_of(model)))
        numbers = [getattr(one, "num_prefix_tokens", 0) for one in (model, taught)]
        skip_prefix, is_soft = numbers[0] != numbers[1], distill.rest == "soft"
        self.student = FeatureModel(model, layers, skip_prefix, with_outputs=distill.weight < 1)
        self.taught = FeatureModel(taught, layers, skip_prefix, with_outputs=is_soft).eval()
        mode = model.training
        features, _ = self.student.eval()(images)
        self.student.train(mode)
        expected, _ = self.teach(images)
        self.check_tokens(features, expected)
        fitted = trained_weights(model, features.values())
        train_fitted(model, fitted, distill, "every weight that the features depend on")
        for name, x in features.items():
            if x.shape[2] != (width := expected[name].shape[2]):
                self.student.projections[name] = nn.Linear(x.shape[2], width, device=images.device)
        if self.student.projections:
            self.own = {"projections": self.student.projections}
        compared = f"blocks {', '.join(features)}" if layers else "the last tokens"
        self.summary = f"distill.type=features compares {compared}"
        self.summary += ", without prefix tokens" * skip_prefix + ", by linear maps" * bool(self.own)
        self.summary += "; the classifier is not trained" * (distill.weight == 1)

    @staticmethod
    def applies(run: Run) -> bool:
        return run.distill.teacher is not None and run.distill.type == "features"

    @staticmethod
    def learns_labels(run: Run) -> bool:
        return run.distill.rest == "labels"

    @staticmethod
    def check(run: Run) -> None:
        """Refuses a classifier that would stay at random values, tokens that are left out, blocks that are named twice,
        and in a run of another type the options of this one.
        """
        distill = run.distill
        if distill.type != "features":
            for name in ("layers", "distance"):
                if (value := getattr(distill, name)) != getattr(Distill, name):
                    shown = value if isinstance(value, str) else list(value)
                    raise OptionError(f"distill.{name}", f" = {shown} acts with distill.type=features; leave it out")
            return
        if distill.weight == 1 and run.init.weights is None:
            problem = " = null, and distill.type=features with distill.alpha=1 does not train the classifier"
            remedy = "give weights that have one, or lower distill.alpha (distill.beside=soft needs no labels either)"
            raise OptionError("init.weights", f"{problem}; {remedy}")
        if distill.layers is not None and not 0 < len(distill.layers) == len({*distill.layers}):
            problem = f" = {list(distill.layers)}: name one or more blocks, each once, or leave it out"
            raise OptionError("distill.layers", problem)
        if rate := run.model.get("patch_drop_rate"):
            problem = f" = {rate:g}: the teacher gives features of all patches (distill.type=features); set it to 0"
            raise OptionError("model.patch_drop_rate", problem)

    @classmethod
    def from_run(cls, run: Run, model: nn.Module, create_teacher: Callable[[], nn.Module]) -> Self:
        shape = run.model["in_chans"], *to_2tuple(run.model["img_size"])
        images = torch.zeros(1, *shape, device=next(model.parameters()).device)
        return cls(label_loss(run, model), run.distill, model, cast(Teacher, create_teacher()), images)

    def check_blocks(self, there: int, here: int) -> None:
        """Refuses `distill.layers` unless both models have as many blocks, and those among them."""
        if not (layers := self.distill.layers):
            return
        if there != here:
            problem = f" = {self.distill.teacher}: it has {there} blocks of this project's, the model has {here}"
            raise OptionError("distill.teacher", f"{problem}; leave distill.layers out, which compares the last tokens")
        if max(layers) >= here:
            raise OptionError(
                "distill.layers", f" = {list(layers)}: blocks are numbered from 0 to {here - 1}; choose of them"
            )

    def check_tokens(self, features: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Refuses a teacher whose features, `expected`, are not as many tokens as those of the model."""
        for name, x in features.items():
            there, here = (math.prod(y.shape[1:-1]) for y in (expected[name], x))  # pooled features are one token
            if there != here:
                where = "" if name == LAST else f" after block {name}"
                problem = f"it gives {there} tokens{where}, the model {here}"
                remedy = "set model.patch_size, model.img_size, ... to the teacher's values"
                raise OptionError("distill.teacher", f" = {self.distill.teacher}: {problem}; {remedy}")

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.student

    @torch.no_grad()
    def teach(self, images: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Features and outputs of the teacher."""
        return self.taught(self.teacher.normalise(images))

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        expected, taught = self.teach(images)
        features, outputs = network(images)
        errors = {name: self.distance(x, expected[name]) for name, x in features.items()}
        self.values = {f"error_{name}": error.detach() for name, error in errors.items()}
        error = torch.stack([*errors.values()]).mean()
        return combine_losses(self.distill, error, self.loss, outputs, targets, taught)
