"""Equal budgets: sizes are solved for a cost, runs are ordinary configurations, and what cannot reach it is named."""

import json
import time
from pathlib import Path

import pytest
import torch

import ablate
from ablation import match
from ablation.match import find_size
from ablation.measured import MATCH_FILE, Measurement, Measurements, measure_call, measure_layers
from ablation.report import report_sweep, to_json
from ablation.sweep import read_ablation
from ablation.tables import tabulate
from attention import ATTENTION, LayerContext
from attention.options import parse_options
from attention.sizes import Size
from engine.config.load import load_run
from engine.runtime.ownership import make_output
from models import layer_contexts
from models.costs import count_costs
from tests.support.sweeps import read, refusal

BASE = """\
model: {name: deit, img_size: 32, patch_size: 4, embed_dim: 12, depth: 2, num_heads: 2, num_classes: 10}
attention: {name: local, window_size: 7}
data: {dataset: digits, workers: 0}
augment: {auto_augment: null, mixup: 0.0, cutmix: 0.0}
schedule: {epochs: 1, warmup_epochs: 0}
train: {total_batch_size: 64, amp: null, device: cpu}
"""
SWEEP = """\
base: base.yaml
match: {layer_macs: 24.0e3}
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
    """64 tokens of 12 channels: by hand, s features cost 64 * s * 48 of 64 * 16 * 24 that are asked for."""
    _, settings, left_out = read(config)
    performer, abc, softmax = settings
    assert [setting.matched and setting.matched.value for setting in settings] == [8, 5, None]
    command = performer.cases[0].command
    assert command[3:5] == ["attention={name: performer}", "attention.num_samples=8"]
    for setting in (performer, abc):
        run = setting.cases[0].run
        assert load_run(config.parent / "base.yaml", setting.cases[0].command[3:5]) == run
        contexts = layer_contexts("deit", {name: run.model[name] for name in run.model if name != "name"})
        mechanism, options = ATTENTION[run.attention["name"]], dict(run.attention)
        parsed = mechanism.Config(**{name: value for name, value in options.items() if name != "name"})
        costs = [mechanism.cost(context, parsed).macs for context in contexts]
        assert setting.matched.reached == sum(costs) / 2
        assert setting.cases[0].directory.name.endswith(f",{setting.matched.override}")
    assert left_out == ["attention=softmax: attention(softmax): declares no option that sets its size"]
    assert softmax.cases[0].directory.name == "attention=softmax"


def test_the_table_shows_target_reached_cost_and_deviation(config):
    ablation, settings, left_out = read(config)
    table = tabulate(settings).programs
    reached = [setting.matched.reached for setting in settings[:2]]
    assert table["size"] == ["num_samples=8", "num_landmarks=5", ""]
    assert table["layer_macs: target"] == ["24000", "24000", ""]
    assert table["layer_macs: reached"] == [f"{x:.0f}" for x in reached] + [""]
    assert table["off target (%)"] == [f"{100 * x / 24e3 - 100:+.1f}" for x in reached] + [""]
    assert table["within 2 %"] == ["no" if abs(x / 24e3 - 1) > 0.02 else "yes" for x in reached] + [""]
    assert "no" in table["within 2 %"]
    assert f"\nLeft out: {left_out[0]}.\n" in report_sweep(ablation.caption, settings, left_out)
    stored = json.loads(to_json("", settings, left_out))
    assert stored["left_out"] == left_out
    assert stored["rows"][0]["matched"]["value"] == 8
    assert "matched" not in stored["rows"][2]


def test_a_target_of_the_model_is_the_counted_cost(config):
    config.write_text(SWEEP.replace("layer_macs: 24.0e3", "model_macs: 500.0e3"))
    _, settings, _ = read(config)
    for setting in settings[:2]:
        run = setting.cases[0].run
        assert setting.matched.reached == count_costs(run.model, run.attention).macs
        others = [{**run.attention, setting.matched.option: setting.matched.value + step} for step in (-1, 1)]
        others = [count_costs(run.model, attention).macs for attention in others]
        assert abs(setting.matched.deviation) * 500e3 <= min(abs(other - 500e3) for other in others)


def test_a_target_of_a_token_is_the_same_on_every_grid(config):
    config.write_text(
        "base: base.yaml\nmatch: {token_macs: 960}\ngrid:\n  attention: [{name: abc}]\n  model.img_size: [32, 64]\n"
    )
    _, settings, _ = read(config)
    for setting, tokens in zip(settings, (64, 256), strict=True):
        config.write_text(
            f"base: base.yaml\nmatch: {{layer_macs: {960 * tokens}}}\nruns:\n  - {{attention: {{name: abc}},"
            f" model.img_size: {4 * tokens**0.5:.0f}}}\n"
        )
        _, [other], _ = read(config)
        assert setting.matched.value == other.matched.value > 1
        assert setting.matched.reached == other.matched.reached / tokens == pytest.approx(960, rel=0.1)


def test_a_size_that_the_grid_refuses_is_replaced_before_the_model_is_built(config):
    """Linformer has 64 landmarks by default, more than the 16 tokens here."""
    config.write_text("base: base.yaml\nmatch: {token_macs: 100}\nruns:\n  - {attention: {name: linformer}}\n")
    (config.parent / "base.yaml").write_text(BASE.replace("patch_size: 4", "patch_size: 8"))
    _, [setting], _ = read(config)
    assert setting.cases[0].run.attention["num_landmarks"] == setting.matched.value <= 16


@pytest.mark.parametrize(
    ("target", "nearest"),
    [
        ("1.0e3", "above the target; the nearest, window_size = 1, has layer_macs = 1536, +53.6%"),
        ("1.0e6", "below the target; the nearest, window_size = 7, has layer_macs = 2.305e+05, -77.0%"),
    ],
)
def test_a_mechanism_whose_costs_are_all_off_is_left_out(config, target, nearest):
    """Windows of 1 token cost 64 * 24; windows of 7 x 7, which are padded, cost more than the one of 8 x 8."""
    config.write_text(f"base: base.yaml\nmatch: {{layer_macs: {target}}}\nruns: [{{}}, {{match: false}}]\n")
    _, [kept], (line,) = read(config)
    assert kept.cases[0].run.attention["window_size"] == 7
    assert line == f"base: attention(local): every size is {nearest}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "{layer_macs: 24.0e3}",
            "{macs: 1.0e6}",
            "equal.yaml:2: match.macs: unknown option; known: batch_size, layer_",
        ),
        ("{layer_macs: 24.0e3}", "{layer_macs: -1}", "equal.yaml:2: match.layer_macs = -1.0 must be greater than 0"),
        (
            "{layer_macs: 24.0e3}",
            "{}",
            "equal.yaml:2: match: expected one of layer_macs, token_macs, model_macs, time, memory",
        ),
        (
            "{layer_macs: 24.0e3}",
            "{layer_macs: 1.0, model_macs: 2.0}",
            "equal.yaml:2: match: expected one of layer_macs, token_macs, model_macs, time, memory, got {",
        ),
        (
            "{layer_macs: 24.0e3}",
            "{layer_macs: 1.0, batch_size: 4}",
            "equal.yaml:2: match.batch_size = 4: acts with time",
        ),
        (
            "{name: abc}",
            "{name: abc, num_landmarks: 3}",
            "equal.yaml:5: runs.1: attention.num_landmarks is given, and match solves it; leave it out, or write match",
        ),
        (
            "{name: abc}",
            "[{blocks: 0, name: abc}, {blocks: 1, name: abc}]",
            "equal.yaml:5: runs.1: attention: match sets the size of one mechanism, and this is a list; write match:",
        ),
        ("match: false", "match: true", "equal.yaml:7: runs.3: match: expected false, or no match, got True; leave it"),
        (
            "match: {layer_macs: 24.0e3}\n",
            "",
            "equal.yaml:6: runs.3: match: acts in a sweep with match only, got False; leave it out",
        ),
        ("{name: abc}", "{name: abd}", "equal.yaml:5: runs.1: attention.name"),
        (
            SWEEP[SWEEP.index("runs:") :],
            "runs: [{attention: softmax}]",
            "equal.yaml:2: match: no setting can be trained; the last: attention=softmax",
        ),
    ],
)
def test_what_cannot_be_honoured_is_one_line(config, old, new, expected):
    config.write_text(SWEEP.replace(old, new))
    assert refusal(config).startswith(expected)


def test_points_of_a_search_out_of_reach_give_way_to_others(config, capsys):
    config.write_text(
        "base: base.yaml\nmatch: {layer_macs: 24.0e3}\ntrials: 2\n"
        "grid:\n  attention: [{name: softmax}, {name: abc}]\n  optim.lr: {log_range: [1.0e-4, 1.0e-2]}\n"
    )
    _, settings, left_out = read(config)
    assert [setting.matched.option for setting in settings] == ["num_landmarks"] * 2
    assert not left_out
    assert "are no valid run, others take their place; the first: attention(softmax)" in capsys.readouterr().err


def test_a_dry_run_names_what_is_left_out(config, capsys):
    ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
    out = capsys.readouterr().out
    assert "Left out: attention=softmax: attention(softmax): declares no option that sets its size.\n" in out
    assert "attention.num_samples=8 --output" in out


@pytest.mark.parametrize(
    ("target", "costs", "expected"),
    [
        (50.0, {size: 10.0 + size for size in range(1, 100)}, (40, False)),
        (50.0, {2**k: float(2**k) for k in range(10)}, (64, True)),
        (0.5, {size: 10.0 + size for size in range(1, 100)}, (1, False)),
        (500.0, {size: 10.0 + size for size in range(1, 100)}, (99, False)),
        (50.0, {size: float(size) if size < 30 else float("inf") for size in range(1, 100)}, (29, True)),
    ],
    ids=["linear", "few sizes", "all above", "all below", "out of memory"],
)
def test_the_measured_size_is_the_nearest_and_found_with_few_measurements(target, costs, expected):
    """Multiply-accumulates of a size are 7 times the size. The first size is within the tolerance if it is the best."""
    asked = []

    def nearest(macs: float) -> Size:
        size = min(costs, key=lambda size: abs(7 * size - macs))
        return Size(size, 7.0 * size, True)

    def cost(size: int) -> float:
        asked.append(size)
        return costs[size]

    assert find_size(target, nearest, cost, 70.0, 0.02) == expected
    assert len(asked) == len(set(asked)) <= 8


MEASURED = """\
base: base.yaml
match: {time: 5.0, batch_size: 2}
runs:
  - {attention: {name: abc}}
  - {attention: {name: performer}}
  - {attention: softmax}
