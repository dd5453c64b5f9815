"""Experiment trackers, to which a run's records go too where the section `report` names them; none is needed otherwise.

Both work without a network: `WANDB_MODE=offline` (`wandb sync` sends the run later), and MLflow in a local
`MLFLOW_TRACKING_URI`. A run that resumes goes on in the same run there.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Protocol

from attention.options import OptionError
from engine.config import dump_run, flatten
from engine.errors import UserError, one_line
from engine.schema import Run, Trackers


class Launch(NamedTuple):
    """What a tracker learns of a launch: the run, its directory, and the name by which its launches belong together."""

    run: Run
    directory: Path
    run_id: str


class Tracker(Protocol):
    """What receives the records of a launch."""

    def __init__(self, name: str, launch: Launch): ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes finite numbers by name, made after update `step`."""

    def close(self, failed: bool) -> None:
        """Ends the launch."""


class Wandb:
    """Weights & Biases: a run of the project `name`, in the folder `wandb` of the run directory too."""

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
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": MLflow}
"""Option of the section `report`, which is the name of the package -> what sends records there."""


def check_trackers(options: Trackers) -> None:
    """Refuses a tracker without a name, or whose package is not installed.

    Raises:
        OptionError: such a one.
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
    """The trackers that the run of a launch names. One that fails later is left out from then on, with a warning.

    Raises:
        UserError: one cannot be opened: no account, no server.
    """

    def __init__(self, launch: Launch):
        self.open: dict[str, Tracker] = {}
        for package, name in _chosen(launch.run.report).items():
            try:
                self.open[package] = TRACKERS[package](name, launch)
            except Exception as error:  # of any kind, by the libraries
                raise UserError(f"report.{package} = {name!r}: {_reason(error)}; or leave it out") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends finite numbers by name, made after update `step`."""
        for package in list(self.open):
            with self._leave_out(package):
                self.open[package].log(values, step)

    def close(self, failed: bool) -> None:
        """Ends the launch."""
        for package in list(self.open):
            with self._leave_out(package):
                self.open[package].close(failed)

    @contextmanager
    def _leave_out(self, package: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a run of days does not end for it
            del self.open[package]
            message = f"warning: report.{package}: {_reason(error)}; nothing more is sent there"
            print(message, file=sys.stderr, flush=True)


def _chosen(options: Trackers) -> dict[str, str]:
    return {package: name for package, name in asdict(options).items() if name is not None}


def _reason(error: Exception) -> str:
    return one_line(" ".join(f"{type(error).__name__}: {error}".split()), 300)
