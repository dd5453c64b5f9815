"""Imports only point down, and the folders are the law.

attention/: mechanisms -> base -> ops -> parts -> torch. models -> types of attention. engine -> those, by room.
Scripts -> all.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
CONTRACT = {"attention.base", "attention.costs", "attention.options", "attention.window_options"}
EXPORT = {"onnxruntime", "onnxscript"}
LIBRARIES = {
    "attention": {"torch", "triton"},
    "models": {"torch", "timm", "transformers"},
    "engine": {
        *("torch", "torchvision", "timm", "yaml", "numpy", "PIL", "matplotlib", "tqdm", "safetensors", "tensorboard"),
        "textalloc",
        *EXPORT,
    },
    "bench": {"torch", "torchvision", "timm", "yaml", "numpy", "PIL", "matplotlib", "tqdm", "triton"},
    "analysis": {"torch", "timm", "yaml", "matplotlib", "tqdm"},
    "ablation": {"torch", "yaml", "matplotlib", "tqdm"},
}
ROOMS = {  # room of engine/ -> rooms below it, which it may import; any room may import attention/ and models/
    "runtime": "",
    "config": "runtime",
    "objectives": "config runtime",
    "run": "objectives config runtime",
    "data": "run objectives config runtime",
    "checkpoints": "run objectives config runtime",
    "evaluation": "checkpoints data run objectives config runtime",
    "training": "checkpoints data run objectives config runtime",
    "reporting": "evaluation checkpoints data run config runtime",
}
BELOW = {  # folder or file -> what of this project it may import
    "attention/parts": {"attention.options", "attention.parts"},
    "attention/ops": {"attention.options", "attention.parts", "attention.ops"},
    "attention/mechanisms": {*CONTRACT, "attention.parts", "attention.ops", "attention.mechanisms"},
    "attention/options.py": set(),
    "attention/inputs.py": {"attention.parts"},
    "attention/base.py": {"attention.inputs", "attention.options", "attention.ops", "attention.parts"},
    "attention/costs.py": {"attention.base", "attention.parts", "attention.window_options"},
    "attention/window_options.py": {"attention.base", "attention.options", "attention.parts"},
    "attention": {"attention"},
    "models/__main__.py": {"attention", "attention.plugins"},
    "models": {"attention", "attention.options", "models"},
    "bench": {"attention", "models", "engine", "bench"},
    "analysis": {"attention", "models", "engine", "bench", "analysis"},
    "ablation": {"attention", "models", "engine", "bench", "ablation"},
    **{
        f"engine/{room}": {"attention", "models", *(f"engine.{name}" for name in (room, *below.split()))}
        for room, below in ROOMS.items()
    },
}
MODELS_MAY_TAKE = {"Attention", "AttentionFactory", "Grid", "OptionError", "LayerContext", "Options"} | {
    *("collecting", "kernels", "option", "nearest", "parse_options", "refuse", "take_plugins", "to_yaml")
}
EVERY_FILE = [path for package in LIBRARIES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """(absolute name of the module, names taken from it) of every import statement.

    The folder attention/ can be copied under any name: its imports of itself are relative, all others absolute.
    """
    found, package = [], path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            of_itself = {path.relative_to(ROOT).parts[0], module.partition(".")[0]} == {"attention"}
            assert (node.level > 0) == of_itself, f"{path}: from {'.' * node.level}{node.module or ''}"
            found.append((module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
    return found


def allowed(path: Path) -> set[str]:
    """Modules and packages of this project that the file may import: the rule of the nearest folder that has one."""
    place = path.relative_to(ROOT)
    return next(BELOW[str(p)] for p in (place, *place.parents) if str(p) in BELOW)


def test_imports_point_down():
    for path, (module, names) in ((file, found) for file in EVERY_FILE for found in imports(file)):
        package = path.relative_to(ROOT).parts[0]
        top = module.partition(".")[0]
        assert top not in SCRIPTS, f"{path} imports the script {top}"
        # from Python 3.12 on, isinstance of such a protocol does not see the parameters of a module
        assert "runtime_checkable" not in names, f"{path}: runtime_checkable"
        if top in LIBRARIES[package] or top in sys.stdlib_module_names:
            continue
        below = allowed(path)
        assert any(f"{module}.".startswith(f"{name}.") for name in below), f"{path} imports {module}"
        if package == "models" and top == "attention":
            assert module in below, f"{path} imports {module}"
            assert set(names) <= MODELS_MAY_TAKE, f"{path} takes {names} from {module}"
        if module.startswith("attention.mechanisms.") and path.parent.name == "mechanisms":
            assert not any(name[0].isupper() for name in names), f"{path} takes a class of {module}"


def test_every_room_has_its_rule():
    assert {path.parent.name for path in ROOT.glob("engine/*/__init__.py")} == {*ROOMS}
    assert not [path.name for path in ROOT.glob("engine/*.py") if path.name != "__init__.py"]


def test_no_file_is_named_for_nothing():
    assert {"utils", "common", "helpers", "misc"}.isdisjoint(path.stem for path in [*ROOT.glob("*.py"), *EVERY_FILE])


def test_every_command_refuses_an_option_given_twice():
    """Every parser is one of engine.runtime.arguments, but that of eav.py, which has no option and imports nothing."""
    paths = {*ROOT.glob("*.py"), *EVERY_FILE} - {ROOT / "eav.py"}
    assert not [path for path in paths if "argparse.ArgumentParser(" in path.read_text()]


def test_inheritance_depth_is_one():
    from attention import ATTENTION, Attention

    assert all(mechanism.__bases__ == (Attention,) for mechanism in ATTENTION.values())
