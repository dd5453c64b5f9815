"""Tables and the figure of speed on the first page and in docs/speed.md, from the files in docs/data/.

python -m engine.reporting.speed_tables  # draws docs/figures/speed.png
"""

from collections.abc import Callable

from matplotlib.figure import Figure

from attention.__main__ import row as describe
from engine.config.papers import read_papers
from engine.reporting.plots import encode, in_style, label_ends, line_style, new_figure
from engine.reporting.result_tables import DATA, Column, read, table
from engine.runtime.files import write_file

TEN = ["softmax", "eva", "lara", "performer", "ra", "local", "nystrom", "combiner", "transformer_ls", "scatterbrain"]
"""Mechanisms of the first page: softmax attention, those of the papers, and their rivals in EVA's table 2."""

MODEL = "deit_tiny_p8"
"""Model of the top-1 on the first page."""

ON_CPU, ON_H100 = {"dtype": "fp32"}, {"dtype": "bf16", "dim": "192"}
TIMM = "timm:vit_tiny_patch16_224:patch_size=8"

LINES = {"EVA": "eva", "LARA": "lara", "Performer": "performer", "local windows": "local"}
"""Lines of the figure: label -> mechanism."""


def ratios(file: str, value: str = "speedup", **where: str) -> Column:
    """Returns ratios of a file; a tilde marks those that are too noisy to quote."""
    rows = read(file, **where)
    return {row["name"]: "~" * (row.get(f"{value}_noisy") == "True") + f"{float(row[value]):.2f}" for row in rows}


def relative_times(file: str, path: str = "", **where: str) -> Column:
    """Returns times relative to softmax attention of the mechanisms of the first page, noisy ones with a tilde."""
    rows = {row["name"]: row for row in read(file, **where)}
    found = {name: rows.get(f"{name}{path}" if name != "softmax" else name) for name in TEN}
    noisy = {"True": "~", "False": ""}
    return {name: f"{noisy[row['speedup_noisy']]}{1 / float(row['speedup']):.2f}" for name, row in found.items() if row}


def ten_mechanisms() -> str:
    """Cost of a layer at 784 tokens, relative times with the backward pass, and top-1 in the papers."""
    top1 = {paper.config: paper.top1 for paper in reversed(read_papers()) if paper.top1 and not paper.overrides}
    columns = {
        "MACs (M)": {name: describe(name)["MACs (M)"] for name in TEN},
        "time, H100": relative_times("h100.csv", "@triton", tokens="784", execution="eager", **ON_H100),
        "time, CPU core": relative_times("efficiency.csv", size="784", **ON_CPU),
        "ImageNet top-1 (%), printed": {
            name: f"{top1[config]:.2f}" for name in TEN if (config := f"{MODEL}/{name}.yaml") in top1
        },
    }
    return table(columns, TEN)


def every_mechanism() -> str:
    """Speed-ups of layers on a CPU core and on an H200, the fastest at 784 tokens on the core first."""
    cpu = {size: ratios("efficiency.csv", size=size, **ON_CPU) for size in ("196", "784", "3136")}
    gpu = {n: ratios("h200.csv", version="second", execution="eager", tokens=n) for n in ("784", "3136")}
    columns = {
        "ratio of MACs": ratios("efficiency.csv", "macs_ratio", size="784", **ON_CPU),
        **{f"core, {size}": column for size, column in cpu.items()},
        **{f"H200, {tokens}": column for tokens, column in gpu.items()},
    }
    return table(columns, sorted(cpu["784"], key=lambda name: -float(cpu["784"][name].strip("~"))))


def layers_on_h100() -> str:
    """Speed-ups of layers on an H100, eager and without the host's time."""
    columns = {
        f"{tokens}, {title}": ratios("h100.csv", tokens=tokens, execution=execution, **ON_H100)
        for tokens in ("784", "3136")
        for execution, title in (("eager", "eager"), ("cuda-graph", "graph"))
    }
    return table(columns | {"peak": ratios("h100.csv", "peak_ratio", tokens="784", execution="eager", **ON_H100)})


def models_on_h100() -> str:
    """Images a second in training on an H100, and the speed-up over timm's model."""

    def cells(execution: str) -> Column:
        speedups, rows = ratios("h100_models.csv", execution=execution), read("h100_models.csv", execution=execution)
        return {row["name"]: f"{row['images_per_second']} ({speedups[row['name']]})" for row in rows}

    columns = {"eager": cells("eager"), "graph": cells("cuda-graph")}
    columns["ratio of MACs"] = ratios("h100_models.csv", "macs_ratio", execution="eager")
    columns["peak (MiB)"] = {row["name"]: row["peak_mib"] for row in read("h100_models.csv", execution="eager")}
    return table(columns, first="model")


@in_style
def speed_against_tokens() -> Figure:
    """Draws the speed-up over fused softmax attention against the number of tokens, on a CPU core and on an H100."""
    figure = new_figure("Speed of a layer in training. Above the line it is faster than fused softmax attention.", 2.6)
    core, gpu = figure.subplots(1, 2, sharey=True)
    places = {
        core: ("CPU core, fp32", "", [("efficiency.csv", {"size": n} | ON_CPU) for n in ("196", "784", "3136")]),
        gpu: (
            "H100, bf16, fused kernels, eager",
            "@triton",
            [("h100.csv", {"tokens": n, "execution": "eager"} | ON_H100) for n in ("784", "3136")],
        ),
    }
    for axes, (title, path, sources) in places.items():
        sizes = [int(where.get("size") or where["tokens"]) for _, where in sources]
        found = [{row["name"]: float(row["speedup"]) for row in read(file, **where)} for file, where in sources]
        axes.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axes.axhline(1, color="black", linewidth=0.8)
        lines = [
            axes.plot(sizes, [speedups[name + path] for speedups in found], **line_style(number + 1))[0]
            for number, name in enumerate(LINES.values())
        ]
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_yticks((0.25, 0.5, 1, 2, 4, 8), ("¼", "½", "softmax", "2x", "4x", "8x"))
        axes.minorticks_off()
        axes.grid()
        label_ends(axes, lines, [*LINES])
    return figure


SPEED_TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"ten mechanisms": ten_mechanisms},
    "docs/speed.md": {
        "models on an H100": models_on_h100,
        "layers on an H100": layers_on_h100,
        "every mechanism": every_mechanism,
    },
}
"""Page -> its tables: name -> function that returns the text."""

if __name__ == "__main__":
    write_file(DATA.parent / "figures/speed.png", encode(speed_against_tokens()))
