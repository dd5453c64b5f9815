"""The interface of an objective: the task that a run trains its model for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn

from engine.config.schema import Run
from models.budgets import Budgets

BALANCED = "balanced_accuracy"
"""Name of the mean of the recalls of all classes that have images."""


class Measure(NamedTuple):
    """Metrics that an evaluation computes.

    Attributes:
        names: names of the metrics, which are means over images.
        values: function of model, images and targets of a batch, and the `rows` of `evaluate`. It returns the metrics
            of every image of the batch, each (b,) in float64, in the order of `names`.
        by_class: whether the targets are class indices, so that the mean of the first metric over the images of a class
            is the recall of the class.
    """

    names: tuple[str, ...]
    values: Callable[[nn.Module, Tensor, Tensor, list[Tensor] | None], Sequence[Tensor]]
    by_class: bool = False

    @property
    def ranks_by(self) -> tuple[str, ...]:
        """The metrics that `train.best_by` may name, the default first."""
        return (*self.names, BALANCED) if self.by_class else self.names


class Objective:
    """Base of the objectives, one file each, listed in `engine.objectives.OBJECTIVES`.

    Attributes:
        measure: metrics of an evaluation.
        inputs: what the model takes: images, or sequences of tokens.
        predicts_classes: whether the classes of the data are the outputs of the model.
        takes_targets: whether a training step gives the network the targets, too.
        graph_refusal: why the passes of the network cannot be in a CUDA graph, with the remedy; "": they can.
        identity: metadata of checkpoints; a run resumes only with equal ones.
        values: scalars of the last batch of this process, which are logged beside the loss: name -> value.
        compiled: models of the objective itself whose blocks `train.compile` compiles.
        summary: what is trained, for the first lines of a run.
        budgets: sizes of attention that the updates of the run draw, see `engine.training.objective`.
    """

    measure: ClassVar[Measure]
    inputs: ClassVar[Literal["images", "tokens"]] = "images"
    predicts_classes: ClassVar[bool] = True
    takes_targets: ClassVar[bool] = False
    graph_refusal: ClassVar[str] = ""
    identity: Mapping[str, str] = {}
    values: Mapping[str, Tensor] = {}
    compiled: Sequence[Any] = ()
    summary: str = ""
    budgets: Budgets = Budgets(nn.Module(), {}, None, None)

    @staticmethod
    def applies(run: Run) -> bool:
        """Returns whether the options of `run` choose this objective."""
        raise NotImplementedError("an objective defines applies")

    @staticmethod
    def learns_labels(run: Run) -> bool:
        """Returns whether the labels of images have a part in the loss of `run`, which has this objective."""
        return True

    @staticmethod
    def check(run: Run) -> None:
        """Refuses options that contradict each other. Every run is checked by all objectives.

        Raises:
            OptionError: the run has this objective, and model, data or augmentation that it cannot use; or it has
                another one, and options of this one.
        """

    @staticmethod
    def prediction_refusal(source: str, of_metrics: bool) -> str:
        """Returns why a model of this objective predicts no classes of images, with the remedy; "" if it does.

        Args:
            source: name of the model. of_metrics: true if only the metrics of an evaluation are asked for.
        """
        return ""

    @staticmethod
    def create_targets(run: Run, is_training: bool) -> Callable[[int], Tensor] | None:
        """Creates the function of an image's index that returns its target. None: the target is the class index."""
        return None

    @classmethod
    def from_run(cls, run: Run, model: nn.Module, create_teacher: Callable[[], nn.Module]) -> Self:
        """Creates the objective of `run`, which trains `model`; `create_teacher` reads its teacher, if it has one."""
        return cls()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module with the weights of `model` that a training step calls; by default the model itself."""
        return model

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        """Computes the loss of a batch, a scalar; `network` is the result of `wrap`, wrapped for training."""
        raise NotImplementedError("an objective defines its loss")
