"""The tables and findings of docs/gpus.md show the files in docs/data/."""

import re
from statistics import median

import pytest

from tests.test_results import BENCHMARKS, CONTROLS, DOCS, Row, markdown, read

TEXT = " ".join(BENCHMARKS.split())


def on_h200(version: str, tokens: int, execution: str = "eager") -> dict[str, Row]:
    """Layers measured on an H200: name -> row. `version`: first, or second, after the changes that it led to."""
    setting = version, str(tokens), execution
    return {
        row["name"]: row for row in read("h200.csv") if (row["version"], row["tokens"], row["execution"]) == setting
    }


def noise(row: Row) -> str:
    return "~" * ("True" in (row["ms_noisy"], row["speedup_noisy"]))


def model_cell(row: Row) -> str:
    """Images a second, and in parentheses the speed-up over timm's model; ~ if noisy."""
    return f"{noise(row)}{row['images_per_second']} ({row['speedup']})"


def gpu_cell(row: Row) -> str:
    """Milliseconds, and in parentheses the speed-up over softmax attention; ~ if noisy."""
    return f"{noise(row)}{float(row['ms']):.2f}" + (
        f" ({float(row['speedup']):.2f})" if row["name"] != "softmax" else ""
    )


def h200() -> str:
    """Times and speed-ups on an H200 at 784 and 3136 tokens, the fastest at 3136 tokens first."""
    at_784, at_3136 = on_h200("second", 784), on_h200("second", 3136)
    lines = [["", "784 tokens", "3136 tokens", "peak", "operators"]]
    for name in sorted(at_3136, key=lambda name: float(at_3136[name]["ms"])):
        row = at_784[name]
        cells = [gpu_cell(row), gpu_cell(at_3136[name])]
        lines.append([f"`{name}`", *cells, f"{float(row['peak_ratio']):.2f}", row["operators"]])
    return markdown(lines)


def h200_compiled() -> str:
    """Times on an H200 at 784 tokens, eager and compiled."""
    eager, compiled = on_h200("first", 784), on_h200("first", 784, "compiled")
    lines = [["", "eager", "compiled", "kernels, eager", "kernels, compiled"]]
    for name, row in compiled.items():
        cells = [gpu_cell(each) for each in (eager[name], row)]
        lines.append([f"`{name}`", *cells, *(each["launches"] for each in (eager[name], row))])
    return markdown(lines)


def h200_models() -> str:
    """Training on an H200: images a second and the speed-up over timm's model."""
    rows = read("h200_models.csv")
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = [["", *(f"{size} pixels" for size in sizes), "peak (MiB)", "operators"]]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        lines.append([f"`{name}`", *map(model_cell, own), own[0]["peak_mib"], own[0]["operators"]])
    return markdown(lines)


def h200_changes() -> str:
    """Milliseconds before and after the changes that the first measurement led to."""
    lines = [["", *(f"{tokens} tokens, {when}" for tokens in (784, 3136) for when in ("before", "after"))]]
    for name in (*CHANGED, "local@triton"):
        rows = [on_h200(version, tokens).get(name) for tokens in (784, 3136) for version in ("first", "second")]
        cells = [(row and f"{'~' * (row['ms_noisy'] == 'True')}{float(row['ms']):.2f}") or "" for row in rows]
        lines.append([f"`{name}`", *cells])
    return markdown(lines)


CHANGED = ("local", "shifted_window", "hilo", "combiner", "transformer_ls", "eva", "eva_lsh", "lara", "performer")
"""Layers whose operators on a GPU changed between the versions of h200.csv."""


def test_tables_of_an_h200():
    for shown in (h200(), h200_compiled(), h200_models(), h200_changes()):
        assert shown in BENCHMARKS, shown
    lines = [["", "H200", "H100"], *(row.values() for row in read("layouts.csv"))]
    assert markdown(lines) in BENCHMARKS, markdown(lines)


