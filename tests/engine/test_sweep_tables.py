"""Tables and figures of sweeps: statistics over seeds and folds, the papers' figures, names and fronts."""

import itertools
import math
import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ablation.figures import draw_heat_map, draw_pareto, draw_results, non_dominated
from ablation.names import short_names
from ablation.report import FIGURES, report_sweep, to_latex, write_figures, write_tables
from ablation.runs import Case, Setting, failure_mark, in_order
from ablation.sweep import read_ablation
from ablation.tables import ONE_RUN, list_best, measure, tabulate
from engine.reporting.plots import encode, in_style
from engine.reporting.tables import Spread, holm, spread, student
from engine.runtime.ownership import claim
from tests.support.launcher import ROOT
from tests.support.sweeps import BASE, finish, read, read_table, write_records

RUNS = """\
caption: Windows
base: base.yaml
runs: [{attention: softmax}, {attention.window_size: 1}, {attention.window_size: 2}]
"""
REPLICATED = f"{RUNS}seeds: 3\n"
NAMES = ["attention=softmax", "attention.window_size=1", "attention.window_size=2"]


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "out").mkdir()
    return tmp_path / "windows.yaml"


@pytest.mark.parametrize(("replicate", "option"), [("seed", "train.seed"), ("fold", "data.fold")])
def test_replicates_are_runs_of_their_own_and_a_row_together(config, replicate, option):
    """Means and deviations by hand. Window 1 is 4, 5 and 6 below softmax: 4.303 / sqrt(3) from 5; window 2 is noise."""
    ablation, settings, _ = read(config, REPLICATED.replace("seeds", f"{replicate}s"))
    cases, output = in_order(settings), config.parent / "out"
    section, name = option.split(".")
    assert [getattr(getattr(case.run, section), name) for case in cases] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    folds = ["data.folds=3"] * (replicate == "fold")
    texts = [[*folds, f"{option}={number}"] for number in range(3) for _ in NAMES]
    assert [case.command[-3 - len(folds) : -2] for case in cases] == texts
    directories = [",".join([name, *text]) for name, text in zip(3 * NAMES, texts, strict=True)]
    assert [case.directory.name for case in cases] == directories  # every row once before any row twice
    reached = [90, 86, 90.5, 91, 86, 92.5, 92, 86, 91]
    for case, top1 in zip(cases, reached, strict=True):
        finish(case, top1=top1)
    write_tables(ablation.caption, settings, output)
    softmax, small, large = read_table(output / "table.csv")
    assert [row[f"{replicate}s"] for row in (softmax, small, large)] == ["3", "3", "3"]
    assert (softmax["top-1 (%)"], softmax["top-1 std"], softmax["top-1 difference"]) == ("91.00", "1.00", "")
    assert (small["top-1 difference"], small["top-1 difference std"]) == ("-5.00", "1.00")
    assert small["top-1 difference 95 % half width"] == f"{4.303 / 3**0.5:.2f}"
    assert (large["top-1 difference"], large["top-1 difference std"]) == ("+0.33", "1.26")
    table = (output / "table.md").read_text()
    for text in (
        *(f"\n\nAll rows: {replicate}s = 3.\n\n", "| 91.00 ± 1.00 |  |", "| 86.00 ± 0.00 | -5.00 ± 1.00 |"),
        *("| 91.33 ± 1.04 | +0.33 ± 1.26 (noise) |", "Statistics: ± is", "after Holm's correction"),
        *(f"standard deviation over {replicate}s", f"runs of the same {replicate}"),
    ):
        assert text in table
    assert ("share training images" in table) == (replicate == "fold")
    runs = read_table(output / "runs.csv")
    assert [(run["directory"], float(run["top-1 (%)"])) for run in runs] == list(zip(directories, reached, strict=True))
    assert [run[option] for run in runs] == [*"000111222"]


