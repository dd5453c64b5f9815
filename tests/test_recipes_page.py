"""Every example of docs/recipes.md runs where its package is installed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs/recipes.md").read_text()
RECIPES = {
    section.partition("\n")[0]: re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for section in PAGE.split("\n## ")[1:]
}
"""Heading -> code."""


def find(heading: str) -> str:
    (code,) = [code for title, code in RECIPES.items() if title.startswith(heading)]
    return code


def run(heading: str) -> dict[str, Any]:
    """Returns the names that the example under a heading defines."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(find(heading), names)
    return names


def test_every_recipe_has_a_test():
    text = Path(__file__).read_text()
    assert len(RECIPES) == 7
    assert all(f'"{re.split(r"[:,]| of ", heading)[0]}"' in text for heading in RECIPES)


def test_low_rank_terms_are_trained_and_merged():
    pytest.importorskip("peft")
    code, names = find("LoRA"), {}
    exec(code[: code.index("merged")], names)
    trained = {name for name, p in names["tuned"].named_parameters() if p.grad is not None}
    assert any("lora_B" in name for name in trained)
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    exec(code[code.index("merged") :], names)
    assert not any("lora_" in name for name in names["merged"].state_dict())


@pytest.mark.complete
def test_parameters_are_sharded_by_two_processes(tmp_path):
    code = find("Sharded parameters") + (
        "\nfrom pathlib import Path\n"
        "weight = model.head.weight\n"
        "result = f'{type(weight).__name__} {weight.to_local().shape[0]}'\n"
        "Path(__file__).with_name(f'rank_{dist.get_rank()}').write_text(result)\n"  # a pipe would mix their lines
        "dist.destroy_process_group()\n"
    )
    (tmp_path / "script.py").write_text(code)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *command, tmp_path / "script.py"],
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["DTensor 500"] * 2


@pytest.mark.parametrize(
    ("package", "heading", "name", "expected"),
    [
        ("torchao", "Weights", "error", lambda error: 0 < error < 0.05),
        ("segmentation_models_pytorch", "Segmentation", "masks", lambda x: x.shape == (1, 21, 128, 128)),
        ("captum", "Attribution", "attribution", lambda x: x.shape == (1, 3, 224, 224)),
    ],
)
def test_an_example_of_an_optional_package(package, heading, name, expected):
    pytest.importorskip(package)
    assert expected(run(heading)[name])


@pytest.mark.complete
def test_gradients_are_those_without_checkpointing():
    code = find("Less memory")
    grads = []
    for text in (code, code.replace("model.set_grad_checkpointing()\n", "")):
        names: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(text, names)
        grads.append([p.grad for p in names["model"].parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_images_of_any_size():
    assert [x.shape for x in run("Images")["logits"]] == [(1, 1000)] * 3
