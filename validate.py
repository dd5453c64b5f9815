"""Evaluates a checkpoint on the validation images, every one of them once: exact top-1, top-5 and mean loss.

    python validate.py runs/eva                                # a run directory, or any checkpoint file
    python validate.py runs/eva --budgets all                  # at every size of attention that it was trained with
    python validate.py runs/eva --predictions predictions.csv --confusion confusion.png --mistakes mistakes.png
    torchrun --nproc_per_node=8 validate.py runs/eva data.root=/data/imagenet

The model is rebuilt from the configuration in the checkpoint; another `model.img_size` resamples its embeddings. Plain
and averaged (EMA) weights are reported apart, of a run directory each kind from the epoch that was best by it. Files
have the predictions of one kind, see `open_weights`. The data may be other data:
`engine.evaluation.label_matching.match_classes` says which of the model's classes theirs are.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.evaluation.command_lines:parse_validate")

from attention import OptionError, kernels
from attention.options import to_yaml
from engine.checkpoints.adapt import restore_model
from engine.checkpoints.files import Opened, Weights, open_weights
from engine.checkpoints.origin import is_made_here
from engine.checkpoints.weights import check_predicts_classes
from engine.config.schema import Data, Run
from engine.data.identity import check_held_out, identify_split
from engine.data.loaders import count_broken, create_val_loader, indices_read, show_images
from engine.data.splits import classes_of
from engine.evaluation.command_lines import parse_validate
from engine.evaluation.evaluate import evaluate
from engine.evaluation.label_matching import ClassSubset, Flipped, match_classes
from engine.evaluation.predictions import PredictionTable, gather_predictions
from engine.objectives import choose_objective
from engine.reporting.outputs import chosen_outputs, write_outputs
from engine.reporting.tables import align
from engine.run.described import parse_described
from engine.runtime.distributed import World, init_distributed, set_arithmetic
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.memory import refuse_too_large
from engine.training.device import check_kernels
from engine.training.differences import list_data_differences
from models.assignment import Budget, with_budget
from models.costs import count_costs


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_validate(arguments)
    with refuse_bad_input():
        outputs = chosen_outputs(args)
        opened = open_weights(args.checkpoint, args.select, args.weights)
        overrides = [f"data.workers={Data.workers}", *args.overrides]
        is_own = is_made_here(args.checkpoint)
        source = str(opened.path)
        run = parse_described(opened.checkpoint["config"], source, overrides, is_own=is_own, reads_images=True)
        if run.data.dataset == "csv":
            labels = [os.path.join(str(run.data.root), f"{x}.csv") for x in (run.data.train_split, run.data.val_split)]
            if same := {*map(os.path.realpath, labels)} & {*map(os.path.realpath, outputs)}:
                raise UserError(f"{same.pop()}: has the labels of data.root, which would be lost; name another file")
        runs, budgets = {"": run}, dict[str, Budget]()
        if args.budgets:
            budgets = {f" {to_yaml(x)}": x for x in run.train.budgets or ()}
            runs = {size: replace(run, attention=with_budget(run.attention, x)) for size, x in budgets.items()}
        if not runs:
            problem = " = all: the model was trained for its own size only; give another as attention.OPTION=SIZE"
            raise OptionError("--budgets", problem)
        if [*runs.values()][-1].attention != run.attention:
            problem = " = all evaluates the sizes of train.budgets; leave attention's sizes out, or --budgets"
            raise OptionError("--budgets", problem)
        set_arithmetic(run.train.deterministic, run.train.tf32)
        world = init_distributed(run.train.device, run.train.timeout_minutes)
        records: dict[Weights, PredictionTable] | None = {} if outputs else None
        with world.ending(), refuse_bad_input(), refuse_too_large("lower --batch-size"):  # see train.py
            check_kernels(run, world.device)
            check_predicts_classes(run, source, of_metrics=not (outputs or args.flip))
            asked, results = (args.batch_size, records, args.flip), {}
            for size, each in runs.items():
                more = {"macs": count_costs(each.model, each.attention).macs, "budget": budgets[size]} if size else {}
                results |= {kind + size: found | more for kind, found in validate(each, opened, world, *asked).items()}
    if world.is_primary:
        with refuse_bad_input():
            print(to_json(results) if args.json else table(results))
            if records:
                write_outputs(outputs, records[opened.weights], opened.weights)


def validate(
    run: Run,
    opened: Opened,
    world: World,
    batch_size: int | None = None,
    records: dict[Weights, PredictionTable] | None = None,
    flip: bool = False,
) -> dict[Weights, dict[str, Any]]:
    """Results for each kind of weights that is kept: its checkpoint and epoch, metrics of `evaluate`, wall time
    (`seconds`) and `images_per_second`, the number of `broken` images if any were left out.

    Args:
        batch_size: images per process and step; None: see `create_val_loader`.
        records: where given, what was found of single images is added, for each kind. flip: see `Flipped`.
    Raises:
        BrokenImage: there is one, and `data.broken_val` refuses it.
        OptionError, UserError: data that cannot be used, or are not the same on all ranks; weights that do not fit; or
            held-out images that may have been trained on.
    """
    img_size, num_classes = run.model["img_size"], run.model["num_classes"]
    loader = create_val_loader(run, world, img_size=img_size, batch_size=batch_size)
    names, shown = classes_of(loader.dataset), show_images(loader.dataset, run)
    columns, note = match_classes(opened.checkpoint.get("classes"), names, num_classes)
    models = {kind: restore_model(run, checkpoint, kind) for kind, (_, checkpoint) in opened.kept.items()}
    identity = identify_split("val", loader.dataset)
    world.check_same_files(identity)
    warning = check_held_out(run.data, opened.checkpoint, identity)
    if not note and list_data_differences(opened.checkpoint, identity):
        note = "data: other images than those of the validation in training"
    resampled = dict.fromkeys(line for _, line in models.values())
    for line in filter(None, [warning, note, *resampled]) if world.is_primary else ():
        print(line, file=sys.stderr)
    results = {}
    for kind, (model, _) in models.items():
        path, checkpoint = opened.kept[kind]
        model = Flipped(model) if flip else model
        model = (model if columns == [*range(num_classes)] else ClassSubset(model, columns)).to(world.device)
        rows = None if records is None else []
        begin = time.perf_counter()
        with kernels.use(run.train.kernels):
            metrics = evaluate(model, loader, world, run.train.amp, rows=rows, measure=choose_objective(run).measure)
        seconds = time.perf_counter() - begin
        source = {"checkpoint": str(path), "epoch": checkpoint["progress"]["epoch"]}
        speed = {"seconds": seconds, "images_per_second": metrics["images"] / seconds}
        results[kind] = {**source, **metrics, **speed}
        if records is not None:
            records[kind] = gather_predictions(rows, indices_read(loader), shown, names, world)
        if broken := count_broken(loader, world):
            results[kind]["broken"] = broken
    return results


def to_json(results: Mapping[str, dict[str, Any]]) -> str:
    """Returns the results in JSON, with null for a value that is not finite."""
    finite = {
        kind: {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in each.items()}
        for kind, each in results.items()
    }
    return json.dumps(finite)


COLUMNS = {
    "images": ("images", ""),
    "top1": ("top-1 %", ".3f"),
    "top5": ("top-5 %", ".3f"),
    "balanced_accuracy": ("balanced %", ".3f"),
    "loss": ("loss", ".4f"),
    "macs": ("MACs", ","),
    "images_per_second": ("images/s", ".1f"),
    "epoch": ("epoch", ""),
    "checkpoint": ("checkpoint", ""),
}
"""Column of the table -> title and format; it is shown if it was measured."""


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line per kind of weights and size, and notes."""
    shown = {name: column for name, column in COLUMNS.items() if all(name in result for result in results.values())}
    lines = [["weights", *(title for title, _ in shown.values())]]
    notes = []
    for kind, result in results.items():
        lines.append([kind, *(f"{result[name]:{form}}" for name, (_, form) in shown.items())])
        if count := result.get("not_finite"):
            notes.append(f"{kind}, wrong: {count:,} of {result['images']:,} images, as their logits are not finite")
        if "broken" in result:
            notes.append(f"{kind}, left out: {result['broken']} broken images")
    return "\n".join([align(lines), *notes])


if __name__ == "__main__":
    main()
