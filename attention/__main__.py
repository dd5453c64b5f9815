"""`python -m attention` prints the table of all mechanisms, in Markdown, as in docs/mechanisms.md but without
its last column.

`python -m attention eva` prints EVA's description, paper and cost, and the table of its options.

Each row comes from the docstring at the top of a mechanism's file: ``Title (authors year, arXiv:number): idea.``, then
prose, then ``Cost: formula multiply-accumulates``. A mechanism without a paper leaves out the parenthesis. The figures
come from `Attention.cost`.
"""

import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import ATTENTION, AttentionFactory, Grid, LayerContext, OptionError, options_of
from .base import Cost
from .option_tables import markdown_table
from .option_tables import table as option_table
from .plugins import take_plugins

ROOT = Path(__file__).parents[1]
DOCSTRING = re.compile(
    r"[^(:]+?(?: \((?P<authors>[^()]+), arXiv:(?P<number>[\d.]+)\))?: (?P<idea>.+?)\. .*?"
    r"Cost: (?P<cost>.+?) multiply-accumulates"
)


def table() -> str:
    """The table in Markdown, with one row per mechanism of `ATTENTION` that has a shipped configuration.

    Raises:
        ValueError: a mechanism's docstring does not have the expected shape.
    """
    rows = [row(name) for name in ATTENTION if config(name)]
    return markdown_table(rows[0], (cells.values() for cells in rows))


def row(name: str) -> dict[str, str]:
    """Column -> cell of mechanism `name`: name, paper, idea, cost as a formula and in figures, and configuration."""
    found, costs = read_docstring(name), layer_costs(name, (28, 28))
    idea, cost = (found[part].replace("|", r"\|").replace("^2", "²").replace("^3", "³") for part in ("idea", "cost"))
    return {
        "name": f"`{name}`",
        "paper": f"[{found['authors']}](https://arxiv.org/abs/{found['number']})" if found["number"] else "",
        "idea": idea,
        "cost": cost,
        "MACs (M)": " or ".join(f"{cost.macs / 1e6:.1f}" for cost in costs),
        "parameters": " or ".join(f"{cost.parameters:,}" for cost in costs),
        "config": config(name),
    }


def page(name: str) -> str:
    """The docstring of mechanism `name` and the table of its options; an OptionError refuses an unknown one."""
    options = option_table(ATTENTION[name].Config) if options_of(name) else "It has no options of its own."
    return f"{inspect.cleandoc(ATTENTION[name].__doc__ or 'It has no docstring.')}\n\n{options}"


def read_docstring(name: str) -> re.Match[str]:
    """Parses the module docstring of mechanism `name` into authors, number, idea and cost.

    Raises:
        ValueError: the docstring does not have the expected shape.
    """
    cls = ATTENTION[name]
    found = DOCSTRING.match(" ".join((cls.__doc__ or "").split()))
    if found is None:
        shape = "'Title (authors year, arXiv:number): idea.' ... 'Cost: formula multiply-accumulates.'"
        also = "without a paper, no parenthesis; the class's docstring counts before its file's"
        raise ValueError(f"{cls.__module__}: its docstring does not have the shape {shape} ({also})")
    return found


def layer_costs(name: str, grid: Grid) -> list[Cost]:
    """Distinct costs of DeiT-Tiny's layers with mechanism `name` at its defaults; one unless layers differ in kind."""
    options = AttentionFactory.from_options(name).config
    layers = (LayerContext(dim=192, num_heads=3, grid=grid, layer=layer, depth=12) for layer in range(12))
    return list(dict.fromkeys(ATTENTION[name].layer_cost(context, options) for context in layers))


def config(name: str) -> str:
    """Link to the configuration of mechanism `name` for DeiT-Tiny at 784 tokens, else at 196, else for any model."""
    for model in ("deit_tiny_p8", "deit_tiny_p16", "*"):
        for path in sorted(ROOT.glob(f"configs/{model}/{name}.yaml")):
            return f"[{path.parent.name}]({path.relative_to(ROOT).as_posix()})"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Prints the table of all mechanisms, or what the mechanism that `arguments` names is; exits with 2 for others."""
    try:
        arguments = take_plugins(arguments)
        if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
            print("usage: python -m attention [--plugin MODULE] [NAME]")
            sys.exit(0 if {"-h", "--help"} & {*arguments} else 2)
        print(page(*arguments) if arguments else table(), flush=True)
    except BrokenPipeError:  # by a reader that has enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OptionError as error:
        print(f"python -m attention: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