def test_a_row_shows_what_its_runs_have_measured(config):
    """Averaged weights have a column of their own, and a run says which options were changed within it."""
    _, settings, _ = read(config, "runs: [{train.ema_decay: 0.9}, {}]\n")
    values = {"ema_top1": 98.5, "loss": 0.25, "top5": 99.0, "elapsed_seconds": 36.0, "epoch": 4}
    change = {"kind": "change", "epoch": 0, "step": 3, "option": "optim.lr", "before": 1e-3, "now": 5e-4}
    final = {"kind": "final", "step": 9, "top1": 97.5, **values}
    finish(settings[0].cases[0])
    write_tables("", settings, config.parent / "out")
    assert "changed" not in read_table(config.parent / "out/runs.csv")[0]
    write_records(settings[0].cases[0], change, final)
    write_tables("", settings, config.parent / "out")
    row, _ = read_table(config.parent / "out/table.csv")
    assert (row["top-1 (%)"], row["EMA top-1 (%)"]) == ("97.50", "98.50")
    run, _ = read_table(config.parent / "out/runs.csv")
    columns = ("epochs", "loss", "top-1 (%)", "top-5 (%)", "hours", "train.ema_decay")
    assert [float(run[column]) for column in columns] == [4, 0.25, 97.5, 99, 0.01, 0.9]
    text = "optim.lr 0.001 -> 0.0005 at step 3"
    assert run["changed"] == text
    name = settings[0].cases[0].directory.name
    assert f"\n{name} changed options during training: {text}.\n" in (config.parent / "out/table.md").read_text()


def test_step_times_beside_other_runs_of_the_sweep_are_left_out(config):
    """The first two runs overlap on the CPUs of a machine. The third ends after them, the fourth runs on another
    machine, and the fifth on a GPU.
    """
    _, settings, _ = read(config, "grid: {optim.lr: [0.1, 0.2, 0.3, 0.4, 0.5]}\n")
    hosts = [{"host": "a"}] * 3 + [{"host": "b"}, {"host": "a", "cuda": "13.0"}]
    launches = [("10:00", "12:00")], [("11:00", "13:00")], [("09:00", "10:00"), ("13:00", "14:00")]
    for setting, host, spans in zip(settings, hosts, [*launches, *[[("10:00", "12:00")]] * 2], strict=True):
        records = []
        for begin, end in spans:
            records += [{"kind": "start", "epoch": 0, "step": 0, "time": begin, **host}]
            records += [{"kind": "stop", "epoch": 0, "step": 0, "time": end}]
        final = {"kind": "final", "epoch": 1, "step": 9, "time": end, "top1": 90.0, "step_seconds": 0.5}
        write_records(setting.cases[0], *records, final)
    write_tables("", settings, config.parent / "out")
    rows = {name: read_table(config.parent / f"out/{name}.csv") for name in ("table", "runs")}
    assert [row["step (s)"] for row in rows["table"]] == ["", "", *["0.500"] * 3]
    assert [row["step (s)"] for row in rows["runs"]] == ["0.5"] * 5
    note = "\nstep (s) leaves out 2 runs, which shared the CPUs of a machine with other runs.\n"
    assert note in (config.parent / "out/table.md").read_text()
    by_time = draw_pareto("", settings).axes[1]
    assert len(by_time.containers) == 3
    assert "step (s)" not in report_sweep("", settings[:2])


def test_what_is_the_same_in_all_rows_goes_to_the_caption(config):
    grid = "grid: {attention.window_size: [1, 2], attention.position_bias: [table]}\n"
    ablation, settings, _ = read(config, f"caption: Windows\nbase: base.yaml\n{grid}")
    caption, same, header, *_, note = filter(None, report_sweep(ablation.caption, settings).split("\n"))
    assert (caption, same, note) == ("Windows", "All rows: attention.position_bias = table.", ONE_RUN)
    columns = ["attention.window_size", "parameters (M)", "MACs (G)", "top-1 (%)"]
    assert header == f"| {' | '.join(columns)} |"  # without a paper's, which gives none
    assert "attention.position_bias" in tabulate(settings)
    assert "paper (%)" not in tabulate(settings)


