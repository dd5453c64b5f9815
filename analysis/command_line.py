"""Common options of the questions' command lines."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention import AttentionFactory
from engine.config.yaml_files import Tree, override, read_yaml
from engine.evaluation.command_lines import add_checkpoint
from engine.runtime.arguments import Count, find_config

EVERY_MECHANISM = "configs/ablation/mechanisms.yaml"
"""File of every mechanism with options for a 14x14 grid, which a name without options stands for."""


def add_run(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Adds RUN, the choice of its weights, and the directory of results."""
    add_checkpoint(parser, "RUN", f"run directory, checkpoint or export{also}")
    directory = "directory of tables and figures (current directory)"
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help=directory)


def add_mechanisms(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds --attention. otherwise: description of the default."""
    text = f"a mechanism with the options in {EVERY_MECHANISM}, or '{{name: eva, window_size: 7}}' ({otherwise})"
    parser.add_argument("--attention", nargs="+", metavar="NAME", help=text)


def add_sample(parser: argparse.ArgumentParser, num_images: int) -> None:
    """Adds the numbers of draws and of images."""
    draws = "number of random initialisations and samples, with seeds from 0 on (3)"
    parser.add_argument("--draws", type=Count(), default=3, help=draws)
    add_images(parser, num_images)


def add_images(parser: argparse.ArgumentParser, number: int) -> None:
    """Adds the number of images."""
    images = f"number of validation images, evenly spaced ({number})"
    parser.add_argument("--images", type=Count(), default=number, help=images)


def add_align(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """Adds --align. batch_size: images of a step."""
    text = f"fit each to the run's own attention, in steps of {batch_size} training images without labels; DIR/aligned"
    parser.add_argument("--align", type=Count(), metavar="STEPS", help=text)


def read_mechanisms(texts: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Reads the mechanisms of --attention (None: every mechanism): text -> options.

    Raises:
        ConfigError, OptionError: invalid YAML, or an unknown mechanism or option.
    """
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
