"""pyproject.toml agrees with the code, and the installed project trains from any directory."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentTypeError
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attention
import eav
from engine.runtime.arguments import find_config
from tests.test_layers import EVERY_FILE, LIBRARIES, ROOT, SCRIPTS, imports

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
REQUIREMENTS = {
    canonicalize_name(requirement.name): requirement
    for extra in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][x] for x in ("triton", "export", "hf")))
    for requirement in map(Requirement, extra)
}
PACKAGED = [path for package in (*LIBRARIES, "configs") for path in (ROOT / package).rglob("*") if path.is_file()]


def test_imported_packages_are_declared():
    own = {*SCRIPTS, *LIBRARIES, *sys.stdlib_module_names}
    files = [*ROOT.glob("*.py"), *EVERY_FILE]
    imported = {module.partition(".")[0] for path in files for module, _ in imports(path)} - own
    distributions = packages_distributions()
    undeclared = {
        name for name in imported if not REQUIREMENTS.keys() & map(canonicalize_name, distributions.get(name, [name]))
    }
    assert imported >= {"torch", "numpy", "PIL", "yaml"}
    assert not undeclared


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_declared_package_has_a_lower_bound_that_this_environment_meets(name):
    requirement = REQUIREMENTS[name]
    assert [specifier.operator for specifier in requirement.specifier] == [">="]
    if requirement.marker is None or requirement.marker.evaluate():
        assert requirement.specifier.contains(version(name), prereleases=True)


def test_commits_are_checked_by_the_ruff_of_the_tests():
    hooks = {entry["repo"]: entry for entry in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]}
    (ruff,) = (Requirement(each) for each in PROJECT["optional-dependencies"]["test"] if each.startswith("ruff"))
    assert ruff.specifier.contains(hooks["https://github.com/astral-sh/ruff-pre-commit"]["rev"].removeprefix("v"))


def test_all_scripts_are_installed_and_are_commands():
    assert set(PYPROJECT["tool"]["setuptools"]["py-modules"]) == SCRIPTS
    assert PROJECT["scripts"] == {"eav": "eav:main"}
    assert {*eav.COMMANDS} >= SCRIPTS - {"eav"}
    for command, (module, *_) in eav.COMMANDS.items():
        assert command == module.rpartition(".")[2]
        assert callable(import_module(module).main)


def test_a_subcommand_gets_the_arguments_after_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eav", "runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        eav.main()
    assert (ended.value.code, capsys.readouterr().err.count(str(tmp_path))) == (2, 1)
    monkeypatch.setattr(sys, "argv", ["eav", "trian"])
    with pytest.raises(SystemExit):
        eav.main()
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_all_files_of_the_packages_are_installed():
    data = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    left_out = {path for path in PACKAGED if path.suffix not in (".py", ".pyc") and not any(map(path.match, data))}
    assert not left_out
    assert all((ROOT / package / "py.typed").exists() for package in LIBRARIES)


def test_the_version_is_one():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == attention.__version__
    assert f"\n## {attention.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_configurations_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/quickstart.yaml") == ROOT / "configs/quickstart.yaml"
    with pytest.raises(ArgumentTypeError, match=r"README\.md: no such file"):
        find_config("README.md")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").touch()
    assert find_config("configs/quickstart.yaml") == Path("configs/quickstart.yaml")


@pytest.mark.parametrize("stranger", ["models.py", "attention/__init__.py"])
def test_a_module_in_the_place_of_ours_is_named(tmp_path, stranger):
    """`python -m` finds modules of the current directory first."""
    (path := tmp_path / stranger).parent.mkdir(exist_ok=True)
    path.touch()
    command, environment = [sys.executable, "-m", "engine.reporting.runs"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    name = path.relative_to(tmp_path).parts[0].removesuffix(".py")
    problem = (
        f"ImportError: {path} stands in the place of this project's {name} ({ROOT / name}): rename it, or run this"
    )
    assert done.stderr.splitlines()[-1] == f"{problem} in a directory without a module {name}"


@pytest.mark.stress
def test_installed_it_trains_the_quickstart_in_an_empty_directory(tmp_path, figure):
    """The wheel is built from the source distribution; its dependencies are this environment's."""
    source, dist, site, empty = (tmp_path / name for name in ("source", "dist", "site", "empty"))
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs"))
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, source], check=True)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel], check=True)
    assert all((site / path.relative_to(ROOT)).exists() for path in PACKAGED if path.suffix != ".pyc")
    empty.mkdir()
    (empty / "train.py").write_text("raise SystemExit('a script of the user')")
    environment = os.environ | {"PYTHONPATH": str(site)}
    run = "configs/quickstart.yaml", "--output", "runs/quickstart", "schedule.epochs=3"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    subprocess.run([*launcher, site / "bin/eav", "train", *run], check=True, cwd=empty, env=environment)
    subprocess.run([site / "bin/eav", "validate", "runs/quickstart"], check=True, cwd=empty, env=environment)
    records = [json.loads(line) for line in (empty / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert records[0]["git"] is None
    assert records[0]["version"] == attention.__version__
    assert records[-1]["top1"] > 80
    figure("P1", f"installed from the wheel: {records[-1]['top1']:.2f} % after 3 epochs of the quickstart")
