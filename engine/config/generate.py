"""Writes anew everything in a clone of the repository that follows from the registry and the options of the code.

    python -m engine.config.generate

That is configs/schema.json, and the parts of pages between ``<!-- generated: NAME -->`` and ``<!-- end -->``. Plugins
are left out.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from attention import ATTENTION
from attention.__main__ import table
from engine.config.json_schema import describe
from engine.config.options_table import tables
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.files import write_file

ROOT = Path(__file__).parents[2]
COMMAND = "python -m engine.config.generate"
WIDTH = 120


def refusing() -> str:
    """The mechanisms that refuse key masks."""
    return _list(name for name, mechanism in ATTENTION.items() if mechanism.key_mask_refusal)


def causal() -> str:
    """The mechanisms that have the option `causal`."""
    return _list(name for name, mechanism in ATTENTION.items() if hasattr(mechanism.Config, "causal"))


def fitting() -> str:
    """The mechanisms that have the option `fit`."""
    return _list(name for name, mechanism in ATTENTION.items() if hasattr(mechanism.Config, "fit"))


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"mechanisms": table},
    "docs/integration.md": {"mechanisms without key masks": refusing},
    "docs/mechanisms.md": {"mechanisms that fit small grids": fitting, "causal mechanisms": causal},
    "docs/options.md": {"options": tables},
}
"""Page -> its generated parts: name -> function that returns the text."""

SCHEMA = "configs/schema.json"
FILES = (*PARTS, SCHEMA)


def generate(file: str) -> bytes:
    """Returns the content that one of `FILES` should have.

    Raises:
        UserError: a page is missing, or does not have a part between its two comments once.
    """
    if file == SCHEMA:
        return describe()
    try:
        page = (ROOT / file).read_text()
    except FileNotFoundError:
        raise UserError(f"{ROOT / file}: not there; `{COMMAND}` works in a clone of the repository") from None
    for name, text in PARTS[file].items():
        begin, end = f"<!-- generated: {name} -->\n\n", "\n\n<!-- end -->"
        found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", page, re.DOTALL)
        if len(found) != 1:
            raise UserError(f"{file}: expected {begin.strip()} and {end.strip()} once, each between empty lines")
        page = page.replace(found[0], f"{begin}{text()}{end}")
    return page.encode()


def main() -> None:
    with refuse_bad_input():
        for file in FILES:
            content, path = generate(file), ROOT / file
            if not path.exists() or path.read_bytes() != content:
                write_file(path, content)
                print(file)


def _list(names: Iterator[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) + ".", WIDTH)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"{COMMAND} takes no arguments")
    main()
