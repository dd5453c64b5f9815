"""The README's own words, executed."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

import attention
from attention import ATTENTION
from attention.__main__ import row, table
from models import create_model
from tests.uniform.test_twins import test_op_equals_its_literal_twin_in_value_and_all_gradients as assert_twins

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_opening_example():
    names = {"x": torch.randn(2, 784, 192)}
    exec(PYTHON[0], names)
    assert names["y"].shape == (2, 784, 192)
    assert names["model"](torch.randn(1, 3, 224, 224)).shape == (1, 1000)


def test_your_own_attention(monkeypatch):
    (code,) = (block for block in PYTHON if "class Pooled" in block)
    module = types.ModuleType("attention.pooled")
    monkeypatch.setitem(sys.modules, "attention.pooled", module)
    monkeypatch.setattr(attention, "pooled", module, raising=False)
    exec(code, vars(module))
    (line,) = re.findall(r"`\"pooled\": (\w+)`", README)
    monkeypatch.setitem(ATTENTION, "pooled", getattr(module, line))

    from tests.support import cases

    (line,) = re.findall(r"`(Case\(\"pooled\".*?)`", README)
    case = eval(line, vars(cases))
    for training in (True, False):
        assert_twins(case, training)
    assert row("pooled") == ("`pooled`", "", "softmax over the means of c bins of the grid", "2 N c C", "")
    model = create_model("deit_tiny_p16", attention={"name": "pooled", "num_landmarks": 16}, num_classes=3)
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 3)


def test_mechanism_table_is_that_of_the_docstrings():
    (written,) = re.findall(r"^\| name \|.*?(?=\n\n)", README, re.MULTILINE | re.DOTALL)
    assert written.splitlines() == table().splitlines(), "let `python -m attention` print it anew"


def test_mechanism_table_links_to_configurations_of_the_mechanism():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\]\((configs/[\w/]+\.yaml)\)", README, re.MULTILINE))
    assert set(rows) == set(ATTENTION)
    for name, path in rows.items():
        mechanisms = yaml.safe_load((ROOT / path).read_text())["attention"]
        assert name in [m["name"] for m in (mechanisms if isinstance(mechanisms, list) else [mechanisms])]


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\b(?:configs|attention|models|engine|tests)/[\w/]+\.\w+", README)))
)
def test_files_it_names_exist(path):
    assert (ROOT / path).exists() or path == "attention/pooled.py"


def test_commands_name_real_scripts_and_options():
    commands = re.findall(r"^(?:python|torchrun[^\n]*?) ?(\w+\.py)", README, re.MULTILINE)
    assert {"train.py", "validate.py", "ablate.py"} <= set(commands)
    assert all((ROOT / script).exists() for script in commands)


def test_a_docstring_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(attention.eva, "__doc__", "EVA. Cost: linear.")
    with pytest.raises(ValueError, match=r"attention\.eva: its docstring .* 'Title \(authors year, arXiv:number\)"):
        table()
