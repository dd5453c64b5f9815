"""Parameters and multiply-accumulates (MACs) of models beside the papers' figures."""

import functools
from collections.abc import Sequence
from pathlib import Path

from engine.config.papers import PaperRow
from engine.reporting.tables import markdown_table
from engine.run.load import load_run
from models.costs import Costs, count_costs

CONFIGS = Path(__file__).parents[1] / "configs"


def print_costs(rows: Sequence[PaperRow]) -> None:
    """Prints parameters and MACs of every row beside the paper's and the released code's figures, as Markdown."""
    titles = "configuration", "parameters (M)", "paper", "MACs (G)", "paper", "released code", "top-1 (%)", "source"
    lines = []
    for row in rows:
        parameters, macs = costs_of_run(row.config, row.overrides)
        figures = f"{parameters / 1e6:.3f}", row.parameters, f"{macs / 1e9:.3f}", row.macs, row.released_macs, row.top1
        cells = " ".join((row.config, *row.overrides)), *figures, row.source, row.note
        lines.append([str(cell or "") for cell in cells])
    print(markdown_table([*titles, "note"], lines))


@functools.cache
def costs_of_run(config: str, overrides: tuple[str, ...]) -> Costs:
    """Returns the costs of the model of a file in configs/. The cache serves rows of the same model."""
    run = load_run(CONFIGS / config, overrides)
    return count_costs(run.model, run.attention)
