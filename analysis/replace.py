"""What becomes of a trained model that gets another mechanism, without training: the drop-in test of Scatterbrain."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from analysis import drop_in as shared
from analysis.drop_in import Reference, Spread
from analysis.implied import attention_layers
from attention import OptionError
from bench.costs import count_costs
from bench.memory import peak_bytes
from engine.errors import UserError
from engine.files import to_csv, write_file
from engine.outputs import encode

NUM_IMAGES = 2000
"""The most images that are classified by default: every command takes minutes, and they are held in memory."""

NUM_COMPARED = 32
"""Images on which errors of attention layers, and the memory of a forward pass, are measured."""


@dataclass(frozen=True)
class Row:
    """What was measured of a mechanism: mean and standard deviation over draws.

    Attributes:
        name: as on the command line. options: of the mechanism. top1: percent. error: of attended values, see
            `normalised_error`, mean over layers. macs: of one image. peak: bytes that a forward pass of
            `NUM_COMPARED` images allocates at one time. untrained: parameters. problem: why there is no result.
    """

    name: str
    options: str = ""
    top1: Spread | None = None
    error: Spread | None = None
    macs: int | None = None
    peak: int | None = None
    untrained: int = 0
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_arguments(parser, NUM_IMAGES)
    parser.add_argument("--finetune", type=int, metavar="EPOCHS", help="write an ablation that trains them on, too")


def main(args: argparse.Namespace) -> None:
    shared.check_arguments(args)
    mechanisms = shared.read_mechanisms(args.attention)
    if args.finetune is not None:
        write_file(args.output / "finetune.yaml", plan_finetuning(args, mechanisms))
    reference = shared.load_reference(args.checkpoint, args.overrides, args.images)
    own = shared.top1(reference.model, reference)
    inputs = shared.layer_inputs(reference, NUM_COMPARED)
    targets = [
        shared.attended(layer, *given) for layer, given in zip(attention_layers(reference.model), inputs, strict=True)
    ]
    rows = []
    with tqdm(mechanisms.items(), unit=" mechanisms", dynamic_ncols=True, leave=False, disable=None) as bar:
        for name, attention in bar:
            bar.set_description(name)
            rows.append(measure(reference, name, attention, inputs, targets, args.draws, args.mode))
    count = len(reference.images)
    title = f"{args.checkpoint}: top-1 {own:.2f} % with its own attention, {count} images"
    title += f"; {args.mode} mode, without training, mean ± standard deviation over draws: {args.draws}"
    print(f"{title}\n\n{shared.markdown([readable(row, own) for row in rows])}")
    header = ["attention", "options", "mode", "images", "draws", "top1", "top1_std", "change", "error", "error_std"]
    header += ["macs", "peak_bytes", "untrained_parameters", "problem"]
    setting = args.mode, count, args.draws
    write_file(args.output / "replace.csv", to_csv(header, (values(row, own, setting) for row in rows)))
    write_file(args.output / "replace.png", draw(title, rows, own))
    if args.finetune is not None:
        print(f"\nto train them on: python ablate.py {args.output}/finetune.yaml --output {args.output}/finetune")


def plan_finetuning(args: argparse.Namespace, mechanisms: Mapping[str, Mapping[str, Any]]) -> bytes:
    """An ablation file that trains the run's model on with each of the mechanisms.

    Raises:
        UserError: RUN is not the directory of a run.
    """
    base = (args.checkpoint / "config.yaml").resolve()
    if not base.is_file():
        raise UserError(f"--finetune: {base} is not there; give the directory of a run as RUN")
    changes = {"init.weights": str(args.checkpoint.resolve()), "schedule.epochs": args.finetune}
    runs = [{"attention": attention, **changes} for attention in mechanisms.values()]
    plan = {"caption": f"{args.checkpoint}, trained on with other attention", "base": str(base), "runs": runs}
    return json.dumps(plan, indent=1).encode()  # which is YAML


def measure(
    reference: Reference,
    name: str,
    attention: dict[str, Any],
    inputs: Sequence[tuple[Any, ...]],
    targets: Sequence[torch.Tensor],
    draws: int,
    mode: shared.Mode,
) -> Row:
    """The row of a mechanism.

    Args:
        inputs, targets: what the attention layers of the trained model get, and the values that they attend to.
    """
    accuracies, errors = [], []
    try:
        for seed in range(draws):
            model, untrained = shared.drop_in(reference, attention, seed, mode)
            layers = attention_layers(model)
            errors.append(mean(shared.layer_errors(layers, inputs, targets)))
            accuracies.append(shared.top1(model, reference))
    except OptionError as error:
        return Row(name, shared.describe(attention), problem=str(error))
    images = reference.images[:NUM_COMPARED].to(reference.device)
    with torch.no_grad():
        peak = peak_bytes(partial(model, images), reference.device)
    macs = count_costs(reference.run.model, attention).macs
    spreads = map(shared.mean_and_deviation, (accuracies, errors))
    return Row(name, shared.describe(attention), *spreads, macs, peak, untrained)


def readable(row: Row, own: float) -> dict[str, str]:
    """Title of a column -> its text."""
    return {
        "attention": row.name,
        "options": row.options,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "top-1 (%)": shared.quote(row.top1, ".2f"),
        "change (points)": "" if row.top1 is None else f"{row.top1[0] - own:+.2f}",
        "error": shared.quote(row.error, ".3f"),
        "MACs (G)": "" if row.macs is None else f"{row.macs / 1e9:.4f}",
        "peak (MiB)": "" if row.peak is None else f"{row.peak / 2**20:.1f}",
        "cannot be built": row.problem,
    }


def values(row: Row, own: float, setting: Sequence[Any]) -> list[Any]:
    """The row of the CSV file."""
    top1, error = row.top1 or (None, None), row.error or (None, None)
    change = None if row.top1 is None else row.top1[0] - own
    found = [*top1, change, *error, row.macs, row.peak, row.untrained, row.problem]
    return [row.name, row.options, *setting, *found]


def draw(title: str, rows: Sequence[Row], own: float) -> bytes:
    """Top-1 and error of every mechanism that could be built, best first, with standard deviations over draws."""
    rows = sorted((row for row in rows if row.top1), key=lambda row: -row.top1[0])
    figure = Figure(figsize=(10, 1.8 + 0.27 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True)
    accuracy, error = figure.subplots(1, 2, sharey=True)
    for axes, column, label in (
        (accuracy, "top1", "top-1 (%)"),
        (error, "error", "normalised mean squared error\nof attended values"),
    ):
        for hollow in (False, True):
            chosen = [(i, *getattr(row, column)) for i, row in enumerate(rows) if bool(row.untrained) == hollow]
            if chosen:
                y, means, deviation = zip(*chosen, strict=True)
                deviation = [d or 0 for d in deviation]
                face = {"markerfacecolor": "white"} if hollow else {}
                note = "with untrained parameters" if hollow else "all parameters trained"
                color = "#d55e00" if hollow else "#0072b2"
                axes.errorbar(means, y, xerr=deviation, fmt="s" if hollow else "o", color=color, label=note, **face)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.4)
    accuracy.axvline(own, color="black", linestyle="--", label=f"its own attention: {own:.2f} %")
    error.set_xscale("symlog", linthresh=0.01)  # softmax has an error of zero
    error.set_xlim(-0.001, 2 * max([0.01, *(row.error[0] for row in rows)]))
    accuracy.set_yticks(range(len(rows)), [row.name for row in rows])
    accuracy.invert_yaxis()
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return encode(figure)
