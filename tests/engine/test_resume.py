"""Killed, stopped and resumed, a run ends bit-identical to an undisturbed one.

The rows R1 to R5, S1, G1 and M1 of the stress suite, with all random augmentation and regularisation on.
"""

import hashlib
import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from timm.optim import list_optimizers

from attention.options import OptionError
from engine.checkpoints.files import list_checkpoints, newest_checkpoint, open_weights, save_checkpoint
from engine.config.schema import Optim
from engine.training.differences import list_differences
from engine.training.optim import check_optimizer
from tests.support.launcher import Fault, ForkServer, Job

RUN = yaml.safe_load("""
model: {name: deit, img_size: 28, patch_size: 4, stem: conv, embed_dim: 12, depth: 2, num_heads: 3, num_classes: 10,
  drop_path_rate: 0.2}
attention: {name: eva, window_size: 3, num_landmarks: 4}
data: {dataset: digits, workers: 0}
optim: {lr: 0.002, lr_base_size: 8}
schedule: {epochs: 2, warmup_epochs: 1}
train: {total_batch_size: 8, device: cpu, amp: null, ema_decay: 0.9, keep_checkpoints: 2, checkpoint_steps: 2,
  log_every: 4}
""")
"""Two epochs of six updates, on the 50 digits that the launcher leaves."""

LARA = "attention={name: lara, num_landmarks: 4}"

STEPS = 12

WITHIN_STEP = [
    "train.seed_everything",
    "train.nn.utils.clip_grad_norm_",
    "engine.training.exchange.UpdateExchange.send",
    "engine.training.optim.ModelEmaV3.update",
    "engine.reporting.recorder.SilentRecorder.end_step",
]
"""Functions that a run calls once in every update."""

LAST = ("engine.evaluation.evaluate.autocast", 9, "SIGKILL")
"""Faults that kill a run in its last evaluation, after all updates."""

KILLS: dict[str, list[tuple[str, int, str]]] = {
    "step": [(target, STEPS, "SIGKILL") for target in WITHIN_STEP],
    "write": [
        ("os.replace", 13, "SIGKILL"),
        ("os.fsync", 32, "SIGKILL"),
        ("engine.checkpoints.files.write_atomically", 8, "half"),
    ],
    "evaluation": [("engine.evaluation.evaluate.autocast", 12, "SIGKILL")],
}
"""Place -> (function, its least number of calls in an undisturbed run, fault)."""


def digest(value, hasher=None) -> str:
    """SHA-256 of a checkpoint: every tensor, number and string in it, with its key."""
    hasher = hasher or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            digest(value[key], hasher)
    elif isinstance(value, list | tuple):
        for item in value:
            digest(item, hasher)
    else:
        hasher.update(repr(value).encode())
    return hasher.hexdigest()


