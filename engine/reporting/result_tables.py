"""Tables of result pages, from the files in docs/data/.

A column is a mapping from the name of a row to its cell. Values of several seeds are a `Series` for each row.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean

from engine.reporting.tables import Spread, markdown_table, plus_minus, spread, verdict
from engine.runtime.reading import read_csv

DATA = Path(__file__).parents[2] / "docs/data"

Column = Mapping[str, str]
"""Name of a row -> text of its cell."""

Series = dict[str, float]
"""Seed -> value."""

ONE_IMAGE = 0.01
"""Step of a top-1 of 10,000 images, in percent."""


def read(file: str, **where: str) -> list[dict[str, str]]:
    """Returns the rows of a file whose columns have these values."""
    return [row for row in read_csv(DATA / file) if all(row[key] == value for key, value in where.items())]


def table(columns: Mapping[str, Column], names: Iterable[str] | None = None, first: str = "") -> str:
    """Formats columns, title -> cells, as a table in Markdown; cells that a column lacks are empty.

    Args:
        names: rows in their order; those of the first column by default. first: title of the column of names.
    """
    rows = [*(names or next(iter(columns.values())))]
    lines = [[f"`{name}`", *(column.get(name, "") for column in columns.values())] for name in rows]
    return markdown_table([first, *columns], lines)


def series(
    file: str, value: str = "top1", seed: str = "train.seed", name: str = "attention", **where: str
) -> dict[str, Series]:
    """Returns values by seed for every row of a table; empty values are left out."""
    found: dict[str, Series] = {}
    for row in read(file, **where):
        if row[value]:
            found.setdefault(row[name], {})[row[seed]] = float(row[value])
    return found


def texts(file: str, value: str, form: str = "", name: str = "attention", **where: str) -> Column:
    """Returns the cells of a column of the file as they are, or formatted as numbers."""
    return {row[name]: f"{float(row[value]):{form}}" if form else row[value] for row in read(file, **where)}


def means(found: Mapping[str, Series], form: str = ".2f") -> Column:
    """Returns the means and standard deviations over seeds."""
    return {name: plus_minus(spread(values.values()), form) for name, values in found.items()}


def averages(found: Mapping[str, Series], form: str) -> Column:
    """Returns the means over seeds alone."""
    return {name: f"{mean(values.values()):{form}}" for name, values in found.items()}


def difference(values: Series, others: Series, step: float = 0.0) -> Spread | None:
    """Returns the spread of the differences between values of the same seed; `step`: see `Spread`."""
    return spread((values[seed] - others[seed] for seed in values if seed in others), step)


def less(found: Mapping[str, Series], others: Mapping[str, Series], step: float = 0.0) -> Column:
    """Returns the differences to the row of the same name, each with its verdict."""
    return {name: _signed(difference(found[name], others[name], step)) for name in found if name in others}


def less_one(found: Mapping[str, Series], baseline: str, step: float = 0.0) -> Column:
    """Returns the differences of all other rows to one row, each with its verdict."""
    return less({n: x for n, x in found.items() if n != baseline}, dict.fromkeys(found, found[baseline]), step)


def best_first(found: Mapping[str, Series]) -> list[str]:
    return sorted(found, key=lambda name: -mean(found[name].values()))


def over_seeds(file: str, title: str = "", other: str = "", of: Callable[[float], float] = float) -> str:
    """Top-1 of every setting over its seeds, its difference to the first, and the mean of another value."""
    top1 = series(file)
    columns = {
        "top-1 (%)": means(top1),
        "of seeds 0, 1, 2": {n: ", ".join(f"{x[seed]:.2f}" for seed in sorted(x)) for n, x in top1.items()},
        "difference to softmax": less_one(top1, next(iter(top1))),
    }
    if title:
        values = series(file, other)
        columns[title] = means({name: {seed: of(y) for seed, y in x.items()} for name, x in values.items()})
    return table(columns)


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
    untrained = texts("replace.csv", "untrained_parameters", ",.0f")
    columns = {
        "options": texts("replace.csv", "options"),
        "untrained parameters": {name: text for name, text in untrained.items() if text != "0"},
        "top-1 (%)": both("top1", ".2f"),
        "change": texts("replace.csv", "change", "+.2f"),
        "error of attended values": both("error", ".3f"),
        "MACs (M)": {name: f"{float(count) / 1e6:.1f}" for name, count in macs.items()},
    }
    return table(columns, sorted(top1, key=lambda name: -float(top1[name])))


def transferred(file: str, stage: str) -> dict[str, Series]:
    """Top-1 by seed of a file of replaced models; `stage` is a column's prefix."""
    return series(file, f"{stage}top1", "seed")


