"""Tables of result pages, from the files in docs/data/.

A column is a mapping from the name of a row to its cell. Values of several seeds are a `Series` for each row.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean

from attention.option_tables import markdown_table
from engine.reporting.tables import Spread, as_cells, compact_table, holm, plus_minus, spread, verdict
from engine.runtime.reading import read_csv

DATA = Path(__file__).parents[2] / "docs/data"

Column = Mapping[str, str]
"""Name of a row -> text of its cell."""

Series = dict[str, float]
"""Seed -> value."""


def read(file: str, **where: str) -> list[dict[str, str]]:
    """Returns the rows of a file whose columns have these values."""
    return [row for row in read_csv(DATA / file) if all(row[key] == value for key, value in where.items())]


def table(columns: Mapping[str, Column], names: Iterable[str] | None = None) -> str:
    """Formats columns, title -> cells, as a table in Markdown; cells that a column lacks are empty.

    Args:
        names: rows in their order; those of the first column by default.
    """
    rows = [*(names or next(iter(columns.values())))]
    lines = [[f"`{name}`", *(column.get(name, "") for column in columns.values())] for name in rows]
    return markdown_table(["mechanism", *columns], lines)


def series(
    file: str, value: str = "top1", seed: str = "train.seed", name: str = "attention", **where: str
) -> dict[str, Series]:
    """Returns values by seed for every row of a table; empty values are left out."""
    found: dict[str, Series] = {}
    for row in read(file, **where):
        if row[value]:
            found.setdefault(row[name], {})[row[seed]] = float(row[value])
    return found


def texts(file: str, value: str, form: str = "", **where: str) -> Column:
    """Returns the cells of a column of the file as they are, or formatted as numbers."""
    return {row["attention"]: f"{float(row[value]):{form}}" if form else row[value] for row in read(file, **where)}


def means(found: Mapping[str, Series]) -> Column:
    """Returns the means and standard deviations over seeds."""
    return {name: plus_minus(spread(values.values()), ".2f") for name, values in found.items()}


def averages(found: Mapping[str, Series], form: str) -> Column:
    """Returns the means over seeds alone."""
    return {name: f"{mean(values.values()):{form}}" for name, values in found.items()}


def difference(values: Series, others: Series, step: float = 0.0) -> Spread | None:
    """Returns the spread of the differences between values of the same seed; `step`: see `Spread`."""
    return spread((values[seed] - others[seed] for seed in values if seed in others), step)


def less(found: Mapping[str, Series], others: Mapping[str, Series], step: float = 0.0) -> Column:
    """Returns the differences to the row of the same name, each with its verdict."""
    spreads = holm({name: difference(found[name], others[name], step) for name in found if name in others})
    return {name: plus_minus(each, "+.2f") + verdict(each) for name, each in spreads.items()}


def less_one(found: Mapping[str, Series], baseline: str, step: float = 0.0) -> Column:
    """Returns the differences of all other rows to one row, each with its verdict."""
    return less({n: x for n, x in found.items() if n != baseline}, dict.fromkeys(found, found[baseline]), step)


def best_first(found: Mapping[str, Series]) -> list[str]:
    return sorted(found, key=lambda name: -mean(found[name].values()))


def over_seeds(file: str) -> str:
    """Top-1 of every setting over its seeds, and its difference to the first."""
    top1 = series(file)
    return table({"top-1 (%)": means(top1), "difference to softmax": less_one(top1, next(iter(top1)))})


def without_and_with(file: str, key: str, values: tuple[str, str], titles: tuple[str, str], other: str = "") -> str:
    """Top-1 for both values of a column, the difference of the second to the first, and a value of the file.

    Settings without either value are in the first column.
    """
    first, second = (series(file, **{key: value}) for value in values)
    first |= series(file, **{key: ""})
    columns: dict[str, Column] = {titles[0]: means(first), titles[1]: means(second), "difference": less(second, first)}
    if other:
        columns["L1 of masked pixels"] = texts(file, other)
    return table(columns)


def replaced() -> str:
    """Top-1 and error of every mechanism in the place of softmax attention."""

    def both(name: str, form: str) -> Column:
        own, std = (texts("replace.csv", column, form) for column in (name, f"{name}_std"))
        return {row: f"{own[row]} ± {std[row]}" for row in own}

    top1, macs = (texts("replace.csv", column, ".9g") for column in ("top1", "macs"))
    columns = {
        "top-1 (%)": both("top1", ".2f"),
        "error of attended values": both("error", ".3f"),
        "MACs (M)": {name: f"{float(count) / 1e6:.1f}" for name, count in macs.items()},
    }
    return table(columns, sorted(top1, key=lambda name: -float(top1[name])))


def transferred(stage: str) -> dict[str, Series]:
    """Top-1 by seed of replaced models; `stage` is a column's prefix."""
    return series("transfer.csv", f"{stage}top1", "seed")


