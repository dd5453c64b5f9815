"""Writes weights that the project can read, those of the released code of EVA and LARA among them, as an export.

    python -m models.convert released.pth eva.safetensors
    python -m models.convert released.pth eva.safetensors model.num_heads=3 attention.window_size=7

The export holds all options. Those that a file does not say, which are named, follow as key.path=value.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint import WEIGHTS, export_checkpoint, find_weights, parse_weights
from engine.config import dump_run, parse_run, refuse_bad_input
from engine.weights import build_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.convert", description="Export the weights of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="file of the released code, or directory or checkpoint of a run")
    parser.add_argument("output", type=Path, help="file to write, .safetensors")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the checkpoint's")
    parser.add_argument("--weights", type=parse_weights, help="plain or ema: the kind of weights (ema where kept)")
    args = parser.parse_intermixed_args(arguments)
    with refuse_bad_input():
        path, checkpoint, kinds = find_weights(args.checkpoint, "best", args.weights)[-1]  # averaged weights come last
        run = parse_run(checkpoint["config"], str(path), args.overrides)
        build_model(run, checkpoint[WEIGHTS[kinds[-1]]], str(path))  # refuses weights that do not fit
        export_checkpoint(args.output, checkpoint | {"config": dump_run(run)}, kinds[-1])
    print(f"{args.output}: the {kinds[-1]} weights of {path}, of the model {run.model['name']}")


if __name__ == "__main__":
    main()
