"""What the questions' command lines have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attention import AttentionFactory
from engine.checkpoint import parse_weights
from engine.config import Tree, find_config, override, read_yaml
from engine.errors import UserError

EVERY_MECHANISM = "configs/ablation/mechanisms.yaml"
"""Every mechanism with options for a 14x14 grid: what a name alone stands for."""

MODES = "evaluation", "sampled"
"""Of what attention draws at random: what it keeps for evaluation, or has in its place; or fresh, as in training."""


def add_run(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Adds RUN, which of its weights, and where results go."""
    parser.add_argument("checkpoint", type=Path, metavar="RUN", help=f"run directory, checkpoint or export{also}")
    parser.add_argument("--weights", type=parse_weights, help="plain or ema: the kind of weights (ema where kept)")
    parser.add_argument("--select", choices=("best", "last"), default="best", help="which of a run directory (best)")
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="directory of tables and figures (the present one)"
    )


def add_mechanisms(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds --attention. otherwise: what is taken where it is not given."""
    parser.add_argument(
        "--attention",
        nargs="+",
        metavar="NAME",
        help=f"a mechanism as {EVERY_MECHANISM} has it, or '{{name: eva, window_size: 7}}' ({otherwise})",
    )


def add_drop_in(parser: argparse.ArgumentParser, num_images: int, modes: Sequence[str]) -> None:
    """Adds what measuring untrained mechanisms takes."""
    add_mechanisms(parser, "all of that file")
    parser.add_argument(
        "--draws", type=int, default=3, help="of all that is random and not trained, by seeds from 0 on (3)"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=modes,
        help=f"noise of attention: as kept for evaluation, or sampled as in training ({' '.join(modes)})",
    )
    parser.add_argument(
        "--images", type=int, default=num_images, help=f"of the validation data, evenly spaced ({num_images})"
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises the UserError for a count below 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise UserError(f"--{name} = {getattr(args, name)} is below the least valid value 1")


def read_mechanisms(texts: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """What --attention names (None: every mechanism) -> the options of each.

    Raises:
        ConfigError, OptionError: no YAML, or an unknown mechanism or option.
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


def progress(title: str, total: int, unit: str) -> tqdm:
    """A bar on the terminal, which goes away in the end."""
    return tqdm(desc=title, total=total, unit=f" {unit}", leave=False, dynamic_ncols=True, disable=None)