def records(directory: Path) -> list[dict]:
    """The records of `metrics.jsonl` without times and memory, and without the starts and ends of launches."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    measured = {"images_per_second", "step_seconds", "data_wait", "time", "elapsed_seconds"}
    launches = ("start", "stop", "fail")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines if line["kind"] not in launches]


def outcome(job: Job, directory: Path, before: Job | None = None) -> dict[str, str | list]:
    """Returns all that must be equal in two runs: last checkpoint, last random state, records.

    The last update may have been made by the launch `before`, so that only the evaluation was left.
    """
    _, last = newest_checkpoint(directory)
    digests = {name: digest(value) for name, value in last.items() if name != "config"}
    digests["step"] = str(last["progress"]["step"])
    assert {"model", "model_ema", "optimizer", "scaler", "progress"} <= digests.keys()
    random_states = job.recorded("random") or before.recorded("random")
    states = [state for step, state in random_states if step == digests["step"]]
    return digests | {"random": states, "records": records(directory)}


class Runs:
    """Runs of RUN with the same overrides, and the outcome of an undisturbed one."""

    def __init__(self, fork_server: ForkServer, directory: Path, overrides: Sequence[str] = (), ranks: int = 1):
        self.fork_server, self.directory, self.ranks, self.count = fork_server, directory, ranks, 0
        directory.mkdir(exist_ok=True)
        config = directory / "run.yaml"
        config.write_text(yaml.safe_dump(RUN))
        self.command = [str(config), *overrides]
        statuses, job, output = self.launch()
        assert statuses == [0] * ranks, job.text
        self.expected = outcome(job, output)

    def launch(self, *faults: Fault, output: Path | None = None, rank: int = 0, more: Sequence[str] = ()):
        """The statuses, job and directory of a launch, in a new directory unless one is given."""
        self.count += 1
        output = output or self.directory / f"run{self.count}"
        command = [*self.command, *more, "--output", str(output)]
        log = self.directory / f"{self.count}.log"
        return *self.fork_server.run(command, log, {rank: faults}, self.ranks), output

    def survives(self, *faults: Fault, rank: int = 0) -> list[int]:
        """The exit statuses of a launch with faults, after which the same command ends as if there had been none."""
        statuses, before, output = self.launch(*faults, rank=rank)
        again, job, _ = self.launch(output=output)
        assert again == [0] * self.ranks, job.text
        assert outcome(job, output, before) == self.expected, faults
        return statuses


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(fork_server, tmp_path_factory.mktemp("runs"))


def light_and_full(light: int, full: int):
    return pytest.mark.parametrize("amount", [light, pytest.param(full, marks=pytest.mark.stress)])


def choose_kill(rng: random.Random, place: str) -> Fault:
    target, calls, action = rng.choice(KILLS[place])
    return target, rng.randint(1, calls), action


@light_and_full(3, 20)
@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_ends_in_the_same_bits(place: str, amount: int, runs: Runs, figure: Callable):
    rng = random.Random(place)
    for _ in range(amount):
        assert runs.survives(choose_kill(rng, place)) == [-9]
    figure("R1", f"{amount}/{amount} runs killed in {place} end in the same SHA-256")


EVA = "{blocks: 0, name: eva, window_size: 3, num_landmarks: 4}"
HYBRID = f"attention=[{EVA}, {{blocks: 1, name: softmax, attn_drop: 0.2}}]"


@light_and_full(1, 10)
def test_a_killed_hybrid_ends_in_the_same_bits(amount: int, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    runs, rng = Runs(fork_server, tmp_path, [HYBRID]), random.Random(0)
    for _ in range(amount):
        assert runs.survives(choose_kill(rng, "step")) == [-9]
    figure("R1", f"{amount}/{amount} killed runs of a hybrid end in the same SHA-256")


@pytest.mark.stress
def test_a_run_killed_in_the_second_save_of_a_step_ends_in_the_same_bits(runs: Runs, figure: Callable):
    """The first checkpoint is damaged. Kills come before each rename, at each flush to the disk, and in writing."""
    killed, signal = 0, ("engine.evaluation.evaluate.autocast", 1, "SIGTERM")
    kills = [("os.replace", call, "SIGKILL") for call in range(1, 4)]
    kills += [("os.fsync", call, "SIGKILL") for call in range(1, 11, 2)]
    kills += [("engine.checkpoints.files.write_atomically", call, "half") for call in range(1, 3)]
    for kill in kills:
        statuses, _, output = runs.launch(signal)
        assert statuses == [75]
        newest = list_checkpoints(output)[0]
        newest.write_bytes(newest.read_bytes()[:-1])
        (status,), before, _ = runs.launch(kill, signal, output=output)
        assert status in (-9, 75)
        killed += status == -9
        statuses, job, _ = runs.launch(output=output)
        assert statuses == [0], job.text
        assert outcome(job, output, before) == runs.expected, kill
    assert killed >= len(kills) // 2
    figure("R1", f"{killed}/{killed} runs killed in saving a step a second time end in the same SHA-256")


def test_an_evaluation_may_be_all_that_is_left(runs: Runs):
    assert runs.survives(LAST) == [-9]


@light_and_full(2, 10)
def test_log_steps_increase_through_many_kills(amount: int, runs: Runs, figure: Callable):
    rng, output, more = random.Random(2), None, [f"schedule.epochs={amount}"]
    for _ in range(amount):
        fault = ("engine.training.exchange.UpdateExchange.send", rng.randint(2, 5), "SIGKILL")
        statuses, _, output = runs.launch(fault, output=output, more=more)
        assert statuses == [-9]
    assert runs.launch(output=output, more=more)[0] == [0]
    steps = [record["step"] for record in records(output) if record["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6 * amount
    figure("R2", f"{amount} kills in one run: {len(steps)} log steps strictly increase")


CELLS = [*itertools.product((0, 2), (1, 2), (1, 2), ("null", "bf16"))]
LIGHT_CELLS = [(0, 1, 2, "bf16"), (2, 1, 1, "null"), (0, 2, 1, "bf16")]


@pytest.mark.parametrize(
    ("cell", "amount"),
    [((2, 2, 2, "null"), 1), *((cell, 1) for cell in LIGHT_CELLS[1:])]
    + [pytest.param(LIGHT_CELLS[0], 1, marks=pytest.mark.quick)]
    + [pytest.param(cell, 3, marks=pytest.mark.stress) for cell in CELLS],
)
def test_any_way_to_run_resumes(cell, amount: int, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    """The last kill has LARA, the others EVA."""
    workers, ranks, accumulation, amp = cell
    overrides = [f"data.workers={workers}", f"train.grad_accum_steps={accumulation}", f"train.amp={amp}"]
    rng = random.Random(str(cell))
    for mechanism, kills in (([], amount - 1), ([LARA], 1)):
        if kills:
            runs = Runs(fork_server, tmp_path / str(kills > 1 or mechanism), [*overrides, *mechanism], ranks)
            for _ in range(kills):
                assert -9 in runs.survives(choose_kill(rng, "step"))
    figure("R3", f"{amount}/{amount} kills: workers {workers}, ranks {ranks}, accumulation {accumulation}, amp {amp}")


SHORT = ["attention={name: softmax}", "augment.auto_augment=null", "schedule.epochs=1", "train.total_batch_size=24"]
"""Two updates, of a batch that one to four ranks share."""

MASKED = [
    *("model.mask_token=true", "model.num_classes=0", "model.stem=linear", "simmim.mask_size=4"),
    *("augment.mixup=0", "augment.cutmix=0", "augment.smoothing=0", "augment.reprob=0"),
    *("train.grad_accum_steps=2", "train.amp=bf16"),
]


def test_a_run_on_masked_images_resumes(fork_server: ForkServer, tmp_path: Path):
    runs = Runs(fork_server, tmp_path / "runs", [*MASKED, *SHORT[:3], "schedule.warmup_epochs=0"])
    assert "best_loss" in runs.expected["records"][-1]
    assert runs.survives(("train.nn.utils.clip_grad_norm_", 4, "SIGKILL")) == [-9]


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_masked_images_resumes_after_any_kill(ranks: int, fork_server: ForkServer, tmp_path: Path):
    runs, rng = Runs(fork_server, tmp_path / "runs", MASKED, ranks), random.Random(ranks)
    for _ in range(10):
        assert -9 in runs.survives(choose_kill(rng, "step"))


@pytest.mark.stress
def test_two_ranks_learn_from_masked_images_what_one_learns(fork_server: ForkServer, tmp_path: Path):
    """The network draws no random numbers, because those differ between ranks."""
    plain = [*MASKED, "train.amp=null", "model.drop_path_rate=0", "attention={name: softmax}"]
    one, two = (Runs(fork_server, tmp_path / str(n), plain, n).expected["records"] for n in (1, 2))
    losses = [[record["loss"] for record in records if record["kind"] in ("train", "eval")] for records in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) >= 5


BALANCED = [
    "train.class_weights=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]",
    *("data.folds=2", "data.fold=1", "data.subset_seed=3", "train.best_by=balanced_accuracy"),
    "train.total_batch_size=8",
]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.stress)])
def test_a_run_of_balanced_classes_resumes(ranks: int, fork_server: ForkServer, tmp_path: Path):
    runs = Runs(fork_server, tmp_path / "runs", [*SHORT[:3], "schedule.warmup_epochs=0", *BALANCED], ranks)
    assert {"balanced_accuracy", "best_balanced_accuracy"} <= runs.expected["records"][-1].keys()
    assert -9 in runs.survives(("train.nn.utils.clip_grad_norm_", 2, "SIGKILL"))


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.stress)])
def test_any_number_of_ranks_ends_in_the_same_bits(ranks: int, fork_server: ForkServer, tmp_path: Path):
    """Three gradients have other bits when summed in another order."""
    runs = Runs(fork_server, tmp_path / "runs", [*SHORT, "schedule.warmup_epochs=0"], ranks)
    assert runs.survives(("train.seed_everything", 2, "SIGTERM")) == [75] * ranks


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_ends(ranks: int, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    """Success, stop and failure, 100 ends in all."""
    ends: list[tuple[list[Fault], int]] = [
        ([], 0),
        ([("train.seed_everything", 2, "SIGTERM")], 75),
        ([("engine.training.optim.ModelEmaV3.update", 2, "raise")], 1),
    ]
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    for number in range(100):
        faults, status = ends[number % 3]
        output, log = tmp_path / f"run{number}", tmp_path / f"{number}.log"
        command = [str(config), *SHORT, "schedule.warmup_epochs=0", "--output", str(output)]
        statuses, job = fork_server.run(command, log, {number % ranks: faults}, ranks)
        assert statuses == [status] * ranks, job.text
        shutil.rmtree(output, ignore_errors=True)
    figure("E1", f"100/100 ends of {ranks} ranks: finished, stopped, failed")


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in list_optimizers()), ("kron", 2), ("lamb", 3)])
def test_any_optimizer_resumes_or_is_refused(name: str, ranks: int, fork_server: ForkServer, tmp_path: Path):
    """Resumed ranks begin with the first rank's weights, so that ranks that drifted apart would end otherwise."""
    command, output = [*SHORT, "schedule.warmup_epochs=0", f"optim.opt={name}"], tmp_path / "refused"
    try:
        check_optimizer(Optim(opt=name), torch.device("cpu"))
        refusal = None
    except OptionError as error:
        refusal = f"error: {error}\n"
    if refusal:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
        command = [str(tmp_path / "run.yaml"), *command, "--output", str(output)]
        statuses, job = fork_server.run(command, tmp_path / "log")
        assert (statuses, job.text) == ([2], refusal)
        assert not output.exists()
    else:
        runs = Runs(fork_server, tmp_path / "runs", command, ranks)
        assert runs.survives(("train.seed_everything", 2, "SIGTERM")) == [75] * ranks


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_that_is_restarted_at_every_step(ranks: int, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    """The run has EVA, random augmentation and random regularisation."""
    runs = Runs(fork_server, tmp_path / "runs", ["train.total_batch_size=24"], ranks)
    job, output, statuses, num_launches = None, None, [75] * ranks, 0
    while statuses == [75] * ranks:
        before = job
        statuses, job, output = runs.launch(("train.seed_everything", 2, "SIGUSR1"), output=output)
        num_launches += 1
        assert statuses in ([75] * ranks, [0] * ranks), job.text
    assert num_launches > 4
    assert outcome(job, output, before) == runs.expected
    figure("R3", f"{ranks} rank(s), restarted {num_launches - 1} times: same bits")


TWO_HEADS = ["model.class_token=true", "model.dist_token=true"]


@pytest.mark.stress
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["distill.type=soft", "distill.tau=3.0"]),
        (1, TWO_HEADS),
        (2, [*TWO_HEADS, "train.grad_accum_steps=2", "train.amp=bf16", "augment.mixup=0", "augment.cutmix=0"]),
    ],
)
def test_a_distilled_run_resumes_with_its_teacher_only(ranks: int, overrides, fork_server, runs: Runs, tmp_path: Path):
    """The teacher is another run, and its weights are in no checkpoint of this one."""
    teacher = shutil.copytree(runs.directory / "run1", tmp_path / "teacher")
    students = Runs(fork_server, tmp_path / "runs", [*overrides, f"distill.teacher={teacher}", LARA], ranks)
    rng = random.Random(ranks)
    for _ in range(3):
        assert -9 in students.survives(choose_kill(rng, "step"))
    statuses, _, output = students.launch(("train.seed_everything", 4, "SIGTERM"))
    assert statuses == [75] * ranks
    shutil.rmtree(teacher)
    assert runs.launch(output=teacher, more=["train.seed=1"])[0] == [0]
    statuses, job, _ = students.launch(output=output)
    assert statuses == [2] * ranks
    lines = job.text.splitlines()
    assert len(lines) == 1 + 2 * ranks  # no launcher ends the others, so that each says it
    difference = r"  teacher_weights: [0-9a-f]{64} there, [0-9a-f]{64} here"
    assert sum(re.fullmatch(difference, line) is not None for line in lines) == ranks