def aligned(file: str) -> str:
    """Top-1 in every stage, the best aligned first, the difference at the end, errors of outputs, and seconds."""
    tuned = transferred(file, "tuned_")
    columns = {
        "options": texts(file, "options"),
        "replaced: top-1 (%)": means(transferred(file, "")),
        "aligned: top-1 (%)": means(transferred(file, "aligned_")),
        "fine-tuned: top-1 (%)": means(tuned),
        "difference": less_one(tuned, "softmax", ONE_IMAGE),
        "replaced: error": averages(series(file, "output_error", "seed"), ".3f"),
        "aligned: error": averages(series(file, "aligned_output_error", "seed"), ".3f"),
        "seconds": {"softmax": "0", **averages(series(file, "aligned_seconds", "seed"), ".0f")},
    }
    return table(columns, best_first(transferred(file, "aligned_")))


def hybrids() -> str:
    """Top-1 of mechanisms in all layers, and with softmax attention in the first one."""
    every, first = "transfer.csv", "transfer_hybrids.csv"
    tuned, own = transferred(first, "tuned_"), transferred(every, "tuned_")
    columns = {
        "everywhere: aligned (%)": means(transferred(every, "aligned_")),
        "everywhere: fine-tuned (%)": means(own),
        "softmax first: aligned (%)": means(transferred(first, "aligned_")),
        "softmax first: fine-tuned (%)": means(tuned),
        "difference to everywhere": less(tuned, own, ONE_IMAGE),
        "difference to softmax": less(tuned, dict.fromkeys(tuned, own["softmax"]), ONE_IMAGE),
    }
    return table(columns, best_first(transferred(first, "aligned_")))


def scratch() -> str:
    """Top-1 after an epoch from scratch, and after alignment and an epoch in a trained model."""
    own, tuned = series("scratch_epoch.csv"), transferred("transfer.csv", "tuned_")
    columns = {
        "from scratch: top-1 (%)": means(own),
        "aligned and fine-tuned: top-1 (%)": means(tuned),
        "difference": less(tuned, own),
        "minutes from scratch": averages(series("scratch_epoch.csv", "minutes"), ".0f"),
    }
    return table(columns, own)


def equal_macs(tokens: str) -> dict[str, Series]:
    """Top-1 by seed at equal multiply-accumulates; runs at 196 tokens are those of one machine."""
    where = {"processor": "xeon"} if tokens == "196" else {}
    return series("equal_macs.csv", seed="seed", name="name", tokens=tokens, **where)


def equal(tokens: str, title: str, elsewhere: Mapping[str, Series]) -> str:
    """Top-1 at equal multiply-accumulates, best first, and top-1 elsewhere."""
    top1, cells = equal_macs(tokens), partial(texts, "equal_macs.csv", name="name", tokens=tokens)
    columns = {
        "size": cells("size"),
        "MACs of a token": cells("token_macs"),
        "top-1 (%)": means(top1),
        "difference to softmax": less_one(top1, "softmax"),
        title: means(elsewhere),
    }
    return table(columns, best_first(top1))


def from_scratch() -> dict[str, Series]:
    """Mechanism -> top-1 by seed in the table from scratch; EVA at its first size."""
    found: dict[str, Series] = {}
    for name, values in series("fashion_mnist.csv").items():
        if "window_size: 2" not in name and "num_landmarks: 1}" not in name:
            found[name.strip("{}").split(",")[0].removeprefix("name: ")] = values
    return found


def resolutions() -> str:
    """Top-1 of models of 196 tokens at other resolutions, the best at 784 tokens first."""
    by_tokens = {n: series("resolutions.csv", seed="seed", name="name", tokens=n) for n in ("100", "441", "784")}
    own, trained = equal_macs("196"), equal_macs("784")
    columns = {
        **{f"{n} tokens (%)": means(own if n == "196" else by_tokens[n]) for n in ("100", "196", "441", "784")},
        "784 less 196": less(by_tokens["784"], own),
        "trained at 784 (%)": means(trained),
    }
    return table(columns, best_first(by_tokens["784"]))


