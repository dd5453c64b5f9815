"""Weights & Biases, which gets a run's records too if `report.wandb` names a project.

It works without a network: with `WANDB_MODE=offline`, `wandb sync` sends the run later.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from attention.options import OptionError
from engine.config.schema import Report, Run
from engine.run.load import dump_run
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error


class Launch(NamedTuple):
    """Facts of a launch that the tracker gets: the run, its directory, and the id that all launches of the run share.

    A run that resumes continues in the same run of the tracker.
    """

    run: Run
    directory: Path
    run_id: str


class Wandb:
    """A run of the project `name`, with a copy in the folder `wandb` of the run directory."""

    def __init__(self, name: str, launch: Launch):
        import wandb

        self.run = wandb.init(
            project=name,
            id=launch.run_id,
            name=launch.directory.name,
            dir=launch.directory,
            config=dump_run(launch.run),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def check_tracker(options: Report) -> None:
    """Refuses a tracker without a project name, or without its package.

    Raises:
        OptionError: the name is blank, or the package is not installed.
    """
    if options.wandb is None:
        return
    key, value = "report.wandb", f" = {options.wandb!r}"
    if not options.wandb.strip():
        raise OptionError(key, f"{value}: name a project, or leave it out")
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        remedy = "pip install wandb, or leave it out"
        raise OptionError(key, f"{value}: needs the package wandb ({error}); {remedy}") from None


class Tracker:
    """The tracker of a launch, if its run names one. After a failure it gets no more records, with a warning.

    Raises:
        UserError: it cannot be opened, for example without an account.
    """

    def __init__(self, launch: Launch):
        self.wandb: Wandb | None = None
        if (name := launch.run.report.wandb) is not None:
            try:
                self.wandb = Wandb(name, launch)
            except Exception as error:  # the library raises errors of any kind
                raise UserError(f"report.wandb = {name!r}: {describe_error(error, 300)}; or leave it out") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends finite numbers by name, recorded after update `step`."""
        self._tell(lambda wandb: wandb.log(values, step))

    def close(self, failed: bool) -> None:
        """Ends the launch."""
        self._tell(lambda wandb: wandb.close(failed))

    def _tell(self, call: Callable[[Wandb], None]) -> None:
        if self.wandb is not None:
            try:
                call(self.wandb)
            except Exception as error:  # it must not end a run of days
                self.wandb = None
                message = f"warning: report.wandb: {describe_error(error, 300)}; nothing more is sent there"
                print(message, file=sys.stderr, flush=True)