MIXED = ["distill.alpha=0.7", "train.grad_accum_steps=2", "train.amp=bf16"]


@pytest.mark.parametrize(("ranks", "overrides"), [(1, []), (2, []), (2, MIXED)])
def test_a_run_that_aligns_resumes(ranks: int, overrides, fork_server: ForkServer, runs: Runs, tmp_path: Path):
    """Averaged weights, too. They, and the weights, are the teacher's where nothing trains them."""
    teacher = shutil.copytree(runs.directory / "run1", tmp_path / "teacher")
    students = [f"init.weights={teacher}", "distill.teacher=init.weights", "distill.type=attention", LARA, *overrides]
    students = Runs(fork_server, tmp_path / "runs", students, ranks)
    assert -9 in students.survives(("train.nn.utils.clip_grad_norm_", 4, "SIGKILL"))
    _, last = newest_checkpoint(students.directory / "run1")
    assert any("ema_top1" in record for record in students.expected["records"])
    _, before = open_weights(teacher, weights="ema")[:2]
    for weights in ("model", "model_ema"):
        is_kept = torch.equal(last[weights]["head.weight"], before["model_ema"]["head.weight"])
        assert is_kept == (overrides != MIXED)
    assert digest(last["model"]) != digest(last["model_ema"])


def test_images_do_not_depend_on_the_workers(runs: Runs):
    statuses, job, output = runs.launch(more=["data.workers=2"])
    assert statuses == [0]
    assert outcome(job, output) == runs.expected


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_every_image_comes_once_at_another_number_of_processes(
    before: int, after: int, fork_server: ForkServer, runs: Runs, figure: Callable
):
    log, output = runs.directory / f"{before}to{after}.log", runs.directory / f"{before}to{after}"
    command = [*runs.command, "--output", str(output)]
    statuses, job = fork_server.run(command, log, {0: [("train.nn.utils.clip_grad_norm_", 3, "SIGTERM")]}, before)
    assert statuses == [75] * before
    places = job.recorded("place")
    statuses, job = fork_server.run(command, log, ranks=after)
    assert 2 in statuses
    assert f"  processes: {before} there, {after} here" in job.text.splitlines()
    statuses, job = fork_server.run([*command, "--allow-change", "processes"], log, ranks=after)
    assert statuses == [0] * after, job.text
    places += job.recorded("place")
    for epoch in "01":
        indices, positions = zip(*((int(index), int(p)) for index, e, p in places if e == epoch), strict=True)
        assert sorted(positions) == list(range(48))
        assert len(set(indices)) == 48
    figure("R4", f"{before} -> {after} ranks: each of 48 images of both epochs once")


