"""Parameters and multiply-accumulates (MACs) of models beside the papers' figures."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from attention import OptionError
from attention.option_tables import markdown_table
from bench.workload import read_options
from engine.config.papers import PaperRow
from engine.run.load import load_run
from models import is_host
from models.costs import Costs, costs_of, count_costs
from models.of_transformers import HF, class_of

CONFIGS = Path(__file__).parents[1] / "configs"


def print_costs(rows: Sequence[PaperRow]) -> None:
    """Prints parameters and MACs of every row beside the paper's and the released code's figures, as Markdown."""
    titles = "configuration", "parameters (M)", "paper", "MACs (G)", "paper", "released code", "top-1 (%)", "source"
    lines = []
    for row in rows:
        parameters, macs, note = None, None, row.note
        try:
            if costs := costs_of_row(row.config, row.overrides):
                parameters, macs = f"{costs.parameters / 1e6:.3f}", f"{costs.macs / 1e9:.3f}"
        except OptionError as error:  # transformers is not installed
            note = str(error)
        figures = parameters, row.parameters, macs, row.macs, row.released_macs, row.top1
        cells = " ".join((row.config, *row.overrides)), *figures, row.source, note
        lines.append([str(cell or "") for cell in cells])
    print(markdown_table([*titles, "note"], lines))


@functools.cache
def costs_of_row(config: str, overrides: tuple[str, ...]) -> Costs | None:
    """Returns the costs of a row's model, None if it cannot be built here. The cache serves rows of the same model."""
    if config.startswith(HF):
        given = {"model_type": config.removeprefix(HF), "num_labels": 1000}
        kind, options = class_of(given | read_options(config, ",".join(overrides)))
        with torch.device("meta"):
            return costs_of(kind(options).eval(), torch.empty(1, 3, 224, 224))
    if is_host(config):
        return count_costs({"name": config, "img_size": 224}, None)
    if not config.endswith(".yaml"):
        return None
    run = load_run(CONFIGS / config, overrides)
    return count_costs(run.model, run.attention)