@pytest.mark.complete
def test_a_papers_table_has_the_papers_figures_beside_ours(tmp_path):
    """By its configurations, with a note on what the paper prints, or as rows give them."""
    ablation, settings, _ = read_ablation(ROOT / "configs/ablation/eva_table2.yaml", [], tmp_path, ["python"])
    assert settings[1].cases[0].directory == tmp_path / "deit_tiny_p8-performer"
    assert settings[1].cases[0].command[2].endswith("/deit_tiny_p8/performer.yaml")
    table = tabulate(settings[:2])
    assert table["base"] == ["deit_tiny_p8/softmax", "deit_tiny_p8/performer"]
    assert [table[title][1] for title in ("MACs (G)", "paper: MACs (G)", "paper (%)")] == ["4.655", "4.9", "67.19"]
    note = "deit_tiny_p8/performer, not as the paper prints it: 4.9 G is the cost of 96 features"
    assert note in report_sweep(ablation.caption, settings[:2])
    ablation, settings, _ = read_ablation(ROOT / "configs/ablation/eva_table6.yaml", [], tmp_path, ["python"])
    table = tabulate(settings)
    assert table["paper: step (ms)"] == ["87", "65", "77", "87", "89", "94", "119", "108", "99"]
    assert table["paper: memory (GB)"] == ["8.1", "7.8", "8.4", "9.1", "9.4", "9.9", "12.5", "11.9", "17.7"]
    assert table["paper (%)"][-1] == "77.16"
    assert "| paper: memory (GB) |" in report_sweep(ablation.caption, settings)


def test_the_latex_table_has_names_a_label_and_the_best_rows_bold(config):
    """Row 3 is the best of three seeds; row 1 differs from it by noise, row 2 with p = 0.017, less than 0.05 / 2."""
    _, settings, _ = read(config, REPLICATED)
    for case, top1 in zip(in_order(settings), [90, 88.5, 91, 91, 88.5, 92, 92.5, 88, 92], strict=True):
        finish(case, top1=top1)
    write_tables("Windows & more", settings, config.parent / "out")
    text = (config.parent / "out/table.tex").read_text()
    assert "  \\caption{Windows \\& more. All rows: seeds = 3. Bold: the highest mean, and those whose " in text
    assert "  \\label{tab:out}\n  \\begin{tabular}{lrrrrrr}\n    \\toprule\n    setting & parameters (M) & " in text
    assert text.count(" \\\\\n") == 4
    assert "\n    softmax & $" in text
    assert "& {\\boldmath$91.17 \\pm 1.26$} &  \\\\\n    E=1 & $" in text
    assert "& $88.33 \\pm 0.29$ & $-2.83 \\pm 1.53$ (noise) \\\\\n    E=4 & $" in text
    assert "& {\\boldmath$91.67 \\pm 0.58$} & $+0.50 \\pm 0.87$ (noise) \\\\\n    \\bottomrule\n" in text
    assert "\n% Statistics: ± is the standard deviation over seeds." in text
    single = read(config, RUNS)[1]
    for case in in_order(single):
        finish(case)
    assert "boldmath" not in to_latex("", single)  # no rank


def test_a_row_shows_the_seeds_that_are_finished(config):
    """The first row has three seeds, the second one, without a deviation, and the third none."""
    ablation, settings, _ = read(config, REPLICATED)
    for case in (settings[0].cases[0], settings[1].cases[1]):
        finish(case, top1=97.5)
    assert list_best(settings) == {"top-1 (%)": [True, True, False]}  # rows without a seed in common
    for case in settings[0].cases[1:]:
        finish(case, top1=97.5)
    table = tabulate(settings)
    found = list(zip(table["seeds"], table["top-1 (%)"], table["top-1 std"], strict=True))
    assert found == [("3", "97.50", "0.00"), ("1", "97.50", ""), ("0", "", "")]
    assert "| 1 | 97.50 | +0.00 (one run) |" in report_sweep(ablation.caption, settings)
    assert len(draw_results(ablation.caption, settings).axes) == 2


