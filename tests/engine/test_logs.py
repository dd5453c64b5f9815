"""The logs that a run leaves, and docs/logs.md, which names exactly the fields of the records."""

import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoints.progress import Progress, Resumption
from engine.reporting.metrics import TOTALS, find_records
from engine.reporting.recorder import Recorder
from engine.runtime.distributed import World
from engine.runtime.provenance import provenance
from tests.engine.test_recorder import CPU, RUN
from tests.engine.test_train import start

TEXT = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()
DOCUMENTED = {
    name: kinds
    for names, kinds in re.findall(r"^\| (`[\w/`, ]+`) \| ([\w, ]+) \|.*\|.*\|$", TEXT, re.MULTILINE)
    for name in re.findall(r"[\w/]+", names)
}
KINDS = re.findall(r"^\| `(\w+)` \|", TEXT[TEXT.index("## Records") : TEXT.index("## Fields")], re.MULTILINE)
OVERRIDES = ("train.ema_decay=0.5", "train.freeze=[pos_embed]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run's directory and what it printed."""
    directory, out, err = tmp_path_factory.mktemp("logs"), StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        start(directory, *OVERRIDES)
    return SimpleNamespace(directory=directory / "run", out=out.getvalue(), err=err.getvalue())


def test_a_run_keeps_its_console(run: SimpleNamespace):
    """The log has every line, and its last line names the logs; a refused launch adds nothing."""
    path = run.directory / "console.log"
    text = path.read_text()
    assert run.err in text
    assert text.replace(run.err, "") == run.out
    assert text.startswith("train.freeze: ")
    last = f"logs of {run.directory}:  epochs.csv (a row per epoch)  metrics.jsonl (all records)  console.log  "
    assert run.out.splitlines()[-1].startswith(last)
    with pytest.raises(SystemExit):
        start(run.directory.parent, *OVERRIDES, "train.seed=1")
    assert path.read_text() == text


def test_every_field_and_kind_is_documented_and_there(
    run: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The records are those of a run, and of rare events, as on a GPU."""
    for name in ("allocated", "reserved"):
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda device: 2**20)
    rare = {"cuda": "13.0", "plugins": {}}
    monkeypatch.setattr("engine.reporting.recorder.provenance", lambda device: provenance(CPU) | rare)
    monkeypatch.setattr(World, "gather", lambda self, values: [values, values])
    world = World(CPU)
    with pytest.raises(ValueError, match="a reason"), Recorder(tmp_path, RUN, Progress(), 1, world):
        raise ValueError("a reason")
    with Recorder(tmp_path, RUN, Progress(), 1, world) as recorder:
        recorder.start(0, 1, Resumption(changes={"optim.lr": (1e-3, 5e-4)}), macs=1)
        recorder.num_gpus, recorder.speed.device = 1, torch.device("cuda")
        recorder.begin_epoch(1)
        recorder.end_step()
        recorder.train(1, loss=1.0, loss_largest=0.5, error_N=0.5)
        recorder.eval(1, {"broken": 1, "not_finite": 1, "ema_not_finite": 1})
        metrics = ("loss", "balanced_accuracy")
        best = {f"best_{kind}{name}": 0.5 for kind in ("", "ema_") for name in metrics}
        recorder.final(broken=1, not_finite=1, ema_not_finite=1, **best)
    found: dict[str, set[str]] = {}
    for record in [*find_records(run.directory), *find_records(tmp_path)]:
        for name in record:
            found.setdefault(re.sub("recall/.*", "recall/CLASS", name), set()).add(record["kind"])
    documented = {name: set(KINDS if kinds == "all" else kinds.split(", ")) for name, kinds in DOCUMENTED.items()}
    assert found["kind"] == set(KINDS)
    assert found.keys() == documented.keys()
    for name in found.keys() - {"kind", "epoch", "step", *TOTALS}:
        assert found[name] == documented[name], name
