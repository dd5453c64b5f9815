"""Shows what attention does in a trained model.

    python analyze.py QUESTION --help
    python analyze.py error runs/softmax data.root=/data/imagenet --attention lara eva

Options of the run (key.path=value) may stand anywhere on the line.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from engine.config import refuse_bad_input
from engine.signals import end_at_interrupt

QUESTIONS: dict[str, str] = {
    "maps": "what attends to what in each layer and head, how far, and through all layers, on images",
    "replace": "what a trained model loses when another mechanism takes the place of its own, without training",
    "error": "how far mechanisms are from softmax attention on a trained model's queries, keys and values",
    "oracle": "how near low rank, sparse, and both come to its attention matrices, at one budget",
}
"""Module of `analysis` -> what it shows."""

OVERRIDE = re.compile(r"\w+(\.\w+)*=")
"""How key.path=value begins; no option of the command line does."""


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show what attention does in a trained model.")
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, shows in QUESTIONS.items():
        question = questions.add_parser(
            name, help=shows, description=shows, epilog="key.path=value, anywhere: an option in place of the run's"
        )
        import_module(f"analysis.{name}").add_arguments(question)
    texts = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args([text for text in texts if not OVERRIDE.match(text)])
    args.overrides = [text for text in texts if OVERRIDE.match(text)]
    with refuse_bad_input():
        import_module(f"analysis.{args.question}").main(args)


if __name__ == "__main__":
    main()
