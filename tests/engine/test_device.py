"""Checks of a run on its device, and the choice of attention's kernels by their times there, here by a fake clock."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import nn

import train
from attention import kernels
from attention.ops.random_features import fused
from attention.options import OptionError
from engine.checkpoints.files import newest_checkpoint
from engine.checkpoints.progress import check_progress
from engine.run.load import parse_run
from engine.runtime.distributed import World
from engine.training import device
from tests.engine.test_train import RUN
from tests.support.launcher import ForkServer

TWO = RUN | {"attention": [{"blocks": 0, "name": "performer"}, {"blocks": 1, "name": "lara", "num_landmarks": 4}]}
CHOSEN = {"performer 3x49x4 float32": 2.0, "lara 3x49x4 float32": 0.5}
TEXT = "auto: torch for lara 3x49x4 float32 (0.50x), triton for performer 3x49x4 float32 (2.00x); fast "
TAKEN: set[str] = set()
"""Names of the kernels that were called since the last time."""


def kernel(run, covers) -> kernels.Kernel:
    return kernels.Kernel(lambda *args, **options: (TAKEN.add(run.__name__), run(*args, **options))[1], covers)


def with_kernels(gpu: str):
    """Contexts in which a CPU has stand-ins for kernels, the name of a GPU, and a clock that prefers one of the two."""
    found = {"performer": kernel(fused.performer, fused.covers_performer)}
    found |= {"lara": kernel(fused.lara, fused.covers_lara)}
    parts = patch.multiple(kernels, _triton=found, has_kernels=lambda x: True)
    return parts, patch.multiple(
        device,
        is_timed=lambda run, world: run.train.kernels == "auto",
        device_name=lambda place: gpu,
        gpu_milliseconds=milliseconds,
    )


def milliseconds(call) -> float:
    TAKEN.clear()
    call()
    times = {"performer": 1.0, "lara": 4.0}
    if os.environ.get("RANK", "0") != "0":
        times = {name: 4.0 / time for name, time in times.items()}
    return times[next(iter(TAKEN))] if TAKEN else 2.0


def run_two(directory: Path, *arguments: str, gpu: str = "GPU") -> set[str]:
    """Trains both mechanisms below `directory`; returns the kernels that training called."""
    if not (directory / "run.yaml").exists():
        (directory / "run.yaml").write_text(yaml.safe_dump(TWO))
    first, second = with_kernels(gpu)
    with first, second:
        train.main([str(directory / "run.yaml"), *arguments, "--output", str(directory / "run")])
    return set(TAKEN)


def recorded(directory: Path) -> list[str]:
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["kernels"] for record in map(json.loads, lines) if record["kind"] == "start"]


def test_times_choose_once_and_stand_in_the_records(tmp_path, monkeypatch):
    assert run_two(tmp_path) == {"performer"}
    assert recorded(tmp_path)[0].startswith(TEXT)
    assert newest_checkpoint(tmp_path / "run")[1]["progress"]["kernels"] == {"GPU": CHOSEN}
    more = "--allow-change", "schedule.epochs"
    with monkeypatch.context() as stopped:
        stopped.setitem(globals(), "milliseconds", None)
        TAKEN.clear()
        assert run_two(tmp_path, "schedule.epochs=2", *more) == {"performer"}
    assert recorded(tmp_path)[1] == recorded(tmp_path)[0]
    assert run_two(tmp_path, "schedule.epochs=3", *more, gpu="another GPU") == {"performer"}
    kept = newest_checkpoint(tmp_path / "run")[1]["progress"]["kernels"]
    assert kept == {"GPU": CHOSEN, "another GPU": CHOSEN}


def test_the_timed_pass_keeps_no_activations():
    passes, model = [], nn.Linear(28, 2)
    model.register_forward_hook(lambda module, inputs, y: passes.append(y.exp()))
    device.time_kernels(parse_run(RUN, "run.yaml", []), model, {}, World(torch.device("cpu")))
    with pytest.raises(TypeError, match="None"):
        _ = passes[0].grad_fn._saved_result


def test_the_plan_says_what_a_run_would_take(tmp_path, capsys):
    run_two(tmp_path, "--dry-run")
    assert f"kernels     {TEXT}" in capsys.readouterr().out


@pytest.mark.complete
def test_the_choice_changes_no_other_number(tmp_path):
    """A pass of a copy of the model draws no random number of the run, and changes no state."""
    weights = []
    for path in "auto", "torch":
        (tmp_path / path).mkdir()
        run_two(tmp_path / path, f"train.kernels={path}")
        weights.append(newest_checkpoint(tmp_path / path / "run")[1]["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.complete
def test_the_primary_ranks_choice_holds_for_all(tmp_path, fork_server: ForkServer):
    config = TWO | {"train": RUN["train"] | {"total_batch_size": 24}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    statuses, job = fork_server.run([str(tmp_path)], tmp_path / "log", ranks=2, script=__name__)
    assert statuses == [0, 0], job.text
    assert job.text.count("took ['performer']") == 2


def main(command: list[str]) -> None:
    """A rank of two; its log says which kernels it took."""
    print(f"took {sorted(run_two(Path(command[0])))}", flush=True)


def test_a_path_that_fails_is_not_chosen():
    def fails(*args):
        raise MemoryError("no room")

    x, times = torch.zeros(1, 2, 3, requires_grad=True), {}
    TAKEN.clear()
    with kernels.use("auto", times, milliseconds), pytest.warns(UserWarning, match="fails fails here: no room"):
        kernels.prefer("op", fails, torch.neg, x)
    assert times == {"op 2x3 float32": 0.0}


@pytest.mark.parametrize("speedups", [{"GPU": {"op": "fast"}}, {"GPU": 1.0}, {"GPU": {1: None}}])
def test_speedups_that_are_no_numbers_are_refused(speedups):
    with pytest.raises((ValueError, TypeError)):
        check_progress({"epoch": 0, "step": 0, "kernels": speedups})


@pytest.mark.parametrize(
    ("capability", "is_there", "reason"),
    [
        ((7, 5), True, "kernels need compute capability 8.0, and this GPU has 7.5"),
        ((8, 0), False, "triton is not installed"),
    ],
)
def test_kernels_that_cannot_run_are_refused(capability, is_there, reason, monkeypatch):
    run = parse_run(RUN | {"train": RUN["train"] | {"kernels": "triton"}}, "run")
    kernels.refusal_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: is_there or None)
    monkeypatch.setattr(device, "check_optimizer", lambda *arguments: None)
    with pytest.raises(OptionError, match=f"train.kernels = triton: {reason}; set it to auto or torch"):
        device.check_device(run, torch.device("cuda:0"))
    kernels.refusal_of.cache_clear()


@pytest.mark.gpu
def test_a_run_on_a_gpu_chooses_trains_and_resumes(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TWO))
    command = [str(tmp_path / "run.yaml"), "train.device=cuda", "train.amp=bf16", "model.embed_dim=48"]
    command += ["--output", str(tmp_path / "run")]
    train.main(command)
    (found,) = newest_checkpoint(tmp_path / "run")[1]["progress"]["kernels"].values()
    assert found
    assert all(0 < ratio < 1000 for ratio in found.values()), found
    train.main([*command, "schedule.epochs=2", "--allow-change", "schedule.epochs"])
    first, second = recorded(tmp_path)
    assert first == second
    assert all(f"{'triton' if ratio > 1 else 'torch'} for {key} " in first for key, ratio in found.items())
    assert f"train.kernels = {first}" in capsys.readouterr().out
