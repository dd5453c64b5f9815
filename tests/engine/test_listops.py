"""ListOps: its expressions and their values, the classification of sequences, and the options that it refuses."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.data.augment import ReadTokens
from engine.data.idx import IdxReader
from engine.data.images import BrokenImage
from engine.data.listops import NUMBERS, TOKENS, draw, main
from engine.data.loaders import create_loaders
from engine.evaluation.evaluate import evaluate
from engine.objectives import choose_objective
from engine.run.load import load_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError
from models import create_model
from tests.support.launcher import ROOT
from tests.support.refusals import refusal
from train import main as train
from validate import main as validate

SMALL = ("model.img_size=[1, 24]", "model.embed_dim=8", "train.total_batch_size=8", "data.workers=0", "train.amp=null")
SMALL += ("schedule.epochs=2",)
NO_MASK = r"model.pad_token = 0: attention\(sra\) takes no key_mask: its conv"


def evaluate_tokens(tokens: list[str]) -> int:
    """The value of an expression by a stack, which shares no code with the generator."""
    stack: list[list] = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            operator, *values = stack.pop()
            ranked = sorted(values)
            middle = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) // 2
            results = {"[MIN": ranked[0], "[MAX": ranked[-1], "[MED": middle, "[SM": sum(values) % 10}
            stack[-1].append(results[operator])
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("listops")
    main([str(output), "--sequences", "80", "80", "--length", "8", "24"])
    return output


def run_of(root: Path, *overrides: str):
    return load_run(ROOT / "configs/lra_listops/softmax.yaml", [*SMALL, f"data.root={root}", *overrides])


def test_an_expression_has_its_value_and_a_length_in_the_range():
    seen = set()
    for seed in range(200):
        tokens, value = draw(random.Random(seed), 4, 80)
        assert 4 <= len(tokens) <= 80
        assert evaluate_tokens(tokens) == value
        seen |= set(tokens)
    assert seen == set(TOKENS) - {""}
    assert evaluate_tokens(["[MAX", "2", "[MIN", "3", "1", "]", "[SM", "9", "9", "]", "[MED", "1", "4", "]", "]"]) == 8


def test_files_hold_sequences_that_are_filled_to_one_length(root: Path, tmp_path: Path):
    reader = IdxReader(str(root / "train-images-idx3-ubyte.gz"))
    assert reader.images.shape == (80, 1, 24)
    for (row,), label in zip(reader.images, reader.labels, strict=True):
        length = int((row > 0).sum())
        assert not row[length:].any()
        names = [*reader.class_to_idx]
        assert evaluate_tokens([TOKENS[number] for number in row[:length]]) == int(names[label])
    main([str(tmp_path), "--sequences", "5", "1", "--length", "8", "24"])
    fewer = IdxReader(str(tmp_path / "train-images-idx3-ubyte.gz"))
    np.testing.assert_array_equal(fewer.images, reader.images[:5])
    assert len(NUMBERS) == 16


@pytest.mark.parametrize("arguments", [["--length", "9", "8"], ["--length", "1", "3"]])
def test_sizes_that_cannot_be_drawn_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    assert f"{arguments[0]} must be" in refusal(main, [tmp_path / "x", *arguments], capsys)
    assert not (tmp_path / "x").exists()


def test_the_model_is_trained_and_validated_on_tokens(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Batches hold numbers of tokens; padding does not change what the model says."""
    run = run_of(root)
    assert choose_objective(run).inputs == "tokens"
    loader, val, _ = create_loaders(run, World(torch.device("cpu")), img_size=(1, 24), num_classes=10)
    tokens, _ = next(iter(loader))
    assert tokens.dtype == torch.uint8
    assert tokens.shape == (8, 1, 1, 24)
    model = create_model(attention=run.attention, **run.model).eval()
    shorter = tokens[:1, ..., : int((tokens[0] > 0).sum())]
    alone = create_model(attention=run.attention, **{**run.model, "img_size": (1, shorter.shape[-1])}).eval()
    state = model.state_dict()
    alone.load_state_dict({**state, "pos_embed": state["pos_embed"][:, : shorter.shape[-1]]})
    torch.testing.assert_close(model(tokens[:1]), alone(shorter))
    assert evaluate(model, val, World(torch.device("cpu")), None)["images"] == 80

    sets = [*SMALL, f"data.root={root}"]
    train([str(ROOT / "configs/lra_listops/softmax.yaml"), *sets, "--output", str(tmp_path / "run")])
    capsys.readouterr()
    validate([str(tmp_path / "run")])
    assert re.search(r"plain +80 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("augment.hflip=0.5", r"hflip = 0\.5: with model.vocab_size, pixels are numbers of tokens; set it to 0.0"),
        ("distill.weights=x", "distill"),
        ("train.compile=true", "with model.pad_token, blocks are not compiled; set it to false"),
        ("attention={name: sra, reduction: 1}", NO_MASK),
        ("attention=[{blocks: 0, name: softmax}, {blocks: 1, name: sra, reduction: 1}]", NO_MASK),
        ("model.dynamic_img_size=true", "with pad_token set it to false"),
    ],
)
def test_options_that_take_pixels_or_padding_are_refused(override: str, message: str, root: Path):
    with pytest.raises(ConfigError, match=message):
        run_of(root, override)


def test_sequences_that_do_not_fit_the_model_are_named():
    read = ReadTokens((1, 5), vocab_size=4)
    image = Image.fromarray(np.array([[0, 1, 2, 3, 3]], np.uint8))
    assert read(image).tolist() == [[[0, 1, 2, 3, 3]]]
    with pytest.raises(BrokenImage, match=r"it holds token 3, but model.vocab_size = 3"):
        ReadTokens((1, 5), vocab_size=3)(image)
    with pytest.raises(BrokenImage, match=r"1 x 5 tokens, but model.img_size = \[1, 6\]"):
        ReadTokens((1, 6), vocab_size=4)(image)
