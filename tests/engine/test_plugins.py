"""Mechanisms from outside: what registers, what loads plugins, and what never does."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from ablation.sweep import read_ablation
from attention import ATTENTION, Attention, OptionError, create_attention, plugins, register
from attention.__main__ import page
from attention.base import Cost
from attention.mechanisms.eva import Eva
from attention.options import Options, option
from attention.plugins import GROUP, as_arguments, find_mechanism, load_installed, load_plugin, plugin_of, take_plugins
from attention.registry import KEYS_OF_ENTRIES, UnknownMechanism
from engine.checkpoints.files import save_checkpoint
from engine.checkpoints.progress import Progress
from engine.evaluation.inference import load
from engine.run.load import dump_run, load_run, parse_run
from engine.runtime.arguments import ArgumentParser
from engine.runtime.errors import ConfigError
from engine.runtime.provenance import provenance
from models import create_model
from models.assignment import Place
from tests.engine.test_train import RUN
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests/outside"
FILE = OUTSIDE / "pooled_attention.py"
POOLED = {"name": "pooled", "num_landmarks": 4}
MODULE = """
from attention import Attention, register
from attention.base import Cost
from attention.options import Options

@register
class {name}(Attention):
    class Config(Options):
        pass
    @classmethod
    def cost(cls, context, config):
        return Cost(0, 0)
    def attend(self, q, k, v, grid):
        return v
