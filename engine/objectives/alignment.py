"""Alignment: attention layers fitted to those of a teacher on the teacher's own inputs, without labels.

A trained model keeps its weights and gets another attention: each new layer learns to give what the layer in its place
gave. Every layer gets the tokens that the teacher's layer gets, so that the layers learn apart from each other, in
a few hundred steps. This is the attention transfer of LoLCATs (Zhang et al., 2024, arXiv:2410.10254); Hedgehog
(arXiv:2402.04347) fits attention weights instead, which not every mechanism has.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from attention.options import OptionError
from engine.config.objective_options import Distill
from engine.config.schema import Run
from engine.objectives.classification import CLASSES, label_loss
from engine.objectives.distillation import digest_weights
from engine.objectives.objective import Objective
from models.base import Backbone, Layer, attention_layers, is_same_attention


class LayerCall(NamedTuple):
    """A call of an attention layer: its tokens, other arguments by name, and its output (B, N, C)."""

    x: Tensor
    others: dict[str, Any]
    output: Tensor


def record_calls(model: nn.Module) -> list[Layer]:
    """Makes the attention layers of `model` keep their last `LayerCall`, for `last_call`. Returns the layers.

    The hooks have no state of their own, so that compiled blocks that are alike still share a graph.
    """
    layers = attention_layers(model)
    for layer in layers:
        layer.register_forward_hook(_keep, with_kwargs=True)
    return layers


def _keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    layer.last_call = args, kwargs, tokens_of(output)


def last_call(layer: Any) -> LayerCall:
    """Returns the last call of a layer of `record_calls`."""
    args, kwargs, output = layer.last_call
    x, others = layer.arguments(args, kwargs)
    return LayerCall(x, others, output)


def tokens_of(output: Any) -> Tensor:
    """The tokens (B, N, C) of a layer's output; layers of transformers also return weights."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


def relative_error(y: Tensor, expected: Tensor, dim: int | None = None) -> Tensor:
    """Mean squared error over the mean square of `expected`, in fp32 or wider: 0 if equal, 1 for zeros.

    Args:
        dim: dimension of the means; None: all, which gives a scalar.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    y, expected = y.to(dtype), expected.to(dtype)
    return (y - expected).square().mean(dim) / expected.square().mean(dim)


class FittedLayers(nn.Module):
    """A model whose training step calls some attention layers directly.

    Args:
        layers: numbers of these attention layers. with_outputs: also call the model on the images.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], with_outputs: bool):
        super().__init__()
        self.model, self.layers, self.with_outputs = model, layers, with_outputs

    def forward(self, images: Tensor, calls: Sequence[LayerCall]) -> tuple[list[Tensor], Any]:
        """Returns the outputs of the layers for the arguments of `calls`, and the model's outputs (or None)."""
        layers = attention_layers(self.model)
        numbered = zip(self.layers, calls, strict=True)
        outputs = [tokens_of(layers[number](call.x, **call.others)) for number, call in numbered]
        return outputs, self.model(images) if self.with_outputs else None


class Alignment(Objective):
    """The objective of a run whose attention layers are fitted to a teacher's, `distill.type: attention`.

    The loss is alpha x the mean over layers and images of `relative_error` + (1 - alpha) x the cross-entropy with the
    labels. A ratio of means over all images would depend on their division into micro-batches.
    Layers that are the teacher's own, with the same mechanism and options, are not fitted. With alpha = 1, the fitted
    layers alone are trained; frozen weights stay frozen. The teacher makes one forward pass for each batch.

    Args:
        loss: function of logits and targets. model: what is trained. teacher: see `engine.objectives.distillation`.
    Raises:
        OptionError: every layer is the teacher's own, or no weight of the others is trained.
    """

    measure = CLASSES
    graph_refusal = "distill.type = attention gives the network activations of the teacher; choose another type"

    def __init__(self, loss: nn.Module, distill: Distill, model: nn.Module, teacher: nn.Module):
        self.loss, self.distill, self.teacher = loss, distill, teacher
        self.identity = {"teacher_weights": digest_weights(teacher.get_submodule("model").state_dict())}
        theirs, own = record_calls(teacher), attention_layers(model)
        numbers = [i for i, pair in enumerate(zip(own, theirs, strict=True)) if not is_same_attention(*pair)]
        if not numbers:
            problem = f" = {distill.teacher}: every attention layer is its own, and none is left to fit"
            raise OptionError("distill.teacher", f"{problem}; choose another mechanism (attention)")
        self.taught = [theirs[number] for number in numbers]
        self.fitted = FittedLayers(model, numbers, with_outputs=distill.weight < 1)
        self.compiled = [cast(Backbone, teacher.get_submodule("model"))]
        fitted = {id(weight) for number in numbers for weight in own[number].parameters() if weight.requires_grad}
        if not fitted:
            raise OptionError("train.freeze", "freezes every attention layer that is to be fitted; leave some out")
        if distill.weight == 1:
            for weight in model.parameters():
                weight.requires_grad_(id(weight) in fitted)
        self.summary = f"distill.type=attention fits layers {', '.join(map(str, numbers))}"

    @staticmethod
    def applies(run: Run) -> bool:
        return run.distill.teacher is not None and run.distill.type == "attention"

    @staticmethod
    def learns_labels(run: Run) -> bool:
        return run.distill.weight < 1

    @staticmethod
    def check(run: Run) -> None:
        """Refuses a run without initial weights whose other layers would stay at random values."""
        distill = run.distill
        if distill.type == "attention" and distill.weight == 1 and run.init.weights is None:
            remedy = "give those of the teacher, init.weights=TEACHER"
            raise OptionError("init.weights", f" = null, and distill.type=attention trains no other weights; {remedy}")

    @classmethod
    def from_run(cls, run: Run, model: nn.Module, create_teacher: Callable[[], nn.Module]) -> Self:
        return cls(label_loss(run, model), run.distill, model, create_teacher())

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.fitted

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        self.teacher(images)
        calls = [last_call(layer) for layer in self.taught]
        found, outputs = network(images, calls)
        pairs = [(y.flatten(1), call.output.flatten(1)) for y, call in zip(found, calls, strict=True)]
        errors = [relative_error(*pair, dim=1).mean() for pair in pairs]
        numbered = zip(self.fitted.layers, errors, strict=True)
        self.values = {f"error_{number}": error.detach() for number, error in numbered}
        error, alpha = torch.stack(errors).mean(), self.distill.weight
        return error if alpha == 1 else alpha * error + (1 - alpha) * self.loss(outputs, targets)