def test_other_options_are_refused_until_allowed(runs: Runs, figure: Callable):
    statuses, _, output = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "SIGTERM"))
    assert statuses == [75]
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.name != "lock"}
    others = ["attention.window_size=1", "optim.weight_decay=0.01", "train.log_every=3"]
    statuses, job, _ = runs.launch(output=output, more=others)
    assert statuses == [2]
    differences = ["  attention.window_size: 3 there, 1 here", "  optim.weight_decay: 0.05 there, 0.01 here"]
    assert job.text.splitlines()[1:] == differences
    statuses, job, _ = runs.launch(output=output, more=["data.train_split=val"])
    assert "  images: 50 there, 24 here" in job.text.splitlines()
    assert "warning: data.val_split = val has the images of data.train_split; top-1 is not that of new" in job.text
    statuses, job, _ = runs.launch(output=output, more=["--allow-change", "optim.weigth_decay", *others])
    assert statuses == [2]
    assert "did you mean 'optim.weight_decay'?" in job.text
    assert {path.name: path.read_bytes() for path in output.iterdir() if path.name != "lock"} == before
    allowed = ["--allow-change", "optim.weight_decay", "optim.weight_decay=0.01", "train.log_every=3"]
    assert runs.launch(output=output, more=allowed)[0] == [0]
    groups = newest_checkpoint(output)[1]["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.01}
    trace = {"kind": "change", "step": 4, "option": "optim.weight_decay", "before": 0.05, "now": 0.01}
    changes = [record for record in records(output) if record["kind"] == "change"]
    assert [{key: record[key] for key in trace} for record in changes] == [trace]
    console = (output / "console.log").read_text()
    assert f"resumes from {output / 'step_4.pt'}  epoch 0/2  step 4/12; differences:\n" in console
    assert "\n  optim.weight_decay: 0.05 -> 0.01\n  train.log_every: 4 -> 3\nstart  epoch 0/2  step 4/12" in console
    figure("R5", "changed options refused key by key, allowed ones take effect")


def stop_with_config(runs: Runs, change: Callable[[dict], None]) -> Path:
    """Returns the directory of a stopped run with another configuration in its checkpoint."""
    statuses, _, output = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "SIGTERM"))
    assert statuses == [75]
    path, checkpoint = newest_checkpoint(output)
    change(checkpoint["config"])
    save_checkpoint(path, checkpoint)
    return output


