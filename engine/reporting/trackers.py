"""Experiment trackers that get a run's records too, if the section `report` names them.

Both work without a network: `WANDB_MODE=offline` (`wandb sync` sends the run later), and MLflow in a local
`MLFLOW_TRACKING_URI`. A run that resumes goes on in the same run there.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from attention.options import OptionError
from engine.config.schema import Report, Run
from engine.run.load import dump_run, flatten
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error


class Launch(NamedTuple):
    """Facts of a launch that a tracker gets: the run, its directory, and the id that all launches of the run share."""

    run: Run
    directory: Path
    run_id: str


class Wandb:
    """Weights & Biases: a run of the project `name`, with a copy in the folder `wandb` of the run directory."""

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


class MLflow:
    """MLflow: a run of the experiment `name`."""

    def __init__(self, name: str, launch: Launch):
        import mlflow

        self.mlflow, tag = mlflow, "run_id"
        mlflow.set_experiment(name)
        found = mlflow.search_runs(filter_string=f"tags.{tag} = '{launch.run_id}'", output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(run_name=launch.directory.name, tags={tag: launch.run_id})
            mlflow.log_params(flatten(dump_run(launch.run)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        allowed = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in values.items()}  # classes have any name
        self.mlflow.log_metrics(allowed, step=step)

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Wandb | MLflow]] = {"wandb": Wandb, "mlflow": MLflow}
"""Option of the section `report`, which is also the name of the package -> tracker."""


def check_trackers(options: Report) -> None:
    """Refuses trackers without a project or experiment name, or without their package.

    Raises:
        OptionError: the name is blank, or the package is not installed.
    """
    for package, name in _chosen(options).items():
        key, value = f"report.{package}", f" = {name!r}"
        if not name.strip():
            raise OptionError(key, f"{value}: name a project, or leave it out")
        try:
            importlib.import_module(package)
        except ImportError as error:
            remedy = f"pip install {package}, or leave it out"
            raise OptionError(key, f"{value}: needs the package {package} ({error}); {remedy}") from None


class OpenTrackers:
    """Trackers that the run of a launch names. A tracker that fails later is left out from then on, with a warning.

    Raises:
        UserError: a tracker cannot be opened, for example without an account or a server.
    """

    def __init__(self, launch: Launch):
        self.open: dict[str, Wandb | MLflow] = {}
        for package, name in _chosen(launch.run.report).items():
            try:
                self.open[package] = TRACKERS[package](name, launch)
            except Exception as error:  # the libraries raise errors of any kind
                raise UserError(f"report.{package} = {name!r}: {_reason(error)}; or leave it out") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends finite numbers by name, recorded after update `step`."""
        self._tell(lambda tracker: tracker.log(values, step))

    def close(self, failed: bool) -> None:
        """Ends the launch."""
        self._tell(lambda tracker: tracker.close(failed))

    def _tell(self, call: Callable[[Wandb | MLflow], None]) -> None:
        for package, tracker in list(self.open.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker must not end a run of days
                del self.open[package]
                message = f"warning: report.{package}: {_reason(error)}; nothing more is sent there"
                print(message, file=sys.stderr, flush=True)


def _chosen(options: Report) -> dict[str, str]:
    return {package: name for package in TRACKERS if (name := getattr(options, package)) is not None}


def _reason(error: Exception) -> str:
    return describe_error(error, 300)
