"""Tables and figures of speed on the first page, in docs/speed.md and in docs/integration.md, from docs/data/.

python -m engine.reporting.speed_tables  # draws docs/figures/speed.png and high_resolution.png
"""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention.__main__ import row as describe
from attention.option_tables import markdown_table
from engine.config.papers import read_papers
from engine.reporting.plots import PAGE, encode, in_style, line_style, name_lines, new_figure
from engine.reporting.result_tables import DATA, Column, read, table
from engine.runtime.files import write_file

SHOWN = ["softmax", "eva", "lara", "performer", "ra", "local", "scatterbrain"]
SHOWN += ["nystrom", "monarch", "agent", "linformer", "transformer_ls"]
"""Mechanisms of the first page: softmax attention, those of the papers, and rivals that lead a table: with a trained
model's weights (Nystrom, monarch), aligned (agent), at equal multiply-accumulates (Linformer), on ImageNet.
"""

MODEL = "deit_tiny_p8"
"""Model of the top-1 on the first page."""

ON_CPU: dict[str, Any] = {"dtype": "fp32"}

TRAINING = "../../engine/training/gpu_training.csv"
"""File of `python -m bench.gpu_run`. Rows with a note are of another run, and count as noisy."""

TRAINED = {
    "tiny16": "DeiT-Tiny/16",
    "tiny8": "DeiT-Tiny/8",
    "tiny4": "DeiT-Tiny/4",
    "small16": "DeiT-Small/16",
    "small8": "DeiT-Small/8",
    "pvtv2_b1": "PVT-v2-b1",
}
"""Model in `TRAINING` -> its name."""

LINES = {"EVA": "eva", "LARA": "lara", "Performer": "performer", "local windows": "local"}
"""Lines of the figure for a CPU: label -> mechanism."""

HOSTS = {"vit_small_patch16_dinov3": "ViT-S/16", "vit_base_patch14_dinov2": "ViT-B/14"}
"""Host of high_resolution.csv -> its name."""

OURS = {"softmax": "softmax", "EVA": "eva", "LARA": "lara", "local windows": "local"}
OURS |= {"Performer (64)": "performer:num_samples=64"}
"""Title -> network in `TRAINING`."""


def ratios(file: str, value: str = "speedup", power: int = 1, **where: str) -> Column:
    """Returns ratios of a file, or their inverses; a tilde marks those that are too noisy to quote."""
    rows = [row for row in read(file, **where) if row[value]]
    marks = {row["name"]: "~" * (row.get(f"{value}_noisy") == "True") for row in rows}
    return {row["name"]: f"{marks[row['name']]}{float(row[value]) ** power:.2f}" for row in rows}


def shown_mechanisms() -> str:
    """Cost of a layer at 784 tokens, relative times with the backward pass, and top-1 in the papers."""
    top1 = {paper.config: paper.top1 for paper in reversed(read_papers()) if paper.top1 and not paper.overrides}
    updates = trained("tiny8")
    columns = {
        "MACs (M)": {name: describe(name)["MACs (M)"] for name in SHOWN},
        "training, H100": {name: over(updates, "softmax", name) for name in SHOWN},
        "time, CPU core": ratios("efficiency.csv", power=-1, size="784", **ON_CPU),
        "ImageNet top-1 (%), printed": {
            name: f"{top1[config]:.2f}" for name in SHOWN if (config := f"{MODEL}/{name}.yaml") in top1
        },
    }
    return table(columns, SHOWN)


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


def trained(model: str) -> dict[str, dict[str, str]]:
    """Returns rows of training by the name of a network: ours, timm's model as it is ("timm"), and its fastest row.

    timm's models were timed before and after ours, and the faster time counts.
    """
    rows = sorted(
        (row for row in read(TRAINING, model=model) if row["seconds"]), key=lambda row: float(row["images_per_second"])
    )
    ours = {row["name"]: row for row in rows if row["name"] != "timm"}
    of_timm = {row["execution"]: row for row in rows if row["name"] == "timm"}
    best = {"best": max(of_timm.values(), key=lambda row: float(row["images_per_second"]))} if of_timm else {}
    return ({"timm": of_timm["eager"]} if "eager" in of_timm else {}) | best | ours