def test_a_configuration_that_is_written_otherwise_is_the_same(runs: Runs):
    """Options that config.yaml leaves out have their defaults."""

    def shorten(config: dict) -> None:
        config["attention"] = RUN["attention"]
        del config["train"]["timeout_minutes"], config["augment"]

    output = stop_with_config(runs, shorten)
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0], job.text
    assert outcome(job, output) == runs.expected


@pytest.mark.parametrize(
    ("section", "option", "problem"),
    [
        ("attention", "window_sides", "attention(eva).window_sides: unknown option; did you mean 'window_size'?"),
        ("model", "patch_drop_rate", "model.patch_drop_rate = 0.5: gone from this version; use an earlier one"),
    ],
)
def test_a_configuration_that_cannot_be_resumed_is_refused_in_one_line(section, option, problem, runs: Runs):
    output = stop_with_config(runs, lambda config: config[section].update({option: 0.5}))
    statuses, job, _ = runs.launch(output=output)
    problem = f"this version cannot resume it; its configuration: {problem}"
    assert (statuses, job.text) == ([2], f"error: {output}/step_4.pt: {problem}\n")


def test_only_the_mode_of_a_mechanism_may_differ_by_itself():
    """Another ranking forgets the best epochs until then."""
    there = {"attention.released": True, "attention.2.released": True, "attention.scale": 0.5, "data.workers": 1}
    here = there | {"attention.released": False, "data.workers": 2}
    assert list_differences(there, here) == []
    del here["attention.2.released"]  # an option that came later
    assert list_differences(there, here) == list_differences(here, there) == []
    here |= {"attention.scale": 1.0, "model.released": True}
    lines = ["attention.scale: 0.5 there, 1.0 here", "model.released: absent there, True here"]
    assert list_differences(there, here) == lines
    assert list_differences(there, here, ["attention.scale"]) == lines[1:]
    there, here = ({"train.best_by": metric} for metric in (None, "loss"))
    assert list_differences(there, here) == ["train.best_by: None there, loss here"]


