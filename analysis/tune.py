"""Runs of train.py that continue training replaced models with labels, as an ablation in the directory of results."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.align import validates_on_training_images
from analysis.draws import Tuned
from analysis.trained import Trained
from attention import OptionError
from attention.plugins import as_arguments
from engine.config.objective_options import Distill
from engine.config.schema import Init, Run
from engine.config.yaml_files import dump_yaml
from engine.data.splits import open_split
from engine.run.load import dump_run, parse_run
from engine.runtime.files import write_file
from engine.runtime.ownership import claim_results, remove_owned
from engine.runtime.processes import run_to_end
from engine.runtime.reading import parsing, read_csv


class Start(NamedTuple):
    """Beginning of a run: its attention, the file of its weights, and its seed."""

    attention: Any
    weights: str
    seed: int


def further(run: Run, weights: str, epochs: int) -> Run:
    """Returns the run that trains all weights of a file further with labels.

    Another mechanism may have weights that the model lacks, so that `init.strict` and `train.freeze` of the run that
    made it do not apply. Nor does its teacher.
    """
    schedule = replace(run.schedule, epochs=epochs, warmup_epochs=min(run.schedule.warmup_epochs, epochs - 1))
    changed = {"init": Init(weights=weights), "distill": Distill(), "schedule": schedule}
    return replace(run, **changed, train=replace(run.train, freeze=None, budgets=None, budget_distill=False))


def shorter(run: Run, weights: str) -> Run:
    """Returns the run that trains a file further for a tenth of the epochs, at a quarter of the learning rates."""
    found = further(run, weights, max(1, round(run.schedule.epochs / 10)))
    rates = {name: getattr(found.schedule, name) / 4 for name in ("warmup_lr", "min_lr")}
    return replace(found, optim=replace(run.optim, lr=run.optim.lr / 4), schedule=replace(found.schedule, **rates))


def configure(trained: Trained, epochs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of a run that trains all weights of the model further, unless `overrides` freeze some.

    Raises:
        ConfigError: the model cannot be trained further. OptionError: there are no training images.
    """
    options = dump_run(further(trained.run, str(trained.path.resolve()), epochs))
    run = parse_run(options, f"--finetune {epochs}", overrides)
    open_split(run.data, "train_split")
    check_apart(trained)
    return dump_run(run)


def check_apart(trained: Trained) -> None:
    """Raises the OptionError if a model would be fitted to the images that it is measured on."""
    if validates_on_training_images(trained):
        problem = f" = {trained.run.data.train_split!r}: models would be fitted to the images that they are measured on"
        raise OptionError("data.train_split", f"{problem}; name another split, or set data.val_fraction=0.5")


def tune(
    base: Mapping[str, Any], starts: Sequence[Start], directory: Path, jobs: int
) -> tuple[int, list[Tuned | None]]:
    """Trains from each of `starts` by an ablation in `directory`; finished runs are skipped, unfinished ones resume.

    Args:
        jobs: runs at the same time.
    Returns:
        The exit status of ablate.py, and the result of each run (None: it is not finished).
    """
    claim_results(directory, ["base.yaml", "plan.yaml"])
    caption = f"{base['init']['weights']} with other attention, fine-tuned for {base['schedule']['epochs']} epochs"
    rows = [{"attention": start.attention, "init.weights": start.weights, "train.seed": start.seed} for start in starts]
    for name, content in (("base", base), ("plan", {"caption": caption, "base": "base.yaml", "runs": rows})):
        write_file(directory / f"{name}.yaml", dump_yaml(content).encode())
    remove_owned(directory, ["runs.csv"])  # the plan of an earlier command may have had other rows
    command = [str(Path(__file__).parents[1] / "ablate.py"), str(directory / "plan.yaml"), *as_arguments()]
    command += ["--output", str(directory), "--jobs", str(jobs)]
    print(f"fine-tuning: python {' '.join(command)}", flush=True)
    status = run_to_end([sys.executable, *command])
    return status, read_results(directory / "runs.csv", len(starts))


def read_results(table: Path, number: int) -> list[Tuned | None]:
    """Reads the result of each of so many runs of an ablation, None if it is not finished, or raises a UserError."""
    if not table.exists():
        return [None] * number
    with parsing(table, "delete it, and give the command again"):
        runs = [(row["top-1 (%)"], row.get("hours", ""), row["directory"]) for row in read_csv(table)]
        if len(runs) != number:
            raise ValueError(f"{len(runs)} rows for {number} runs")
        return [
            Tuned(float(top1), 60 * float(hours), table.parent / Path(name).name) if top1 else None
            for top1, hours, name in runs
        ]