def test_runs_that_take_no_part_are_named(config):
    """The first row has a run that has failed, the second two, the third one that is to come."""
    ablation, settings, _ = read(config, REPLICATED)
    for case in (*settings[0].cases[:2], settings[1].cases[1], *settings[2].cases[:2]):
        finish(case)

    def report(*failing: Case) -> str:
        for case in failing:
            case.directory.mkdir()
            failure_mark(case).touch()
        return report_sweep(ablation.caption, settings)

    first = report(settings[0].cases[2], *settings[1].cases[::2])
    assert "\nsoftmax: 1 of 3 runs failed or diverged, and take no part.\n" in first
    assert "\nE=1: 2 of 3 runs failed or diverged, and take no part.\n" in first
    assert "E=4:" not in first
    assert "Not finished" not in first  # the column of seeds shows that
    finish(settings[1].cases[0])  # tried again
    again = report()
    assert "\nE=1: 1 of 3 runs failed or diverged, and take no part.\n" in again
    assert "All rows: seeds = 2." in again
    assert "\nNot finished: every row has 2 of its 3 runs.\n" in again
    last = report(settings[2].cases[2])
    assert last.count(": 1 of 3 runs failed") == 3
    assert "Not finished" not in last


def grid_of_numbers(config: Path) -> list[Setting]:
    """3 x 2 settings: the first has three seeds, the last none, each other setting one."""
    _, settings, _ = read(config, "seeds: 3\ngrid: {attention.window_size: [4, 1, 2], schedule.epochs: [10, 9]}\n")
    for number, setting in enumerate(settings[:-1]):
        for case in setting.cases[: 3 if number == 0 else 1]:
            finish(case, top1=90 + number, step_seconds=0.1 * abs(number - 2))
    return settings


def test_two_axes_of_numbers_make_a_heat_map(config):
    settings = grid_of_numbers(config)
    figure = draw_heat_map("Windows", settings)
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("|E| (tokens)", "schedule.epochs")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4", "16"]  # ascending, as is no list above
    assert [label.get_text() for label in axes.get_xticklabels()] == ["9", "10"]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(1, 2): "90.00 ± 0.00", (0, 2): "91.00", (1, 0): "92.00", (0, 0): "93.00", (1, 1): "94.00"}
    assert draw_heat_map("Windows", settings[:-1]) is None  # a combination is missing
    assert draw_heat_map("Windows", settings[::2]) is None  # one axis


def test_labels_replace_words_of_names(config):
    labels = 'labels: {E: $\\abs$, epochs: "7"}\n'
    _, settings, _ = read(config, f"{labels}grid: {{attention.window_size: [1, 2], schedule.epochs: [10, 9]}}\n")
    assert short_names(settings) == ["$\\abs$=1, 7=10", "$\\abs$=1, 7=9", "$\\abs$=4, 7=10", "$\\abs$=4, 7=9"]
    axes = draw_heat_map("Windows", settings).axes[0]
    assert encode(axes.figure)  # labels are no mathematics
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("$\\abs$", "7")


@pytest.mark.complete
def test_a_figure_that_a_sweep_has_no_longer_is_removed(config, monkeypatch):
    """A PDF has no title."""
    settings, titles = grid_of_numbers(config), set()

    def encoding(figure, form: str = "png") -> bytes:
        titles.add((form, figure.get_suptitle() != ""))
        return encode(figure, form)

    monkeypatch.setattr("ablation.report.encode", encoding)
    claim(config.parent, FIGURES)
    for rows, gone in (settings, set()), (settings[:-1], {"heat_map.png", "heat_map.pdf"}):
        write_figures("Windows", rows, config.parent)
        assert {path.name for path in config.parent.glob("*.p[nd][gf]")} == set(FIGURES) - gone
        assert (config.parent / "table.pdf").read_bytes().startswith(b"%PDF")
    assert titles == {("png", True), ("pdf", False)}


