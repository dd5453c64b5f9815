"""Evaluates a checkpoint on the validation images, every one of them once: exact top-1, top-5 and mean loss.

    python validate.py runs/eva                                # the best of a run directory, or any checkpoint file
    python validate.py runs/eva --export eva.safetensors
    torchrun --nproc_per_node=8 validate.py runs/eva data.root=/data/imagenet

The model is rebuilt from the configuration in the checkpoint. Plain and averaged (EMA) weights are reported apart.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint import export_checkpoint, find_checkpoint, load_checkpoint, load_weights
from engine.config import parse_run, refuse_bad_input
from engine.data import count_broken, create_val_loader
from engine.distributed import World, init_distributed
from engine.errors import UserError
from engine.evaluate import evaluate
from engine.schema import Run
from models import create_model

WEIGHTS = {"plain": "model", "EMA": "ema"}
"""Name in the report -> state dict in the checkpoint."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Evaluate a checkpoint.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="directory of a run, or a checkpoint file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--weights", choices=("best", "last"), default="best", help="which of a run directory (best)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per process and step (128)")
    parser.add_argument("--skip-broken", action="store_true", help="leave out and count images that cannot be read")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write weights (EMA where kept) and configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_intermixed_args(arguments)
    if args.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {args.batch_size}")
    with refuse_bad_input():
        path = args.checkpoint
        if not path.exists():
            raise UserError(f"{path}: no such run directory or checkpoint")
        found = find_checkpoint(path, args.weights) if path.is_dir() else (path, load_checkpoint(path))
        if found is None:
            raise UserError(f"{path}: no checkpoint there")
        path, checkpoint = found
        run = parse_run(checkpoint["config"], str(path), args.overrides)
        world = init_distributed(run.train.device)
        try:
            results = validate(run, checkpoint, world, args.batch_size, args.skip_broken)
        finally:
            world.destroy()
    if world.is_primary:
        if args.export:
            export_checkpoint(args.export, checkpoint)
        epoch = checkpoint["progress"]["epoch"]
        if args.json:
            print(json.dumps({"checkpoint": str(path), "epoch": epoch, **results}))
        else:
            print(f"{path}, epoch {epoch}\n{table(results)}")


def validate(
    run: Run, checkpoint: dict[str, Any], world: World, batch_size: int, skip_broken: bool = False
) -> dict[str, dict[str, float]]:
    """Metrics of `engine.evaluate` for each of the checkpoint's sets of weights, and with `skip_broken` how many images
    were broken.

    Raises:
        BrokenImage: there is one, and `skip_broken` is not set.
        OptionError: data that cannot be used. UserError: weights that do not fit the model that `run` describes.
    """
    model = create_model(attention=run.attention, **run.model).to(world.device)
    loader = create_val_loader(
        run,
        world,
        img_size=model.config.img_size,
        num_classes=model.num_classes,
        batch_size=batch_size,
        skip_broken=skip_broken,
    )
    results = {}
    for name, key in WEIGHTS.items():
        if key in checkpoint:
            load_weights(model, checkpoint[key], key)
            results[name] = evaluate(model, loader, world, run.train.amp)
            if skip_broken:
                results[name]["broken"] = count_broken(loader, math.inf, world)
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """One line per set of weights."""
    lines = [f"{'weights':<8}{'images':>8}{'top-1 %':>10}{'top-5 %':>10}{'loss':>10}"]
    for name, result in results.items():
        lines.append("{:<8}{images:>8}{top1:>10.3f}{top5:>10.3f}{loss:>10.4f}".format(name, **result))
        if result.get("broken"):
            lines.append(f"left out: {result['broken']} broken images")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
