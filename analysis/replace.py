"""Accuracy of a trained model with another mechanism: replaced, aligned without labels, and fine-tuned.

python analyze.py replace runs/softmax --attention local performer lara eva   # the drop-in test of Scatterbrain
python analyze.py replace runs/softmax --attention local eva --align 150                # also fitted to the model's own
python analyze.py replace runs/softmax --attention local eva --align 150 --finetune 2   # then fine-tuned, by ablate.py
python analyze.py replace runs/softmax --attention eva --blocks 0-8           # in these blocks alone
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.budgets import options_text
from analysis.certificate import NOTE, columns
from analysis.command_line import read_mechanisms
from analysis.draws import Draw, Row, Stage, is_own, paired, to_lines
from analysis.laboratory import MEASUREMENTS_FILE, Laboratory
from analysis.stage_figures import draw
from analysis.trained import Trained, load_trained, read_sample
from analysis.tune import Start, configure, tune
from attention import OptionError
from engine.data.splits import open_split
from engine.reporting.plots import encode
from engine.reporting.tables import Spread, compact_table, holm, mean_and_std, over_draws, plus_minus, verdict
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output
from engine.runtime.terminal import progress
from models import depths_of
from models.assignment import assign, mechanisms_of, single_layers
from models.assignment import replace as replace_entry
from models.costs import count_costs

CERTIFIED = "replaced", "aligned", "tuned"
"""Stages of which the fall of top-1 is bounded."""

FILES = ("replace.csv", "replace_draws.csv", "replace.png")


def main(args: argparse.Namespace) -> None:
    mechanisms = read_mechanisms(args.attention)
    if args.finetune is not None and args.weights:
        raise UserError("--finetune goes on from averaged weights where they are kept; leave out --weights")
    trained = load_trained(args)
    base = None if args.finetune is None else configure(trained, args.finetune, args.overrides)
    sample = read_sample(trained, args.images)
    place = {name: value for name in ("stage", "blocks") if (value := getattr(args, name)) is not None}
    assignments = {name: assignment(trained, place, mechanism) for name, mechanism in mechanisms.items()}
    make_output(args.output, [*FILES, MEASUREMENTS_FILE])
    laboratory = Laboratory(trained, sample, args.output, args.align)
    rows = []
    with progress("replace", len(mechanisms) * args.draws, "draws") as bar:
        for name, mechanism in mechanisms.items():
            bar.set_postfix_str(name)
            rows.append(measure(laboratory, args.draws, name, options_text(mechanism), *assignments[name], bar.update))
    where = "".join(f", in {name} {value}" for name, value in place.items())
    report(laboratory, rows, where, args)
    if base is not None:
        status, rows = finetune(laboratory, base, rows, args)
        report(laboratory, rows, where, args)
        if status:
            sys.exit(status)


def assignment(trained: Trained, place: Mapping[str, Any], mechanism: Mapping[str, Any]) -> tuple[Any, Sequence[int]]:
    """Returns the attention of the trained model with another mechanism in a place, or everywhere if it is empty, and
    the numbers of the layers that are replaced.

    Raises:
        OptionError: the model has no such place.
    """
    name, depths = trained.run.model["name"], depths_of(trained.run.model)
    if not place and len(depths) == 1:
        return mechanism, single_layers(depths)
    entries = assign(name, trained.run.attention, depths)
    if place:
        entries = replace_entry(entries, depths, place, mechanism, "--")
        return [entry.options for entry in entries], entries[-1].layers
    for stage in range(len(depths) - 1):  # the last stage of a pyramid keeps its own
        entries = replace_entry(entries, depths, {"stage": stage}, mechanism, "--")
    return [entry.options for entry in sorted(entries, key=lambda entry: entry.layers)], single_layers(depths)


def measure(
    laboratory: Laboratory,
    draws: int,
    name: str,
    options: str,
    attention: Any,
    layers: Sequence[int],
    done: Callable[[], Any],
) -> Row:
    """Returns the row of a mechanism; `layers` of `attention` are replaced.

    Args:
        done: is called after every draw.
    """
    measured = []
    try:
        for seed in range(draws):
            measured.append(laboratory.measure(name, attention, layers, seed))
            done()
    except (OptionError, FloatingPointError) as error:
        return Row(name, options, problem=str(error))
    macs = count_costs(laboratory.trained.run.model, attention).macs
    return Row(name, options, attention, tuple(measured), macs)


def finetune(
    laboratory: Laboratory, base: Mapping[str, Any], rows: Sequence[Row], args: argparse.Namespace
) -> tuple[int, list[Row]]:
    """Fine-tunes every draw of every mechanism, and the trained model itself once per seed.

    Returns:
        The exit status of ablate.py, and the rows with what was trained, the trained model's first.
    """
    trained, own = laboratory.trained, laboratory.own
    if not any(is_own(row) for row in rows):
        stage = Stage(own.score.top1, own.score.loss, 0.0, 0.0, 0)
        same = [Draw(stage, None if args.align is None else stage, weights=trained.path.resolve())] * args.draws
        names = ", ".join(dict.fromkeys(options["name"] for options in mechanisms_of(trained.run.attention)))
        macs = count_costs(trained.run.model, trained.run.attention).macs
        rows = [Row(names, "", trained.run.attention, tuple(same), macs), *rows]
    by_name = {row.name: row for row in rows if row.draws}
    draws = [(name, seed) for seed in range(args.draws) for name in by_name]
    starts = [Start(by_name[name].attention, str(by_name[name].draws[seed].weights), seed) for name, seed in draws]
    status, found = tune(base, starts, args.output / "finetune", args.jobs)
    last = {"overrides": [], "weights": None, "select": "last"}  # the best epoch is chosen by labels
    for i, result in enumerate(found):
        if result is not None:
            model = load_trained(argparse.Namespace(**vars(args) | last | {"checkpoint": result.run})).model
            found[i] = result._replace(changed=laboratory.score(model).changed)
    tuned = dict(zip(draws, found, strict=True))
    return status, [
        replace(row, draws=tuple(x._replace(tuned=tuned[row.name, seed]) for seed, x in enumerate(row.draws)))
        for row in sorted(rows, key=is_own, reverse=True)
    ]


def report(laboratory: Laboratory, rows: Sequence[Row], where: str, args: argparse.Namespace) -> None:
    """Prints the table, and writes tables and figure."""
    own, count = laboratory.own.score.top1, len(laboratory.sample.images)
    validation = len(open_split(laboratory.trained.run.data, "val_split"))
    stages = ["without training" if args.align is None else f"as they are and aligned in {args.align} steps"]
    if control := next((row for row in rows if any(draw.tuned for draw in row.draws)), None):
        epochs = f"{args.finetune} epoch{'s' * (args.finetune > 1)}"
        stages.append(f"then fine-tuned for {epochs} (tuned: top-1 of all {validation} validation images)")
    title = f"{args.checkpoint}: top-1 {own:.2f} % with its own attention, {count} images"
    title += f"; others{where} {', '.join(stages)}, {over_draws(args.draws)}"
    differences = {} if control is None else holm({row: paired(row, control, 100 / validation) for row in rows})
    print(f"{title}\n\n{compact_table([readable(row, own, differences.get(row)) for row in rows])}")
    print("", *certify(rows, count), NOTE, sep="\n")
    lines = [values(row, own, count, differences.get(row)) for row in rows]
    by_draw = [line for row in rows for line in to_lines(row)] or [{"attention": ""}]
    for name, table in zip(FILES, (lines, by_draw), strict=False):
        write_file(args.output / name, dicts_to_csv(table))
    write_file(args.output / FILES[-1], encode(draw(title, rows, own, differences)))


def certify(rows: Sequence[Row], images: int) -> Iterator[str]:
    """Yields the certificates of the rows in all stages."""
    for row in rows:
        for stage in CERTIFIED:
            if certificate := row.certificate(stage, images):
                yield f"{row.name}, {stage}: {certificate}"


def readable(row: Row, own: float, difference: Spread | None) -> dict[str, str]:
    """Returns title of a column -> its text."""
    replaced, aligned = row.spread("replaced", "top1"), row.spread("aligned", "outputs")
    return {
        "attention": row.name,
        "options": row.options,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "top-1 (%)": plus_minus(replaced, ".2f"),
        "change (points)": "" if replaced is None else f"{replaced.mean - own:+.2f}",
        "error": plus_minus(row.spread("replaced", "attended"), ".3f"),
        "error of outputs": "" if aligned is None else plus_minus(row.spread("replaced", "outputs"), ".3f"),
        "aligned: top-1 (%)": plus_minus(row.spread("aligned", "top1"), ".2f"),
        "aligned: error of outputs": plus_minus(aligned, ".3f"),
        "aligned: seconds": plus_minus(row.seconds(), ".0f"),
        "tuned: top-1 (%)": plus_minus(row.spread("tuned", "top1"), ".2f"),
        "tuned: difference": plus_minus(difference, "+.2f") + verdict(difference),
        "tuned: minutes": plus_minus(row.spread("tuned", "minutes"), ".1f"),
        "MACs (G)": "" if row.macs is None else f"{row.macs / 1e9:.4f}",
        "cannot be measured": row.problem,
    }


def values(row: Row, own: float, images: int, difference: Spread | None) -> dict[str, Any]:
    """Returns the row of the CSV file, column -> value."""
    line: dict[str, Any] = {"attention": row.name, "options": row.options, "images": images, "draws": len(row.draws)}
    spreads = {
        "top1": row.spread("replaced", "top1"),
        "error": row.spread("replaced", "attended"),
        "output_error": row.spread("replaced", "outputs"),
        "aligned_top1": row.spread("aligned", "top1"),
        "aligned_output_error": row.spread("aligned", "outputs"),
        "aligned_seconds": row.seconds(),
        "tuned_top1": row.spread("tuned", "top1"),
        "tuned_difference": difference,
        "tuned_minutes": row.spread("tuned", "minutes"),
    }
    for stage in CERTIFIED:
        line |= columns(row.certificate(stage, images), "" if stage == "replaced" else f"{stage}_")
    for name, found in spreads.items():
        line[name], line[f"{name}_std"] = mean_and_std(found)
        if name == "top1":
            line["change"] = None if found is None else found.mean - own
    line |= {"macs": row.macs, "untrained_parameters": row.untrained, "problem": row.problem}
    return line
