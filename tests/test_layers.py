"""Imports only point down: attention -> torch; models -> attention's types, timm; engine -> those; scripts -> all."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
MECHANISM_HELPERS = {
    *("base", "complement", "control_variates", "decoding", "draws", "exact", "features", "hashing", "landmarks"),
    *("options", "position", "proposals", "resampling", "windows", "kernels.tiles"),
}
MODELS_MAY_TAKE = {"Attention", "AttentionFactory", "Grid", "OptionError", "Site", "option", "nearest", "parse_options"}
ALLOWED = {
    "attention": {"torch", "triton", "attention"},
    "models": {"torch", "timm", "attention", "models"},
    "engine": {
        *("torch", "torchvision", "timm", "yaml", "numpy", "PIL", "tqdm", "safetensors"),
        *("attention", "models", "engine"),
    },
}
EVERY_FILE = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names taken from it) of every import statement."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
    return found


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    package = path.relative_to(ROOT).parts[0]
    for module, names in imports(path):
        top, _, rest = module.partition(".")
        assert top not in SCRIPTS, f"{path} imports the script {top}"
        assert top in ALLOWED[package] or top in sys.stdlib_module_names, f"{path} imports {module}"
        if package == "models" and top == "attention":
            assert set(names) <= MODELS_MAY_TAKE, f"{path} takes {names} from {module}"
        if package == "attention" and top == "attention" and path.stem not in {"__init__", "__main__"}:
            is_mechanism = rest not in MECHANISM_HELPERS and not rest.startswith("kernels")
            assert not (is_mechanism and path.stem in MECHANISM_HELPERS), f"{path} imports the mechanism {module}"
            assert not (is_mechanism and any(name[0].isupper() for name in names)), f"{path} takes a class of {module}"


@pytest.mark.parametrize("path", [*ROOT.glob("*.py"), *EVERY_FILE], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_named_for_nothing(path):
    assert path.stem not in {"utils", "common", "helpers", "misc"}


def test_inheritance_depth_is_one():
    from attention import ATTENTION, Attention

    assert all(mechanism.__bases__ == (Attention,) for mechanism in ATTENTION.values())
