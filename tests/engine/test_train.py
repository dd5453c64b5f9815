"""The training script: optimiser, schedule, precision, switches, and the input that it refuses."""

import json
import math
import signal
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from torch._dynamo.utils import counters

import train
from attention import ATTENTION, kernels
from engine.checkpoints.files import load_checkpoint, newest_checkpoint
from engine.checkpoints.progress import Progress
from engine.config.schema import Data, Optim, Schedule, Train
from engine.objectives.classification import Classification
from engine.run.load import load_run, parse_run
from engine.runtime.distributed import World
from engine.training.compilation import CompilationFailed, compiled_blocks, describe_compilation
from engine.training.exchange import UpdateExchange
from engine.training.optim import create_average, create_optimizer, create_schedule
from models import create_model
from tests.support.launcher import ROOT
from tests.support.launches import Launches
from tests.support.refusals import refusal

RUN = yaml.safe_load("""
model: {name: deit, img_size: 28, patch_size: 4, embed_dim: 12, depth: 2, num_heads: 3, num_classes: 10}
attention: softmax
data: {dataset: digits, workers: 0}
augment: {auto_augment: null, color_jitter: 0.0, reprob: 0.0, mixup: 0.0, cutmix: 0.0}
optim: {lr: 0.002, lr_base_size: 240}
schedule: {epochs: 1, warmup_epochs: 0}
train: {total_batch_size: 240, device: cpu, amp: null, log_every: 2}
""")
"""A run of five updates of 240 digits."""


def start(directory: Path, *overrides: str) -> dict:
    """Trains RUN below `directory`, and returns its last checkpoint."""
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    train.main([str(config), *overrides, "--output", str(directory / "run")])
    return newest_checkpoint(directory / "run")[1]


def relative_rms(state: dict, expected: dict) -> float:
    """RMS of the difference of two state dicts over the RMS of the second."""
    assert state.keys() == expected.keys()
    difference = sum((state[name].double() - expected[name].double()).square().sum() for name in expected)
    return (difference / sum(value.double().square().sum() for value in expected.values())).sqrt().item()


@pytest.mark.parametrize("name", ATTENTION)
def test_only_matrices_decay(name: str):
    model = create_model("deit", attention=name, img_size=56, patch_size=4, embed_dim=12, depth=1)
    optimizer = create_optimizer(model, Optim(weight_decay=0.05), 512)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays.keys() == set(names.values())
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and not any(word in name for word in ("pos_embed", "table", "position"))
        assert decays[name] == (0.05 if is_matrix else 0.0), name


@pytest.mark.parametrize(("total_batch_size", "peak"), [(1024, 1e-3), (256, 2.5e-4)])
def test_learning_rate_of_the_papers(total_batch_size: int, peak: float):
    """Every step of the recipe (300 epochs, 10 of warm-up from 1e-6) has its closed form."""
    updates = 7
    optimizer = create_optimizer(nn.Linear(2, 2), Optim(), total_batch_size)
    schedule = create_schedule(optimizer, Schedule(), updates)
    warmup, total = 10 * updates, 300 * updates
    rates = []
    for step in range(total):
        schedule.step_update(step)
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == 1e-6
    assert rates[:warmup] == pytest.approx([1e-6 + (peak - 1e-6) * t / warmup for t in range(warmup)], rel=1e-12)
    cosine = [1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * t / total)) / 2 for t in range(warmup, total)]
    assert rates[warmup:] == pytest.approx(cosine, rel=1e-12)
    assert max(rates) == rates[warmup] == pytest.approx(peak, rel=3e-3)  # the cosine has fallen that far by then
    assert rates[-1] == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(("sched", "middle"), [("linear", (1e-3 + 1e-5) / 2), ("constant", 1e-3)])
def test_other_schedules(sched: str, middle: float):
    optimizer = create_optimizer(nn.Linear(2, 2), Optim(lr=1e-3), 512)
    schedule = create_schedule(optimizer, Schedule(sched=sched, epochs=400, warmup_epochs=1), updates_per_epoch=3)
    rates = []
    for step in (0, 600, 1200):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-6, middle, 1e-5 if sched == "linear" else 1e-3])


