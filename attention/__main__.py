"""`python -m attention` prints the table of all mechanisms, in Markdown, as README.md shows it.

It is made of what every mechanism's file begins with: ``Title (authors year, arXiv:number): idea.``, then prose, then
``Cost: formula multiply-accumulates``. A mechanism without a paper leaves out the parenthesis. The figures are those of
`Attention.cost`.
"""

import re
import sys
from pathlib import Path

from attention import ATTENTION, AttentionFactory, Grid, LayerContext
from attention.base import Cost

ROOT = Path(__file__).parents[1]
DOCSTRING = re.compile(
    r"[^(:]+?(?: \((?P<authors>[^()]+), arXiv:(?P<number>[\d.]+)\))?: (?P<idea>.+?)\. .*?"
    r"Cost: (?P<cost>.+?) multiply-accumulates"
)


def table() -> str:
    """One row per mechanism of `ATTENTION` that a configuration ships for: name, paper, idea, cost as a formula and in
    figures, and the configuration.

    Raises:
        ValueError: a mechanism's file does not begin as it should.
    """
    header = "name", "paper", "idea", "cost", "MACs (M)", "parameters", "config"
    rows = [header, ("---",) * len(header), *(row(name) for name in ATTENTION if config(name))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """The cells of mechanism `name`."""
    found, costs = read_docstring(name), layer_costs(name, (28, 28))
    paper = f"[{found['authors']}](https://arxiv.org/abs/{found['number']})" if found["number"] else ""
    idea, cost = (found[part].replace("|", r"\|").replace("^2", "²").replace("^3", "³") for part in ("idea", "cost"))
    macs, parameters = (
        " or ".join(f"{c.macs / 1e6:.1f}" for c in costs),
        " or ".join(f"{c.parameters:,}" for c in costs),
    )
    return f"`{name}`", paper, idea, cost, macs, parameters, config(name)


def read_docstring(name: str) -> re.Match[str]:
    """What the file of mechanism `name` begins with: authors, number, idea, cost.

    Raises:
        ValueError: it does not begin as it should.
    """
    module = ATTENTION[name].__module__
    found = DOCSTRING.match(" ".join((sys.modules[module].__doc__ or "").split()))
    if found is None:
        shape = "'Title (authors year, arXiv:number): idea.' ... 'Cost: formula multiply-accumulates'"
        raise ValueError(f"{module}: its docstring does not have the shape {shape}")
    return found


def layer_costs(name: str, grid: Grid) -> list[Cost]:
    """Costs of DeiT-Tiny's layers with mechanism `name` at its defaults: one, or of every kind of layer one."""
    options = AttentionFactory.from_options(name).config
    layers = (LayerContext(dim=192, num_heads=3, grid=grid, layer=layer, depth=12) for layer in range(12))
    return list(dict.fromkeys(ATTENTION[name].cost(context, options) for context in layers))


def config(name: str) -> str:
    """Link to the configuration of mechanism `name` for DeiT-Tiny at 784 tokens, else at 196, else of any model."""
    for model in ("deit_tiny_p8", "deit_tiny_p16", "*"):
        for path in sorted(ROOT.glob(f"configs/{model}/{name}.yaml")):
            return f"[{path.parent.name}]({path.relative_to(ROOT).as_posix()})"
    return ""


if __name__ == "__main__":
    print(table())
