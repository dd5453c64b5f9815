"""Equal budgets: sizes are solved for a cost, runs are ordinary configurations, and what cannot reach it is named."""

from pathlib import Path

import pytest

from ablation.match import solve
from ablation.report import report_sweep
from ablation.tables import tabulate
from attention import ATTENTION
from engine.run.load import load_run, load_unbuilt
from models import layer_contexts
from tests.support.launcher import ROOT
from tests.support.sweeps import BASE, read, refusal

BASE = BASE.replace("patch_size: 8", "patch_size: 4").replace("depth: 1", "depth: 2").replace("size: 2}", "size: 7}")
SWEEP = """\
base: base.yaml
match: {token_macs: 375}
runs:
  - {attention: {name: performer}}
  - {attention: {name: abc}}
  - {attention: softmax}
  - {attention: softmax, match: false}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "equal.yaml").write_text(SWEEP)
    return tmp_path / "equal.yaml"


def test_the_solved_size_is_an_override_of_an_ordinary_run(config):
    """64 tokens of 12 channels: by hand, s features cost s * 48 a token of 375 that are asked for."""
    ablation, settings, left_out = read(config)
    performer, abc, softmax = settings
    assert [setting.matched and setting.matched.value for setting in settings] == [8, 5, None]
    assert performer.cases[0].command[3:5] == ["attention={name: performer}", "attention.num_samples=8"]
    for setting in (performer, abc):
        run = setting.run
        assert load_run(config.parent / "base.yaml", setting.cases[0].command[3:5]) == run
        contexts = layer_contexts("deit", {name: run.model[name] for name in run.model if name != "name"})
        mechanism = ATTENTION[run.attention["name"]]
        parsed = mechanism.Config(**{name: value for name, value in run.attention.items() if name != "name"})
        assert setting.matched.reached == sum(mechanism.layer_cost(each, parsed).macs for each in contexts) / 2 / 64
        assert setting.cases[0].directory.name.endswith(f",{setting.matched.override}")
    assert left_out == ["attention=softmax: attention(softmax): declares no option that sets its size"]
    assert softmax.cases[0].directory.name == "attention=softmax"
    table, reached = tabulate(settings), [performer.matched.reached, abc.matched.reached]
    assert table["size"] == ["num_samples=8", "num_landmarks=5", ""]
    assert table["token_macs: target"] == ["375", "375", ""]
    assert table["token_macs: reached"] == [f"{x:.0f}" for x in reached] + [""]
    assert table["off target (%)"] == [f"{100 * x / 375 - 100:+.1f}" for x in reached] + [""]
    assert f"\nLeft out: {left_out[0]}.\n" in report_sweep(ablation.caption, settings, left_out)


def test_a_target_is_the_same_on_every_grid(config):
    sizes = "grid: {attention: [{name: abc}], model.img_size: [32, 64]}\n"
    _, settings, _ = read(config, f"match: {{token_macs: 960}}\n{sizes}")
    assert [(setting.matched.value, setting.matched.reached) for setting in settings] == [(13, 13 * 72)] * 2


def test_sizes_of_the_shipped_sweep_stay_where_two_are_equally_near():
    """25 samples are as far below the target of equal_macs.yaml as 26 are above it; runs are named by the size."""
    overrides = ["model.img_size=56", "attention={name: scatterbrain}"]
    assert solve(9600.0, load_unbuilt(ROOT / "configs/fashion_mnist/softmax.yaml", overrides)).value == 26


@pytest.mark.parametrize(
    ("mechanism", "per_layer"), [("transnormer", (16 * 24, 6 * 24)), ("shifted_window", (16 * 24, 16 * 24))]
)
def test_layers_that_differ_count_each_for_itself(config, mechanism, per_layer):
    """TransNormer's first layer has windows of 4 x 4 tokens, its second linear attention of heads of 6 channels."""
    target = sum(per_layer) / 2
    _, [setting], _ = read(config, f"match: {{token_macs: {target}}}\nruns: [{{attention: {{name: {mechanism}}}}}]\n")
    assert (setting.matched.override, setting.matched.reached) == ("attention.window_size=4", target)


def test_a_size_that_the_grid_refuses_is_replaced_before_the_model_is_built(config):
    """Linformer has 64 landmarks by default, more than the 16 tokens here."""
    (config.parent / "base.yaml").write_text(BASE.replace("patch_size: 4", "patch_size: 8"))
    _, [setting], _ = read(config, "match: {token_macs: 100}\nruns:\n  - {attention: {name: linformer}}\n")
    assert setting.run.attention["num_landmarks"] == setting.matched.value <= 16


@pytest.mark.parametrize(
    ("target", "nearest"),
    [
        ("16", "above the target; the nearest, window_size = 1, has token_macs = 24, +50.0%"),
        ("1.0e4", "below the target; the nearest, window_size = 7, has token_macs = 3602, -64.0%"),
    ],
)
def test_a_mechanism_whose_costs_are_all_off_is_left_out(config, target, nearest):
    """Windows of 1 token cost 24; windows of 7 x 7, which are padded, cost more than the one of 8 x 8."""
    _, [kept], (line,) = read(config, f"match: {{token_macs: {target}}}\nruns: [{{}}, {{match: false}}]\n")
    assert kept.run.attention["window_size"] == 7
    assert line == f"base: attention(local): every size is {nearest}"


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("{macs: 1.0e6}", ".macs: unknown option; known: token_macs"),
        ("{token_macs: -1}", ".token_macs = -1.0 must be greater than 0"),
        ("{token_macs: 24e3x}", ".token_macs: expected float, got '24e3x'"),
        ("{token_macs: .inf}", ".token_macs: inf is not a finite number"),
        ("{}", ".token_macs: required, but not given"),
        ("{token_macs: 1.0, macs: 2.0}", ".macs: unknown option; known: token_macs"),
    ],
)
def test_a_target_of_another_form_is_one_line(config, match, expected):
    config.write_text(SWEEP.replace("{token_macs: 375}", match))
    assert refusal(config).startswith(f"equal.yaml:2: match{expected}")


LISTED = "[{blocks: 0, name: abc}, {blocks: 1, name: abc}]"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{name: abc}", "{name: abc, num_landmarks: 3}", "5: runs.1: attention.num_landmarks is given, and match sol"),
        ("{name: abc}", LISTED, "5: runs.1: attention: match sets the size of one mechanism, and this is a list; wr"),
        ("match: false", "match: true", "7: runs.3: match: expected false, or no match, got True; leave it"),
        ("match: {token_macs: 375}\n", "", "6: runs.3: match: acts in a sweep with match only, got False; leave it"),
        ("{name: abc}", "{name: abd}", "5: runs.1: attention.name"),
        (
            *(SWEEP[SWEEP.index("runs:") :], "runs: [{attention: softmax}]"),
            "2: match: no setting can be trained; the last: attention=softmax",
        ),
    ],
)
def test_a_row_that_cannot_be_solved_is_one_line(config, old, new, expected):
    config.write_text(SWEEP.replace(old, new))
    assert refusal(config).startswith(f"equal.yaml:{expected}")
