"""Accuracy of a trained model with another mechanism, without training: the drop-in test of Scatterbrain.

python analyze.py replace runs/softmax --attention local performer lara eva
python analyze.py replace runs/softmax --attention local eva --finetune 2     # then trains on with each: ablate.py
python analyze.py replace runs/softmax --attention eva --blocks 0-8           # in these blocks alone
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import yaml
from matplotlib.figure import Figure
from torch import Tensor, nn

from analysis import command_line
from analysis.budgets import options_text
from analysis.drop_in import attended, drop_in, layer_errors, layer_inputs, merge_modes, set_mode
from analysis.trained import Sample, Trained, load_trained, read_sample
from attention import Grid, OptionError
from attention.plugins import as_arguments
from engine.config.load import dump_run, parse_run
from engine.data.loaders import choose_batch_size
from engine.data.splits import open_split
from engine.evaluation.label_matching import ClassSubset
from engine.reporting.plots import COLORS, encode
from engine.reporting.tables import Spread, compact_table, plus_minus, spread
from engine.runtime.errors import UserError
from engine.runtime.files import make_output, to_csv, write_file
from engine.runtime.memory import peak_bytes
from models.assignment import assign, replace
from models.base import attention_layers
from models.costs import count_costs

NUM_IMAGES = 500
"""Default number of classified images; every mechanism, three times, takes minutes."""

NUM_COMPARED = 32
"""Number of images on which errors of attention layers, and memory of a forward pass, are measured."""

ABLATE = Path(__file__).parents[1] / "ablate.py"


@dataclass(frozen=True)
class Row:
    """Measurements of a mechanism: mean and standard deviation over draws.

    Attributes:
        name: as on the command line. options: options of the mechanism. mode: see `merge_modes`. top1: percent.
            error: `normalised_error` of attended values, mean over the layers that are replaced. macs: for one image.
            peak: peak bytes of a forward pass of `NUM_COMPARED` images. untrained: number of untrained parameters.
            problem: why there is no result.
    """

    name: str
    options: str
    mode: str = ""
    top1: Spread | None = None
    error: Spread | None = None
    macs: int | None = None
    peak: int | None = None
    untrained: int = 0
    problem: str = ""


class Own(NamedTuple):
    """Trained model with its own attention: top-1 in percent, and tokens, grid and attended values of every layer.

    images: `NUM_COMPARED` of the sample, evenly spaced, for which the layers are measured.
    """

    top1: float
    images: Tensor
    inputs: Sequence[tuple[Tensor, Grid]]
    attended: Sequence[Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    command_line.add_drop_in(parser, NUM_IMAGES, ["evaluation"])
    parser.add_argument("--blocks", help="blocks to replace it in, as 0-8 or '0-2, 5'; all others keep the run's (all)")
    parser.add_argument("--stage", type=int, help="stage of a pyramid to replace it in, all of it or --blocks of it")
    parser.add_argument("--finetune", type=int, metavar="EPOCHS", help="then train each further, in DIR/finetune")


def main(args: argparse.Namespace) -> None:
    command_line.check_positive(args, "draws", "images", *["finetune"] * (args.finetune is not None))
    make_output(args.output, ["replace.csv", "replace.png"])
    mechanisms = command_line.read_mechanisms(args.attention)
    if args.finetune is not None and args.weights:
        raise UserError("--finetune goes on from averaged weights where they are kept; leave out --weights")
    trained = load_trained(args)
    base = None if args.finetune is None else finetuning(trained, args.finetune, args.overrides)
    sample = read_sample(trained, args.images)
    place = {name: value for name in ("stage", "blocks") if (value := getattr(args, name)) is not None}
    where = "".join(f", in {name} {value}" for name, value in place.items())
    in_place = {name: assignment(trained, place, mechanism) for name, mechanism in mechanisms.items()}
    own, rows = measure_own(trained, sample), []
    with command_line.progress("replace", len(mechanisms), "mechanisms") as bar:
        for name, mechanism in mechanisms.items():
            bar.set_postfix_str(name)
            rows += measure(trained, sample, own, name, options_text(mechanism), *in_place[name], args)
            bar.update()
    count = len(sample.images)
    title = f"{args.checkpoint}: top-1 {own.top1:.2f} % with its own attention, {count} images"
    title += f"; others{where} without training, {' and '.join(args.modes)} mode"
    title += f", mean ± standard deviation over draws: {args.draws}"
    print(f"{title}\n\n{compact_table([readable(row, own.top1) for row in rows])}")
    lines = [values(row, own.top1, count, args.draws) for row in rows]
    write_file(args.output / "replace.csv", to_csv(list(lines[0]), (line.values() for line in lines)))
    write_file(args.output / "replace.png", encode(draw(title, rows, own.top1)))
    if base is not None:
        built = [in_place[name][0] for name in dict.fromkeys(row.name for row in rows if row.top1)]
        train_on(base, built, args.output / "finetune")


def finetuning(trained: Trained, epochs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of a run that trains all weights of the model further, unless `overrides` freeze some.

    Another mechanism may have weights that the model lacks, so that `init.strict` and `train.freeze` of the run that
    made it do not apply.

    Raises:
        ConfigError: the model cannot be trained further. OptionError: there are no training images.
    """
    options = dump_run(trained.run)
    options["init"]["strict"], options["train"]["freeze"] = False, None
    options = dump_run(parse_run(options, f"--finetune {epochs}", overrides))
    options["init"]["weights"] = str(trained.path.resolve())
    options["schedule"] |= {"epochs": epochs, "warmup_epochs": min(options["schedule"]["warmup_epochs"], epochs - 1)}
    open_split(parse_run(options, f"--finetune {epochs}").data, "train_split")
    return options


