"""The objectives that a run can have. A further one is a file here and a line of `OBJECTIVES`."""

from engine.config.schema import Run
from engine.objectives.alignment import Alignment
from engine.objectives.classification import Classification
from engine.objectives.copying import Copying
from engine.objectives.distillation import Distillation
from engine.objectives.masked_images import MaskedImages
from engine.objectives.objective import Objective
from engine.objectives.sandwich import Sandwich
from engine.objectives.sequences import SequenceClassification

OBJECTIVES: dict[str, type[Objective]] = {
    "masked_images": MaskedImages,
    "copying": Copying,
    "sequences": SequenceClassification,
    "alignment": Alignment,
    "distillation": Distillation,
    "sandwich": Sandwich,
    "classification": Classification,
}
"""Name of an objective -> its class. A run has the first one that applies; the last one always does."""


def choose_objective(run: Run) -> type[Objective]:
    """Returns the class of the objective of `run`."""
    return next(objective for objective in OBJECTIVES.values() if objective.applies(run))
