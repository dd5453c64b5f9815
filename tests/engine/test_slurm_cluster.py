"""slurm.sh and the array line of docs/ablations.md on a real SLURM: two nodes of its own, on this machine.

Needs Debian's slurm-wlm and munge (SLURM 22.05); no root, no cgroups, nothing of the system's own SLURM. Row S4 of the
stress suite, some minutes.
"""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
import yaml

from tests.engine.test_faults import wait_for
from tests.engine.test_torchrun import RUN
from tests.support.launcher import ROOT

DAEMONS = ("munged", "slurmctld", "slurmd")
FOLDERS = os.pathsep.join(["/usr/sbin", "/sbin", os.environ["PATH"]])
ABSENT = [name for name in DAEMONS if not shutil.which(name, path=FOLDERS)]

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (Debian: slurm-wlm, munge)"),
]

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of the nodes, and their addresses: slurm.sh takes the first name for the address where ranks meet."""

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[2]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is queued again waits for the first one's credential to expire.
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# More CPUs than there are: as many as slurm.sh asks for.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes[0]} Port={ports[0]} CPUs=96 Gres=gpu:8
NodeName={nodes[1]} Port={ports[1]} CPUs=96 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A SLURM of two nodes with its files in `folder`, whose path is short, as sockets need."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        path = os.pathsep.join([str(Path(sys.executable).parent), FOLDERS])
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))} | own

    def start(self) -> None:
        with ExitStack() as stack:  # all at once, so that they differ
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1] for free in sockets]
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        for name in ["plugstack.conf", *(f"gpu{number}" for number in range(8))]:
            (self.folder / name).touch()
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        conf = CONF.format(folder=self.folder, host=host, user=user, ports=ports, nodes=NODES)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")  # never opened
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        names = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munged.pid", "seed-file": "munged.seed"}
        places = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self.daemon("munged", "--foreground", "--force", f"--log-file={self.folder}/munged.log", *places)
        wait_for((self.folder / "munge.socket").exists, 20)
        self.daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.daemon("slurmd", "-D", "-N", node)
        wait_for(self.is_idle, 60)

    def is_idle(self) -> bool:
        return self.ask("sinfo", "--noheader", "--format=%D %t", check=False).split() == ["2", "idle"]

    def daemon(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}-{len(self.daemons)}.log").open("w") as log:
            command = [shutil.which(name, path=FOLDERS), *options]
            started = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.daemons.append(started)

    def ask(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def processes(self, *marks: str) -> list[int]:
        """The daemons, and what they have started: all know this cluster's configuration. `marks` choose among them."""
        found, marks = [], {f"SLURM_CONF={self.folder}/slurm.conf".encode(), *map(str.encode, marks)}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if marks <= {*path.read_bytes().split(b"\0")}:
                    found.append(int(path.parent.name))
        return found

    def lose(self, node: str) -> None:
        """Kills the daemon of a node and what runs there, and tells SLURM, which waits 5 minutes otherwise."""
        daemon = next(one for one in self.daemons if one.args[-1] == node and one.poll() is None)
        for pid in [daemon.pid, *self.processes(f"SLURMD_NODENAME={node}")]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait(10)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def bring_back(self, node: str) -> None:
        self.daemon("slurmd", "-D", "-N", node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def stop(self) -> None:
        """Ends every process of the cluster, whatever state it is in."""
        while found := self.processes():  # they may start others meanwhile
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons:
            daemon.wait(10)

    def logs(self) -> str:
        """The last lines of all logs of daemons and jobs."""
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def submit(self, *command: str) -> str:
        return re.findall(r"Submitted batch job (\d+)", self.ask(*command))[0]

    def jobs(self, job: str) -> list[dict[str, str]]:
        """Returns the fields that SLURM shows of a job, or of the tasks of an array."""
        lines = self.ask("scontrol", "show", "job", "--oneliner", job).splitlines()
        return [dict(word.partition("=")[::2] for word in line.split()) for line in lines]

    def wait_for_state(self, job: str, state: str, seconds: float = 120) -> None:
        """Waits until all tasks of `job` have this state; none may have ended otherwise."""

        def is_reached() -> bool:
            states = {task["JobState"] for task in self.jobs(job)}
            assert not states & {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"} - {state}
            return states == {state}

        wait_for(is_reached, seconds)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(Path(mkdtemp(prefix="slurm")))
    try:
        cluster.start()
        yield cluster
    finally:
        print(cluster.logs())  # pytest shows it of a test that fails
        cluster.stop()
        shutil.rmtree(cluster.folder)


@pytest.fixture(autouse=True)
def show_logs(cluster: Cluster) -> Iterator[None]:
    yield
    print(cluster.logs())  # pytest shows it of a test that fails


def write_config(place: Path, epochs: int) -> Path:
    (place / "run.yaml").write_text(yaml.safe_dump(RUN | {"schedule": {"epochs": epochs, "warmup_epochs": 0}}))
    return place / "run.yaml"


def submit_training(cluster: Cluster, place: Path, nodes: int = 2, *options: str) -> tuple[str, Path]:
    """Submits slurm.sh, one rank on each of `nodes`, with a run of days, and waits until it trains.

    Returns the job's number and the file of the run's metrics.
    """
    config = write_config(place, epochs=100_000)
    own = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--output={cluster.folder}/job-%j.out"]
    run = [*options, "--output", str(place / "run"), "--allow-change", "schedule.epochs"]
    job = cluster.submit("sbatch", *own, "slurm.sh", str(config), *run)
    metrics = place / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"train"' in metrics.read_text(), 180)
    return job, metrics


def test_a_run_on_two_nodes_is_warned_queued_again_and_finished(cluster: Cluster, tmp_path: Path, figure: Callable):
    """SLURM itself sends SIGUSR1 two minutes before the time is up, which the test brings near."""
    job, metrics = submit_training(cluster, tmp_path)
    (found,) = cluster.jobs(job)
    assert (found["NodeList"], found["NumTasks"], found["Restarts"]) == ("127.0.0.[1-2]", "2", "0")
    minutes = sum(int(part) * unit for part, unit in zip(found["RunTime"].split(":"), (60, 1, 0), strict=True)) + 2
    cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    cluster.wait_for_state(job, "PENDING", 240)  # warned within half a minute, ended with 75, queued again
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    warned = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert warned[0]["processes"] == 2
    epochs = len([line for line in warned if line["kind"] == "eval"]) + 2
    write_config(tmp_path, epochs)
    cluster.wait_for_state(job, "COMPLETED", 240)
    assert [(task["Restarts"], task["ExitCode"]) for task in cluster.jobs(job)] == [("1", "0:0")]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert records[: len(warned)] == warned  # it went on
    assert [line["epoch"] for line in records if line["kind"] == "eval"] == [*range(1, epochs + 1)]
    assert records[-1]["kind"] == "final"
    figure("S4", "SLURM, two nodes: warned, saved, queued again, resumed, finished")


def test_a_cancelled_run_is_saved_and_not_queued_again(cluster: Cluster, tmp_path: Path, figure: Callable):
    job, metrics = submit_training(cluster, tmp_path)
    cluster.ask("scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    wait_for(lambda: not set(map(int, cluster.ask("pgrep", "-f", str(metrics.parent), check=False).split())), 60)
    time.sleep(2)
    assert [(task["JobState"], task["Restarts"]) for task in cluster.jobs(job)] == [("CANCELLED", "0")]
    assert '"final"' not in metrics.read_text()
    assert list(metrics.parent.glob("step_*.pt"))
    figure("S4", "SLURM, two nodes: cancelled, saved, not queued again")


def test_a_run_goes_on_without_a_lost_node_and_with_it_again(cluster: Cluster, tmp_path: Path, figure: Callable):
    """A job on fewer nodes takes over from one that waits for a node, and a larger job from it."""

    def starts() -> list[dict[str, int]]:
        """Records of all starts after which updates were made."""
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        first = [number for number, line in enumerate(lines) if line["kind"] == "start"]
        return [lines[n] for n in first if any(line["kind"] == "train" for line in lines[n:])]

    options = ["--allow-change", "processes", "train.checkpoint_steps=4"]
    job, metrics = submit_training(cluster, tmp_path, 2, *options)
    wait_for(lambda: list(metrics.parent.glob("step_*.pt")), 60)
    cluster.lose(NODES[1])
    cluster.wait_for_state(job, "PENDING")
    for nodes in (1, 2):
        cluster.ask("scancel", job)
        cluster.wait_for_state(job, "CANCELLED")
        before = len(starts())
        job, _ = submit_training(cluster, tmp_path, nodes, *options)
        wait_for(lambda before=before: len(starts()) > before, 240)
        (found,) = cluster.jobs(job)
        assert found["NumNodes"] == str(nodes)
        if nodes == 1:
            cluster.bring_back(NODES[1])
    cluster.ask("scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    wait_for(cluster.is_idle, 60)
    assert [line["processes"] for line in starts()] == [2, 1, 2]
    assert 0 == starts()[0]["step"] < starts()[1]["step"] < starts()[2]["step"]
    figure("S4", "SLURM, two nodes: one lost, the run goes on with the other, and with both when it is back")


def test_the_array_of_a_sweep_goes_on_where_it_was_warned(cluster: Cluster, tmp_path: Path, figure: Callable):
    """The line of docs/ablations.md, with two tasks, one of which is warned."""
    base, output = write_config(tmp_path, epochs=20), tmp_path / "sweep"
    sweep = {"caption": "learning rates", "base": str(base), "grid": {"optim.lr": [0.05, 0.1, 0.2]}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (line,) = re.findall(r"^sbatch --array.*?(?=```)", (ROOT / "docs/ablations.md").read_text(), re.M | re.S)
    own = {"sbatch ": f"sbatch --output={cluster.folder}/job-%j.out ", "--array=1-8": "--array=1-2"}
    for there, here in (own | {"SWEEP.yaml": f"{tmp_path}/sweep.yaml", "/shared/runs/sweep": str(output)}).items():
        assert there in line
        line = line.replace(there, here)
    job = cluster.submit("bash", "-c", line)

    def count(kind: str) -> int:
        return sum(f'"{kind}"' in path.read_text() for path in output.rglob("metrics.jsonl"))

    wait_for(lambda: count("train") == 2, 180)
    cluster.ask("scancel", "--signal=USR1", f"{job}_1")
    cluster.wait_for_state(job, "COMPLETED", 600)
    assert {task["ArrayTaskId"]: task["Restarts"] for task in cluster.jobs(job)} == {"1": "1", "2": "0"}
    assert count("final") == 3
    figure("S4", "SLURM, an array of two tasks: one warned, queued again, the sweep finished")