def assignment(trained: Trained, place: Mapping[str, Any], mechanism: Mapping[str, Any]) -> tuple[Any, Sequence[int]]:
    """Returns the attention of the trained model with another mechanism in a place, or everywhere if it is empty, and
    the numbers of the layers that are replaced.

    Raises:
        OptionError: the model has no such place.
    """
    name, depths = trained.run.model["name"], trained.model.config.depths
    if not place:
        return mechanism, range(sum(depths))
    entries = replace(assign(name, trained.run.attention, depths), depths, place, mechanism, "--")
    return [entry.options for entry in entries], entries[-1].layers


def train_on(base: Mapping[str, Any], attentions: Sequence[Any], directory: Path) -> None:
    """Replaces this process by an ablation that trains each attention further from `base` and resumes such runs."""
    directory.mkdir(exist_ok=True)
    caption = f"{base['init']['weights']}, trained on for {base['schedule']['epochs']} epochs"
    plan = {"caption": caption, "base": "base.yaml", "runs": [{"attention": attention} for attention in attentions]}
    for name, content in (("base", base), ("plan", plan)):
        write_file(directory / f"{name}.yaml", yaml.safe_dump(content, sort_keys=False).encode())
    command = [str(ABLATE), str(directory / "plan.yaml"), "--output", str(directory), *as_arguments()]
    print(f"\ntraining on; to go on after an interruption: python {' '.join(command)}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def measure_own(trained: Trained, sample: Sample) -> Own:
    count = min(NUM_COMPARED, len(sample.images))
    images = sample.images[torch.arange(count) * len(sample.images) // count].to(trained.device)
    inputs = layer_inputs(trained, images)
    outputs = [attended(layer, *given) for layer, given in zip(attention_layers(trained.model), inputs, strict=True)]
    return Own(top1(trained.model, trained, sample), images, inputs, outputs)


@torch.no_grad()
def top1(model: nn.Module, trained: Trained, sample: Sample) -> float:
    """Returns the percentage of images whose class has the highest logit."""
    model = ClassSubset(model, sample.columns).to(trained.device)
    parts = sample.images.split(choose_batch_size(tuple(sample.images.shape[2:])))
    found = torch.cat([model(part.to(trained.device)).argmax(1).cpu() for part in parts])
    return 100 * (found == sample.classes).double().mean().item()


def measure(
    trained: Trained,
    sample: Sample,
    own: Own,
    name: str,
    options: str,
    attention: Any,
    layers: Sequence[int],
    args: argparse.Namespace,
) -> Iterator[Row]:
    """Yields the rows of a mechanism, one for each mode if the modes differ; `layers` of `attention` are replaced."""
    found = {mode: [] for mode in args.modes}
    try:
        for seed in range(args.draws):
            model, untrained = drop_in(trained, attention, seed)
            for mode, results in found.items():
                set_mode(model, mode, seed)
                errors = layer_errors(model, own.inputs, own.attended)
                error = mean(errors[layer] for layer in layers)
                results.append((top1(model, trained, sample), error))
    except OptionError as error:
        yield Row(name, options, problem=str(error))
        return
    with torch.no_grad():
        peak = peak_bytes(partial(model.eval(), own.images), trained.device)
    macs = count_costs(trained.run.model, attention).macs
    for mode, results in merge_modes(found).items():
        accuracy, error = map(spread, zip(*results, strict=True))
        yield Row(name, options, mode, accuracy, error, macs, peak, untrained)


def readable(row: Row, own: float) -> dict[str, str]:
    """Returns title of a column -> its text."""
    return {
        "attention": row.name,
        "options": row.options,
        "mode": row.mode,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "top-1 (%)": plus_minus(row.top1, ".2f"),
        "change (points)": "" if row.top1 is None else f"{row.top1.mean - own:+.2f}",
        "error": plus_minus(row.error, ".3f"),
        "MACs (G)": "" if row.macs is None else f"{row.macs / 1e9:.4f}",
        "peak (MiB)": "" if row.peak is None else f"{row.peak / 2**20:.1f}",
        "cannot be built": row.problem,
    }


def values(row: Row, own: float, images: int, draws: int) -> dict[str, Any]:
    """Returns the row of the CSV file, column -> value."""
    (top1, top1_std), (error, error_std) = ((found or (None, None))[:2] for found in (row.top1, row.error))
    line = {"attention": row.name, "options": row.options, "mode": row.mode, "images": images, "draws": draws}
    line |= {"top1": top1, "top1_std": top1_std, "change": None if top1 is None else top1 - own}
    line |= {"error": error, "error_std": error_std, "macs": row.macs, "peak_bytes": row.peak}
    return line | {"untrained_parameters": row.untrained, "problem": row.problem}


def draw(title: str, rows: Sequence[Row], own: float) -> Figure:
    """Draws top-1 and error of every mechanism that can be built, best first, with standard deviations over draws."""
    rows = sorted((row for row in rows if row.top1), key=lambda row: -row.top1.mean)
    figure = Figure(figsize=(10, 2.2 + 0.27 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True, parse_math=False)
    accuracy, error = figure.subplots(1, 2, sharey=True)
    for axes, column, label in (
        (accuracy, "top1", "top-1 (%)"),
        (error, "error", "normalised mean squared error\nof attended values"),
    ):
        for note, style, hollow in (
            ("all parameters trained", {"fmt": "o", "color": COLORS[5]}, False),
            ("with untrained parameters", {"fmt": "s", "color": COLORS[4], "mfc": "white"}, True),
        ):
            chosen = [(i, *getattr(row, column)[:2]) for i, row in enumerate(rows) if bool(row.untrained) == hollow]
            if chosen:
                y, means, deviations = zip(*chosen, strict=True)
                axes.errorbar(means, y, xerr=[d or 0 for d in deviations], label=note, **style)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.4)
    accuracy.axvline(own, color="black", linestyle="--", label=f"its own attention: {own:.2f} %")
    error.set_xscale("symlog", linthresh=0.01)  # softmax has an error of zero
    error.set_xlim(-0.001, 2 * max([0.01, *(row.error.mean for row in rows)]))
    names = [row.name if row.mode in ("evaluation", "any") else f"{row.name}, {row.mode}" for row in rows]
    accuracy.set_yticks(range(len(rows)), names, parse_math=False)
    accuracy.invert_yaxis()
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
