"""One console command for the scripts, from any directory: eav train, eav validate, eav runs, ...

eav train configs/quickstart.yaml --output runs/quickstart
torchrun --no-python --nproc_per_node=8 eav train configs/deit_tiny_p8/eva.yaml --output runs/eva
"""

import argparse
import sys
from importlib import import_module

from engine.runtime.signals import begin

OF_DATA, OF_TRAINED = "engine.data.command_lines", "engine.evaluation.command_lines"
OF_CHECKPOINTS = "engine.checkpoints.command_line"

COMMANDS = {
    "train": ("train", "train one configuration, or resume its run", "engine.training.command_line:parse_arguments"),
    "validate": ("validate", "evaluate a checkpoint", f"{OF_TRAINED}:parse_validate"),
    "predict": ("predict", "predict the classes of images", f"{OF_TRAINED}:parse_predict"),
    "ablate": ("ablate", "run a sweep, and tabulate it", "ablation.command_line:parse_arguments"),
    "analyze": ("analyze", "ask what the attention of a trained model does", ""),
    "benchmark": ("benchmark", "time and count layers and models on this device", "bench.arguments:parse_arguments"),
    "runs": ("engine.reporting.runs", "show runs", ""),
    "export": ("engine.checkpoints.export", "write a model for timm or ONNX", f"{OF_CHECKPOINTS}:parse_arguments"),
    "prepare": ("engine.data.prepare", "decode a data set once", f"{OF_DATA}:parse_prepare"),
    "verify": ("engine.data.verify", "list the broken images of a data set", f"{OF_DATA}:parse_verify"),
    "draw": ("engine.data.draw", "draw images of paths, or clips of moving digits", f"{OF_DATA}:parse_draw"),
}
"""Subcommand -> its module, which is imported only then, what it does, and the parser that runs before the import."""


def main() -> None:
    """Runs the subcommand that the first argument names, with the other arguments."""
    lines = "\n".join(f"  {name:<10} {text}" for name, (_, text, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="eav",
        description="Efficient attention for vision.",
        epilog=f"commands:\n{lines}\n\neav COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    command = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"{parser.prog} {command}", *sys.argv[2:]]
    module, _, parser = COMMANDS[command]
    begin(parser)
    import_module(module).main()


if __name__ == "__main__":
    main()