def aligned() -> str:
    """Top-1 in every stage, the best aligned first, the difference at the end, and errors of outputs."""
    tuned = transferred("tuned_")
    columns = {
        "replaced: top-1 (%)": means(transferred("")),
        "aligned: top-1 (%)": means(transferred("aligned_")),
        "fine-tuned: top-1 (%)": means(tuned),
        "difference to softmax": less_one(tuned, "softmax", 0.01),  # step of a top-1 of 10,000 images
        "aligned: error": averages(series("transfer.csv", "aligned_output_error", "seed"), ".3f"),
    }
    return table(columns, best_first(transferred("aligned_")))


def certificates() -> str:
    """Fall of top-1 and changed predictions of aligned models, median bounds of samples, and their coverage."""
    of = partial(series, "certificate.csv", seed="seed", model="fashion_mnist")
    fall = of("fall", stage="aligned")
    columns = {"fall (points)": averages(fall, ".2f"), "changed (%)": averages(of("rate", stage="aligned"), ".2f")}
    for size in (100, 300, 1000):
        columns[f"bound: {size:,} images"] = averages(of(f"bound_{size}", stage="aligned"), ".1f")
    for stage in ("aligned", "replaced"):
        least = {name: f"{min(values.values()) / 10:.1f}" for name, values in of("covered", stage=stage).items()}
        columns[f"{stage}: covered (%)"] = least
    return table(columns, reversed(best_first(fall)))


def scratch() -> str:
    """Top-1 after an epoch from scratch, and after alignment and an epoch in a trained model."""
    own, tuned = series("scratch_epoch.csv"), transferred("tuned_")
    columns = {
        "from scratch: top-1 (%)": means(own),
        "aligned and fine-tuned: top-1 (%)": means(tuned),
        "difference": less(tuned, own),
        "minutes from scratch": averages(series("scratch_epoch.csv", "minutes"), ".0f"),
    }
    return table(columns, own)


def by_tokens(file: str) -> dict[str, Column]:
    """Top-1 on two grids and the differences to softmax attention, the best on the smaller grid first."""
    small, large = (series(file, seed="seed", name="name", tokens=n) for n in ("196", "784"))
    return {
        "196 tokens (%)": means({name: small[name] for name in best_first(small)}),
        "difference at 196": less_one(small, "softmax"),
        "784 tokens (%)": means(large),
        "difference at 784": less_one(large, "softmax"),
    }


def at_equal_macs() -> str:
    """Top-1 at equal multiply-accumulates on two grids, and of the models of the smaller grid on the larger one."""
    tested = means(series("resolutions.csv", seed="seed", name="name", tokens="784"))
    return table(by_tokens("equal_macs.csv") | {"trained at 196, tested at 784 (%)": tested})


def at_budgets(file: str, *trainings: str) -> str:
    """Top-1 at some sizes of models that were trained for one size, and of models that were trained for all."""
    own, *shared = (series(file, seed="seed", training=kind) for kind in ("own", *trainings))
    columns: dict[str, Column] = {"a model for each (%)": means(own)}
    for kind, found in zip(trainings, shared, strict=True):
        columns |= {f"one, {kind} (%)": means(found), f"difference, {kind}": less(found, own)}
    return table(columns)


def tasks() -> str:
    """Top-1 on the tasks of long range, with the verdict on the difference to softmax attention."""
    columns: dict[str, dict[str, str]] = {}
    files = {"Pathfinder": "pathfinder_ablation", "copy task": "copy_task", "ListOps": "listops", "Image": "lra_image"}
    for title, file in files.items():
        found = {re.findall(r"name: (\w+)", name)[0]: values for name, values in series(f"{file}.csv").items()}
        differences = holm({name: difference(x, found["softmax"]) for name, x in found.items() if name != "softmax"})
        columns[title] = {name: cell + verdict(differences.get(name)) for name, cell in means(found).items()}
    return table(columns, dict.fromkeys(name for column in columns.values() for name in column))


