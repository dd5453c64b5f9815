"""Command lines of `analyze.py`: the arguments of every question, and mechanisms by name."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config.yaml_files import Tree, override, read_yaml
from engine.evaluation.command_lines import add_checkpoint
from engine.runtime.arguments import PROCESSES, SEED, Count, find_config

EVERY_MECHANISM = "configs/ablation/mechanisms.yaml"
"""File of every mechanism with options for a 14x14 grid, which a name without options stands for."""

SEARCHED = ("eva", "lara", "linear", "local", "monarch", "performer")
"""Mechanisms that a search tries by default."""

PER_BUDGET = 8
"""Default number of assignments that a search measures for each budget, after the layers alone."""

BATCH_SIZE = 24
"""Images of a step of alignment."""

MODES = "evaluation", "sampled"
"""Randomness of attention: as kept or replaced for evaluation, or sampled anew as in training."""

BUDGETS = {
    "macs": "multiply-accumulates, as a share of those with the model's own attention",
    "ms": "milliseconds of a forward pass on this machine",
    "memory": "MiB at the peak of a forward pass",
}
"""Kind of a search's budget -> what it limits."""


def add_arguments(question: str, parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a question of `analyze.py`."""
    add = parser.add_argument
    add_checkpoint(parser, "RUN", "run directory, checkpoint or export")
    directory = "directory of tables and figures (current directory)"
    add("--output", type=Path, default=Path(), metavar="DIR", help=directory)
    if question == "maps":
        add("images", nargs="+", metavar="IMAGE", help="image, folder of images, or - for a list on stdin")
        _add_mechanisms(parser, "the run's own")
        query = "the patch, from 0,0, whose weights are shown (the class token if there is one, else the centre)"
        add("--query", metavar="ROW,COLUMN", help=query)
    elif question == "replace":
        _add_mechanisms(parser, "all of that file")
        _add_sample(parser, 500)
        add("--blocks", help="blocks to replace it in, as 0-8 or '0-2, 5'; all others keep the run's (all)")
        add("--stage", type=Count(0), help="stage of a pyramid to replace it in, all of it or --blocks of it")
        _add_align(parser)
        text = "then train each further with labels, and the run's own attention beside them; in DIR/finetune"
        add("--finetune", type=Count(), metavar="EPOCHS", help=text)
        add("--jobs", type=PROCESSES, default=1, metavar="K", help="runs of --finetune at the same time (1)")
    elif question == "error":
        _add_mechanisms(parser, "all of that file")
        _add_sample(parser, 16)  # with 14x14 tokens and three heads, 9,408 outputs of a layer
        noise = "noise of attention: as kept for evaluation, or sampled as in training (both)"
        add("--modes", nargs="+", choices=MODES, default=MODES, help=noise)
        sizes = "sizes of a mechanism: landmarks, samples, tokens of a window, ..., at temperature 1 (16 49 196)"
        add("--budgets", type=Count(), nargs="+", default=[16, 49, 196], help=sizes)
        passes = "split the error with samples into squared bias and variance, over so many passes"
        add("--decompose", type=Count(2), metavar="PASSES", help=passes)
        divisors = "divisors of the logits, at the middle budget (0.25 1 4; 1 with --align)"
        add("--temperatures", type=float, nargs="+", help=divisors)
        _add_align(parser)
    elif question == "oracle":
        add("--images", type=Count(high=10_000), default=4, help="validation images (4)")
        add("--budgets", type=Count(), nargs="+", default=[8, 16, 32, 64], help="numbers per row (8 16 32 64)")
        add("--draws", type=Count(), default=3, help="number of samples of Scatterbrain's random features (3)")
        add("--seed", type=SEED, default=0, help="seed of these (0)")
    else:
        _add_mechanisms(parser, f"{' '.join(SEARCHED)}, where a layer can have them")
        text = f"steps of {BATCH_SIZE} training images in which mechanisms are aligned (150)"
        add("--align", type=Count(), default=150, metavar="STEPS", help=text)
        meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in BUDGETS.items())
        text = f"largest costs of the model, all of one kind. {meanings}"
        add("--budget", nargs="+", required=True, metavar="KIND=LIMIT", help=text)
        text = "images of the forward pass that is timed, and that ms= and memory= limit (32)"
        add("--batch-size", type=Count(), default=32, metavar="N", help=text)
        text = "assignments to measure, those with at most one replaced layer included"
        text += f" (default: these, and {PER_BUDGET} for each budget)"
        add("--evaluations", type=Count(), metavar="N", help=text)
        add("--seed", type=SEED, default=0, help="seed of alignment (0)")
        _add_images(parser, 1000)
        if question == "convert":
            text = "epochs of training with labels after the search (a tenth of the model's); 0: none"
            add("--finetune", type=Count(0), metavar="EPOCHS", help=text)


def _add_mechanisms(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds --attention. otherwise: description of the default."""
    text = f"a mechanism with the options in {EVERY_MECHANISM}, or '{{name: eva, window_size: 7}}' ({otherwise})"
    parser.add_argument("--attention", nargs="+", metavar="NAME", help=text)


def _add_sample(parser: argparse.ArgumentParser, num_images: int) -> None:
    draws = "number of random initialisations and samples, with seeds from 0 on (3)"
    parser.add_argument("--draws", type=Count(), default=3, help=draws)
    _add_images(parser, num_images)


def _add_images(parser: argparse.ArgumentParser, number: int) -> None:
    images = f"number of validation images, evenly spaced ({number})"
    parser.add_argument("--images", type=Count(), default=number, help=images)


def _add_align(parser: argparse.ArgumentParser) -> None:
    text = f"fit each to the run's own attention, in steps of {BATCH_SIZE} training images without labels; DIR/aligned"
    parser.add_argument("--align", type=Count(), metavar="STEPS", help=text)


def read_mechanisms(texts: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Reads the mechanisms of --attention (None: every mechanism): text -> options.

    Raises:
        ConfigError, OptionError: invalid YAML, or an unknown mechanism or option.
    """
    from attention import AttentionFactory  # and torch

    cases = read_yaml(find_config(EVERY_MECHANISM)).values["runs"]
    known = {case["attention"]["name"]: case["attention"] for case in cases}
    found = {}
    for text in known if texts is None else texts:
        tree = Tree({}, {})
        override(tree, f"attention={text}")
        options = tree.values["attention"]
        AttentionFactory.from_options(options, "--attention")
        found[text] = known.get(options, {"name": options}) if isinstance(options, str) else options
    return found
