"""The two stages of configs/transfer: both commands in small, and what docs/finetuning.md says of them."""

import gc
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models._hub import save_for_hf
from torch import nn

import train
import validate
from engine.checkpoints.identify import Kind
from engine.checkpoints.initial_weights import create_initial_model
from engine.config.schema import Run
from engine.run.load import load_run
from engine.runtime.distributed import World, autocast
from engine.runtime.memory import peak_bytes
from engine.training.objective import create_objective
from models import create_model, family_of
from tests.support.launcher import ROOT

WORLD = World(torch.device("cpu"))
TRANSFER = ROOT / "configs/transfer"
RECIPES = sorted(path.stem for path in TRANSFER.glob("*_eva.yaml"))
TEXT = (ROOT / "docs/finetuning.md").read_text()
SECTION = TEXT[TEXT.index("## Another attention in a trained model") : TEXT.index("## Recipes")]
DEIT = {"embed_dim": 24, "depth": 2, "num_heads": 3}
PVT = {"embed_dims": [8, 16, 20, 32], "depths": [1, 2, 1, 1]}
ROWS = re.findall(r"^\| \[(\w+)\]\(.*\| ([\d.]+) of ([\d.]+) M \| ([\d.]+) MiB \| ([\d.]+) MiB \|", SECTION, re.M)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Class folders of noise, 24 training and 6 validation images."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name in ("cat", "dog", "eel"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
                pixels.resize((160, 120)).save(root / split / name / f"{i}.jpg")
    return root


def leave_source(recipe: str, directory: Path, small: list[str]) -> str:
    """Leaves weights in `directory`, as timm's hub, an own run or a file; returns their name for `init.weights`."""
    if recipe == "deit_tiny_p16_eva":
        save_for_hf(timm.create_model("deit_tiny_patch16_224", **DEIT), directory, model_args=DEIT)
        return f"timm:local-dir:{directory}"
    if recipe == "deit_tiny_p8_eva":
        train.main([str(ROOT / "configs/deit_tiny_p8/softmax.yaml"), *small, "--output", str(directory)])
        return str(directory)
    directory.mkdir()
    torch.save(timm.create_model("pvt_v2_b1", **PVT).state_dict(), directory / "weights.pth")
    return str(directory / "weights.pth")


@pytest.mark.complete
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_stages_run_and_their_result_is_validated_and_exported(recipe: str, images: Path, tmp_path: Path, capsys):
    sizes = PVT | {"num_heads": [1, 2, 5, 8]} if recipe.startswith("pvt") else DEIT
    small = [f"model.{key}={json.dumps(value)}" for key, value in sizes.items()]
    small += [f"data.root={images}", "model.num_classes=3", "data.workers=0", "train.total_batch_size=6"]
    small += ["optim.lr_base_size=6", "train.log_every=1", "schedule.warmup_epochs=0", "schedule.epochs=1"]
    aligned, tuned = tmp_path / "aligned", tmp_path / "tuned"
    source = leave_source(recipe, tmp_path / "source", small)
    align = [str(TRANSFER / f"{recipe}.yaml"), *small, f"init.weights={source}"]
    train.main([*align, "--output", str(aligned)])
    records = [json.loads(line) for line in (aligned / "metrics.jsonl").read_text().splitlines()]
    errors = [{k: x for k, x in row.items() if k.startswith("error_")} for row in records if row["kind"] == "train"]
    layers = 4 if recipe.startswith("pvt") else 2  # the last stage of a PVT-v2 is as published
    assert [len(row) for row in errors] == [layers] * 4
    capsys.readouterr()
    train.main([str(TRANSFER / f"{recipe}_tune.yaml"), *small, f"init.weights={aligned}", "--output", str(tuned)])
    found = re.findall(r"^  ([\w-]+) +([1-9]\d*)", capsys.readouterr().out, re.M)
    weights = [torch.load(max(directory.glob("step_4*.pt")))["model"] for directory in (aligned, tuned)]
    assert found == [("loaded", str(len(weights[0])))]
    same = [name for name, x in weights[0].items() if torch.equal(x, weights[1][name])]
    if recipe == "deit_tiny_p16_eva":  # of the last block the class token alone counts, which attends exactly
        same = [
            name for name in same if not name.startswith(("blocks.1.attn.landmarks", "blocks.1.attn.position_bias"))
        ]
    assert not same
    validate.main([str(tuned), "--export", f"{tmp_path}/export/"])
    assert re.search(r"^plain +6 ", capsys.readouterr().out, re.M)
    rebuilt = timm.create_model(f"local-dir:{tmp_path / 'export'}", pretrained=True)
    assert all(torch.equal(x, weights[1][name]) for name, x in rebuilt.state_dict().items())


