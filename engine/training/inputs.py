"""Checks of what a run needs beside its configuration: its device, its data, and files of weights."""

import os
import time
from collections.abc import Collection
from pathlib import Path

import torch

from attention.options import OptionError
from engine.checkpoints.identify import list_checkpoints
from engine.checkpoints.weight_sources import read_weights
from engine.config.objective_options import TEACHER_OF_INIT
from engine.config.schema import Run
from engine.data.splits import Splits, open_splits
from engine.run.draft import Draft
from engine.runtime.distributed import World, choose_device
from engine.runtime.errors import UserError
from engine.runtime.files import check_directory
from engine.runtime.ownership import check_claim
from engine.training.device import check_device
from models import is_host


def check_launch(draft: Draft, output: Path) -> Run:
    """Returns the run of `draft`, to be trained in `output`.

    If it is refused, the first rank opens its inputs, too, so that one message has all that is wrong.

    Raises:
        ConfigError: a line for each problem.
    """
    device = None
    with draft.step():
        device = torch.device(choose_device(draft.run.train.device))
    if draft.problems and os.environ.get("RANK", "0") == "0":
        _open(draft, device, output)
    elif draft.problems:
        try:
            time.sleep(30.0)  # until the first rank has opened its inputs
        except KeyboardInterrupt:  # by the launcher, when the first rank has ended
            raise SystemExit(2) from None
    return draft.finish()


def open_inputs(draft: Draft, world: World, output: Path, names: Collection[str]) -> Splits:
    """Opens the data of a run that `check_launch` has checked.

    Raises:
        UserError: a device, data or files that cannot be used on one of the ranks, a line for each problem; or
            `output` has files of others that are called as those of `names`.
    """
    with world.refusing():
        splits = _open(draft, world.device, output)
        draft.finish()
        check_directory(output)
        check_claim(output, names)
    return splits[0]


def _open(draft: Draft, device: torch.device | None, output: Path) -> list[Splits]:
    """Checks the device, opens both splits, fetches or looks for weights; returns the splits, none if refused."""
    splits = list[Splits]()
    with draft.step():
        if device is not None:
            check_device(draft.run, device)
    with draft.step():
        splits.append(open_splits(draft.run))
    for section, name in ("init", "weights"), ("distill", "teacher"):
        with draft.step():
            source = getattr(getattr(draft.run, section), name)
            is_read = source != TEACHER_OF_INIT and (section == "distill" or not list_checkpoints(output))
            try:
                if source is not None and is_read and is_host(source):
                    read_weights(source)  # fetches them
                elif source is not None and is_read and not os.path.exists(os.path.expanduser(source)):
                    raise UserError(f"{source}: no such run directory or checkpoint")
            except UserError as error:
                raise OptionError(f"{section}.{name}", str(error)) from None
    return splits