"""
"""A plugin with the mechanism `name`."""


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Forgets what a test registers and imports."""
    before, modules = dict(ATTENTION), {*sys.modules}
    monkeypatch.setattr(plugins, "LOADED", {})
    monkeypatch.setattr(plugins, "_asked", False)
    monkeypatch.setattr(plugins, "_failed", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in {*ATTENTION} - {*before}:
        del ATTENTION[name]
    for name in {*sys.modules} - modules:
        if name.partition(".")[0] not in {"attention", "engine", "models", "torch", "timm"}:
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(site: Path, module: str, name: str = "pooled-attention", version: str = "1.2") -> Path:
    """Makes the directory that pip would write for a package with an entry point."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "entry_points.txt", f"[{GROUP}]\nown = {module}\n")
    return site


# Registering


def mechanism(**changes) -> type:
    """A class `RowMean` with everything a mechanism needs, but for `changes`; None leaves a part out."""

    class Config(Options):
        window_size: int = option(7, "side, tokens", low=1)

    parts = {"Config": Config, "cost": classmethod(lambda cls, context, config: Cost(0, 0))}
    parts |= {"attend": lambda self, q, k, v, grid: v}
    return type("RowMean", (Attention,), {name: part for name, part in (parts | changes).items() if part is not None})


def test_a_class_is_registered_under_its_name_in_snake_case():
    cls = mechanism()
    assert register(cls) is cls is ATTENTION["row_mean"]
    assert create_attention("row_mean", dim=8, num_heads=2, grid=(3, 5), window_size=2).config.window_size == 2
    names = {"MyLSHAttention": "my_lsh_attention", "T2r": "t2r", "Eva2d": "eva2d", "LSH": "lsh"}
    assert {name: type(name, (Attention,), {}).name() for name in names} == names
    assert all(name == cls.name() for name, cls in ATTENTION.items())


def test_a_mechanism_without_a_docstring_is_not_described_by_that_of_another_class():
    register(mechanism(__module__="elsewhere"))
    assert page("row_mean").startswith("It has no docstring.\n\n| option |")


class NoField(Options):
    window_size: int = 7


class Blocks(Options):
    blocks: int = option(7, "tokens of a block")


class Sides(Options):
    grid: int = option(7, "side of a grid")


class Reach(Options):
    local: int = option(3, "tokens of a neighbourhood")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (int, "<class 'int'> is no mechanism; write `class RowAttention(attention.Attention): ...`"),
        (len, "<built-in function len> is no mechanism"),
        (mechanism(Config=None), "RowMean has no options; write `class Config(Options): window_size: int = option(7,"),
        (mechanism(Config=dict), "RowMean has no options; write `class Config(Options)"),
        (mechanism(Config=NoField), "an option window_size that is no option(); write `window_size: int = option(7"),
        (mechanism(Config=Blocks), "RowMean has an option blocks, a key of its own beside"),
        (mechanism(Config=Sides), "RowMean has an option grid, a key of its own beside"),
        (mechanism(Config=Reach), "RowMean has an option local that is no bool, which it is in all mechanisms; rename"),
        (mechanism(cost=None), "RowMean defines no cost; write `@classmethod def cost(cls, context, config): return"),
        (mechanism(attend=None), "RowMean defines no attend; write `def attend(self, q, k, v, grid): ...`"),
    ],
    ids=lambda value: None,
)
def test_a_class_that_lacks_a_part_is_refused_in_one_line(cls, message):
    assert {"name", *Place.__dataclass_fields__} == {*KEYS_OF_ENTRIES}
    with pytest.raises(TypeError, match=re.escape(message)) as refused:
        register(cls)
    assert "\n" not in str(refused.value)
    assert "row_mean" not in ATTENTION


def test_a_taken_name_is_refused_and_a_class_defined_anew_replaces_itself():
    own = type("Eva", (Attention,), {**vars(mechanism()), "__module__": "mine"})
    with pytest.raises(ValueError, match=r"mine\.Eva would be the mechanism 'eva', but attention\.mechanisms\.eva\.E"):
        register(own)
    assert ATTENTION["eva"] is Eva
    first, again, other = mechanism(), mechanism(), mechanism(__module__="other")
    register(first)
    register(again)
    with pytest.raises(ValueError, match=r"other\.RowMean would be the mechanism 'row_mean', but .*; rename the class"):
        register(other)
    assert ATTENTION["row_mean"] is again


# Loading


def test_a_module_or_a_file_is_loaded_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one.py", MODULE.format(name="One"))
    write(tmp_path / "pack/__init__.py", "from pack import below")
    write(tmp_path / "pack/below.py", MODULE.format(name="Two"))
    load_plugin("one")
    load_plugin("pack")
    load_plugin("./one.py")
    load_plugin(str(FILE))
    assert [plugin_of(name) for name in ("one", "two", "pooled", "eva")] == ["one", "pack", str(FILE), None]
    assert as_arguments() == ["--plugin", "one", "--plugin", "pack", "--plugin", str(FILE)]
    assert plugins.versions()["one"] == f"sha256 {hashlib.sha256((tmp_path / 'one.py').read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        ("absent.py", None, "cannot be imported: FileNotFoundError: "),
        ("a-b", None, "cannot be imported: ImportError: expected the name of a module"),
        ("plain.py", "x = 1", "registers no mechanism; write @attention.register above the class"),
        ("wrong.py", "\n1 / 0", "cannot be imported: ZeroDivisionError: division by zero (.*, line 2)"),
        ("ends.py", "raise SystemExit(3)", "cannot be imported: SystemExit: 3 "),
        ("code.py", "", "cannot be imported: ImportError: code is the name of another module (.*)"),
        ("taken.py", MODULE.format(name="Eva"), "cannot be imported: ValueError: register: taken.Eva"),
    ],
)
def test_what_is_no_plugin_is_refused_in_one_line(name, content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path / name, content)
    line = refusal(ArgumentParser().parse_args, ["--plugin", name], capsys)
    assert re.match(f"error: --plugin {name}: " + re.escape(message).replace(r"\.\*", ".*"), line), line
    assert line.count("\n") == 1


def test_a_command_line_loads_plugins_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):
        write(tmp_path / f"{name}.py", MODULE.format(name=name.capitalize()))
    parser = ArgumentParser()
    asked = parser.add_subparsers().add_parser("ask")
    asked.add_argument("rest", nargs="*")
    args = parser.parse_args(["--plugin=one", "ask", "a", "--plugin", "two", "b", "--plugin", "three.py"])
    assert args.rest == ["a", "b"]
    assert {"one", "two", "three"} <= {*ATTENTION}
    with pytest.raises(OptionError, match="--plugin: expected a module"):
        take_plugins(["a", "--plugin"])


# Installed packages


def test_an_installed_package_is_found_when_its_mechanism_is_asked_for(tmp_path, monkeypatch):
    shutil.copy(FILE, install(tmp_path, "pooled_attention"))
    monkeypatch.syspath_prepend(tmp_path)
    assert create_attention("eva", dim=8, num_heads=2, grid=(14, 14)).name() == "eva"
    assert "pooled_attention" not in sys.modules
    assert create_attention(dim=8, num_heads=2, grid=(4, 4), **POOLED).name() == "pooled"
    load_plugin("pooled_attention")  # also by name
    assert plugins.versions() == {"pooled_attention": "pooled-attention 1.2"}
    assert (plugin_of("pooled"), as_arguments()) == ("pooled_attention", [])
    assert find_mechanism("pooled") is ATTENTION["pooled"]


def test_a_broken_package_is_left_out_with_one_line(tmp_path, monkeypatch, capsys):
    write(install(tmp_path / "a", "broken", "broken-package") / "broken.py", "import torch\n1 / 0\n")
    shutil.copy(FILE, install(tmp_path / "b", "pooled_attention"))
    for site in "ab":
        monkeypatch.syspath_prepend(tmp_path / site)
    load_installed()
    load_installed()
    path = tmp_path / "a/broken.py"
    problem = f"ZeroDivisionError: division by zero ({path}, line 2)"
    assert capsys.readouterr().err == f"warning: the plugin broken of broken-package is left out: {problem}\n"
    assert "pooled" in ATTENTION
    with pytest.raises(
        UnknownMechanism,
        match=rf"'broken_mechanism'.*; the plugin broken of broken-package is left out: {re.escape(problem)}",
    ):
        find_mechanism("broken_mechanism")


@pytest.mark.complete
def test_a_package_may_be_imported_before_anything_else(tmp_path):
    """Nothing is imported with `attention`, so that a module that imports it first is not imported twice."""
    shutil.copy(FILE, install(tmp_path, "pooled_attention"))
    code = "import pooled_attention, attention; assert attention.ATTENTION['pooled'] is pooled_attention.Pooled"
    code += "; import sys; assert 'importlib.metadata' not in sys.modules or not attention.plugins.LOADED"
    code += "; attention.create_attention('pooled', dim=8, num_heads=2, grid=(14, 14))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


# Configurations and checkpoints


def test_a_configuration_that_the_user_gives_loads_plugins_and_the_run_names_those_it_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write(tmp_path / f"{name}.py", MODULE.format(name=name.capitalize()))
    path = write(tmp_path / "run.yaml", yaml.safe_dump(RUN | {"attention": "one", "plugins": ["one", "two.py"]}))
    run = load_run(path)
    assert run.plugins == ("one",)
    assert load_run(path, ["attention=two"]).plugins == ("two.py",)
    assert load_run(path, ["attention=softmax"]).plugins == ()
    assert parse_run(dump_run(run), "x") == run
    assert set(provenance(torch.device("cpu"))["plugins"]) == {"one", "two.py"}
    write(tmp_path / "wrong.yaml", yaml.safe_dump(RUN | {"plugins": ["absent"]}))
    with pytest.raises(ConfigError, match=r"wrong\.yaml:\d+: plugins absent: cannot be imported: ModuleNotFoundError"):
        load_run(tmp_path / "wrong.yaml")


def test_a_checkpoint_never_imports_what_it_names(tmp_path, monkeypatch):
    """Neither a checkpoint, nor an export, nor timm's layout, nor the configuration in a run directory."""
    monkeypatch.chdir(tmp_path)
    trap = write(tmp_path / "trap.py", f"open({str(tmp_path / 'sprung')!r}, 'w')\n" + MODULE.format(name="Trap"))
    config = RUN | {"attention": "trap", "plugins": ["trap", str(trap), "$(touch x)"]}
    metadata = {"processes": 1, "images": 9, "progress": asdict(Progress())}
    state = create_model(attention="softmax", **RUN["model"]).state_dict()
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run/step_1_epoch_1.pt", {"config": config, **metadata, "model": state})
    write(tmp_path / "run/config.yaml", yaml.safe_dump(config))
    advice = f"add --plugin trap --plugin {trap} --plugin '$(touch x)' if you trust it"
    ends = re.escape(f"attention.name: the mechanism 'trap' came from a plugin; {advice}") + "$"
    for source in ("run", "run/step_1_epoch_1.pt"):
        with pytest.raises(ConfigError, match=ends):
            load(source)
    assert not (tmp_path / "sprung").exists()
    assert "trap" not in sys.modules


def test_the_children_of_a_sweep_get_its_plugins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write(tmp_path / f"{name}.py", MODULE.format(name=name.capitalize()))
    write(tmp_path / "base.yaml", yaml.safe_dump(RUN))
    sweep = {"base": "base.yaml", "plugins": ["one"], "grid": {"attention": ["one", "two", "softmax"]}}
    path = write(tmp_path / "sweep.yaml", yaml.safe_dump(sweep))
    with pytest.raises(ConfigError, match=r"sweep\.yaml:\d+: grid: .*unknown mechanism 'two'"):
        read_ablation(path, [], tmp_path / "out", ["python"])
    take_plugins(["--plugin", "two"])
    _, settings, _ = read_ablation(path, [], tmp_path / "out", ["python"])
    commands = [setting.cases[0].command for setting in settings]
    assert all(command[-4:] == ["--plugin", "one", "--plugin", "two"] for command in commands)
    assert [setting.cases[0].run.plugins for setting in settings] == [("one",), ("two",), ()]


def test_a_run_with_a_mechanism_from_outside(tmp_path, fork_server):
    """Trained by two ranks with loader workers; every command takes its checkpoints and exports with the flag alone."""
    config = RUN | {"attention": POOLED, "data": {"dataset": "digits", "workers": 1}}
    config["train"] = RUN["train"] | {"total_batch_size": 10}
    path = write(tmp_path / "run.yaml", yaml.safe_dump(config))
    shutil.copy(FILE, plugin := tmp_path / "pooled_attention.py")
    Image.new("L", (28, 28), 99).save(image := tmp_path / "image.png")
    run, flag, log = tmp_path / "run", ["--plugin", str(plugin)], tmp_path / "log"
    train, export, directory = [str(path), "--output", str(run)], tmp_path / "own.safetensors", tmp_path / "dir"

    def call(script, *command, ranks=1):
        statuses, job = fork_server.run([*map(str, command)], log, script=script, ranks=ranks)
        return set(statuses), job.text

    status, text = call("train", *train)
    assert (status, text.count("\n")) == ({2}, 1)
    assert "attention.name: unknown mechanism 'pooled'" in text
    assert call("train", *train, *flag, ranks=2)[0] == {0}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert records[0]["plugins"] == {str(plugin): f"sha256 {digest}"}
    assert yaml.safe_load((run / "config.yaml").read_text())["plugins"] == [str(plugin)]

    advice = f"the mechanism 'pooled' came from a plugin; add --plugin {plugin} if you trust it\n"
    status, text = call("validate", run, "--json")
    assert (status, text.count("\n")) == ({2}, 1)
    assert text.endswith(advice)
    assert [call("engine.checkpoints.export", run, x, *flag)[0] for x in (export, f"{directory}/")] == [{0}] * 2
    status, text = call("validate", run, "--json", *flag)
    assert status == {0}
    (found,) = re.findall(r"^{.*}$", text, re.MULTILINE)
    assert json.loads(found)["plain"]["top1"] == records[-1]["top1"]
    answers = set()
    for source in (run, export, directory):
        status, text = call("predict", source, image)
        assert (status, text.endswith(advice)) == ({2}, True), text
        status, text = call("predict", source, image, *flag)
        assert status == {0}, text
        answers.add(text)
    assert len(answers) == 1

    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(plugin, tmp_path / "elsewhere")
    status, text = call("train", *train, "--plugin", moved, ranks=2)  # goes on from another path
    assert status == {0}
    assert "is finished:  1 epochs" in text