@pytest.mark.complete
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_like_fp32(amp: str, tmp_path: Path):
    (tmp_path / "fp32").mkdir()
    expected = start(tmp_path / "fp32", "optim.opt=sgd")
    mixed = start(tmp_path, "optim.opt=sgd", f"train.amp={amp}")
    assert 0 < relative_rms(mixed["model"], expected["model"]) < 1e-2
    assert mixed["scaler"].keys() == (
        {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} if amp == "fp16" else set()
    )
    assert mixed["progress"]["metrics"]["loss"] == pytest.approx(expected["progress"]["metrics"]["loss"], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
@pytest.mark.parametrize(
    "overrides",
    [("train.amp=null",), ("train.amp=bf16", "train.channels_last=true"), ("train.amp=fp16", "train.compile=true")],
    ids=" ".join,
)
def test_cuda_trains_like_the_cpu(overrides: tuple[str, ...], tmp_path: Path):
    (tmp_path / "cpu").mkdir()
    expected = start(tmp_path / "cpu", "optim.opt=sgd")
    again = start(tmp_path, "optim.opt=sgd", "train.device=cuda", "train.compile=false", *overrides)
    assert relative_rms(again["model"], expected["model"]) < 1e-2


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.grad_accum_steps=4",),
        pytest.param(("train.grad_checkpointing=true",), marks=pytest.mark.complete),
        pytest.param(("train.channels_last=true",), marks=pytest.mark.complete),
    ],
    ids=" ".join,
)
def test_switches_that_change_no_result(overrides: tuple[str, ...], tmp_path: Path):
    """The optimiser is SGD: Adam would enlarge rounding errors of gradients that are exactly zero (key biases)."""
    (tmp_path / "plain").mkdir()
    plain = ("optim.opt=sgd", "augment.scale=[1, 1]", "augment.ratio=[1, 1]", "augment.hflip=0", "model.stem=linear")
    expected = start(tmp_path / "plain", *plain)
    assert relative_rms(start(tmp_path, *plain, *overrides)["model"], expected["model"]) < 1e-5


@pytest.mark.complete
def test_checkpointed_blocks_restore_random_state(tmp_path: Path):
    """With stochastic depth and dropout, recomputed activations equal those of the forward pass bit for bit."""
    (tmp_path / "plain").mkdir()
    random = ("model.drop_path_rate=0.5", "model.proj_drop_rate=0.2", "attention={name: softmax, attn_drop: 0.2}")
    expected = start(tmp_path / "plain", *random)
    again = start(tmp_path, *random, "train.grad_checkpointing=true")
    assert all(torch.equal(again["model"][name], value) for name, value in expected["model"].items())


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_compiled_model_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks go through dynamo, but not through inductor, which takes longer than all these tests."""
    compiled = partial(train.compiled_blocks, backend="eager")
    (tmp_path / "plain").mkdir()
    expected = start(tmp_path / "plain", "optim.opt=sgd")
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(train, "compiled_blocks", compiled)
    again = start(tmp_path, "optim.opt=sgd", "train.compile=true")
    assert counters["stats"]["unique_graphs"] == 3  # the first block in training, the other one, and in evaluation
    assert relative_rms(again["model"], expected["model"]) < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compilation_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    def no_compiler(graph, inputs):
        raise RuntimeError("no C++ compiler")

    torch.compiler.reset()
    monkeypatch.setattr(train, "compiled_blocks", partial(train.compiled_blocks, backend=no_compiler))
    with pytest.raises(SystemExit) as caught:
        start(tmp_path, "train.compile=true")
    assert caught.value.code == 1
    error = capfd.readouterr().err
    assert "error: train.compile: the blocks cannot be compiled here; set it to false (BackendCompilerFailed" in error
    assert "no C++ compiler" in error


def test_too_many_graphs_are_an_error():
    model = create_model("deit", attention="softmax", img_size=16, patch_size=8, embed_dim=12, depth=1)
    run = parse_run(RUN, "run.yaml", ["train.total_batch_size=2", "train.compile=true"])
    torch.compiler.reset()
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(pytest.raises(CompilationFailed, match="again and again"))
        stack.enter_context(compiled_blocks([model], run, World(torch.device("cpu")), backend="eager"))
        for grid in [(1, 4), (4, 1)]:
            model.blocks[0](torch.zeros(2, 4, 12), grid)
        model.blocks[0](torch.zeros(2, 4, 12), (2, 2))


@pytest.mark.parametrize(
    ("override", "capability", "triton", "expected"),
    [
        ("train.compile=auto", (8, 0), True, "on"),
        ("train.compile=auto", (12, 0), True, "on"),
        ("train.compile=auto", (7, 5), True, "off: kernels need compute capability 8.0, and this GPU has 7.5"),
        ("train.compile=auto", (9, 0), False, "off: triton is not installed"),
        ("train.compile=auto", None, True, "off: no CUDA GPU"),
        ("train.compile=true", None, False, "on"),
        ("train.compile=false", (9, 0), True, "off: train.compile = false"),
    ],
)
def test_automatic_compilation(override: str, capability, triton: bool, expected: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: triton or None)
    world = World(torch.device("cuda" if capability else "cpu"))
    kernels.refusal_of.cache_clear()
    assert describe_compilation(parse_run(RUN, "run.yaml", [override]), world).startswith(expected)
    kernels.refusal_of.cache_clear()


def test_blocks_of_sequences_with_padding_are_not_compiled(monkeypatch):
    monkeypatch.setattr(kernels, "refusal_of", lambda gpu: None)
    run = load_run(ROOT / "configs/listops/softmax.yaml")
    assert describe_compilation(run, World(torch.device("cuda"))) == "off: model.pad_token"


@pytest.mark.complete
def test_deterministic_switch(tmp_path: Path):
    try:
        start(tmp_path, "train.deterministic=true")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("decay", "last"), [(0.9999, 4 / 13), pytest.param(0.25, 0.25, marks=pytest.mark.complete)])
def test_every_update_is_averaged(decay: float, last: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The fifth update has the decay 4 / (4 + 9), unless `train.ema_decay` is smaller; float32."""
    monkeypatch.setattr("engine.training.resume.NUM_LAST", 9)
    new = start(tmp_path, f"train.ema_decay={decay}", "train.checkpoint_steps=1")
    assert new["progress"]["step"] == 5
    old = load_checkpoint(tmp_path / "run" / "step_4.pt")
    for name, average in new["model_ema"].items():
        torch.testing.assert_close(average, last * old["model_ema"][name] + (1 - last) * new["model"][name])
    assert relative_rms(new["model_ema"], old["model_ema"]) > 1e-3