def test_findings_on_an_h200():
    at_3136 = on_h200("second", 3136)
    faster = {name for name, row in at_3136.items() if round(float(row["speedup"]), 2) > 1} - CONTROLS
    (named,) = re.findall(r"At 3136 tokens, (.*?) are faster than fused softmax attention", TEXT)
    assert {*re.findall(r"`([^`]+)`", named)} == faster, faster
    at_784 = on_h200("second", 784)
    assert {name for name, row in at_784.items() if float(row["speedup"]) > 1} == {"identity", "mean", "convolution"}

    mechanisms = " ".join((DOCS / "mechanisms.md").read_text().split())
    gains = [
        float(rows[name]["ms"]) / float(rows[f"{name}@triton"]["ms"])
        for rows in (at_784, at_3136)
        for name in ("eva", "local")
    ]
    assert f"{min(gains):.2f} to {max(gains):.2f} times](gpus.md#on-an-h200) as fast with them" in mechanisms, gains
    of_eager, compiled = on_h200("first", 784), on_h200("first", 784, "compiled")
    gains = sorted(float(of_eager[name]["ms"]) / float(row["ms"]) for name, row in compiled.items())
    shown = f"{gains[1]:.1f} to {gains[-1]:.1f} times as fast compiled, and softmax attention {gains[0]:.1f} times"
    assert shown in " ".join((DOCS / "training.md").read_text().split()), shown

    for tokens in (784, 3136):
        old, new = (on_h200(version, tokens) for version in ("first", "second"))
        same = [
            name
            for name, row in new.items()
            if name in old and name not in CHANGED
            if "True" not in (row["ms_noisy"], old[name]["ms_noisy"])
        ]
        others = sorted(float(new[name]["ms"]) / float(old[name]["ms"]) for name in same)
        shown = f"{others[0]:.2f} to {others[-1]:.2f} times as long, {median(others):.2f} in the median"
        assert shown in TEXT, (tokens, shown)


def test_figures_in_the_text_on_an_h200():
    rows = {tokens: on_h200("second", tokens) for tokens in (784, 3136)}

    def speedups(name: str) -> list[str]:
        return [f"{float(each[name]['speedup']):.2f}" for each in rows.values()]

    eva, lara, local, kernel = map(speedups, ("eva", "lara", "local", "local@triton"))
    assert "({} and {} times as fast, {} and {})".format(*eva, *lara) in TEXT
    assert f"Local attention is faster at 3136, by {local[1]}, and by {kernel[1]} with Triton's kernel" in TEXT
    identity = rows[784]["identity"]
    assert f"`identity` ({identity['operators']} operators, {float(identity['ms']):.2f} ms)" in TEXT
    found = [1e3 * float(row["ms"]) / int(row["operators"]) for row in map(rows[784].get, ("identity", "eva", "lara"))]
    assert f"take {min(found):.0f} to {max(found):.0f} microseconds for each counted operator" in TEXT, found
    before = on_h200("first", 784)
    slower = [float(rows[784][name]["ms"]) / float(before[name]["ms"]) for name in ("local@triton", "eva@triton")]
    assert 1.2 < max(slower) <= 1.25  # a quarter


def on_h100(tokens: int, execution: str, dim: int = 192, dtype: str = "bf16") -> dict[str, Row]:
    """Layers of `dim` channels measured on an H100: name -> row."""
    setting, columns = (str(dim), str(tokens), execution, dtype), ("dim", "tokens", "execution", "dtype")
    return {row["name"]: row for row in read("h100.csv") if tuple(map(row.get, columns)) == setting}


def on_triton(name: str) -> str:
    """Name of a layer on the path "triton"."""
    return "@triton:".join(name.split(":")) if ":" in name else f"{name}@triton"


EXECUTIONS = {"eager": "eager", "cuda-graph": "graph"}
"""Execution -> title of its column."""


def h100() -> str:
    """Times and speed-ups on an H100, eager and without the host's time."""
    columns = [(tokens, execution) for tokens in (784, 3136) for execution in EXECUTIONS]
    lines = [["", *(f"{tokens}, {EXECUTIONS[execution]}" for tokens, execution in columns), "peak", "operators"]]
    for name, row in on_h100(784, "eager").items():
        cells = [gpu_cell(on_h100(*column)[name]) for column in columns]
        lines.append([f"`{name}`", *cells, f"{float(row['peak_ratio']):.2f}", row["operators"]])
    return markdown(lines)


def h100_wide() -> str:
    """Times and speed-ups of layers of 768 channels on an H100."""
    lines = [["", *EXECUTIONS.values(), "ratio of MACs"]]
    for name, row in on_h100(784, "eager", 768).items():
        cells = [gpu_cell(on_h100(784, execution, 768)[name]) for execution in EXECUTIONS]
        lines.append([f"`{name}`", *cells, f"{float(row['macs_ratio']):.2f}"])
    return markdown(lines)


def h100_models() -> str:
    """Training on an H100: images a second and the speed-up over timm's model."""
    rows = {(row["name"], row["execution"]): row for row in read("h100_models.csv")}
    lines = [["", *EXECUTIONS.values(), "peak (MiB)", "operators"]]
    for name in dict.fromkeys(name for name, _ in rows):
        found = [rows.get((name, execution)) for execution in EXECUTIONS]
        lines.append([f"`{name}`", *map(model_cell, found), found[0]["peak_mib"], found[0]["operators"]])
    return markdown(lines)


