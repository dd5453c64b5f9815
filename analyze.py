"""Shows what attention does in a trained model.

python analyze.py QUESTION --help
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

from engine.config import refuse_bad_input

QUESTIONS: dict[str, str] = {
    "maps": "what attends to what in each layer and head, how far, and through all layers, on images",
    "replace": "what a trained model loses when another mechanism takes the place of its own, without training",
    "error": "how far mechanisms are from softmax attention on a trained model's queries, keys and values",
    "oracle": "how near low rank, sparse, and both come to its attention matrices, at one budget",
}
"""Module of `analysis` -> what it shows."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show what attention does in a trained model.")
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, shows in QUESTIONS.items():
        import_module(f"analysis.{name}").add_arguments(questions.add_parser(name, help=shows, description=shows))
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        import_module(f"analysis.{args.question}").main(args)


if __name__ == "__main__":
    main()