@pytest.mark.complete
def test_the_settings_that_no_other_beats_are_named(config):
    """By step time: the third takes none; the fourth and fifth take 0.1 s and 0.2 s more for one percent each."""
    settings = grid_of_numbers(config)
    by_macs, by_time, _ = draw_pareto("Windows", settings).axes
    names = short_names(settings)
    assert {text.get_text() for text in by_time.texts} == set(names[2:5])
    assert {text.get_text() for text in by_macs.texts} == {names[3], names[4]}  # windows of 1 and 2 cost less than of 4
    assert non_dominated([(1, 5), (1, 5), (1, 4), (2, 5), (2, 6)]) == [True, True, False, False, True]
    for path in config.parent.rglob("metrics.jsonl"):  # as on a CPU
        path.write_text(re.sub('"memory_mb": [0-9.]+', '"memory_mb": null', path.read_text()))
    assert len(draw_pareto("Windows", settings).axes) == 2


@pytest.mark.complete
@in_style
def test_names_in_a_figure_of_costs_are_apart_though_points_are_near(config):
    _, settings, _ = read(config, "grid: {attention.window_size: [1, 2, 4], train.seed: [1, 2, 3, 4]}\n")
    for number, setting in enumerate(settings):
        finish(setting.cases[0], top1=90 + 0.01 * number, step_seconds=1 + 1e-4 * number)
    figure = draw_pareto("Windows", settings)
    by_time = figure.axes[1]
    assert len(by_time.texts) == len(settings) == 12
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in by_time.texts]  # without the lines that join them to points
    assert not [pair for pair in combinations(boxes, 2) if Bbox.intersection(*pair)]


def test_probabilities_are_those_of_tables_of_students_t():
    """Degrees of freedom -> quantiles of 97.5 and 99.95 %."""
    tabulated = {1: (12.706, 636.619), 2: (4.303, 31.599), 3: (3.182, 12.924), 4: (2.776, 8.610), 30: (2.042, 3.646)}
    for freedom, (quantile, higher) in tabulated.items():
        assert Spread(7.0, math.sqrt(freedom + 1), freedom + 1).half_width == pytest.approx(quantile, abs=5.1e-4)
        assert student(higher, freedom) == pytest.approx(0.001, rel=1.5e-3)


def test_holms_correction_goes_on_after_an_effect_and_ends_after_noise():
    """Means are t of two degrees of freedom: 11 has p = 0.0082, 7 0.0198, 5.5 0.0315 and 3 0.0955."""
    for means, effects in {(3, 7, 11): 2, (11, 5.5, 7): 3, (5.5, 5.6, 11): 1, (3, 5.5): 0, (5.5,): 1}.items():
        found = holm({"none": None, "one": Spread(9.0, None, 1)} | {mean: Spread(mean, 3**0.5, 3) for mean in means})
        assert [mean for mean in means if not found[mean].is_noise] == [*means[len(means) - effects :]]
    for means in itertools.permutations((11.0, math.nan, 7.0)):  # what is not finite comes last
        found = holm({mean: Spread(mean, 3**0.5, 3) for mean in means})
        assert [found[mean].comparisons for mean in (11.0, 7.0)] == [3, 2]


def test_what_a_run_did_not_measure_is_left_out():
    """A run that stops after its last step and resumes has no step time."""
    (measured,) = measure([{0: {"step_seconds": None}, 1: {"step_seconds": 0.5}, 2: {}}], "step_seconds")
    assert (measured.values, measured.spread.n) == ({1: 0.5}, 1)


def test_one_difference_is_never_clear():
    (_, second) = measure([{0: {"top1": 1.0}, 1: {"top1": 2.0}}, {1: {"top1": 90.0}, 2: {"top1": 90.0}}], "top1")
    assert (second.difference.mean, second.difference.n, second.difference.is_noise) == (88.0, 1, True)
    assert not Spread(mean=0.5, std=0.0, n=2).is_noise


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_deviation_and_is_no_difference(bad):
    found = spread([bad, 1.0])
    assert (repr(found.mean), math.isnan(found.std), found.n, found.is_noise) == (repr(bad), True, 2, True)
    results = [{0: {"loss": 1.0}, 1: {"loss": 2.0}}, {0: {"loss": bad}, 1: {"loss": 2.5}}]
    first, second = measure(results, "loss")
    assert (first.values, second.values, second.difference.mean) == ({0: 1.0, 1: 2.0}, {1: 2.5}, 0.5)


