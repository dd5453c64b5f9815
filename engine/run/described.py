"""Options that a checkpoint, an export or a run directory may choose, because a stranger may have made the file.

Such a file describes its model, the preparation of images and its training. It never chooses a host, a file or cache to
open, a number of processes or a size of memory: a run directory of this machine chooses its images, and otherwise the
command line does. Every other option than those listed here has its default unless the command line gives it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

from attention.options import to_yaml
from engine.config.schema import Run
from engine.config.yaml_files import Tree, override
from engine.run.load import is_overridden, parse_run, plain
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.text import one_line


def _options(section: str, names: str) -> set[str]:
    return {f"{section}.{name}" for name in names.split()}


DESCRIBED = {
    *("model", "attention", "plugins", "simmim", "augment", "optim", "schedule"),
    *_options("init", "weights strict"),
    *_options("distill", "teacher type alpha tau"),
    *_options("data", "subset val_fraction folds fold subset_seed num_sequences"),
    *_options("data", "crop_mode crop_pct interpolation mean std"),
    *_options("train", "total_batch_size class_weights grad_accum_steps amp tf32 seed freeze"),
    *_options("train", "ema_decay eval_every best_by early_stop budgets budget_distill"),
}
"""Options and whole sections that any file brings. `plugins`, `init.weights` and `distill.teacher` are names that no
reader of such a file opens; the size of drawn sequences has a bound."""

CHOICE_OF_IMAGES = _options("data", "dataset root train_split val_split classes")
"""Options that a run directory of this machine brings, with `PLACE`."""

PLACE = _options("train", "device compile cuda_graph kernels grad_checkpointing channels_last deterministic")
"""Options about the device, which act on no other machine's user."""

INSIDE = {"digits", "copy"}
"""Data sets that this program holds or draws: nothing is opened for them."""


def parse_described(
    options: Mapping[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    *,
    is_own: bool = False,
    reads_images: bool = False,
) -> Run:
    """Returns the run that a file describes, as `parse_run`, with defaults for what the file does not choose.

    Args:
        source: name of the file. is_own: it is a run directory of this machine, see `engine.checkpoints.origin`.
        reads_images: the images of the run will be read.
    Raises:
        ConfigError: anything that cannot be honoured. UserError: with `reads_images`, the choice of images is left to
            the command line; the message has what the file says, ready to be copied.
    """
    run = parse_run(options, source, overrides)
    allowed = DESCRIBED | (CHOICE_OF_IMAGES | PLACE if is_own else set())
    if run.data.dataset in INSIDE:
        allowed |= _options("data", "dataset train_split val_split")
    reset: dict[str, dict[str, Any]] = {}
    for section in [field.name for field in fields(run) if is_dataclass(getattr(run, field.name))]:
        for field in fields(getattr(run, section)):
            key = f"{section}.{field.name}"
            if not {section, key} & allowed and not is_overridden(key, overrides):
                reset.setdefault(section, {})[field.name] = field.default
    described = replace(run, **{name: replace(getattr(run, name), **values) for name, values in reset.items()})
    missing = {key: value for key in sorted(CHOICE_OF_IMAGES) if (value := _get(run, key)) != _get(described, key)}
    if described.data.held_out_by:  # then it is not read
        missing.pop("data.val_split", None)
    if reads_images and missing:
        given = " ".join(shlex.quote(f"{key}={_in_yaml(plain(value))}") for key, value in missing.items())
        problem = "does not choose what is opened, as it may be a stranger's"
        remedy = f"add {one_line(given, 2000)} for the images of its training, or name others"
        raise UserError(f"{source}: {problem}; {remedy}")
    return described


def _in_yaml(value: Any) -> str:
    tree, text = Tree({}, {}), to_yaml(value)
    with suppress(ConfigError):
        override(tree, f"x={text}")
    return text if tree.values == {"x": value} else json.dumps(value)


def _get(run: Run, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)