def first_softmax() -> str:
    """Top-1 from scratch with a mechanism everywhere, and with softmax attention in the first layer."""
    own, first = equal_macs("196"), series("first_softmax.csv", seed="seed", name="name")
    columns = {
        "everywhere (%)": means(own),
        "softmax first (%)": means(first),
        "difference to everywhere": less(first, own),
        "difference to softmax": less(first, dict.fromkeys(first, own["softmax"])),
    }
    return table(columns, first)


def pathfinder(file: str, titles: Mapping[str, str], form: str = "") -> str:
    """The columns of a file under other titles."""
    rows = [[f"{float(row[x]):{form}}" if x == "train_loss" else row[x] for x in titles] for row in read(file)]
    return markdown_table([*titles.values()], rows)


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
    titles = [f"bias, layer {layer} (%)" for layer in (1, 2, 3)]
    return markdown_table(["", "options", "error", "squared bias", *titles], lines)


def errors_by_tokens() -> str:
    """Errors, means over layers, by samples and by the number of tokens."""
    found: dict[str, dict[str, list[float]]] = {}
    names = [*dict.fromkeys(row["attention"] for row in read("error_tokens.csv"))]
    for name in names:
        for row in read("error_tokens.csv", attention=name):
            column = found.setdefault(f"`{name}`, {row['tokens']}", {})
            column.setdefault(row["budget"], []).append(float(row["error"]))
    budgets = [*dict.fromkeys(budget for column in found.values() for budget in column)]
    rows = [[b, *(f"{mean(column[b]):.3g}" if b in column else "" for column in found.values())] for b in budgets]
    return markdown_table(["samples", *found], rows)


LOSS = "training loss", "train_loss"
PRETRAINED = ("scratch", "pretrained"), ("from scratch (%)", "pre-trained (%)")

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/results_scratch.md": {
        "from scratch": partial(over_seeds, "fashion_mnist.csv"),
        "sparse and low rank": partial(over_seeds, "scatterbrain.csv"),
        "equal MACs at 196 tokens": lambda: equal("196", "at its size above (%)", from_scratch()),
        "equal MACs at 784 tokens": lambda: equal("784", "at 196 tokens (%)", equal_macs("196")),
        "other resolutions": resolutions,
        "softmax attention first": first_softmax,
        "local term": partial(
            without_and_with, "local_term.csv", "local", ("false", "true"), ("without (%)", "with the local term (%)")
        ),
        "Pathfinder, epochs": partial(
            pathfinder,
            "pathfinder.csv",
            {"epoch": "epoch", "train_loss": "training loss", "top1": "top-1 (%)"},
            ".3f",
        ),
        "Pathfinder, scenes": partial(
            pathfinder,
            "pathfinder_scenes.csv",
            {
                "scenes": "scenes along a side",
                "side": "side of a scene (patches)",
                "separation": "ends apart (patches)",
                "top1": "top-1 (%)",
            },
        ),
        "Pathfinder": partial(over_seeds, "pathfinder_ablation.csv", *LOSS),
        "copy task": partial(over_seeds, "copy_task.csv", "perplexity", "loss", math.exp),
        "ListOps": partial(over_seeds, "listops.csv", *LOSS),
        "Image": partial(over_seeds, "lra_image.csv", *LOSS),
        "pre-training": partial(without_and_with, "simmim.csv", "start", *PRETRAINED, "masked_l1"),
        "survey": partial(without_and_with, "survey.csv", "start", *PRETRAINED, "masked_l1"),
    },
    "docs/results_trained.md": {
        "replaced": replaced,
        "aligned": partial(aligned, "transfer.csv"),
        "from scratch for the same time": scratch,
        "softmax attention first": hybrids,
        "aligned, six layers": partial(aligned, "transfer_six_layers.csv"),
    },
    "docs/results_error.md": {
        "errors by tokens": errors_by_tokens,
        "bias": partial(bias, "bias.csv"),
        "bias after alignment": partial(bias, "bias_aligned.csv"),
    },
}
"""Page -> its tables: name -> function that returns the text."""


def _signed(spread: Spread | None) -> str:
    return plus_minus(spread, "+.2f") + verdict(spread)