def test_an_accuracy_is_rounded_to_images():
    """Three equal differences of one image are no effect, of ten they are; other measurements have no steps."""
    for images, is_noise in ((1, True), (10, False)):
        values = 80.0, 80 + images / 5
        results = [{seed: {"top1": x, "loss": x, "images": 500} for seed in range(3)} for x in values]
        assert measure(results, "top1")[1].difference.is_noise == is_noise
        assert not measure(results, "loss")[1].difference.is_noise


@pytest.mark.parametrize(("rows", "tables", "seeds", "deviation"), [(1, 999, 2, 0.7), (1, 999, 3, 2), (33, 150, 3, 20)])
def test_at_most_one_in_twenty_tables_without_effect_seems_to_have_one(rows, tables, seeds, deviation):
    """Accuracies of 10,000 images of which right ones vary by so many. Effects of 50 deviations are found."""
    noise = torch.randn(tables, rows + 1, seeds, generator=torch.Generator().manual_seed(0)).mul(deviation).add(8000.37)

    def effects(table: torch.Tensor) -> list[bool]:
        rows = [{i: {"top1": x / 100, "images": 10_000} for i, x in enumerate(row)} for row in table.round().tolist()]
        return [not own.difference.is_noise for own in measure(rows, "top1")[1:]]

    assert sum(any(effects(table)) for table in noise) <= 0.05 * tables + 4 * math.sqrt(tables * 0.05 * 0.95)
    changed = (rows + 3) // 4
    noise[:, 1 : changed + 1] -= 50 * deviation
    assert sum(sum(effects(table)[:changed]) for table in noise[:30]) > 0.98 * 30 * changed


WINDOWED = "attention: {name: local, window_size: 4, causal: true}"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (["attention.num_landmarks: 4", "attention.num_landmarks: 9"], ["C=4", "C=9"]),
        (["attention: {name: local, window_size: 2}", "attention: sra"], ["local, E=4", "sra"]),
        ([WINDOWED, "attention: softmax"], ["local, E=4", "softmax"]),
        (["attention: {name: linear}", "attention: {name: linear, local: true}"], ["linear", "linear, local=true"]),
        (["schedule.epochs: 2", "schedule.epochs: 3", "optim.lr: 2.0e-3"], ["epochs=2", "epochs=3", "lr=0.002"]),
        (["attention.window_size: 2", "attention.position_bias: none"], ["E=4", "position_bias=none"]),
        (
            ["attention: [{blocks: 0, name: softmax}]", "attention: {name: eva, window_size: 2, num_landmarks: 4}"],
            ["0: softmax", "eva, E=4, C=4"],
        ),
    ],
)
def test_names_have_the_sizes_of_a_mechanism_and_what_varies(config, rows, names):
    base = BASE.replace("local, window_size: 2", "eva, window_size: 4, num_landmarks: 1") if "C=" in names[0] else BASE
    (config.parent / "base.yaml").write_text(base)
    assert short_names(read(config, "runs:\n" + "".join(f"  - {{{row}}}\n" for row in rows))[1]) == names


def test_settings_of_the_same_name_have_the_size_that_is_solved(config):
    """`match: false` is no option of the run."""
    runs = "runs: [{attention: {name: performer}}, {attention: {name: performer}, match: false}, {match: false}]\n"
    _, settings, _ = read(config, f"match: {{token_macs: 375}}\n{runs}")
    assert short_names(settings) == [f"performer, num_samples={settings[0].matched.value}", "performer", "base"]


def test_where_short_names_would_be_the_same_they_are_in_full(tmp_path):
    paths = [f"{'long' * 9}/{end}" for end in "ab"]
    settings = [Setting({"init.weights": path}, None, {None: (Case(None, tmp_path, []),)}) for path in paths]
    assert short_names(settings) == [f"init.weights={path}" for path in paths]
