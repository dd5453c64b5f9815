"""The two stages of configs/transfer: both commands in small, and those of docs/finetuning.md."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models._hub import save_for_hf

import train
import validate
from engine.checkpoints import export
from engine.run.load import load_run
from tests.support.launcher import ROOT

TRANSFER = ROOT / "configs/transfer"
RECIPES = sorted(path.stem for path in TRANSFER.glob("*_eva.yaml"))
TEXT = (ROOT / "docs/finetuning.md").read_text()
SECTION = TEXT[TEXT.index("## Another attention in a trained model") : TEXT.index("## Recipes")]
DEIT = {"embed_dim": 24, "depth": 2, "num_heads": 3}
PVT = {"embed_dims": [8, 16, 20, 32], "depths": [1, 2, 1, 1]}


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
    validate.main([str(tuned)])
    export.main([str(tuned), f"{tmp_path}/export/"])
    assert re.search(r"^plain +6 ", capsys.readouterr().out, re.M)
    rebuilt = timm.create_model(f"local-dir:{tmp_path / 'export'}", pretrained=True)
    assert all(torch.equal(x, weights[1][name]) for name, x in rebuilt.state_dict().items())


def test_the_commands_are_valid_and_the_second_starts_from_the_first():
    blocks = re.sub(r"\\\n", "", SECTION)
    commands = re.findall(r"^python train\.py (configs/transfer/\S+) (.*?)--output +(\S+)(.*)", blocks, re.M)
    runs = [load_run(ROOT / path, shlex.split(before + after)) for path, before, _, after in commands]
    assert [run.distill.type == "attention" for run in runs] == [True, False, True]
    assert runs[0].init.weights == load_run(ROOT / commands[0][0]).init.weights
    assert runs[1].init.weights == commands[0][2]
    assert [options["name"] for options in runs[2].attention] == ["softmax", "eva"]
