"""Names of what a checkpoint holds, for command lines too, which need no torch."""

from typing import Literal

IDENTITY = ("classes", "train_files", "train_content", "val_files", "val_content", "teacher_weights")
"""Metadata of the data (`engine.data.identity.identify_data`); also the teacher's digest if the run has a teacher."""

Weights = Literal["plain", "ema"]

WEIGHTS: dict[Weights, str] = {"plain": "model", "ema": "model_ema"}
"""Kind of weights, as trained or averaged -> its state dict in a checkpoint."""