def per_second(row: dict[str, str], form: str = ",.0f") -> str:
    """Formats images a second, with a tilde if they are noisy."""
    return f"{'~' * (row['seconds_noisy'] == 'True')}{float(row['images_per_second']):{form}}"


def over(rows: Mapping[str, dict[str, str]], name: str, other: str) -> str:
    """Formats the speed-up of a row over another; "" without them."""
    if not {name, other} <= rows.keys():
        return ""
    pair = rows[name], rows[other]
    noisy = "~" * ("True" in [row["seconds_noisy"] for row in pair])
    return f"{noisy}{float(pair[0]['images_per_second']) / float(pair[1]['images_per_second']):.2f}"


def training_on_gpu() -> str:
    """Images a second in training, and in brackets the speed-up over the fastest execution of timm's model."""

    def cell(rows: Mapping[str, dict[str, str]], name: str) -> str:
        ratio = over(rows, name, "best")
        return per_second(rows[name]) + (f" ({ratio})" if ratio else "") if name in rows else ""

    columns = {"timm, eager": "timm", "timm, fastest": "best", **OURS}
    models = {title: rows for model, title in TRAINED.items() if (rows := trained(model))}
    lines = [
        [title, rows["best"]["tokens"], *(cell(rows, x) for x in columns.values())] for title, rows in models.items()
    ]
    return markdown_table(["model", "tokens", *columns], lines)


def hours_on_imagenet() -> str:
    """Hours of 300 epochs of ImageNet-1k's 1,281,167 training images, derived from `TRAINING`'s images a second."""
    models = {title: rows for model, title in TRAINED.items() if (rows := trained(model))}
    ours = {title: name for title, name in OURS.items() if any(name in rows for rows in models.values())}
    lines = []
    for title, rows in models.items():
        hours = {name: 300 * 1_281_167 / float(row["images_per_second"]) / 3600 for name, row in rows.items()}
        lines.append([title, *(f"{hours[name]:.0f}" if name in hours else "" for name in ours.values())])
    return markdown_table(["model", *ours], lines)


def gpu_in_short() -> str:
    """Sentences on the training of DeiT-Tiny/8 on a GPU."""
    rows = trained("tiny8")

    def ratios(other: str) -> str:
        found = {title: over(rows, name, other) for title, name in OURS.items() if name != other}
        return ", ".join(f"{title} {ratio}" for title, ratio in found.items() if ratio)

    texts = {
        "**Training of DeiT-Tiny/8 on an H100**, times the speed of timm's model compiled and in a CUDA graph": "best",
        "**Attention's share** of that, over softmax attention in our model, compiled and in a graph too": "softmax",
    }
    lines = [f"- {text}: {ratios(other)}." for text, other in texts.items()]
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


@in_style
def speed_against_tokens() -> Figure:
    """Draws images a second of DeiT-Tiny in training on a GPU, and speed-ups of a layer on a CPU core."""
    figure = new_figure("Speed of training against the number of tokens", 2.8)
    gpu, core = figure.subplots(1, 2)
    models = [rows for model in TRAINED if "tiny" in model and (rows := trained(model))]
    images = {
        int(next(iter(rows.values()))["tokens"]): {name: float(row["images_per_second"]) for name, row in rows.items()}
        for rows in models
    }
    gpu.set(title="DeiT-Tiny on an H100, bf16: images/s", xlabel="tokens", xscale="log", yscale="log")
    draw(gpu, {"timm's fastest": "best", **OURS}, images, {n: f"{n:,}" for n in (300, 1000, 3000, 10000)})
    speedups = {
        size: {row["name"]: float(row["speedup"]) for row in read("efficiency.csv", size=str(size), **ON_CPU)}
        for size in (196, 784, 3136)
    }
    core.set(title="Layer on a CPU core, fp32: speed-up over softmax", xlabel="tokens", xscale="log", yscale="log")
    core.axhline(1, color="black", linewidth=0.8)
    draw(core, LINES, speedups, {0.5: "½", 1: "1", 2: "2", 4: "4", 8: "8"}, first=2)
    return figure


