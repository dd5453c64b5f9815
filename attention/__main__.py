"""`python -m attention` prints the table of all mechanisms, in Markdown, as README.md shows it.

It is made of what every mechanism's file begins with: ``Title (authors year, arXiv:number): idea.``, then prose, then
``Cost: formula multiply-accumulates``. A mechanism without a paper leaves out the parenthesis.
"""

import re
import sys
from pathlib import Path

from attention import ATTENTION

ROOT = Path(__file__).parents[1]
DOCSTRING = re.compile(
    r"[^(:]+?(?: \((?P<authors>[^()]+), arXiv:(?P<number>[\d.]+)\))?: (?P<idea>.+?)\. .*?"
    r"Cost: (?P<cost>.+?) multiply-accumulates"
)


def table() -> str:
    """One row per mechanism of `ATTENTION`: name, paper, idea, cost, and a configuration if there is one.

    Raises:
        ValueError: a mechanism's file does not begin as it should.
    """
    rows = [("name", "paper", "idea", "cost", "config"), ("---",) * 5, *map(row, ATTENTION)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """The cells of mechanism `name`."""
    module = ATTENTION[name].__module__
    told = DOCSTRING.match(" ".join((sys.modules[module].__doc__ or "").split()))
    if told is None:
        shape = "'Title (authors year, arXiv:number): idea.' ... 'Cost: formula multiply-accumulates'"
        raise ValueError(f"{module}: its docstring does not have the shape {shape}")
    paper = f"[{told['authors']}](https://arxiv.org/abs/{told['number']})" if told["number"] else ""
    idea, cost = (told[part].replace("|", r"\|").replace("^2", "²") for part in ("idea", "cost"))
    return f"`{name}`", paper, idea, cost, config(name)


def config(name: str) -> str:
    """Link to the configuration of mechanism `name` for DeiT-Tiny at 784 tokens, else at 196, else of any model."""
    for model in ("deit_tiny_p8", "deit_tiny_p16", "*"):
        for path in sorted(ROOT.glob(f"configs/{model}/{name}.yaml")):
            return f"[{path.parent.name}]({path.relative_to(ROOT).as_posix()})"
    return ""


if __name__ == "__main__":
    print(table())
