"""Compares models and mechanisms side by side.

python benchmark.py --macs                                   # the papers' rows; all mechanisms at 196 to 3136 tokens
python benchmark.py --macs configs/deit_tiny_p8/*.yaml       # any configurations
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from attention import ATTENTION
from engine.config import load_run, refuse_bad_input
from engine.costs import PAPER_COSTS, PaperRow, count_costs

CONFIGS = Path(__file__).with_name("configs")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare models and mechanisms side by side.")
    parser.add_argument("configs", nargs="*", help="YAML files, see configs/; none: the papers' rows, all mechanisms")
    parser.add_argument("--macs", action="store_true", required=True, help="parameters and multiply-accumulates")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        print_costs([PaperRow(os.path.relpath(path, CONFIGS)) for path in args.configs] or PAPER_COSTS)
        if not args.configs:
            print_costs_by_size()


def print_costs(rows: Sequence[PaperRow]) -> None:
    """Prints parameters and MACs of every row beside the paper's figures, as Markdown."""
    print(
        "| configuration | parameters (M) | paper | MACs (G) | paper | source |\n| --- | --- | --- | --- | --- | --- |"
    )
    for row in rows:
        run = load_run(CONFIGS / row.config, row.overrides)
        parameters, macs = count_costs(run.model, run.attention)
        cells = [
            " ".join((row.config, *row.overrides)),
            f"{parameters / 1e6:.3f}",
            row.parameters or "",
            f"{macs / 1e9:.3f}",
            row.macs or "",
            row.source,
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def print_costs_by_size() -> None:
    """Prints MACs and parameters of DeiT-Tiny for 196, 784 and 3136 tokens with every mechanism at its defaults."""
    cells = "MACs (G) at 196 tokens", "parameters (M)", "at 784", "parameters", "at 3136", "parameters"
    print(f"\n| DeiT-Tiny with | {' | '.join(cells)} |\n|{' --- |' * 7}")
    for name in ATTENTION:
        costs = [count_costs({"name": f"deit_tiny_p{patch}", "img_size": 224}, name) for patch in (16, 8, 4)]
        print(f"| {name} | {' | '.join(f'{c.macs / 1e9:.3f} | {c.parameters / 1e6:.3f}' for c in costs)} |")


if __name__ == "__main__":
    main()
