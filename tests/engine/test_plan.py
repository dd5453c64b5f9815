"""`train.py --dry-run` and `--help`: the plan of a run, which starts nothing and writes nothing."""

import dataclasses
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

import train
from attention import OptionError
from engine.config.schema import Run
from engine.run.load import load_run, parse_run
from engine.runtime.distributed import World, autocast
from engine.runtime.memory import saved_bytes
from engine.training.plan import describe_hours, estimate_memory
from models import create_model
from tests.engine.test_train import RUN, start
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
WORLD = World(torch.device("cpu"))


def plan(directory: Path, capsys: pytest.CaptureFixture, *arguments: str) -> tuple[dict, dict[str, str]]:
    """Returns the configuration and the facts that a dry run prints."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    capsys.readouterr()
    train.main([str(directory / "run.yaml"), "--output", str(directory / "run"), "--dry-run", *arguments])
    facts, _, config = capsys.readouterr().out.partition("\n\n")
    return yaml.safe_load(config), dict(re.findall(r"^(\S+) +((?:.|\n )+)", facts, re.MULTILINE))


def test_a_new_run(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config, facts = plan(tmp_path, capsys, "schedule.epochs=3", "train.grad_accum_steps=2")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert (config["schedule"]["epochs"], config["train"]["seed"], config["attention"]["name"]) == (3, 0, "softmax")
    count = sum(p.numel() for p in create_model(attention="softmax", **RUN["model"]).parameters())
    assert facts["parameters"] == f"{count:,}"
    assert re.fullmatch(r"[\d,]+ of an image", facts["MACs"])
    assert facts["images"] == "1,437 to train, 360 to validate"
    assert facts["steps"] == "15: 3 epochs of 5"
    assert facts["batch"].endswith(" = 1 x 2 x 120")
    assert re.match(r"\d+ MB a process, without .*\n +weights 0\.0, gradients 0\.0, optim", facts["memory"])
    assert facts["compile"] == "off: no CUDA GPU"
    assert facts["resumes"].startswith(f"nothing; {tmp_path / 'run'} has no checkpoint")


@pytest.mark.complete
def test_what_would_be_resumed_and_what_would_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    start(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    assert plan(tmp_path, capsys)[1]["resumes"] == f"nothing; {tmp_path / 'run'} is finished"
    more = ["schedule.epochs=2", "--allow-change", "schedule.epochs", "train.log_every=1"]
    _, facts = plan(tmp_path, capsys, *more)
    place = f"{tmp_path / 'run' / 'step_5_epoch_1.pt'}  epoch 1/2  step 5/10; differences:\n"
    assert facts["resumes"] == f"{place}  schedule.epochs: 1 -> 2\n  train.log_every: 2 -> 1"
    for arguments, problem in {
        ("optim.lr=0.001",): "optim.lr: 0.002 there, 0.001 here",
        ("distill.teacher=absent.pt", "distill.type=hard"): "absent.pt: no such run directory or checkpoint",
    }.items():
        with pytest.raises(SystemExit) as ended:
            plan(tmp_path, capsys, *arguments)
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == files


@pytest.mark.complete
def test_weights_that_do_not_fit_are_refused_as_by_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture):
    start(tmp_path)
    trained = tmp_path / "trained"
    (tmp_path / "run").rename(trained)
    begin = [str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--dry-run"]
    train.main([*begin, f"init.weights={trained}", "init.strict=true"])
    refused = {
        ("init.weights=absent",): "absent: no such run directory",
        (f"init.weights={trained}", "init.strict=true", "attention={name: local, window_size: 7}"): "not all is loaded",
    }
    for arguments, problem in refused.items():
        assert problem in refusal(train.main, [*begin, *arguments], capsys)


def test_files_of_others_are_refused_as_by_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "run"
    output.mkdir()
    (output / "config.yaml").write_text("mine")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    for dry in (["--dry-run"], []):
        arguments = [str(tmp_path / "run.yaml"), "--output", str(output), *dry]
        assert f"{output / 'config.yaml'}: is there already" in refusal(train.main, arguments, capsys)
        assert [path.name for path in output.iterdir()] == ["config.yaml"]  # not even a lock
        arguments[2] = str(tmp_path / "run.yaml")
        assert "run.yaml: cannot be made: Not a directory" in refusal(train.main, arguments, capsys)


def test_a_class_without_images_to_balance_is_refused_as_by_a_launch(tmp_path: Path, capsys, monkeypatch):
    problem = OptionError("train.class_weights", ": the class 'k' has no training image")
    monkeypatch.setattr("engine.training.objective.count_classes", Mock(side_effect=problem))
    with pytest.raises(SystemExit, match="2"):
        plan(tmp_path, capsys, "train.class_weights=balanced")
    assert str(problem) in capsys.readouterr().err


def run_with(**train_options: object) -> Run:
    run = parse_run(RUN | {"attention": {"name": "eva", "window_size": 7, "num_landmarks": 49}}, "a test")
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **train_options))


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_activations_are_those_of_a_real_pass(amp: str | None):
    run, images = run_with(amp=amp), 16
    model = create_model(attention=run.attention, **run.model).train()
    batch = torch.zeros(images, 3, 28, 28)

    def forward() -> torch.Tensor:
        with autocast(amp, WORLD.device):
            return model(batch)

    estimate = estimate_memory(run, WORLD, images)[f"activations of {images} images"]
    assert estimate == pytest.approx(saved_bytes(forward, model.parameters()), rel=0.01)


def test_weights_gradients_and_optimiser():
    """AdamW keeps two numbers for each weight, and a step for each tensor."""
    model = create_model(attention=run_with().attention, **RUN["model"])
    size = sum(parameter.nbytes for parameter in model.parameters())
    plain = estimate_memory(run_with(), WORLD, 16)
    assert (plain["weights"], plain["weight average"], plain["gradients"]) == (size, 0, 0)
    assert plain["optimiser"] == 2 * size + 4 * len(list(model.parameters()))
    assert estimate_memory(run_with(ema_decay=0.9), WORLD, 16)["weight average"] == size
    doubled = estimate_memory(run_with(grad_accum_steps=2), dataclasses.replace(WORLD, size=2), 16)
    assert doubled["gradients"] == 2 * size
    frozen = estimate_memory(run_with(freeze="backbone"), WORLD, 16)
    assert frozen["optimiser"] < 0.1 * size
    activations = "activations of 16 images"
    assert frozen[activations] < 0.5 * plain[activations]
    several = estimate_memory(run_with(budgets=(1, 4, 16, 49), budget_distill=True), WORLD, 16)
    assert several[activations] == 3 * plain[activations]
    assert estimate_memory(run_with(grad_checkpointing=True), WORLD, 16)[activations] < 0.5 * plain[activations]


def plan_on(monkeypatch: pytest.MonkeyPatch, gpu: str, config: str, *options: str) -> str:
    """Returns what is said of the time of 1,000 updates on two such GPUs."""
    monkeypatch.setattr("engine.training.plan.device_name", lambda device: gpu)
    monkeypatch.setattr("engine.training.plan.describe_compilation", lambda run, world: "on")
    run = load_run(ROOT / "configs" / config, ["train.device=cuda", *options])
    return describe_hours(run, World(torch.device("cuda"), size=2), 1000)


def test_hours_are_those_of_the_table_on_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    header = "device,batch,model,name,execution,images_per_second"
    rows = ["tiny8,eva,eager,1", "tiny8,eva,compiled-cuda-graph,1000", "tiny8,performer:num_samples=64,eager,"]
    (tmp_path / "table.csv").write_text("\n".join([header, *(f"Fast 9,128,{row}" for row in rows)]))
    monkeypatch.setattr("engine.training.plan.MEASURED", tmp_path / "table.csv")
    eva = "deit_tiny_p8/eva.yaml"
    said = "about 0.1 hours, 0.3 GPU-hours; derived from 1,000 images/s, measured on one Fast 9 without loading and"
    assert plan_on(monkeypatch, "Fast 9", eva).startswith(said)
    assert plan_on(monkeypatch, "Fast 9", eva, "train.cuda_graph=false") == ""
    others = "attention.num_landmarks=16", "model.img_size=192", "train.amp=fp16", "model.depth=6", "attention=softmax"
    others += "train.kernels=torch", "train.deterministic=true", "train.total_batch_size=128"
    for other in (*others, "distill={teacher: absent.pt, type: soft}", "train.freeze=backbone"):
        assert plan_on(monkeypatch, "Fast 9", eva, other) == "", other
    assert plan_on(monkeypatch, "Fast 8", eva) == plan_on(monkeypatch, "Fast 9", "deit_small_p8/lara.yaml") == ""
    monkeypatch.undo()
    for name in ("eva", "softmax", "local", "performer"):  # of the table that is shipped
        assert " GPU-hours; " in plan_on(monkeypatch, "NVIDIA H100 80GB HBM3", f"deit_tiny_p8/{name}.yaml")


def test_a_dry_run_fits_a_screen_and_quotes_what_is_expected(capsys: pytest.CaptureFixture):
    options = ["data.dataset=digits", "data.subset=9", "model.num_classes=10", "train.device=cpu"]
    options += ["train.total_batch_size=2", "optim.lr_base_size=2", "--output", "runs/absent", "--dry-run"]
    train.main([str(ROOT / "configs/deit_tiny_p8/eva.yaml"), *options])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[lines.index("") :])) <= 160  # of the options
    assert "eva.yaml: Expected top-1: 76.67 (EVA Table 2)" in "\n".join(lines[:20])


def test_help_shows_the_sections_and_how_to_list_the_options(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    sections = text[text.index("sections of key.path=value") :]
    assert all(re.search(rf"\b{field.name}\b", sections) for field in dataclasses.fields(Run))
    assert max(map(len, text.splitlines())) <= 80
    for way in ("--dry-run", "python -m attention NAME", "python -m engine.config.option_pages"):
        assert way in text


def test_an_option_of_a_run_is_no_option_of_the_command_line(capsys: pytest.CaptureFixture):
    text = refusal(train.main, ["configs/quickstart.yaml", "--output", "run", "--epochs", "3"], capsys)
    assert text.endswith("--epochs 3; schedule.epochs is an option of the run: write schedule.epochs=3\n")
