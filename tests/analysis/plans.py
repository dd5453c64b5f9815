"""A stand-in for ablate.py, to which analyze.py hands the plan of a sweep."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from analysis import tune
from engine.config.yaml_files import read_yaml


def follow_plans(monkeypatch, results: Sequence[float] = ()) -> list[Path]:
    """Stands for ablate.py, whose runs come to the top-1 `results` in the order of the plan; returns its files."""
    plans = []

    def run_to_end(command: Sequence[str]) -> int:
        plan, output = Path(command[2]), Path(command[command.index("--output") + 1])
        assert Path(command[1]).name == "ablate.py"
        plans.append(plan)
        runs = read_yaml(plan).values["runs"]
        for number, run in enumerate(runs[: len(results)]):
            (output / f"{number}").mkdir()
            shutil.copy(run["init.weights"], output / f"{number}/step_3_epoch_1.pt")
        rows = [f"{number},{top1},0.025" for number, top1 in enumerate(results)] + [",,"] * (len(runs) - len(results))
        (output / "runs.csv").write_text("\n".join(["directory,top-1 (%),hours", *rows]))
        return 0

    monkeypatch.setattr(tune, "run_to_end", run_to_end)
    return plans