def kernels_alone() -> dict[tuple[str, str], dict[str, float]]:
    """The joint softmax alone on an H100: (tokens, mode) -> function -> milliseconds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in read("h100_kernels.csv"):
        found.setdefault((row["tokens"], row["mode"]), {})[row["function"]] = float(row["ms"])
    return found


def h100_kernels() -> str:
    """The joint softmax alone on an H100: milliseconds and launches."""
    columns, launches = kernels_alone(), {row["function"]: row["launches"] for row in read("h100_kernels.csv")}
    lines = [["", *(f"{tokens}, {mode}" for tokens, mode in columns), "launches"]]
    for name, count in launches.items():
        cells = [f"{found[name]:.3f}" if name in found else "" for found in columns.values()]
        lines.append([f"`{name}`", *cells, count])
    return markdown(lines)


def test_tables_of_an_h100():
    for shown in (h100(), h100_wide(), h100_models(), h100_kernels()):
        assert shown in BENCHMARKS, shown


def test_findings_on_an_h100():
    graphs = {tokens: on_h100(tokens, "cuda-graph") for tokens in (784, 3136)}

    def speedup(tokens: int, name: str) -> str:
        return f"{float(graphs[tokens][name]['speedup']):.2f}"

    def without_host(name: str) -> str:
        return "{:.2f} ms instead of {:.2f}".format(
            *(float(on_h100(784, execution)[name]["ms"]) for execution in ("cuda-graph", "eager"))
        )

    shares = [
        1 - float(row["ms"]) / float(on_h100(tokens, "eager")[name]["ms"])
        for tokens, rows in graphs.items()
        for name, row in rows.items()
    ]
    assert 0.64 <= max(shares) < 0.69  # up to two thirds
    assert f"EVA's layer takes {without_host('eva')}, and softmax attention's {without_host('softmax')}" in TEXT
    eva, kernel, lara = (speedup(3136, name) for name in ("eva", "eva@triton", "lara"))
    assert f"local attention is {speedup(3136, 'local')} times as fast as fused softmax attention and Performer" in TEXT
    assert f"with 64 samples {speedup(3136, 'performer:num_samples=64')} times" in TEXT
    shown = f"EVA is {eva} times as fast, and {kernel} times with Triton's kernels. LARA is {lara} times as fast, and"
    shown += f" {speedup(3136, 'lara@triton')} with them, and Performer, with 128 samples, {speedup(3136, 'performer')}"
    assert f"{shown} and {speedup(3136, 'performer@triton')}." in TEXT, shown
    others = [speedup(3136, name + path) for name in ("local", "lara", "performer") for path in ("", "@triton")]
    shown = "EVA at 3136 tokens is {} times as fast as softmax attention and {} times with Triton's kernels. For local"
    shown += " attention the ratios are {} and {}, for LARA {} and {}, for Performer {} and {}."
    assert shown.format(eva, kernel, *others) in TEXT, others
    faster = {name for name, row in graphs[784].items() if float(row["speedup"]) > 1}
    few = "performer@triton:num_samples=64"
    assert faster == {"local", "local@triton", "performer@triton", few}
    local, performer = (
        [speedup(784, name) for name in names] for names in (("local", "local@triton"), ("performer@triton", few))
    )
    shown = "local attention is {} times as fast, and {} with Triton's kernel.".format(*local)
    assert f"{shown} With the kernels Performer is faster too, {{}} times, and {{}} with 64".format(*performer) in TEXT

    def gains(*names: str) -> str:
        found = {
            f"{float(rows[name]['ms']) / float(rows[on_triton(name)]['ms']):.1f}"
            for rows in graphs.values()
            for name in names
        }
        return f"{' and '.join(sorted(found))} times"

    shown = f"layers of EVA {gains('eva')} as fast without the host, of local attention {gains('local')}"
    shown += f", of LARA {gains('lara')} and of Performer {gains('performer')} (784"
    assert shown in TEXT, shown
    of_lara = [float(on_h100(784, "eager")[name]["ms"]) for name in ("lara", "lara@triton")]
    assert f"LARA's layer is {of_lara[0] / of_lara[1]:.2f} times as fast at 784 tokens" in TEXT, of_lara
    single = {name: float(row["ms"]) for name, row in on_h100(784, "cuda-graph", dtype="fp32").items()}
    slower = [single[f"{name}@triton"] / single[name] for name in ("local", "eva")]
    assert "takes {:.2f} times as long with them, EVA {:.2f} times".format(*slower) in TEXT, slower
    taken = float(graphs[784]["eva@triton"]["ms"]) / float(graphs[784]["eva"]["ms"])
    assert taken == pytest.approx(2 / 3, abs=0.01)
    here, there = (
        {
            row["name"]: float(row["images_per_second"])
            for row in read(f"{gpu}_models.csv")
            if (row["size"], row.get("execution", "eager")) == ("224", "eager")
        }
        for gpu in ("h100", "h200")
    )
    ratio = f"{here['deit_tiny_p8:eva'] / there['deit_tiny_p8:eva']:.2f}"
    assert f"DeiT-Tiny/8 with EVA trains {ratio} times as fast here as on the H200's machine" in TEXT, ratio


def test_findings_on_kernels_alone_on_an_h100():
    def gains(mode: str, over: str) -> list[str]:
        found = {tokens: each for (tokens, other), each in kernels_alone().items() if other == mode}
        return [f"{each[over] / each['triton']:.1f}" for each in found.values()]

    forward, both = gains("forward", "torch"), gains("forward+backward", "torch")
    shown = f'Triton\'s kernel is {min(forward)} to {max(forward)} times as fast as "torch" forward, and {min(both)} to'
    assert f"{shown} {max(both)} times with the backward pass" in TEXT, shown
    forward, both = gains("forward", "SDPA"), gains("forward+backward", "SDPA")
    shown = f"Against SDPA it is {forward[0]}, {forward[1]} and {forward[2]} times as fast forward"
    assert f"{shown}, and {both[0]}, {both[1]} and {both[2]} times with the backward pass" in TEXT, (forward, both)


def test_findings_on_wide_layers_and_models_on_an_h100():
    wide = {execution: on_h100(784, execution, 768) for execution in EXECUTIONS}
    graph = {name: f"{float(row['speedup']):.2f}" for name, row in wide["cuda-graph"].items()}
    shown = f"local attention is {graph['local']} times as fast as softmax attention, and {graph['local@triton']} times"
    assert f"{shown} with Triton's kernel; EVA is {graph['eva']} and {graph['eva@triton']} times as fast" in TEXT
    narrow = on_h100(784, "cuda-graph")
    ratios = [float(row["speedup"]) / float(narrow[name]["speedup"]) for name, row in wide["cuda-graph"].items()]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the speed-ups at 192 channels" in TEXT, ratios
    few, lara = (graph[name] for name in ("performer@triton:num_samples=64", "lara@triton"))
    shown = f"Performer with 64 samples is {few} times as fast with Triton's kernels, LARA {lara} times."
    assert shown in TEXT, shown
    models = {(row["name"], row["execution"]): row for row in read("h100_models.csv")}
    eva = [models["deit_tiny_p8:eva", execution]["images_per_second"] for execution in EXECUTIONS]
    assert "DeiT-Tiny/8 with EVA trains {1} images a second instead of {0}".format(*eva) in TEXT, eva
    faster = {
        name for (name, execution), row in models.items() if execution == "cuda-graph" and float(row["speedup"]) > 1
    }
    above = {
        name: row["macs_ratio"]
        for name, row in [*((name, row) for (name, _), row in models.items()), *wide["cuda-graph"].items()]
        if name != "softmax" and float(row["speedup"]) > float(row["macs_ratio"])
    }
    few, wide_few = "pvtv2_b1:performer@triton:num_samples=64", "performer@triton:num_samples=64"
    expected = {
        few: "0.92",
        few.replace("@triton", ""): "0.92",
        "pvtv2_b1:lara@triton": "0.92",
        "pvtv2_b1:local": "0.97",
    }
    assert above == expected | {wide_few: "1.394"}
    shown = "those of Performer and local attention in PVT-v2-b1 (ratios 0.92 and 0.97), of LARA with the kernels there"
    assert f"{shown} (0.92), and of Performer with 64 samples at 768 channels (1.39)" in TEXT
    families = "deit_tiny_p8", "pvtv2_b1"
    few = "performer@triton:num_samples=64"
    assert faster == {f"{family}:{name}" for family in families for name in ("local", few)}

    def kernel(name: str) -> list[str]:
        return [models[f"{family}:{name}", "cuda-graph"]["speedup"] for family in families]

    with_host = models[f"deit_tiny_p8:{few}", "eager"]["speedup"]
    shown = f"Triton's kernels, {{}} times in DeiT-Tiny/8 ({with_host} times with the host) and {{}} times in PVT-v2-b1"
    assert shown.format(*kernel(few)) in TEXT, shown
    assert f"Performer (64 samples) trains {kernel(few)[0]} times as fast as timm's model" in TEXT
    shown = "EVA with Triton's kernels reaches {} of its speed in DeiT-Tiny/8 and {} in PVT-v2-b1, LARA {} and {}."
    assert shown.format(*kernel("eva@triton"), *kernel("lara@triton")) in TEXT