def test_a_change_that_is_allowed_may_touch_every_state(runs: Runs):
    _, _, output = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "SIGTERM"))
    changes = {"train.amp": "fp16", "optim.opt": "sgd", "train.total_batch_size": "6", "train.ema_decay": "null"}
    more = [word for key, value in changes.items() for word in ("--allow-change", key, f"{key}={value}")]
    statuses, job, _ = runs.launch(output=output, more=more)
    assert statuses == [0], job.text
    assert newest_checkpoint(output)[1]["progress"]["step"] == 3 + (50 - 24) // 6 + 50 // 6


def test_scores_on_other_validation_images_are_forgotten(runs: Runs):
    _, _, output = runs.launch()
    assert {epoch for _, epoch in newest_checkpoint(output)[1]["progress"]["ranking"]} == {1, 2}
    changes = {"schedule.epochs": "3", "data.val_split": "train"}
    allowed = [word for key in (*changes, "val_files", "val_content") for word in ("--allow-change", key)]
    statuses, job, _ = runs.launch(output=output, more=[*allowed, *map("=".join, changes.items())])
    assert statuses == [0], job.text
    assert {epoch for _, epoch in newest_checkpoint(output)[1]["progress"]["ranking"]} == {3}


def test_a_finished_run_says_so(runs: Runs):
    _, _, output = runs.launch()
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.name != "lock"}
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0]
    assert f"{output} is finished:  2 epochs  top-1 " in job.text
    statuses, job, _ = runs.launch(output=output, more=["--allow-change", "schedule.epochs", "schedule.epochs=1"])
    assert statuses == [2]
    (line,) = job.text.splitlines()
    assert line.endswith(f"{output}: schedule.epochs = 1, but 2 of 2 epochs are done there; choose more than 2")
    assert {path.name: path.read_bytes() for path in output.iterdir() if path.name != "lock"} == before


