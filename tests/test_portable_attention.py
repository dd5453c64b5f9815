"""The folder attention/, copied into another project under another name, works there (docs/integration.md)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import importlib.util
import pkgutil
import sys

import torch

import their_package.eva_attention as copied
import their_package.second_attention as second

for folder in (copied, second):
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        if ".triton_" not in module.name or importlib.util.find_spec("triton"):
            importlib.import_module(module.name)
for module in copied.kernels.TRITON_MODULES.values():
    assert module.startswith("their_package.eva_attention.ops.") and importlib.util.find_spec(module), module

attn = copied.create_attention("eva", dim=8, num_heads=2, grid=(4, 6), window_size=2, num_landmarks=6).double()
x, found = torch.randn(2, 24, 8, dtype=torch.float64), {}
for path in ("auto", "plain"):
    torch.manual_seed(0)
    with copied.kernels.use(path):
        y = attn(x, (4, 6))
    found[path] = [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))]
for fast, plain in zip(*found.values(), strict=True):
    torch.testing.assert_close(fast, plain)

assert not {"attention", "models"} & set(sys.modules)
namespaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
assert not {name for name in namespaces if name.startswith("attention")}
"""


@pytest.mark.complete
def test_a_copy_under_another_name_works_beside_strangers(tmp_path):
    package = tmp_path / "their_package"
    for name in ("eva_attention", "second_attention"):
        shutil.copytree(ROOT / "attention", package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    (tmp_path / "models").mkdir()
    for stranger in ("attention.py", "models/__init__.py"):
        (tmp_path / stranger).write_text("raise AssertionError('a stranger was imported')\n")
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
