"""Regenerates the files of a clone that follow from the registry and the options of the code.

    python -m engine.reporting.generate

They are the pages of docs/options/ except that of `attention`, and the parts of other pages between
``<!-- generated: NAME -->`` and ``<!-- end -->``. Plugins are left out.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attention import ATTENTION, AttentionFactory, options_of
from attention.__main__ import config, row
from attention.option_tables import markdown_table
from engine.config.option_pages import index, page, sections
from engine.config.papers import read_papers
from engine.reporting.result_tables import TABLES
from engine.reporting.speed_tables import OF_HOSTS, SPEED_TABLES
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.files import write_file

ROOT = Path(__file__).parents[2]
COMMAND = "python -m engine.reporting.generate"
WIDTH = 120

MODELS = "deit_tiny_p8", "deit_tiny_p16", "deit_small_p16", "pvtv2_b3_2xheads"
"""Models whose figures in a paper are quoted, the first that has one."""


def all_mechanisms() -> str:
    """The table of all mechanisms, with links from docs/, and the top-1 on ImageNet that a paper prints."""
    rows = {name: row(name) for name in ATTENTION if config(name)}
    for name, cells in rows.items():
        cells["config"] = cells["config"].replace("](", "](../")
        cells["ImageNet top-1 (%)"] = quote(name)
    return markdown_table(next(iter(rows.values())), (cells.values() for cells in rows.values()))


def quote(name: str) -> str:
    """The first figure of a paper for mechanism `name`, with its model and its table; empty if none is quoted."""
    for model in MODELS:
        for paper in read_papers():
            if paper.config == f"{model}/{name}.yaml" and paper.top1 and not paper.overrides:
                return f"{paper.top1:.2f} ({model}, {paper.source})"
    return ""


def mechanisms_that(is_named: Callable[[str], bool]) -> str:
    """A sentence with the names of mechanisms."""
    return textwrap.fill(", ".join(f"`{name}`" for name in ATTENTION if is_named(name)) + ".", WIDTH)


def refuses_key_masks(name: str) -> bool:
    return bool(ATTENTION[name].refuses_key_mask(AttentionFactory.from_options(name).config))


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/integration.md": {"mechanisms without key masks": partial(mechanisms_that, refuses_key_masks), **OF_HOSTS},
    "docs/mechanisms.md": {
        "mechanisms": all_mechanisms,
        "mechanisms that fit small grids": partial(mechanisms_that, lambda name: "fit" in options_of(name)),
        "mechanisms without prefix tokens": partial(
            mechanisms_that, lambda name: ATTENTION[name].prefix_tokens == "refused"
        ),
        "causal mechanisms": partial(mechanisms_that, lambda name: "causal" in options_of(name)),
    },
    "docs/options.md": {"sections": index},
    **TABLES,
    **SPEED_TABLES,
}
"""Page -> its generated parts: name -> function that returns the text."""

WHOLE: dict[str, Callable[[], str]] = {
    f"docs/options/{name}.md": partial(page, name) for name in sections() if name != "attention"
}
"""Generated file -> function that returns its content. `make docs` makes the page of `attention` for the site."""

FILES = (*PARTS, *WHOLE)


def generate(file: str) -> bytes:
    """Returns the content that one of `FILES` should have; a UserError: no page, or not each part in it once."""
    if file in WHOLE:
        return WHOLE[file]().encode()
    try:
        text = (ROOT / file).read_text()
    except FileNotFoundError:
        raise UserError(f"{ROOT / file}: not there; `{COMMAND}` works in a clone of the repository") from None
    for name, part in PARTS[file].items():
        begin, end = f"<!-- generated: {name} -->\n\n", "\n\n<!-- end -->"
        found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        if len(found) != 1:
            raise UserError(f"{file}: expected {begin.strip()} and {end.strip()} once, each between empty lines")
        text = text.replace(found[0], f"{begin}{part()}{end}")
    return text.encode()


def main() -> None:
    with refuse_bad_input():
        for file in FILES:
            content, path = generate(file), ROOT / file
            if not path.exists() or path.read_bytes() != content:
                write_file(path, content)
                print(file)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"{COMMAND} takes no arguments")
    main()
