"""The benchmark: its workloads, its results for known cases, and its refusals."""

import csv
from ast import literal_eval

import pytest
import torch

import benchmark
from attention.registry import ATTENTION
from bench import choice
from bench.arguments import MODES
from bench.comparison import Comparison
from bench.costs import CONFIGS
from bench.results import COLUMNS, ENDS
from bench.workload import Workload, attention_layer, factory_of, initialise_weights, whole_model
from engine.reporting.tables import Spread, spread
from models.base import Backbone
from models.costs import count_costs
from tests.support.partition import chosen

CPU = torch.device("cpu")
LAYERS = ["--device", "cpu", "--dim", "12", "--num-heads", "3", "--batch-size", "2", "--rounds", "2"]
SMALL_EVA = "eva:window_size=2,num_landmarks=4"


def run(*arguments: str, output) -> list[dict]:
    """The rows of results.csv, with numbers."""
    benchmark.main([*LAYERS, *arguments, "--output", str(output)])
    texts = {"kind", "name", "baseline", "size", "mode", "dtype", "execution"}
    with (output / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    return [{key: x if key in texts else literal_eval(x or "None") for key, x in line.items()} for line in lines]


def plan(*arguments: str, device: torch.device = CPU) -> list[Comparison]:
    return benchmark.plan(benchmark.parse_arguments(arguments), device)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_leaves_nothing_behind(mode):
    workload = Workload(attention_layer(SMALL_EVA, 12, 3), (4, 6), 2, mode, "bf16", "eager", CPU)
    network = workload.network
    before = network.qkv.weight.clone()
    result = workload.call()
    assert network.training == (mode != "inference")
    assert all(leaf.grad is None for leaf in workload.leaves)
    assert (not torch.equal(network.qkv.weight, before)) == (mode == "train")
    assert (result is not None and result.requires_grad) == (mode == "forward")
    assert workload.forward().dtype == torch.bfloat16
    assert (workload.counts()["saved_bytes"] is None) == (mode == "inference")


def test_logits_spread_as_after_training():
    torch.manual_seed(0)
    subject = attention_layer("softmax", 192, 3)
    layer = initialise_weights(subject.build((14, 14)))
    q, k, _ = layer.project(*subject.example(layer, (14, 14), 2, CPU))
    logits = q @ k.mT / 8
    assert 0.8 < logits.std() < 1.2
    assert logits.softmax(-1).min() > 1e-6


def test_default_batches_hold_equally_many_tokens():
    layers = plan("--attention", "eva", "--tokens", "196", "784", "3136", "14x28", "--modes", "train")
    assert [comparison.batch for comparison in layers] == [32, 8, 2, 16]
    layers = plan("--attention", "eva", "--modes", "train", device=torch.device("cuda"))
    assert [comparison.batch for comparison in layers] == [128]
    models = plan("--models", "deit_tiny_p16:softmax", "--image-sizes", "224", "448", "--modes", "train")
    assert [comparison.batch for comparison in models] == [8, 2]


@pytest.mark.parametrize("name", chosen(["transnormer", "shifted_window", "eva"], lambda name: name == "transnormer"))
def test_layers_that_differ_are_rows_of_their_own(name):
    """The rows' costs add up to those of the network."""
    model, tokens, channels = {"name": "deit_tiny_p16", "img_size": 224}, 196, 192
    (found,) = plan("--attention", f"{name}:window_size=14", "--tokens", "196", "--modes", "inference")
    costs = {subject.name: cost.macs for subject, cost in zip(found.subjects, found.costs, strict=True)}
    numbers = {"transnormer": ["0", "6"], "shifted_window": ["0", "1"], "eva": [""]}[name]
    entries = [f"{name}:window_size=14" + f", layer {number} of 12" * bool(number) for number in numbers]
    assert list(costs) == ["softmax", *entries]
    softmax, whole = (count_costs(model, each).macs for each in ("softmax", {"name": name, "window_size": 14}))
    own = 4 * tokens * channels**2 + 2 * tokens**2 * channels
    assert whole - softmax == sum(12 // len(entries) * (costs[entry] - own) for entry in entries)


@pytest.mark.complete
def test_models_of_ours_of_timm_and_of_files():
    def costs(text: str, side: int = 224) -> tuple[float, float]:
        parameters, macs = whole_model(text).costs((side, side))
        return round(parameters / 1e6, 3), round(macs / 1e9, 3)

    assert costs("timm:vit_tiny_patch16_224") == (5.717, 1.254)
    assert costs("timm:vit_tiny_patch16_224", 448) != costs("timm:vit_tiny_patch16_224")
    assert costs("timm:vit_tiny_patch16_224:patch_size=8") != costs("timm:vit_tiny_patch16_224")
    assert costs("timm:pvt_v2_b0") == costs("pvtv2_b0:sra")
    assert costs("timm:vit_tiny_patch16_224:softmax") == costs("timm:vit_tiny_patch16_224")
    assert costs("timm:vit_tiny_patch16_224:linear") < costs("timm:vit_tiny_patch16_224:local:window_size=7")
    assert costs("deit_tiny_p8:eva:window_size=7") == costs("deit_tiny_p8:eva")
    assert costs("deit_tiny_p8:eva:num_landmarks=196") != costs("deit_tiny_p8:eva")
    assert costs(str(CONFIGS / "deit_tiny_p8/eva.yaml")) == costs("deit_tiny_p8:eva:released=true")
    hybrid, *whole = (
        whole_model(text).costs((224, 224))
        for text in (str(CONFIGS / "deit_tiny_p8/hybrid_eva_softmax.yaml"), "deit_tiny_p8:eva", "deit_tiny_p8")
    )
    assert [12 * cost for cost in hybrid] == [9 * eva + 3 * softmax for eva, softmax in zip(*whole, strict=True)]


@pytest.mark.complete
def test_results(tmp_path, capsys):
    arguments = "--attention", SMALL_EVA, "--tokens", "2x12x2", "36", "--modes", "forward", "inference"
    rows = run(*arguments, "--dtypes", "fp32", "bf16", output=tmp_path)
    keys = [tuple(row[key] for key in ("name", "size", "mode", "dtype")) for row in rows]
    settings = [(m, d) for m in ("forward", "inference") for d in ("fp32", "bf16")]
    assert keys == [(n, s, m, d) for s in ("2x12x2", "36") for m, d in settings for n in ("softmax", SMALL_EVA)]

    softmax = rows[0]
    assert softmax["parameters"] == 4 * 12 * 12 + 4 * 12
    assert softmax["macs"] == 48 * 4 * 12 * 12 + 2 * 48 * 48 * 12
    assert softmax["images_per_second"] == 2 / softmax["seconds"]
    assert rows[1]["peak_ratio"] == rows[1]["peak_bytes"] / softmax["peak_bytes"]
    assert rows[1]["macs_ratio"] == softmax["macs"] / rows[1]["macs"]
    assert rows[1]["efficiency"] == rows[1]["speedup"] / rows[1]["macs_ratio"]
    assert softmax["operators"] == 3 + 3 * (softmax["dtype"] == "bf16")
    assert softmax["speedup"] == softmax["speedup_q1"] == softmax["speedup_q3"] == 1
    assert softmax["peak_bytes"] >= 2 * 48 * 12 * 4 * 5  # queries, keys, values, their mixture, the output
    assert softmax["saved_bytes"] >= 2 * 48 * 12 * 4 * 5  # queries, keys, values, their mixture, the input
    assert [row["saved_bytes"] is None for row in rows] == [row["mode"] == "inference" for row in rows]
    for row in rows:
        assert row["seconds_q1"] <= row["seconds"] <= row["seconds_q3"]

    assert tuple(softmax) == COLUMNS
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.md").read_text()
    assert printed.count(f"| {SMALL_EVA} |") == 8
    assert "attention: batch 2, execution eager" in printed


@pytest.mark.complete
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate")])
@pytest.mark.parametrize("method", ["__init__", "counts"])
def test_what_does_not_fit_has_no_figures(tmp_path, monkeypatch, capsys, method, error):
    def call(workload, *arguments, **options):
        if "softmax" in (arguments[0].name if method == "__init__" else str(type(workload.network))):
            raise error
        return original(workload, *arguments, **options)

    original = getattr(Workload, method)
    monkeypatch.setattr(Workload, method, call)
    arguments = "--attention", SMALL_EVA, "local:window_size=2", "--tokens", "36", "64", "--modes", "forward"
    rows = run(*arguments, output=tmp_path)
    assert [row["seconds"] is None for row in rows] == [True, False, False] * 2
    assert all(row["speedup"] is None for row in rows)
    assert all(row["macs"] for row in rows)
    assert "out of memory" in capsys.readouterr().out


def test_inputs_that_do_not_fit(tmp_path, capsys):
    benchmark.main([*LAYERS[:-4], "--rounds", "2", "--attention", "softmax", "--tokens", "16", f"--batch-size={10**9}"])
    assert "out of memory" in capsys.readouterr().out


def test_an_interrupted_run_shows_what_it_has_measured(tmp_path, monkeypatch, capsys):
    def compare(comparison, *arguments):
        if comparison.mode == "train":
            raise KeyboardInterrupt
        return original(comparison, *arguments)

    original = benchmark.compare
    monkeypatch.setattr(benchmark, "compare", compare)
    with pytest.raises(SystemExit, match="130"):
        run("--attention", "softmax", "--tokens", "16", "36", "--modes", "inference", "train", output=tmp_path)
    assert (tmp_path / "results.csv").read_text().count("\n") == 2
    output = capsys.readouterr()
    assert output.out == (tmp_path / "table.md").read_text()
    assert output.err == "interrupted\n"


@pytest.mark.complete
def test_paths_are_compared_in_the_same_rounds(tmp_path):
    paths = "auto", "plain"
    entries = [SMALL_EVA.replace(":", f"@{path}:") for path in paths]
    rows = run("--attention", *entries, "--tokens", "36", "--modes", "forward", output=tmp_path)
    saved = {row["name"]: row["saved_bytes"] for row in rows}
    assert list(saved) == ["softmax", *entries]
    assert saved[entries[0]] < saved[entries[1]]


def measured(name: str, milliseconds: float | None, peak: float, macs: int, mode: str = "inference") -> dict:
    """A row of results.csv."""
    row = dict.fromkeys(COLUMNS) | {"name": name, "baseline": "softmax", "mode": mode, "macs": macs}
    if milliseconds is None:
        return row
    quartiles = {f"{key}{end}": 1.0 for key in ("seconds", "speedup") for end in ENDS}
    found = {"seconds": milliseconds / 1e3, "speedup": 8 / milliseconds, "peak_bytes": peak * 2**20}
    return row | quartiles | {"seconds_noisy": False, "speedup_noisy": False} | found


STORED = {"softmax": 0, "mean": 30, "xca": 9, "local:window_size=9": 1, "transnormer:window_size=2": 3}
KINDS = [f"transnormer@torch:window_size=2, layer {number} of 12" for number in (0, 6)]
MEASURED = [measured("softmax", 8, 10, 800), measured("local", 2, 10, 400), measured("mean", 1, 5, 100)]
MEASURED += [measured("xca@torch", 4, 20, 200), measured("ra", None, 0, 100)]
MEASURED += [measured(name, 7, 30, 900) for name in KINDS]


@pytest.mark.parametrize(
    ("budgets", "names"),
    [
        ({"ms": 8}, ["softmax", *KINDS, "xca@torch", "mean", "local"]),  # by quality; layers without one last
        ({"macs": 0.5}, ["xca@torch", "mean", "local"]),
        ({"ms": 3.9}, ["mean", "local"]),
        ({"memory": 10}, ["softmax", "mean", "local"]),
        ({"memory": 19, "macs": 0.4}, ["mean"]),
        ({"ms": 0.5}, []),
    ],
)
def test_layers_within_budgets_by_stored_quality(budgets, names, monkeypatch):
    stored = {layer: Spread(loss, 0.5, 3) for layer, loss in STORED.items()}
    monkeypatch.setattr(choice, "read_quality", lambda: stored)
    fast = [measured("softmax", 0.5, 1, 800, "train")]
    text, _, other = choice.format_choices([*MEASURED, *fast], [*budgets.items()]).partition("mode train")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == names
    if names:
        assert f"{7 - len(names)} of 7 layers exceed a budget." in text
        assert ["mean", "30.00 ± 0.50", "8.00 (1.00–1.00)"] in [row[:3] for row in rows]
    else:
        assert "No layer meets the budgets. The nearest, mean, exceeds one 2 times; raise a limit" in text
    assert ("0 of 1 layers" in other) == ("macs" not in budgets)


def test_a_choice_among_measured_layers(capsys):
    entry = "lara:num_landmarks=49,released=True"
    options = "--tokens", "196", "--modes", "inference", "--budget", "ms=1e6", "macs=1.5"
    benchmark.main([*LAYERS, "--attention", entry, *options])
    shown = capsys.readouterr().out.partition("Budgets: ms=1e+06 macs=1.5. ")[2]
    names = [line.split(" | ")[0] for line in shown.splitlines() if line.startswith("| ")]
    assert names[2:] == ["| softmax", f"| {entry}"]
    assert "0 of 2 layers" in shown


def test_the_stored_quality_is_that_of_the_measurements():
    """Losses are relative to the mean of softmax attention, which is the trained model's own."""
    with (choice.QUALITY.parents[1] / "docs/data/transfer.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] in ("", "evaluation") and row["aligned_top1"]]
    trained = spread(float(row["top1"]) for row in rows if row["attention"] == "softmax").mean
    losses = {"softmax": [0.0] * 3}
    for row in rows:
        if row["attention"] != "softmax":
            layer = f"{row['attention']}:{row['options'].replace(' ', '')}".rstrip(":")
            losses.setdefault(layer, []).append(trained - float(row["aligned_top1"]))
    found = choice.read_quality()
    assert found.keys() == losses.keys()
    for layer, stored in found.items():
        assert stored == pytest.approx(spread(losses[layer]), abs=1e-5)
        assert factory_of(layer)(dim=48, num_heads=3, grid=(14, 14))


def test_all_mechanisms_include_every_stored_layer():
    found, on_path = (
        [subject.name.partition(", layer")[0] for subject in comparison.subjects]
        for entry in ("all", "all@plain")
        for comparison in plan("--attention", entry, "--tokens", "28x28", "--modes", "inference")
    )
    assert {factory_of(layer) for layer in choice.read_quality()} <= {factory_of(name) for name in found}
    assert {name.partition(":")[0] for name in found} == {*ATTENTION}
    assert {"eva", "lara:num_landmarks=49,released=True"} <= {*found}
    assert {"eva@plain", "lara@plain:num_landmarks=49,released=True"} <= {*on_path}


def test_plain_softmax_keeps_its_matrix(tmp_path):
    rows = run("--attention", "softmax@plain", "--tokens", "64", "--modes", "forward", output=tmp_path)
    fused, plain = (row["saved_bytes"] for row in rows)
    matrix = 2 * 3 * 64 * 64 * 4
    assert fused < matrix < plain


def test_models_have_paths(tmp_path):
    config = tmp_path / "torch.yaml"
    config.write_text("model:\n  name: deit_tiny_p16\nattention:\n  name: eva\ntrain:\n  kernels: torch\n")
    entries = "deit_tiny_p16:eva@plain:num_landmarks=49", "deit_tiny_p16:eva", "timm:vit_tiny_patch16_224", str(config)
    assert [whole_model(entry).path for entry in entries] == ["plain", "auto", "auto", "torch"]


@pytest.mark.complete
def test_every_shape_is_compiled_anew(tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: log.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda network, **options: log.append(options) or network)
    arguments = "--attention", "softmax", "--tokens", "16", "36", "--modes", "forward"
    run(*arguments, "--execution", "compiled", output=tmp_path)
    assert log == ["reset", {"dynamic": False, "fullgraph": True}] * 2


def test_models_are_compiled_as_in_training(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(Backbone, "compile_blocks", lambda self, batch_sizes: compiled.append(batch_sizes))
    config = tmp_path / "tiny.yaml"
    config.write_text(
        "model:\n  name: deit\n  img_size: 16\n  patch_size: 8\n  embed_dim: 12\n  depth: 1\n"
        "attention:\n  name: softmax\n"
    )
    workload = Workload(whole_model(str(config)), (16, 16), 2, "inference", "fp32", "compiled", CPU)
    assert compiled == [{2}]
    assert isinstance(workload.network, Backbone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--attention evaa", "attention.name: unknown mechanism 'evaa'; did you mean 'eva'?"),
        ("--attention eva:windw_size=3", "did you mean 'window_size'?"),
        ("--attention eva:{", "expected OPTION=VALUE,... after the last colon"),
        ("--attention lara:num_landmarks=53", "nearest valid: 52"),
        ("--models deit_tiny_p7:eva", "did you mean 'deit_tiny_p8'?"),
        ("--models deit_tiny_p8:eva --image-sizes 225", "nearest: 224"),
        ("--models timm:vit_tiny_patch16_224:img_size=64", "model.kwargs.img_size: chooses no architecture"),
        ("--models timm:vit_tiny_patch16_225", "did you mean 'timm:vit_tiny_patch16_224'?"),
        ("--models timm:vit_tiny_patch16_224:patchsize=8", "unexpected keyword argument 'patchsize'"),
        ("--models absent.yaml", "absent.yaml: No such file"),
        ("--attention eva@", "'eva@': kernels.use(''): unknown path"),
        ("--attention eva@fast", "'eva@fast': kernels.use('fast'): unknown path; one of auto, torch, triton, plain"),
        ("--attention eva@triton", "'eva@triton', path triton: Triton's kernels need a GPU; use the path auto"),
        ("--attention eva --execution cuda-graph", "--execution cuda-graph needs a GPU; use eager"),
        ("--attention eva --budget mss=5", "--budget: 'mss=5': unknown budget; did you mean 'ms'?"),
        ("--attention eva --budget ms", "--budget: 'ms': '' is not a number above 0; ms is milliseconds of a call"),
        ("--attention eva --budget macs=-1", "--budget: 'macs=-1': '-1' is not a number above 0"),
        ("--attention eva --output /dev/null/x", "--output /dev/null/x: cannot be made: Not a directory"),
    ],
)
def test_refuses_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--device", "cpu", *arguments.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give --attention, --models or --macs"),
        ("--attention eva --tokens 50", "50 is no square number; nearest: 49"),
        ("--attention eva --tokens 2x3x4x5", "is neither HxW nor TxHxW"),
        ("--attention eva --models deit_tiny_p8 --budget ms=5", "--budget: give --attention, without --models"),
        ("--macs --budget ms=5", "--budget: give --attention, without --models"),
        ("--device cuda --attention eva", "train.device: cuda is not available here; use auto or cpu"),
    ],
)
def test_refuses_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(arguments.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_models_of_grey_images_are_given_those(tmp_path):
    config = tmp_path / "grey.yaml"
    config.write_text("model: {name: deit_tiny_p16, in_chans: 1}\nattention: softmax\n")
    for text in (str(config), "timm:resnet18:in_chans=1"):
        subject = whole_model(text)
        with torch.device("meta"):
            assert subject.example(subject.build((32, 32)), (32, 32), 2, "meta")[0].shape == (2, 1, 32, 32)