"""


class Machine:
    """Stands for a machine on which a layer of size s takes s * `scale` ms and as many MiB; notes measured sizes."""

    def __init__(self) -> None:
        self.scale, self.sizes = 0.5, []

    def measure(self, kind, mechanism, options, contexts, batch_size, run) -> Measurement:
        assert (batch_size, len(contexts)) == (2, 2)
        self.sizes.append(size := getattr(options, mechanism.size_option))
        return Measurement(size * self.scale, 0.05, size * self.scale / 1e3)


@pytest.fixture
def machine(config, monkeypatch) -> Machine:
    config.write_text(MEASURED)
    machine = Machine()
    monkeypatch.setattr(match, "measure_layers", machine.measure)
    monkeypatch.setattr(match, "machine_of", lambda device: f"machine {machine.scale}")
    return machine


def test_measured_sizes_are_stored_and_taken_again(config, machine):
    """Also on a slower machine, by which only a new row is measured."""
    measurements = Measurements(config.parent)
    ablation, settings, left_out = read_ablation(config, [], config.parent, [], measurements)
    assert [setting.matched.value for setting in settings] == [10, 10]
    assert settings[1].cases[0].run.attention["num_samples"] == 10
    assert left_out == ["attention=softmax: attention(softmax): declares no option that sets its size"]
    assert not measurements.store()
    count, machine.scale = len(machine.sizes), 1.0
    config.write_text(MEASURED + "  - {attention: {name: linformer}}\n")
    _, again, _ = read_ablation(config, [], config.parent, [])
    assert [setting.matched.value for setting in again] == [10, 10, 5]
    assert 0 < len(machine.sizes) - count <= 8
    table = tabulate(again).programs
    assert table["time (ms): reached"] == ["5"] * 3
    report = report_sweep(ablation.caption, again)
    assert (
        "images: 2, measured once on machine 0.5, machine 1.0; standard error of the medians up to 5.0 %.\n" in report
    )


def test_the_measurements_of_the_first_worker_hold(config, machine, capsys, monkeypatch):
    """Two workers begin together: the second has measured as well when the first has stored."""
    first, second = Measurements(config.parent / "out"), Measurements(config.parent / "out")
    make_output(config.parent / "out", [MATCH_FILE])
    read_ablation(config, [], config.parent / "out", [], first)
    first.store()
    machine.scale = 1.0
    taken = iter([second, Measurements(config.parent / "out")])
    monkeypatch.setattr(ablate, "Measurements", lambda output: next(taken))
    monkeypatch.setattr(ablate, "write_figures", lambda *arguments: None)
    stopping = [str(config), "--output", str(config.parent / "out"), "--launcher", "false", "--no-wait"]
    with pytest.raises(SystemExit):
        ablate.main(stopping)
    assert (
        "run 1/2: " + str(config.parent / "out/attention=name=abc,attention.num_landmarks=10")
        in capsys.readouterr().out
    )
    assert next(taken, None) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "time: 1.0e+9",
            "match.time = 1e+09 ms: a pass would take about 1,000,000 s; lower it until that is at most 10 s;"
            " measured: num_landmarks = 20, 200 ms",
        ),
        (
            "memory: 1.0e+9",
            "match.memory = 1e+09 MiB: a pass would take about 1,000,000 s; lower it until that is at most 10 s;"
            " measured: num_landmarks = 20, 200 MiB",
        ),
    ],
)
def test_a_target_that_takes_too_long_is_refused_soon(config, machine, capsys, target, expected):
    """At the first pass of more than 0.1 s; sizes are doubled until then, and named."""
    machine.scale = 10.0
    config.write_text(MEASURED.replace("time: 5.0", target))
    assert refusal(config) == f"equal.yaml:4: runs.0: {expected}"
    assert machine.sizes == [5, 10, 20]
    key = expected.partition(":")[0]
    assert capsys.readouterr().err == "".join(f"{key}: measuring abc with num_landmarks = {n}\n" for n in (5, 10, 20))


def test_points_of_a_search_that_take_too_long_are_measured_once(config, machine):
    machine.scale = 10.0
    config.write_text(
        "base: base.yaml\nmatch: {time: 1.0e+9, batch_size: 2}\ntrials: 2\n"
        "grid:\n  attention: [{name: abc}]\n  optim.lr: {log_range: [1.0e-4, 1.0e-2]}\n"
    )
    assert "the last is not: match.time = 1e+09 ms: a pass would take about" in refusal(config)
    assert machine.sizes == [5, 10, 20]


def test_measurements_of_a_version_without_seconds_are_taken(tmp_path):
    (tmp_path / MATCH_FILE).write_text('{"{}": {"machine": "m", "sizes": {"3": [4.0, 0.1]}}}')
    assert Measurements(tmp_path).take({}, 3, lambda: pytest.fail("measured"), "m") == Measurement(4.0, 0.1, 0.0)


@pytest.mark.parametrize(("seconds", "calls"), [(0.5, 13), (4.0, 5), (20.0, 5)])
def test_a_long_pass_is_timed_in_few_rounds(monkeypatch, seconds, calls):
    """One call tells how long a pass takes, one how often to repeat it, and one round more than are kept is timed."""
    made = []
    monkeypatch.setattr(time, "perf_counter", lambda: seconds * len(made))
    monkeypatch.setattr(time, "process_time", lambda: seconds * len(made))
    found = measure_call("time", lambda: made.append(1), torch.device("cpu"))
    assert (found, len(made)) == (Measurement(1e3 * seconds, 0.0, seconds), calls)


def test_measurements_that_are_none_are_refused(config):
    (config.parent / "out").mkdir()
    for text in ("", "[1]", '{"q": {"machine": "m", "sizes": {"3": [-1, 0]}}}'):
        (config.parent / "out" / MATCH_FILE).write_text(text)
        config.write_text(MEASURED)
        assert refusal(config) == "out/match.json: holds no measurements of a sweep; move it away to measure again"


def test_a_layer_is_measured(config):
    """Memory grows with the features of Performer; time has an uncertainty."""
    run = load_run(config.parent / "base.yaml")
    contexts = [LayerContext(dim=12, num_heads=2, grid=(4, 8), layer=layer, depth=2) for layer in (0, 1)]
    mechanism = ATTENTION["performer"]
    options = [parse_options(mechanism.Config, {"num_samples": number}) for number in (4, 64)]
    few, many = (measure_layers("memory", mechanism, config, contexts, 2, run) for config in options)
    features = 2 * 2 * 32 * 64 * 4 / 2**20  # of 2 images, 2 heads, 32 keys, in MiB
    assert many.cost - few.cost > features
    assert few.error == many.error == 0
    time = measure_layers("time", mechanism, options[0], contexts, 2, run)
    assert time.cost > 0 < time.error < 1
    assert time.seconds == pytest.approx(time.cost / 1e3)
    assert few.seconds > 0 < many.seconds