def full_size(path: Path, directory: Path) -> tuple[Run, nn.Module]:
    """The recipe and its model, with random weights as its source in a file that `directory` gets."""
    run = load_run(path)
    published = family_of(run.model["name"]).published_attention
    attention = run.attention if path.stem.endswith("_tune") else published
    weights = directory / "weights.pth"
    torch.save(create_model(attention=attention, **run.model).state_dict(), weights)
    run = load_run(path, [f"init.weights={weights}"])
    return run, create_initial_model(run, directory / "run", WORLD)


@pytest.mark.complete
def test_the_console_is_as_it_is_shown(tmp_path: Path, capsys):
    run, model = full_size(TRANSFER / "deit_tiny_p16_eva.yaml", tmp_path)
    create_objective(run, model, None, WORLD)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"^```\n(init\.weights=.*?)^```", SECTION, re.M | re.S)
    for line in shown.splitlines():
        line = line.replace("timm:deit_tiny_patch16_224.fb_in1k", str(run.init.weights))
        line = line.replace(Kind.HUB.value, Kind.STATE_DICT.value)
        assert f"\n{line.removesuffix('...')}" in f"\n{printed}", line


def test_the_commands_are_valid_and_the_second_starts_from_the_first():
    blocks = re.sub(r"\\\n", "", SECTION)
    commands = re.findall(r"^python train\.py (configs/transfer/\S+) (.*?)--output +(\S+)(.*)", blocks, re.M)
    runs = [load_run(ROOT / path, shlex.split(before + after)) for path, before, _, after in commands]
    assert [run.distill.type == "attention" for run in runs] == [True, False, True]
    assert runs[0].init.weights == load_run(ROOT / commands[0][0]).init.weights
    assert runs[1].init.weights == commands[0][2]
    assert [options["name"] for options in runs[2].attention] == ["softmax", "eva"]


def memory_of_an_image(run: Run, model: nn.Module) -> float:
    """MiB that the tensors of a step take for every image."""
    layout: Any = torch.channels_last if run.train.channels_last else torch.contiguous_format
    model.to(memory_format=layout).train()
    peaks = []
    for batch in (4, 12):
        objective = create_objective(run, model, None, WORLD)
        network = objective.wrap(model)
        x, targets = torch.randn(batch, 3, 224, 224).to(memory_format=layout), torch.full((batch, 1000), 1e-3)

        def step(objective=objective, network=network, x=x, targets=targets) -> None:
            with autocast(run.train.amp, WORLD.device):
                loss = objective(network, x, targets)
            loss.backward()

        model.zero_grad()
        gc.collect()
        peaks.append(peak_bytes(step, WORLD.device))
    return (peaks[1] - peaks[0]) / 8 / 2**20


def test_every_recipe_has_its_row():
    assert sorted(row[0] for row in ROWS) == RECIPES


@pytest.mark.stress
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_memory_and_trained_weights_are_as_they_are_given(row: tuple[str, ...], tmp_path: Path):
    """In the table, and at the head of both files."""
    recipe, trained, total, *given = row
    for path, memory in zip((TRANSFER / f"{recipe}.yaml", TRANSFER / f"{recipe}_tune.yaml"), given, strict=True):
        run, model = full_size(path, tmp_path)
        assert memory_of_an_image(run, model) == pytest.approx(float(memory), rel=0.02)
        text = path.read_text()
        whole = float(memory) * run.train.total_batch_size / 1024
        assert f"Memory of a step: {memory} MiB for every image, " in text
        assert float(re.search(r"([\d.]+) GiB for 512", text)[1]) == pytest.approx(whole, abs=0.06)
        if path.stem == recipe:
            counts = [sum(w.numel() for w in model.parameters() if w.requires_grad or every) for every in (False, True)]
            assert [f"{count / 1e6:.1f}" for count in counts] == [trained, total]
            assert f"{trained} M of {total} M parameters are trained" in text