@pytest.mark.parametrize(
    ("plain", "averaged", "last"),
    [
        ([5.0, 7.0, 7.0, 6.0, 7.0], [], 4),  # a tie is no better
        ([5.0, 4.0, 3.0, 2.0], [1.0, 2.0, 2.5, 2.0, 2.0], 5),  # either kind of weights counts
        ([math.nan, math.nan], [], 2),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [], 6),
    ],
)
def test_a_run_stops_early(plain: list[float], averaged: list[float], last: int):
    """Two epochs after its best by either kind of weights, or at its end."""
    run = parse_run({**RUN, "schedule": {"epochs": 6, "warmup_epochs": 0}, "train": {"early_stop": 2}}, "run")
    progress = Progress()
    for plain_score, averaged_score in zip_longest(plain, averaged, fillvalue=0.0):
        assert not progress.is_overdue(run)
        progress.metrics = {"top1": plain_score} | ({"ema_top1": averaged_score} if averaged else {})
        progress.epoch += 1
        progress.rank(progress.epoch, keep=1)
        if progress.is_overdue(run) or progress.is_finished(run):
            break
    assert progress.epoch == last
    assert not Progress(epoch=3, ranking=[[1.0, 1]]).is_finished(run)  # it was interrupted, and has no last record


def test_a_run_that_stopped_early_is_finished_until_it_may_go_on(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The learning rate is too low to change a prediction, so that the first epoch stays the best."""
    options = ["schedule.epochs=4", "optim.lr=1e-9", "schedule.min_lr=0", "schedule.warmup_lr=0"]
    progress = start(tmp_path, *options, "train.early_stop=2")["progress"]
    assert (progress["epoch"], progress["step"]) == (3, 15)
    assert "train.early_stop: no better epoch since epoch 1\nfinal  epoch 3/4  " in capsys.readouterr().out
    start(tmp_path, *options, "train.early_stop=2")
    assert "is finished:  3 epochs" in capsys.readouterr().out
    assert start(tmp_path, *options)["progress"]["epoch"] == 4
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if record["kind"] == "final"] == [4]


@pytest.mark.complete
def test_a_run_stops_early_at_an_evaluation_alone(tmp_path: Path):
    """Two epochs without a best one are over before the first evaluation, after the third epoch."""
    progress = start(tmp_path, "schedule.epochs=4", "train.early_stop=2", "train.eval_every=3")["progress"]
    assert (progress["epoch"], progress["stopped_early"]) == (4, False)


def test_the_decay_of_the_weight_average_on_paper():
    """Weights 0, then 1, 2, 3, 4: d = 0, 1 / 10, 2 / 11, and 0.2 instead of 3 / 12."""
    weight = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(weight.weight)
    average = create_average(weight, 0.2)
    for update, expected in enumerate((1.0, 1.9, (2 * 1.9 + 9 * 3) / 11, 0.2 * (2 * 1.9 + 9 * 3) / 11 + 0.8 * 4), 1):
        nn.init.constant_(weight.weight, update)
        average.update(weight, update)
        assert average.module.weight.item() == pytest.approx(expected, rel=1e-12)
    long = create_average(weight, 0.9999)
    assert [round(long.get_decay(step), 6) for step in (9002, 89_992, 10**6)] == [0.999001, 0.9999, 0.9999]


@pytest.mark.parametrize("name", ATTENTION)
def test_weight_average_leaves_fixed_buffers_exact(name: str):
    """Integer buffers and fixed random draws are equal to the model's after any number of updates."""
    torch.manual_seed(0)
    model = create_model("deit", attention=name, img_size=56, patch_size=4, embed_dim=12, depth=1, stem="conv")
    ema = create_average(model, 0.9999)
    for step in range(1, 20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        model.get_buffer("patch_embed.proj.1.num_batches_tracked").add_(1)
        ema.update(model, step)
    averages = dict(ema.module.named_buffers())
    for buffer, value in model.named_buffers():
        assert torch.equal(averages[buffer], value), buffer


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.opt=adahessian", "optim.opt = 'adahessian' cannot be used, a trial failed (RuntimeError: element 0 of"),
        ("optim.betas=[0.9,0.9,0.9]", "optim.betas = [0.9, 0.9, 0.9], but adamw takes 2"),
        ("model.patch_size=5", "model.img_size = 28 is not a multiple of patch_size = 5; nearest: 30"),
        ("train.total_batch_size=2000", "exceeds the 1437 training images"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(override: str, message: str, tmp_path: Path, capsys):
    run = partial(start, tmp_path, "attention={name: softmax}")
    error = refusal(lambda overrides: run(*overrides), [override], capsys)
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_is_one_line(number: int, tmp_path: Path, monkeypatch, capsys):
    """A signal may come while files are listed, when there is nothing to save yet."""
    before = signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT
    monkeypatch.setattr(train, "create_loaders", lambda *arguments, **options: signal.raise_signal(number))
    with pytest.raises(SystemExit, match=str(128 + number)):
        start(tmp_path)
    signal.signal(number, before)
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.complete
def test_soft_targets_and_label_smoothing_train(tmp_path: Path):
    mixed = start(tmp_path, "augment.mixup=0.8", "augment.cutmix=1.0", "augment.smoothing=0.1")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 3  # after 2, 4 and, the epoch's last, 5 updates
    assert all(1.5 < loss < 3.5 for loss in losses)
    assert mixed["progress"]["metrics"]["images"] == 360


class MetaWorld(World):
    """World on the meta device, with losses and norms that a test makes up."""

    def send(self, values):
        super().send(values)  # its operators count
        return lambda: self.rows.pop(0)


def meta_trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Everything that `Trainer.update` needs, on the device meta."""
    attention = {"name": "eva", "window_size": 3, "num_landmarks": 4}
    model = create_model(**RUN["model"] | {"depth": 1}, attention=attention)
    ema = create_average(model, 0.9).to("meta")
    model, world, progress = model.to("meta").train(), MetaWorld(torch.device("meta")), Progress()
    object.__setattr__(world, "rows", [[[1.0, 1.0, 0.0, 0.0, 0.0]], [[2.0, math.nan, 0.0, 0.0, 0.0]]])
    monkeypatch.setattr(train, "autocast", lambda amp, device: nullcontext())  # meta has none
    run = SimpleNamespace(train=Train(total_batch_size=4, grad_accum_steps=2), data=Data(), optim=Optim())
    exchange = UpdateExchange(run, world, progress)
    exchange.reads_late = True
    return SimpleNamespace(
        run=run, options=run.train, world=world, progress=progress, exchange=exchange,
        model=model, network=model,
        objective=Classification(nn.CrossEntropyLoss()), scaler=torch.amp.GradScaler("cpu", enabled=False),
        optimizer=create_optimizer(model, run.optim, 4), ema=ema,
        signals=SimpleNamespace(stop_requested=lambda: False), checkpoints=SimpleNamespace(is_overdue=lambda: False),
        train_loader=SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=2)),
    )  # fmt: skip


def test_an_update_waits_for_nothing_but_the_update_before(monkeypatch: pytest.MonkeyPatch):
    """Meta tensors stand for those of a GPU."""
    trainer = meta_trainer(monkeypatch)
    batch = torch.zeros(2, 3, 28, 28, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    batches = iter([batch] * 6)
    trainer.model(batch[0])  # brings the tables of groups there
    for number in range(2):
        with Launches("meta") as launches:
            train.Trainer.update(trainer, batches)
        assert launches.waits == []
        assert launches.operators.total() > 200
        assert len(trainer.world.rows) == 2 - number  # the losses of this update are not read
        trainer.progress.step += 1
    with pytest.raises(FloatingPointError, match=r"step 1: the gradient norm is nan; no checkpoint was made after it"):
        train.Trainer.update(trainer, batches)
