"""Analyses attention in a trained model.

    python analyze.py QUESTION --help
    python analyze.py error runs/softmax data.root=/data/imagenet --attention lara eva

Options of the run (key.path=value) may stand anywhere on the line.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin()

from analysis.command_line import add_arguments
from engine.config.schema import Run
from engine.runtime.arguments import ArgumentParser
from engine.runtime.errors import refuse_bad_input

QUESTIONS: dict[str, str] = {
    "maps": "attention maps of each layer and head on images",
    "replace": "accuracy of a trained model with other attention; if asked, also aligned, and fine-tuned",
    "convert": "a trained model to a faster one: search, alignment, training, comparison, export",
    "search": "mechanism of every layer of a trained model under a budget: a front of loss against cost",
    "error": "error of mechanisms against softmax attention on a trained model's queries, keys and values",
    "oracle": "error of low-rank, sparse and combined approximations of attention matrices at one budget",
}
"""Module of `analysis` -> its description."""

NEEDED = {"maps": " photo.jpg", "convert": " --budget macs=0.7 --output runs/faster", "search": " --budget macs=0.7"}
"""Question -> what its example needs after the run."""

OVERRIDE = re.compile(rf"(({'|'.join(Run.__dataclass_fields__)})|\w+(\.\w+)+)=")
"""Beginning of key.path=value; no option of the command line matches, nor a budget, as macs=0.7."""


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    example = "python analyze.py replace runs/softmax --attention eva lara"
    parser = ArgumentParser(description=f"Analyse attention in a trained model.\n\n    {example}")
    texts = sys.argv[1:] if arguments is None else arguments
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, shows in QUESTIONS.items():
        text = f"{shows}\n\n    python analyze.py {name} runs/softmax{NEEDED.get(name, '')}"
        question = questions.add_parser(
            name, help=shows, description=text, epilog="key.path=value, anywhere: overrides an option of the run"
        )
        add_arguments(name, question)
    args = parser.parse_args([text for text in texts if not OVERRIDE.match(text)])
    args.train = lambda texts: import_module("train").main(texts)  # of a script, which only scripts call
    args.overrides = [text for text in texts if OVERRIDE.match(text)]
    from engine.runtime.memory import refuse_too_large  # torch, after help and refusals of arguments

    with refuse_bad_input(), refuse_too_large("give smaller numbers, or a smaller model"):
        import_module(f"analysis.{args.question}").main(args)


if __name__ == "__main__":
    main()
