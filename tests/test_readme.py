"""README.md and docs/ agree with the code: examples run; tables, commands, options, names, files and links exist."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache, partial, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import timm
import torch
import transformers
import yaml
from PIL import Image

import attention
import eav
from ablation.sweep import read_ablation
from attention import ATTENTION, LayerContext, OptionError, create_attention
from attention.__main__ import config, table
from attention.options import parse_options
from engine.reporting.generate import COMMAND as GENERATE
from engine.reporting.generate import FILES, PARTS, generate
from engine.run.load import load_run
from tests.engine.test_predict import CLASSES, make_checkpoint

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("reference/*.md")]
}
README, INTEGRATION, MECHANISMS = (PAGES[f"{name}.md"] for name in ("README", "docs/integration", "docs/mechanisms"))
TEXT = "\n".join(text.partition("\n### Removed\n")[0] for text in PAGES.values())
"""The pages without what the changelog says is removed."""
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_opening_examples():
    names = {"x": torch.randn(2, 784, 192)}
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(example, names)
    assert names["y"].shape == (2, 784, 192)
    assert names["model"](torch.randn(1, 3, 224, 224)).shape == (1, 1000)


def test_prediction(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs/eva").mkdir(parents=True)
    make_checkpoint(tmp_path / "runs/eva/step_3_epoch_1.pt")
    Image.new("RGB", (20, 30), "red").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    (example,) = [code for code in PYTHON if "engine.evaluation.inference" in code]
    names = {}
    exec(example, names)
    assert (names["logits"].shape, names["model"].training) == ((1, 10), False)
    assert capsys.readouterr().out.strip() in names["classes"] == CLASSES


def test_small_grids():
    (example,) = [code for code in PYTHON if "features_only=True" in code]
    names: dict = {}
    exec(example, names)
    sides = re.findall(r"(\d+)x(\d+)", example)
    assert [tuple(map(str, y.shape[2:])) for y in names["grids"]] == sides
    attn = create_attention("eva", dim=192, num_heads=3, grid=(28, 28), fit=True)  # of the first page
    assert attn(torch.randn(1, 6, 192), (3, 2)).shape == (1, 6, 192)


CLIENTS = INTEGRATION[INTEGRATION.index("## In other people's models") : INTEGRATION.index("## timm's scripts")]
IN_OTHERS, SEQUENCE, OF_SIZES, CAUSAL = re.findall(r"```python\n(.*?)```", CLIENTS, re.DOTALL)


def run_example(code: str, **names: Any) -> dict[str, Any]:
    """Returns the names that an example defines, given the names that it takes for granted."""
    names |= {"torch": torch, "create_attention": attention.create_attention}
    exec(code, names)
    return names


def test_other_peoples_models_take_another_attention():
    config = partial(transformers.ViTConfig, num_hidden_layers=1, intermediate_size=64)
    with patch("timm.create_model", partial(timm.create_model, depth=1)), patch("transformers.ViTConfig", config):
        names = run_example(IN_OTHERS)
    for name in ("vit", "vit_of_hf"):
        cores = {re.search(r"\.core\.(\w+)", key) for key in names[name].state_dict()} - {None}
        assert {match[1] for match in cores} == {"position_bias", "landmarks"}
        names[name](torch.randn(1, 3, 224, 224))


def test_attention_on_sequences():
    y = run_example(SEQUENCE, x=torch.randn(2, 512, 64))["y"]
    assert y.shape == (2, 512, 64)
    assert y[1, :300].all()
    assert not y[1, 300:].any()
    assert run_example(CAUSAL, x=y)["attn"].config.causal


def test_images_of_several_sizes_make_a_batch():
    names = run_example(OF_SIZES)
    model, x, logits = names["model"], names["x"], names["logits"]
    alone = torch.cat([model(x[:1, :, :, :160]), model(x[1:, :, :192])])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", FILES)
def test_what_follows_from_the_code_is_written(file):
    """Tables and lists; `engine.reporting.generate.PARTS` names the function of each."""
    assert (ROOT / file).read_bytes() == generate(file), f"run: {GENERATE}"


def test_only_sections_have_a_page_of_options():
    assert {name for name in PAGES if name.startswith("docs/options/")} == {*FILES} & {*PAGES} - {*PARTS}


SECTION = MECHANISMS[MECHANISMS.index("## Add your own attention") : MECHANISMS.index("## Fast paths")]
MECHANISM, FACTS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
OUTSIDE = ROOT / "tests/outside"
IN_PACKAGE = {
    "from attention import Attention, Grid, LayerContext, register\n": "",
    "from attention.base import Cost": "from ..base import Attention, Cost, LayerContext",
    "from attention.mechanisms.": "from .",
    "import split_prefix": "import Grid, split_prefix",
    "from attention.": "from ..",
    "@register\n": "",
}
INSIDE = reduce(lambda text, change: text.replace(*change), IN_PACKAGE.items(), MECHANISM)
"""The module as a file of this repository, with relative imports."""


def test_your_own_attention_is_the_package_of_the_tests():
    """tests/engine/test_plugins.py trains it."""
    (pyproject,) = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
    files = {"pooled_attention.py": MECHANISM, "facts.py": FACTS, "pyproject.toml": pyproject}
    assert {path.name: path.read_text() for path in OUTSIDE.glob("*.*")} == files


@pytest.mark.complete
def test_your_own_attention_passes_every_uniform_suite():
    """By the command in docs/mechanisms.md, and no test of another mechanism runs."""
    command = re.search(r"^python (-m pytest) -n 2 (.*)", SECTION, re.MULTILINE)
    words = shlex.split(" ".join(command.groups()))
    words = [OUTSIDE / word if (OUTSIDE / word).exists() else word for word in words]
    run = subprocess.run(
        [sys.executable, *words, "-n", "0", "-p", "no:cacheprovider", "-vv"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-5000:]
    tests = re.findall(r"^tests/(\S+\.py)::(.*) PASSED", run.stdout, re.MULTILINE)
    assert len({file for file, _ in tests}) > 15
    assert len(tests) > 80
    assert all("pooled" in name for _, name in tests)


@pytest.mark.complete
def test_your_own_attention_becomes_one_of_the_repository(tmp_path):
    """In a copy of the project: its two files, its name, and the command that writes what follows from the code."""
    for folder in ("ablation", "attention", "models", "engine", "bench", "configs", "docs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md"):
        shutil.copy(path, tmp_path)
    named = re.findall(r"`((?:attention|tests)/[\w/]+\.py)`", SECTION)
    assert named == ["attention/mechanisms/pooled.py", "tests/mechanisms/test_pooled.py", "attention/__init__.py"]
    mechanism, facts, registry = (tmp_path / path for path in named)
    registry.write_text(registry.read_text().replace("Name = Literal[", 'Name = Literal["pooled",', 1))
    mechanism.write_text(INSIDE)
    facts.write_text(FACTS)
    call = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    generated = call([sys.executable, *GENERATE.split()[1:]], env=environment)
    assert generated.stdout.split() == ["docs/integration.md"]
    tests = ["tests/uniform/test_facts.py", "tests/uniform/test_twins.py", "tests/test_layers.py"]
    chosen = ["-p", "no:cacheprovider", "-k", "pooled or facts", *tests]
    run = call([sys.executable, "-m", "pytest", *chosen], env=environment)
    assert run.returncode == 0, run.stdout[-5000:]


def test_your_own_attention_refuses_class_tokens_until_it_declares_them():
    undeclared, count = re.subn(r".*prefix_tokens = .*\n", "", INSIDE)
    assert count == 1
    names = {"__name__": "attention.mechanisms.pooled", "__package__": "attention.mechanisms"}
    exec(undeclared, names)
    context = {"dim": 8, "num_heads": 2, "grid": (14, 14)}
    options = parse_options(names["Pooled"].Config, {})
    assert names["Pooled"](LayerContext(**context), options)(torch.randn(1, 196, 8), (14, 14)).shape == (1, 196, 8)
    with pytest.raises(OptionError, match="takes no prefix tokens, and num_prefix_tokens = 1; set class_token"):
        names["Pooled"](LayerContext(**context, num_prefix_tokens=1), options)


def test_mechanism_table_links_to_configurations_of_the_mechanism():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\]\(\.\./(configs/[\w/]+\.yaml)\)", MECHANISMS, re.MULTILINE))
    assert set(rows) == {name for name in ATTENTION if config(name)}
    for name, path in rows.items():
        mechanisms = yaml.safe_load((ROOT / path).read_text())["attention"]
        assert name in [m["name"] for m in (mechanisms if isinstance(mechanisms, list) else [mechanisms])]


@pytest.mark.parametrize(
    "path",
    sorted(
        set(re.findall(r"\b(?:configs|attention|models|engine|bench|analysis|ablation|tests|docs)/[\w/]+\.\w+", TEXT))
    ),
)
def test_files_they_name_exist(path):
    assert (ROOT / path).exists() or path.endswith(("/pooled.py", "/test_pooled.py"))


NAMES = re.findall(r"`((?:models|engine|bench|analysis|ablation)\.[\w.]+)", TEXT)


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_names_in_code_font_exist(name):
    resolve_name(name)


MAINS = {name: module for name, (module, *_) in eav.COMMANDS.items()}
"""Subcommand of the console command `eav` -> module."""

CONFIGS = [path.read_text() for path in ROOT.glob("configs/**/*.yaml")]
BLOCKS = [
    *re.findall(r"^```\w*\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE),
    *(line for config in CONFIGS for line in re.findall(r"^#  (.*\n)", config, re.MULTILINE)),
]
"""Code blocks of the pages, and lines of commands in the comments of configurations."""

COMMAND = r"(?<![\w/])(?:-m ([\w.]+)|(\w+)\.py|eav (\w+))(?![\w./])([^\n|]*)"


@cache
def options_of(module: str, *question: str) -> set[str]:
    """Returns the options in the help of a command; those of analyze.py depend on its question."""
    lines = io.StringIO()
    with redirect_stdout(lines), pytest.raises(SystemExit):
        import_module(module).main([*question, "--help"])
    return set(re.findall(r"--[\w-]+", lines.getvalue()))


def test_commands_name_real_scripts_and_options():
    """Options in quoted arguments are not checked."""
    code = re.sub(r"\"[^\"\n]*\"|'[^'\n]*'|#.*", "''", re.sub(r"\\\n", "", "".join(BLOCKS)))
    used = set()
    for imported, script, console, arguments in re.findall(COMMAND, code):
        module = MAINS[console] if console else imported or script
        assert find_spec(module), module
        if module in MAINS.values():
            words = arguments.split()
            given = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
            assert given <= options_of(module, *words[: module == "analyze"]), (module, arguments)
            used.add(module)
    assert used == {*MAINS.values()}


REPRODUCING = PAGES["docs/reproducing.md"]


@pytest.mark.parametrize("command", re.findall(r"`(python \w+\.py [^`]+)`", REPRODUCING))
def test_a_command_of_the_papers_tables_is_complete(monkeypatch, command):
    class Parsed(Exception):
        """The script has taken the command line, and begins its work."""

    def begin():
        raise Parsed

    _, script, *arguments = shlex.split(command)
    module = import_module(script.removesuffix(".py"))
    monkeypatch.setattr(module, "refuse_bad_input", begin)
    with pytest.raises(Parsed):
        module.main(arguments)


def test_every_sweep_is_on_the_page_of_the_papers_once():
    sweeps = {path.stem for path in ROOT.glob("configs/ablation/*.yaml")}
    assert sorted(name for name in re.findall(r"`(\w+)`", REPRODUCING) if name in sweeps) == sorted(sweeps)


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
def test_configurations_are_valid(text, tmp_path):
    """A sweep is one as if it stood in configs/ablation/, and options are those of a run."""
    text = text.replace("base: ..", f"base: {ROOT}/configs")
    options = yaml.safe_load(text)
    path = tmp_path / "example.yaml"
    path.write_text(text if "base" in options else f"base: {ROOT}/configs/quickstart.yaml\n{text}")
    if options.keys() & {"grid", "runs"}:
        assert read_ablation(path, [], tmp_path / "out", ["python"])[1]
    else:
        load_run(path)


def test_first_page_leads_to_every_other():
    pages = {name for name in PAGES if name.startswith("docs/") and not name.startswith(("docs/api/", "docs/options/"))}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", README))


def test_links_lead_to_files_and_headings():
    found = 0
    for name, text in PAGES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            assert file.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in slugs, f"{name}: {target}"
            found += 1
    assert found


def test_every_figure_and_file_of_data_is_used():
    """By a page, a table or a test."""
    sources = [ROOT / "engine/reporting", ROOT / "bench", ROOT / "analysis", ROOT / "tests"]
    named = "\n".join([TEXT, *(path.read_text() for folder in sources for path in folder.rglob("*.py"))])
    for path in [*ROOT.glob("docs/figures/*"), *ROOT.glob("docs/data/*")]:
        assert path.name in named, path.name


def test_tables_are_rendered():
    """After an empty line, with a line of dashes, and as many cells in every row: else a reader sees the characters."""
    found = 0
    for name, text in PAGES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for before, lines in re.findall(r"(.*\n|^)((?:^ *\|.*\n?)+)", prose, re.MULTILINE):
            rows = [re.split(r"(?<!\\)\|", row.strip()) for row in lines.splitlines()]
            assert not before.strip(), f"{name}: no empty line before {lines[:80]}"
            assert len(rows) > 2, f"{name}: {lines[:80]}"
            assert set(rows[1][1:-1]) <= {" --- "}, f"{name}: no line of dashes after {lines[:80]}"
            assert {len(row) for row in rows} == {len(rows[0])}, f"{name}: rows of several lengths in {lines[:80]}"
            found += 1
    assert found > 40


def test_a_docstring_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(ATTENTION["eva"], "__doc__", "EVA. Cost: linear.")
    with pytest.raises(
        ValueError, match=r"attention\.mechanisms\.eva: its docstring .* 'Title \(authors year, arXiv:number\)"
    ):
        table()
