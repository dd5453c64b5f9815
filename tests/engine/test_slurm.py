"""slurm.sh, with stand-ins for SLURM: a stopped run is queued again until it is finished, a failed one is not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from engine.run.load import load_run
from tests.engine.test_faults import wait_for
from tests.support.launcher import ROOT

SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf '127.0.0.1\\nother\\n'; else echo "$*" >> "$PLACE/requests"; fi
"""

SRUN = """#!/bin/bash
echo "$*" >> "$PLACE/launches"
while [[ $1 == -* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done
highest=0
for rank in $(jobs -p); do
    wait "$rank"
    status=$?
    ((highest = status > highest ? status : highest))
done
exit "$highest"
"""

RANK = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> "$PLACE/ranks"
statuses=($(sed -n "$(wc -l < "$PLACE/launches")p" "$PLACE/statuses"))
exit "${statuses[$RANK]}"
"""
"""Stands for a rank of train.py: ends with the status that the launch's line in `statuses` gives for it."""

WAITING_RANK = """#!/bin/bash
trap 'exit 75' TERM
echo $$ >> "$PLACE/ranks"
while :; do sleep 0.05; done
"""


class Cluster:
    """The commands of SLURM that slurm.sh calls; `rank` stands for python."""

    def __init__(self, place: Path, rank: str):
        self.place = place
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python": rank}.items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
        job = {"SLURM_JOB_ID": "31234", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "3"}
        self.environment = os.environ | job | {"PLACE": str(place), "PATH": f"{place}:{os.environ['PATH']}"}

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(["bash", str(ROOT / "slurm.sh"), *arguments], cwd=ROOT, env=self.environment)

    def submit(self, *arguments: str) -> list[int]:
        """The statuses of the job's launches: it starts again for as long as it has itself queued again."""
        statuses = []
        while len(statuses) == len(self.lines("requests")):
            statuses.append(self.start(*arguments).wait(120))
        assert set(self.lines("requests")) <= {"requeue 31234"}
        return statuses

    def lines(self, name: str) -> list[str]:
        return (self.place / name).read_text().splitlines() if (self.place / name).exists() else []


@pytest.mark.parametrize(
    ("ranks", "statuses"),
    [
        (["75 75", "75 75", "0 0"], [0, 0, 0]),
        (["0 0"], [0]),
        (["1 1"], [1]),
        (["2 2"], [2]),
        (["75 75", "1 1"], [0, 1]),
        (["75 137"], [137]),  # killed while the others saved
        (["138 138"], [138]),  # the warning came before the run could heed it
    ],
)
def test_a_stopped_run_is_queued_again_and_no_other(ranks: list[str], statuses: list[int], tmp_path: Path):
    (tmp_path / "statuses").write_text("\n".join([*ranks, "0 0"]))
    cluster = Cluster(tmp_path, RANK)
    assert cluster.submit("a b.yaml", "--output", "x") == statuses
    launches, started = cluster.lines("launches"), cluster.lines("ranks")
    assert len(launches) == len(ranks)
    assert all("--cpus-per-task=3 " in launch for launch in launches)
    assert sorted(started[:2]) == [f"{i} {i} 2 127.0.0.1 31234 train.py a b.yaml --output x" for i in range(2)]


def test_a_cancelled_job_is_not_queued_again(tmp_path: Path):
    """SLURM sends SIGTERM to the ranks, which save, and to the script."""
    cluster = Cluster(tmp_path, WAITING_RANK)
    job = cluster.start()
    wait_for(lambda: len(cluster.lines("ranks")) == 2)
    for pid in (job.pid, *map(int, cluster.lines("ranks"))):
        os.kill(pid, signal.SIGTERM)
    assert job.wait(30) == -signal.SIGTERM
    time.sleep(0.2)
    assert cluster.lines("requests") == []


@pytest.mark.parametrize(("status", "requests"), [("0", []), ("1", []), ("75", ["requeue 31234"])])
def test_a_task_of_a_sweeps_array_is_queued_again_where_it_was_stopped(status: str, requests: list, tmp_path: Path):
    """The command that docs/ablations.md gives to sbatch."""
    (command,) = re.findall(r"'(srun .*requeue \$SLURM_JOB_ID)'", (ROOT / "docs/ablations.md").read_text())
    (tmp_path / "statuses").write_text(status)
    cluster = Cluster(tmp_path, RANK)
    environment = cluster.environment | {"SLURM_NTASKS": "1", "RANK": "0"}
    subprocess.run(["bash", "-c", command.replace("-c 12 ", "-c12 ")], env=environment, cwd=ROOT, timeout=60)
    assert cluster.lines("requests") == requests
    assert cluster.lines("ranks")[0].endswith("ablate.py SWEEP.yaml --output /shared/runs/sweep --no-wait")


def test_the_example_of_submitit_calls_what_exists(monkeypatch):
    """A stand-in for submitit starts the job at once. Its arguments are those of train.py, of a configuration here."""
    said = []
    executor = SimpleNamespace(
        update_parameters=lambda **options: said.append(options), submit=lambda job, *arguments: job(*arguments)
    )
    environment = SimpleNamespace(export=lambda **options: said.append(options))
    helpers = SimpleNamespace(Checkpointable=object, TorchDistributedEnvironment=lambda: environment)
    stand_in = SimpleNamespace(helpers=helpers, AutoExecutor=lambda folder: executor)
    monkeypatch.setitem(sys.modules, "submitit", stand_in)
    monkeypatch.setattr(train, "main", lambda arguments: said.append(train.parse_arguments(arguments)))
    (code,) = re.findall(r"```python\n(import submitit\n.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    exec(code, {})
    _, ranks, args = said
    assert ranks == {"set_cuda_visible_devices": False}  # a rank takes the GPU of its number
    assert load_run(args.config, args.overrides).data.root == "/data/imagenet"
