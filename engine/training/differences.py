"""Differences between two runs or their data, and which of them are allowed when a run continues."""

from collections.abc import Collection, Mapping
from typing import Any

from engine.checkpoints.files import IDENTITY
from engine.run.load import flatten
from engine.runtime.text import describe_difference

RESUMABLE_OPTIONS = {
    "data.root",
    "data.classes",
    "data.workers",
    "data.max_broken",
    "data.broken_val",
    "train.log_every",
    "train.early_stop",
    "train.keep_checkpoints",
    "train.checkpoint_steps",
    "train.checkpoint_minutes",
    "train.timeout_minutes",
    "plugins",
}
"""Options without an effect on the trained weights: a run may be resumed with other values."""

BY_DEVICE = {"train.compile", "train.cuda_graph"}
"""Options whose value auto depends on the device."""

TEACHER = "teacher_weights"
"""Key of the teacher's digest, known only after the teacher is loaded."""

ABSENT = "absent"
"""Shown for an option or metadata that a run lacks."""


def flatten_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the run, dotted path -> value, and the other metadata in which runs may differ."""
    names = ("processes", "images", *IDENTITY)
    return flatten(metadata["config"]) | {name: metadata[name] for name in names if name in metadata}


def list_data_differences(checkpoint: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns one line for each difference between the data of a checkpoint and that of the identity `here`.

    Only parts of the identity that the checkpoint holds are compared; see `engine.data.identity.identify_data`.
    """
    known = [name for name in here if name in checkpoint]
    return list_differences({name: checkpoint[name] for name in known}, {name: here[name] for name in known})


def find_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> set[str]:
    """Returns the options with an effect in which the runs `here` and `there` differ.

    Besides `RESUMABLE_OPTIONS`, these are without an effect: a mechanism's `released`, which only chooses the defaults
    of other options, and those of `BY_DEVICE` that are auto in one of the runs.

    Args:
        there, here: dotted path of an option -> value.
    """
    changed = {key for key in there.keys() | here.keys() if there.get(key, ABSENT) != here.get(key, ABSENT)}
    idle = {key for key in changed if key.startswith("attention.") and key.endswith(".released")}
    resolved = {key for key in BY_DEVICE if "auto" in (there.get(key), here.get(key))}
    return changed - idle - resolved - RESUMABLE_OPTIONS


def list_differences(there: Mapping[str, Any], here: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Returns one line for each of `find_differences` that is not `allowed`."""

    def describe(key: str) -> str:
        if key == "classes":
            return describe_difference(there.get(key, []), here.get(key, []), ("the run there", "the data here"))
        return f"{there.get(key, ABSENT)} there, {here.get(key, ABSENT)} here"

    return [f"{key}: {describe(key)}" for key in sorted(find_differences(there, here) - set(allowed))]