@light_and_full(2, 10)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.quick), 2])
def test_a_stopped_run_loses_nothing(
    ranks: int, amount: int, fork_server: ForkServer, tmp_path: Path, figure: Callable
):
    runs, rng, slowest = Runs(fork_server, tmp_path / "runs", ranks=ranks), random.Random(ranks), 0.0
    for _ in range(amount):
        place = rng.choice(list(KILLS))
        target, call, _ = choose_kill(rng, place)
        rank = 0 if place == "write" else rng.randrange(ranks)
        statuses, job, output = runs.launch((target, call, "SIGTERM"), rank=rank)
        slowest = max(slowest, time.monotonic() - float(job.recorded("fault")[0][0]))
        assert statuses in ([75] * ranks, [0] * ranks), job.text
        done = int(job.recorded("random")[-1][0])
        assert newest_checkpoint(output)[1]["progress"]["step"] == done
        statuses, again, _ = runs.launch(output=output)
        assert statuses == [0] * ranks
        assert outcome(again, output, job) == runs.expected
    assert slowest < 10
    figure("S1", f"{amount}/{amount} SIGTERM on {ranks} rank(s): no step lost, ended within {slowest:.1f} s, same bits")


def test_a_seed_decides_everything(runs: Runs, figure: Callable):
    _, job, output = runs.launch()
    assert outcome(job, output) == runs.expected
    _, job, output = runs.launch(more=["train.seed=1"])
    other = outcome(job, output)
    assert all(other[name] != runs.expected[name] for name in ("model", "model_ema", "optimizer", "random", "records"))
    figure("G1", "the same seed twice: same bits; another seed: everything differs")


def allocations_per_step(runs: Runs, amount: int, *faults: Fault) -> tuple[float, float, set[float]]:
    """The bytes and Python blocks that a run of `amount` updates keeps per update, and its numbers of descriptors.

    Every interval between two counts has the same number of epochs, evaluations and checkpoints. The median does not
    see what is allocated once, such as a cache.
    """
    plain = ["attention={name: softmax}", "model.depth=1", "augment.auto_augment=null"]
    rare = ["train.eval_every=5", "train.checkpoint_steps=20"]
    more = [f"schedule.epochs={amount // 12}", "train.total_batch_size=4", *rare, *plain]
    statuses, job, _ = runs.launch(*faults, more=more)
    assert statuses == [0], job.text
    step, memory, blocks, files = np.array(job.recorded("memory"), int).T[:, amount // 180 :]
    return *(np.median(np.diff(count) / np.diff(step)) for count in (memory, blocks)), set(files)


@light_and_full(900, 3000)
def test_a_long_run_takes_no_more_memory(amount: int, runs: Runs, figure: Callable):
    memory, blocks, files = allocations_per_step(runs, amount)
    figure("M1", f"{amount} steps: {memory:+.1f} bytes and {blocks:+.3f} blocks per step, {files} descriptors")
    assert len(files) == 1
    assert memory < 250
    assert blocks < 1


@pytest.mark.stress
@pytest.mark.parametrize("leak", ["leak tensor", "leak objects"])
def test_a_leak_of_one_kilobyte_per_step_is_seen(leak: str, runs: Runs):
    memory, blocks, _ = allocations_per_step(runs, 600, ("train.Recorder.end_step", 0, leak))
    assert memory > 1000 if leak == "leak tensor" else blocks > 60


def test_digest_sees_a_single_bit():
    assert digest({"a": [torch.zeros(3)]}) != digest({"a": [torch.tensor([0.0, 0.0, 1e-45])]})
