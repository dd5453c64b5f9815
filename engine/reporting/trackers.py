"""Weights & Biases, which gets a run's records too if `report.wandb` names a project.

It works without a network: with `WANDB_MODE=offline`, `wandb sync` sends the run later.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.options import OptionError
from engine.config.schema import Report, Run
from engine.run.load import dump_run
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error


def check_tracker(options: Report) -> None:
    """Refuses a tracker without its package.

    Raises:
        OptionError: it is not installed.
    """
    if options.wandb is None:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        remedy = "pip install wandb, or leave it out"
        problem = f" = {options.wandb!r}: needs the package wandb ({error}); {remedy}"
        raise OptionError("report.wandb", problem) from None


class Tracker:
    """The tracker of a launch, if its run names one. After a failure it gets no more records, with a warning.

    A run that resumes continues in the same run of the tracker, by its id. Its directory gets a copy in `wandb`.

    Raises:
        UserError: it cannot be opened, for example without an account.
    """

    def __init__(self, run: Run, directory: Path, run_id: str):
        self.wandb: Any = None
        if (name := run.report.wandb) is not None:
            try:
                import wandb

                settings = wandb.Settings(console="off", silent=True)
                names = {"project": name, "id": run_id, "name": directory.name, "dir": directory}
                self.wandb = wandb.init(**names, config=dump_run(run), resume="allow", settings=settings)
            except Exception as error:  # the library raises errors of any kind
                raise UserError(f"report.wandb = {name!r}: {describe_error(error, 300)}; or leave it out") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends finite numbers by name, recorded after update `step`."""
        self._tell("log", dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Ends the launch."""
        self._tell("finish", exit_code=int(failed))

    def _tell(self, method: str, *values: Any, **options: Any) -> None:
        if self.wandb is not None:
            try:
                getattr(self.wandb, method)(*values, **options)
            except Exception as error:  # it must not end a run of days
                self.wandb = None
                message = f"warning: report.wandb: {describe_error(error, 300)}; nothing more is sent there"
                print(message, file=sys.stderr, flush=True)
