"""Files of sweeps: their rows and runs, rows that options name, keys of stages, refusals, and the time that is left."""

import re
from pathlib import Path

import pytest
import yaml

import ablate
from ablation.names import short_names
from ablation.report import count_finished
from ablation.runs import in_order
from ablation.sweep import count_ranks, read_ablation, to_directory
from ablation.tables import tabulate
from engine.runtime.errors import ConfigError
from tests.support.sweeps import BASE, GRID, finish, read, refusal

SWEEP = """\
caption: Windows
base: base.yaml
seeds: 2
runs:
  - {attention: softmax}
  - {attention.window_size: 1}
  - {schedule.epochs: 2}
"""
PYRAMID = """\
model: {name: pvtv2_b0, img_size: 64}
attention: {name: local, window_size: 2}
data: {dataset: digits}
train: {device: cpu, amp: null}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE.replace("epochs: 1", "epochs: 4"))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path / "sweep.yaml"


def test_empty_cells_have_the_values_that_hold(config):
    """Softmax attention has no windows."""
    _, settings, _ = read(config)
    for setting, top1 in zip(settings, (90, 92, 89), strict=True):
        finish(setting.cases[0], top1=top1)
    table = tabulate(settings)
    assert table["attention"] == ["softmax", "local", "local"]
    assert table["attention.window_size"] == ["", "1", "2"]
    assert table["schedule.epochs"] == ["4", "4", "2"]
    assert table["top-1 difference"] == ["", "+2.00", "-1.00"]
    path = settings[0].cases[0].directory / "config.yaml"  # of an earlier version that left out patches in training
    path.write_text(path.read_text().replace("model:\n", "model:\n  patch_drop_rate: 0.5\n"))
    assert settings[0].cases[0].result() is None


def test_bases_are_changed_in_turn(config):
    (config.parent / "other.yaml").write_text(BASE.replace("depth: 1", "depth: 2"))
    _, settings, _ = read(config, GRID.replace("base: base.yaml", "bases: [base.yaml, other.yaml]"))
    assert [setting.run.model["depth"] for setting in settings] == [1, 1, 1, 2, 2, 2]
    assert "-other,attention.window_size=1" in settings[3].cases[0].directory.name
    assert [setting.paper and setting.paper.top1 for setting in settings] == [None, None, 77.16] * 2


def test_a_grid_takes_options_of_an_entry_and_whole_lists(config):
    hybrid = "attention: [{blocks: 0-1, name: local, window_size: 2}, {blocks: 2, name: softmax}]"
    base = BASE.replace("depth: 1", "depth: 3").replace("attention: {name: local, window_size: 2}", hybrid)
    (config.parent / "base.yaml").write_text(base)
    grid = "grid: {attention.0.window_size: [1, 2], attention.0.local: [true, false]}\n"
    runs = "runs: [{attention: [{blocks: 0, name: softmax}, {blocks: 1-2, name: mean}]}, {attention: softmax}]\n"
    _, settings, _ = read(config, grid + runs)
    found = [setting.run.attention for setting in settings]
    assert [entries[0]["window_size"] for entries in found[:4]] == [1, 1, 2, 2]
    assert [(entry["blocks"], entry["name"]) for entry in found[4]] == [("0", "softmax"), ("1-2", "mean")]
    assert found[5]["name"] == "softmax"
    assert len({setting.cases[0].directory for setting in settings}) == 6


def test_keys_of_stages_are_those_of_the_size_and_of_one_mechanism(config):
    """The base gives neither a list of mechanisms nor depths: they are written out."""
    (config.parent / "base.yaml").write_text(PYRAMID)
    grid = "grid: {attention.0-1.window_size: [2, 4], attention.2: [softmax], model.depths.2: [1, 2]}\n"
    _, settings, _ = read(config, grid)
    run = settings[2].run
    assert run.model["depths"] == [2, 2, 1, 2]
    assert [entry["name"] for entry in run.attention] == ["local", "local", "softmax", "softmax"]
    assert [entry.get("window_size") for entry in run.attention[:2]] == [4, 4]
    assert short_names(settings)[2] == "0-1: E=16, depths.2=1"
    assert "attention.1.window_size=4" in settings[2].cases[0].command
    config.write_text("base: base.yaml\ngrid: {attention.1-0.window_size: [2]}\n")
    problem = "sweep.yaml:2: grid: attention.1-0.window_size = '1-0': expected a number, a range"
    assert refusal(config).startswith(problem)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("caption", "captoin", "1: captoin: unknown option; did you mean 'caption'?"),
        ("base: base.yaml\n", "", "1: base: required, but not given"),
        ("base.yaml", "absent.yaml", "2: base: absent.yaml: no such file"),
        ("[1, 2]", "1", "4: grid.attention.window_size: expected a list of values, got 1"),
        ("[1, 2]", "[]", "4: grid.attention.window_size: expected a list of values, got []"),
        ("[1, 2]", "{a: 1}", "4: grid.attention.window_size: expected a list of values, got {'a': 1}"),
        ("[1, 2]", "[1, 1]", "3: grid: a second run with attention.window_size=1"),
        ("[1, 2]", "[1, -2]", "3: grid: override 'attention.window_size=-2': attention(local).window_size"),
        ("softmax}, ", "softmacks}, ", "7: runs.0: override 'attention={name: softmacks}': attention.name"),
        ("77.16", "high", "7: runs.0: paper.top1: expected float, got 'high'"),
        ("77.16", "{step: 3}", "7: runs.0: paper.step: unknown option; did you mean 'step_ms'?"),
        ("77.16", "{step_ms: 0}", "7: runs.0: paper.step_ms = 0.0 must be greater than 0"),
        ("grid:", "seeds: 0\ngrid:", "3: seeds: expected a number of seeds, or a list of different ones"),
        ("grid:", "seeds: [1, 1]\ngrid:", "3: seeds: expected a number of seeds, or a list of different"),
        ("grid:", "seeds: [-1, 1]\ngrid:", "3: seeds: expected a number of seeds, or a list of different"),
        ("grid:", "seeds: three\ngrid:", "3: seeds: expected"),
        ("grid:", "seeds: 100000000000\ngrid:", "3: seeds = 100000000000: a sweep has at most 1000"),
        ("grid:", "seeds: 2\ngrid:\n  train.seed: [3, 4]", "4: grid: train.seed is given beside seeds; leave one of"),
        ("base: base.yaml", "base: base.yaml\nbases: [base.yaml]", "3: bases: given beside base; leave one"),
        ("base: base.yaml", "bases: [base.yaml, absent.yaml]", "2: bases.1: absent.yaml: no such file"),
        (GRID, "bases:\n  - base.yaml\n  - absent.yaml", "3: bases.1: absent.yaml: no such file"),
        (GRID, "bases: [base.yaml, base.yaml]", "1: bases.1: a second run with"),
        (GRID, "base: base.yaml\n", "1: runs: no runs; give grid or runs"),
        (
            *("caption: Windows", "paper: EVA Table 22"),
            "1: paper: 'EVA Table 22' is no source in engine/config/papers.yaml; did you mean 'EVA Table 2'?",
        ),
        ("grid:", "folds: 3\nseeds: 2\ngrid:", "3: folds = 3 is given beside seeds; leave one of them out"),
        ("grid:", "labels: {E: null}\ngrid:", "3: labels.E: expected str, got None"),
        ("grid:", "labels: {E: [a]}\ngrid:", "3: labels.E: expected str, got ['a']"),
        ("grid:", "labels: {soft: x}\ngrid:", "3: labels.soft: no word of a row's name; did you mean 'softmax'?"),
        ("grid:", "labels: {E: x, softmax: x}\ngrid:", "3: labels.E: 'x' is also the name of softmax; give another"),
        ("grid:", "labels: {E: softmax}\ngrid:", "3: labels.E: 'softmax' is also the name of softmax; give another"),
        ("grid:", "folds: 1\ngrid:", "3: folds = 1 is below the least valid value 2"),
        ("grid:", "folds: 3\ngrid:\n  data.fold: [0, 1]", "4: grid: data.fold is given beside folds; leave"),
        ("grid:", "folds: 3\ngrid:\n  data.val_fraction: [0.1]", "4: grid: data.val_fraction = 0.1: folds"),
    ],
)
def test_all_runs_are_checked_before_the_first_starts(config, capsys, old, new, expected):
    config.write_text(GRID.replace(old, new))
    before = sorted(config.parent.rglob("*"))
    with pytest.raises(SystemExit, match="2"):
        ablate.main([str(config), "--output", str(config.parent / "out"), "--launcher", "false"])
    error = capsys.readouterr().err
    assert error.replace(f"{config.parent}/", "").startswith(f"error: sweep.yaml:{expected}")
    assert error.count("\n") == 1
    assert sorted(config.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("rows", "override", "problem"),
    [
        ("grid: {attention.window_size: [1, 2]}", "attention.window_size=3", "attention.window_size itself"),
        ("grid: {attention: [softmax, linear]}", "attention.window_size=3", "attention itself; change it there"),
        ("runs: [{attention: softmax}, {model.depth: 1}]", "attention.window_size=3", None),
        ("grid: {attention.window_size: [1, 2]}", "attention={name: local}", None),
    ],
)
def test_overrides_that_every_run_replaces_are_refused(config, rows, override, problem):
    config.write_text(f"base: base.yaml\n{rows}\n")
    if problem:
        with pytest.raises(ConfigError, match=re.escape(f"{override!r}: every run of {config} sets {problem}")):
            read_ablation(config, [override], config.parent, [])
    else:
        read_ablation(config, [override], config.parent, [])


def test_a_long_name_of_a_directory_ends_in_a_hash(config):
    """The names differ, stay the same at every start, and can be made; those that fit are as they were."""
    grid = {f"augment.{name}": [0.111111111] for name in ("hflip", "vflip", "reprob", "smoothing", "color_jitter")}
    grid |= {"attention.window_size": [1], "schedule.warmup_lr": [1.0e-6], "augment.mixup_switch_prob": [0.5]}
    grid |= {"schedule.min_lr": [1.0e-5], "optim.weight_decay": [0.05], "data.crop_pct": [0.8, 0.9, 0.95]}
    text = yaml.safe_dump({"base": "base.yaml", "grid": grid, "seeds": [7, 100]}, sort_keys=False)
    directories = [case.directory for case in in_order(read(config, text)[1])]
    assert len(set(directories)) == len(directories) == 6
    for directory in directories:
        assert re.fullmatch(r"augment\..*-[0-9a-f]{12},train\.seed=(7|100)", directory.name)
        assert len(directory.name) == 255
        directory.mkdir(parents=True)
    assert [case.directory for case in in_order(read(config)[1])] == directories
    assert to_directory("é" * 127, []) == "é" * 127
    assert len(to_directory("é" * 128, []).encode()) == 255


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("python", 1),
        ("torchrun --nproc_per_node=8", 8),
        ("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id=3", 16),
        ("torchrun --nnodes=1:4 --nproc_per_node=gpu", 1),
    ],
)
def test_ranks_of_a_launcher(launcher, ranks):
    assert count_ranks(launcher.split()) == ranks


def test_a_batch_that_the_launchers_ranks_cannot_share_is_refused(config):
    with pytest.raises(ConfigError, match="total_batch_size = 64 is not divisible by 3 ranks x 1 accumulation steps"):
        read_ablation(config, [], config.parent, ["torchrun", "--nproc_per_node=3"])


def test_the_time_that_is_left_follows_from_finished_runs(config):
    _, settings, _ = read(config)
    assert count_finished(settings, 1) == "0 of 6 runs finished"
    finish(settings[0].cases[0], elapsed_seconds=36.0)  # 4 epochs of 9 seconds
    finish(settings[1].cases[0], elapsed_seconds=4 * 60.0)
    # 2 runs of 4 epochs and 2 of 2 epochs of 34.5 seconds on average
    assert count_finished(settings, 2) == "2 of 6 runs finished, about 0:03:27 left"