def bias(file: str) -> str:
    """Error and squared bias, means over layers, and the share of bias in each; in stages, if there are any."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in read(file):
        key = row["attention"], row["options"], row.get("aligned_steps", "0")
        found.setdefault(key, []).append((float(row["error"]), float(row["squared_bias"])))
    lines = []
    for (name, options, steps), pairs in found.items():
        error, squared = map(mean, zip(*pairs, strict=True))
        shares = [f"{max(0, 100 * part / whole):.0f}" for whole, part in pairs]
        label = f"`{name.split(',')[0].split(': ')[-1]}`" + ", aligned" * (steps != "0")
        lines.append([label, options, f"{error:.4f}", f"{abs(squared):.4f}", *shares])
    titles = [f"bias, layer {layer} (%)" for layer in range(3)]
    return markdown_table(["mechanism", "options", "error", "squared bias", *titles], lines)


def searched() -> str:
    """Assignments of the lowest loss within each budget, a share of the model's multiply-accumulates."""
    rows, lines = sorted(read("search.csv"), key=lambda row: float(row["loss"])), []
    for budget in ("0.68", "0.72", "0.8", "0.85", "0.9"):
        best = next(row for row in rows if float(row["macs_share"]) <= float(budget))
        lines.append([budget, ", ".join(f"`{best[f'layer {n}']}`" for n in range(3)), best["top1"]])
    return markdown_table(["budget", "layers 0, 1, 2", "top-1 (%)"], lines)


def routed() -> str:
    """Forms of sparse-linear attention: top-1 after two alignments and fine-tuning, and with small blocks."""
    of = partial(series, "sla_router.csv", seed="seed", name="form")
    large, small = {"block_size": "7"}, {"block_size": "2", "topk": "2"}
    columns = {
        "first alignment": of("aligned_top1", alignments="1", **large),
        "second": of("aligned_top1", alignments="2", **large),
        "fine-tuned": of("tuned_top1", alignments="2", **large),
        "2 of 49 blocks: first": of("aligned_top1", alignments="1", **small),
        "2 of 49 blocks: second": of("aligned_top1", alignments="2", **small),
    }
    return table({title: means(column) for title, column in columns.items()})


def converted() -> str:
    """The original model, and those of two budgets."""
    rows = read("convert.csv", budget="ms=35") + read("convert.csv", budget="macs=0.7")[1:]
    return compact_table([{"budget": row["budget"]} | as_cells(row) for row in rows])


PRETRAINED = ("scratch", "pretrained"), ("from scratch (%)", "pre-trained (%)")

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/results_scratch.md": {
        "from scratch": partial(over_seeds, "fashion_mnist.csv"),
        "equal MACs": at_equal_macs,
        "near equal MACs": lambda: table(by_tokens("equal_macs_2025.csv")),
        "budgets": partial(at_budgets, "budgets.csv", "5 epochs", "15 epochs"),
        "four sizes": partial(at_budgets, "fashion_budgets.csv", "plain", "distilled"),
        "local term": partial(
            without_and_with, "local_term.csv", "local", ("false", "true"), ("without (%)", "with the local term (%)")
        ),
        "tasks of long range": tasks,
        "moving digits": partial(over_seeds, "moving_digits.csv"),
        "pre-training": partial(without_and_with, "simmim.csv", "start", *PRETRAINED, "masked_l1"),
        "survey": partial(without_and_with, "survey.csv", "start", *PRETRAINED, "masked_l1"),
    },
    "docs/results_trained.md": {
        "replaced": replaced,
        "aligned": aligned,
        "router": routed,
        "certificates": certificates,
        "from scratch for the same time": scratch,
        "searched": searched,
    },
    "docs/finetuning.md": {"converted": converted},
    "docs/results_error.md": {
        "bias": partial(bias, "bias.csv"),
        "bias after alignment": partial(bias, "bias_aligned.csv"),
    },
}
"""Page -> its tables: name -> function that returns the text."""
