"""Learning rates are chosen on held-out training images by one rule; then the seeds are trained on all of them."""

import csv
import json
import shlex
from pathlib import Path

import pytest
import yaml

import ablate
import train
from ablation import worker
from ablation.cases import Case
from ablation.report import report_sweep, to_json
from ablation.settings import in_order, trials_of
from ablation.tables import tabulate
from engine.config.load import dump_run, load_run
from engine.runtime.errors import ConfigError
from engine.runtime.signals import STOPPED
from tests.support.sweeps import read, refusal

BASE = """\
model: {name: deit, img_size: 32, patch_size: 8, embed_dim: 12, depth: 1, num_heads: 2, num_classes: 10}
attention: {name: local, window_size: 2}
data: {dataset: digits, workers: 0, subset: 20}
augment: {auto_augment: null, mixup: 0.0, cutmix: 0.0}
schedule: {epochs: 1, warmup_epochs: 0}
train: {total_batch_size: 32, amp: null, device: cpu}
"""
SWEEP = """\
base: base.yaml
seeds: [3, 5]
lr: [1.0e-3, 5.0e-4, 2.0e-3]
val_fraction: 0.25
runs:
  - {attention: softmax}
  - {attention.window_size: 1}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "tuned.yaml").write_text(SWEEP)
    return tmp_path / "tuned.yaml"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch) -> None:
    monkeypatch.setattr(ablate, "write_figures", lambda *arguments: None)


def write_record(case: Case, **record: object) -> None:
    case.directory.mkdir(parents=True, exist_ok=True)
    (case.directory / "config.yaml").write_text(yaml.safe_dump(dump_run(case.run)))
    (case.directory / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "step": 9, **record}) + "\n")


def finish(case: Case, top1: float, loss: float | None = 1.0) -> None:
    write_record(case, kind="final", top1=top1, loss=loss, step_seconds=0.1)


def test_every_setting_has_a_run_for_each_rate_and_then_its_seeds(config):
    _, settings, _ = read(config)
    trials = trials_of(settings)
    assert [case.run.optim.lr for case in trials] == [5e-4, 5e-4, 1e-3, 1e-3, 2e-3, 2e-3]
    assert {(case.run.train.seed, case.run.data.val_fraction) for case in trials} == {(3, 0.25)}
    assert in_order(settings) == []
    for case, top1 in zip(trials, (90, 91, 92, 90, 91, 89), strict=True):
        finish(case, top1)
    cases = in_order(settings)
    assert [case.run.optim.lr for case in cases] == [1e-3, 5e-4] * 2
    assert [case.run.train.seed for case in cases] == [3, 3, 5, 5]
    assert {case.run.data.val_fraction for case in cases} == {None}
    for case in (*trials, *cases):
        path, *overrides = case.command[2 : case.command.index("--output")]
        assert load_run(path, overrides) == case.run
    assert len({case.directory for case in (*trials, *cases)}) == 10


@pytest.mark.parametrize(
    ("finals", "chosen", "edge"),
    [
        ([(90, 1.0), (91, 1.0), (92, 1.0)], 2e-3, "highest"),
        ([(91, 1.0), (91, 0.9), (90, 0.1)], 1e-3, ""),
        ([(91, 1.0), (91, 1.0), (91, 1.0)], 5e-4, "lowest"),
        ([(90, 1.0), (91, None), (91, 9.0)], 2e-3, "highest"),
        ([(91, None), (91, None), (90, 1.0)], 5e-4, "lowest"),
        ([(90, 1.0), (91, 1.0), None], None, ""),
        ([(90, 1.0), (91, 1.0), "the loss is not finite on rank 0"], 1e-3, ""),
        ([(90, 1.0), (91, 1.0), "No space left on device"], None, ""),
        (["the loss is not finite on rank 0"] * 3, None, ""),
    ],
)
def test_the_best_of_the_finished_runs_is_chosen(config, finals, chosen, edge):
    """By top-1, then loss (null: not finite, the highest), then the smaller. A run that has diverged takes no part, one
    that failed otherwise does.
    """
    _, (setting, _), _ = read(config)
    for case, final in zip(setting.tuning.cases.values(), finals, strict=True):
        if isinstance(final, str):
            write_record(case, kind="fail", reason=final)
        elif final:
            finish(case, *final)
    assert (setting.tuning.choose(), setting.tuning.edge()) == (chosen, edge)
    assert [case.run.optim.lr for case in setting.cases] == [chosen] * 2 * (chosen is not None)


def test_the_table_shows_the_chosen_rate_and_marks_an_edge(config):
    ablation, settings, _ = read(config)
    table = tabulate(settings).programs
    assert (table["lr"], table["edge of lr"], table["top-1 (%)"]) == (["", ""], ["", ""], ["", ""])
    trials = trials_of(settings)
    for case, top1 in zip(trials[:-1], (90, 91, 92, 90, 91), strict=True):
        finish(case, top1)
    write_record(trials[-1], kind="fail", reason="the gradient is not finite at step 3")
    table = tabulate(settings).programs
    assert (table["lr"], table["edge of lr"]) == (["0.001", "0.0005"], ["", "lowest"])
    assert table["held-out top-1 (%)"] == ["92.00", "91.00"]
    report = report_sweep(ablation.caption, settings)
    assert "\nlr was chosen from [0.0005, 0.001, 0.002] for every row: the value with the best top-1" in report
    assert "\nE=1: training has diverged with optim.lr = 0.002, which was not chosen.\n" in report
    stored = json.loads(to_json("", settings))["rows"]
    assert stored[0]["tuning"]["0.001"]["top1"] == 92
    assert [*stored[1]["tuning"]] == ["0.0005", "0.001"]


def test_a_dry_run_shows_both_phases(config, capsys):
    def commands() -> list[list[str]]:
        ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
        lines = capsys.readouterr().out.splitlines()
        return [shlex.split(line) for line in lines if "train.py" in line]

    found = commands()
    assert [sum("data.val_fraction=0.25" in command for command in found), len(found)] == [6, 10]
    assert all("optim.lr=LR" in command and ",optim.lr=LR," in command[-1] for command in found[6:])
    _, settings, _ = read(config)
    for case in trials_of(settings):
        finish(case, 90)
    assert all("optim.lr=0.0005" in command for command in commands()[6:])


def test_a_sweep_with_match_and_lr_end_to_end(config, monkeypatch, capfd):
    """Two mechanisms of equal cost, two learning rates, one seed. It is stopped after two runs, and then goes on."""
    config.write_text(
        "base: base.yaml\nmatch: {layer_macs: 3072}\nlr: [1.0e-3, 4.0e-3]\n"
        "runs: [{attention: {name: abc}}, {attention: {name: performer}}, {attention: softmax}]\n"
    )
    output, trained = config.parent / "out", []

    def train_here(command: list[str], *_: object, **streams: object) -> int:
        """Stands for the process of a run."""
        if len(trained) == 2 and stops:
            return STOPPED
        trained.append(Path(command[-1]).name)
        train.main(command[2:])
        return 0

    monkeypatch.setattr(worker, "run_to_end", train_here)
    stops, arguments = True, [str(config), "--output", str(output)]
    with pytest.raises(SystemExit) as ended:
        ablate.main(arguments)
    assert ended.value.code == STOPPED
    stops = False
    ablate.main(arguments)
    ablate.main(arguments)
    assert ["data.val_fraction=0.1" in name for name in trained] == [True] * 4 + [False] * 2
    assert len(set(trained)) == 6
    with (output / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["size"].partition("=")[0] for row in table] == ["num_landmarks", "num_samples"]
    for row, name in zip(table, trained[4:], strict=True):
        assert name.endswith(f"optim.lr={row['lr']}")
        assert row["edge of lr"] == {"0.001": "lowest", "0.004": "highest"}[row["lr"]]
        assert row["held-out top-1 (%)"]
        assert row["top-1 (%)"]
    for name in trained:
        options = yaml.safe_load((output / name / "config.yaml").read_text())
        assert options["data"]["val_fraction"] == (0.1 if "val_fraction" in name else None)
    assert "declares no option that sets its size" in (output / "table.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[1.0e-3, 5.0e-4, 2.0e-3]", "[1.0e-3]", "tuned.yaml:3: lr: expected two or more different learning rates"),
        ("[1.0e-3, 5.0e-4, 2.0e-3]", "[1.0e-3, 1.0e-3]", "tuned.yaml:3: lr: expected two or more different learning"),
        ("[1.0e-3, 5.0e-4, 2.0e-3]", "[0, 1.0e-3]", "tuned.yaml:3: lr = 0.0 must be greater than 0"),
        ("[1.0e-3, 5.0e-4, 2.0e-3]", "fast", "tuned.yaml:3: lr: expected a list, got 'fast'"),
        ("[1.0e-3, 5.0e-4, 2.0e-3]", "[1.0e-9, 1.0e-3]", "tuned.yaml:6: runs.0: lr: schedule.min_lr = 1e-05 is above"),
        (
            "lr: [1.0e-3, 5.0e-4, 2.0e-3]\n",
            "",
            "tuned.yaml:3: val_fraction = 0.25, but there is no lr to choose; leave",
        ),
        ("val_fraction: 0.25", "val_fraction: 1.5", "tuned.yaml:4: val_fraction = 1.5 must be less than 1"),
        (
            "attention.window_size: 1",
            "optim.lr: 1.0e-3",
            "tuned.yaml:7: runs.1: optim.lr is given beside lr; leave one of them out",
        ),
        (
            "attention.window_size: 1",
            "data.val_fraction: 0.3",
            "tuned.yaml:7: runs.1: data.val_fraction is given beside lr; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_honoured_is_one_line(config, old, new, expected):
    config.write_text(SWEEP.replace(old, new))
    assert refusal(config).startswith(expected)


def test_a_base_that_holds_images_out_or_has_no_accuracy_is_refused(config):
    base = config.parent / "base.yaml"
    for options, shown in (("val_fraction: 0.3", "val_fraction = 0.3"), ("folds: 4", "folds = 4, data.fold = 0")):
        base.write_text(BASE.replace("subset: 20", f"subset: 20, {options}"))
        with pytest.raises(ConfigError, match=rf"runs.0: data.{shown}: lr already holds images out; set it to null"):
            read(config)
    simmim = BASE.replace("num_classes: 10", "num_classes: 0, mask_token: true") + "simmim: {mask_size: 8}\n"
    base.write_text(simmim.replace("cutmix: 0.0", "cutmix: 0.0, smoothing: 0.0, reprob: 0.0"))
    with pytest.raises(ConfigError, match=r"runs.0: lr is chosen by top-1, which this run does not measure; give opti"):
        read(config)