def draw(
    axes: Axes,
    lines: Mapping[str, str],
    values: Mapping[int, Mapping[str, float]],
    ticks: Mapping[float, str],
    first: int = 0,
) -> None:
    """Draws a line for each label over the sizes that have its value, if there are two, with its name beside.

    Args:
        values: size -> name -> value. ticks: value -> its text. first: number of the first line's style.
    """
    drawn = {}
    for number, (label, name) in enumerate(lines.items()):
        sizes = sorted(size for size, found in values.items() if name in found)
        if len(sizes) > 1:
            style: dict[str, Any] = {**line_style(first + number)}
            drawn[label] = axes.plot(sizes, [values[size][name] for size in sizes], **style)[0]
    axes.set_xticks([*values], [f"{size:,}" for size in values])
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.minorticks_off()
    axes.grid()
    name_lines(axes, drawn)


def by_case(cell: Callable[[dict[str, str]], str]) -> str:
    """Formats rows of high_resolution.csv: a line for each attention, a column for each host, size and mode."""
    columns: dict[str, dict[str, str]] = {}
    for row in read("high_resolution.csv"):
        host, _, attention = row["name"].partition(":")
        title = f"{HOSTS[host]}, {row['size']}" + ", training" * (row["mode"] != "inference")
        columns.setdefault(title, {})[attention] = cell(row)
    return f"{table(columns)}\n\nOne core of an {row['device']}, torch {row['torch']}, timm {row['timm']}."


def speed(row: dict[str, str]) -> str:
    """Formats images a second of a host as it is; for other attention the speed-up, and the ratio of MACs."""
    if row["name"] == row["baseline"]:
        return f"{per_second(row, '.3g')} images/s"
    return f"{'~' * (row['speedup_noisy'] == 'True')}{float(row['speedup']):.2f} ({float(row['macs_ratio']):.2f})"


@in_style
def speed_at_high_resolution() -> Figure:
    """Draws images a second of ViT-S/16 in inference, with one kind of attention, against the number of tokens."""
    figure = new_figure("ViT-S/16 on a CPU core, fp32: images/s", 2.6, PAGE / 2)
    axes, values = figure.subplots(), dict[int, dict[str, float]]()
    for row in read("high_resolution.csv", mode="inference"):
        host, _, attention = row["name"].partition(":")
        if HOSTS[host] == "ViT-S/16" and "+" not in attention:
            height, _, width = row["size"].partition("x")
            tokens = int(height) * int(width or height) // 16**2
            values.setdefault(tokens, {})[attention.partition(":")[0]] = float(row["images_per_second"])
    axes.set(xlabel="tokens", xscale="log", yscale="log")
    lines = {"softmax": "softmax", **LINES, "linear": "linear", "agents": "agent"}
    draw(axes, lines, values, {x: f"{x:g}" for x in (0.05, 0.1, 0.2, 0.5, 1, 2)})
    return figure


OF_HOSTS: dict[str, Callable[[], str]] = {
    "speed at high resolution": partial(by_case, speed),
    "memory at high resolution": partial(by_case, lambda row: f"{int(row['peak_bytes']) / 2**20:,.0f}"),
}
"""Tables of docs/integration.md."""

SPEED_TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"mechanisms": shown_mechanisms},
    "docs/reproducing.md": {"hours on ImageNet": hours_on_imagenet},
    "docs/speed.md": {
        "GPU in short": gpu_in_short,
        "training on a GPU": training_on_gpu,
        "every mechanism": every_mechanism,
    },
}
"""Page -> its tables: name -> function that returns the text."""

if __name__ == "__main__":
    write_file(DATA.parent / "figures/speed.png", encode(speed_against_tokens()))
    write_file(DATA.parent / "figures/high_resolution.png", encode(speed_at_high_resolution()))
