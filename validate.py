"""Evaluates a checkpoint on the validation images, every one of them once: exact top-1, top-5 and mean loss.

    python validate.py runs/eva                                # a run directory, or any checkpoint file
    python validate.py runs/eva --weights ema --export eva.safetensors --per-class classes.csv
    torchrun --nproc_per_node=8 validate.py runs/eva data.root=/data/imagenet

The model is rebuilt from the configuration in the checkpoint. Plain and averaged (EMA) weights are reported apart, of a
run directory each kind from the epoch that was best by it.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import WEIGHTS, Weights, export_checkpoint, find_weights, parse_weights
from engine.config import parse_run, refuse_bad_input
from engine.data import classes_of, count_broken, create_val_loader, difference
from engine.distributed import World, init_distributed
from engine.errors import UserError
from engine.evaluate import accuracy_by_class, class_table, evaluate
from engine.files import write_text
from engine.schema import Data, Run
from engine.weights import build_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Evaluate a checkpoint.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="directory of a run, or a checkpoint file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--weights", type=parse_weights, help="plain or ema: the kind of weights (each that is kept)")
    parser.add_argument("--select", choices=("best", "last"), default="best", help="which of a run directory (best)")
    parser.add_argument("--batch-size", type=int, help="images per process and step (128, fewer where they are large)")
    parser.add_argument("--skip-broken", action="store_true", help="leave out and count images that cannot be read")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write weights (ema where kept) and configuration")
    parser.add_argument("--per-class", type=Path, metavar="FILE", help="write the accuracy of every class, as CSV")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_intermixed_args(arguments)
    if args.batch_size is not None and args.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {args.batch_size}")
    with refuse_bad_input():
        found = find_weights(args.checkpoint, args.select, args.weights)
        for path in filter(None, (args.export, args.per_class)):
            if not path.parent.is_dir():
                raise UserError(f"{path}: no directory {str(path.parent)!r}")
        workers = min(Data.workers, os.cpu_count() or 1)  # a file does not decide how many processes start
        overrides = [f"data.workers={workers}", *args.overrides]
        runs = [parse_run(checkpoint["config"], str(path), overrides) for path, checkpoint, _ in found]
        world, results = init_distributed(runs[0].train.device), {}
        try:
            for run, (path, checkpoint, kinds) in zip(runs, found, strict=True):
                metrics = validate(run, checkpoint, kinds, world, args.batch_size, args.skip_broken)
                source = {"checkpoint": str(path), "epoch": checkpoint["progress"]["epoch"]}
                results |= {kind: source | metrics[kind] for kind in kinds}
        finally:
            world.destroy()
    if world.is_primary:
        by_class = {kind: result.pop("classes", []) for kind, result in results.items()}
        print(json.dumps(results) if args.json else table(results))
        if args.per_class:
            with refuse_bad_input():
                write_text(args.per_class, class_table(by_class))
        if args.export:
            path, checkpoint, kinds = found[-1]  # averaged weights come last
            with refuse_bad_input():
                export_checkpoint(args.export, checkpoint, kinds[-1])
            print(f"{args.export}: the {kinds[-1]} weights of {path}", file=sys.stderr)


def validate(
    run: Run,
    checkpoint: dict[str, Any],
    kinds: Sequence[Weights],
    world: World,
    batch_size: int | None = None,
    skip_broken: bool = False,
) -> dict[Weights, dict[str, Any]]:
    """Results for the `kinds` of weights in the checkpoint: metrics of `engine.evaluate`, wall time (`seconds`) and
    `images_per_second`, `classes` (see `accuracy_by_class`), and with `skip_broken` how many images were `broken`.

    Args:
        batch_size: images per process and step; None: see `create_val_loader`.
    Raises:
        BrokenImage: there is one, and `skip_broken` is not set.
        OptionError: data that cannot be used. UserError: weights that do not fit the model that `run` describes.
    """
    loader = create_val_loader(
        run,
        world,
        img_size=run.model["img_size"],
        num_classes=run.model["num_classes"],
        batch_size=batch_size,
        skip_broken=skip_broken,
    )
    known, here = checkpoint.get("classes"), classes_of(loader.dataset)
    if known is not None and known != here and world.is_primary:
        names = difference(known, here, ("the checkpoint", "the data"))
        print(f"warning: the classes are not those of the training: {names}", file=sys.stderr)
    models = {kind: build_model(run, checkpoint[WEIGHTS[kind]], WEIGHTS[kind]).to(world.device) for kind in kinds}
    results = {}
    for kind, model in models.items():
        counts = torch.zeros(len(here), 3, dtype=torch.int64, device=world.device)
        begin = time.perf_counter()
        metrics = evaluate(model, loader, world, run.train.amp, by_class=counts)
        seconds = time.perf_counter() - begin
        results[kind] = {**metrics, "seconds": seconds, "images_per_second": metrics["images"] / seconds}
        results[kind]["classes"] = accuracy_by_class(counts, here)
        if skip_broken:
            results[kind]["broken"] = count_broken(loader, math.inf, world)
    return results


def table(results: dict[Weights, dict[str, Any]]) -> str:
    """One line per kind of weights."""
    lines = [
        f"{'weights':<8}{'images':>8}{'top-1 %':>10}{'top-5 %':>10}{'loss':>10}{'images/s':>10}{'epoch':>7}  checkpoint"
    ]
    row = "{:<8}{images:>8}{top1:>10.3f}{top5:>10.3f}{loss:>10.4f}{images_per_second:>10.1f}{epoch:>7}  {checkpoint}"
    for kind, result in results.items():
        lines.append(row.format(kind, **result))
        if result.get("broken"):
            lines.append(f"left out: {result['broken']} broken images")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
