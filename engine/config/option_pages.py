"""Prints the options of a run in Markdown: of one section, or a page for each section, as in docs/options/.

    python -m engine.config.option_pages [SECTION]

The options come from the dataclasses that hold them: the sections of `engine.config.schema.Run`, and the `Config` of
every family of models and of every mechanism.
"""

import dataclasses
import inspect
from collections.abc import Mapping

from attention.option_tables import describe, table
from attention.options import to_yaml
from attention.registry import ATTENTION
from engine.config.schema import SECTIONS, Run
from engine.runtime.arguments import ArgumentParser

LINKS = """[Mechanisms](../mechanisms.md) describes all of them, with their costs, and lists that give [a mechanism per
block](../mechanisms.md#a-mechanism-per-block)."""
KINDS = {
    "model": "Family of models, or a size of one (`deit_tiny_p8`, `pvtv2_b2`), which sets some of its options.",
    "attention": "Mechanism, or a list of mechanisms that name their blocks, or their stages of PVT-v2.",
}
"""Sections whose options depend on their option `name` -> description."""


def sections() -> dict[str, str]:
    """Returns section of a run -> the first paragraph of its description."""
    texts = {name: (inspect.getdoc(cls) or "").partition("\n\n")[0] for name, cls in SECTIONS.items()}
    return KINDS | {name: " ".join(text.split()) for name, text in texts.items()}


def page(section: str) -> str:
    """Returns the page of a section: a heading for each option; for a section of `KINDS` one for each kind."""
    from models import MODELS
    from models.assignment import Place
    from models.hosted import HostConfig

    if section == "model":
        families = {family.__name__.lower(): family.Config for family, _ in MODELS.values()}
        text = _tables(families | {"timm:NAME, hf:NAME": HostConfig})
    elif section == "attention":
        classes = {"An entry of a list": Place} | {name: mechanism.Config for name, mechanism in ATTENTION.items()}
        text = f"{LINKS}\n\n{_tables(classes)}"
    else:
        text = entries(SECTIONS[section], f"{section}.")
    return f"# Options: {section}\n\n{sections()[section]}\n\n{text}\n"


def entries(cls: type, path: str = "") -> str:
    """Returns for every option of the dataclass `cls` a heading, its key under `path`, meaning, values and default."""
    return "\n\n".join(
        f"## `{name}`\n\n`{path}{name}`: {about.meaning}.\n\n"
        f"Value: {about.values}. Default: `{to_yaml(about.default)}`."
        for name, about in describe(cls).items()
    )


def index() -> str:
    """Returns a link to the page of each section, with its description, and the options that are in no section."""
    pages = {name: f"[{name}](options/{name}.md)" for name in sections()} | {"attention": "attention"}
    links = "\n".join(f"- {pages[name]}: {text}" for name, text in sections().items())
    return f"{links}\n\n{entries(Run)}"


def _tables(classes: Mapping[str, type]) -> str:
    """Returns a heading and a table for each class that has options."""
    return "\n\n".join(f"## {name}\n\n{table(cls)}" for name, cls in classes.items() if dataclasses.fields(cls))


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m engine.config.option_pages", description="Print options in Markdown.")
    parser.add_argument("section", nargs="?", choices=sections(), help="default: all sections")
    if only := parser.parse_args().section:
        print(page(only), end="")
    else:
        print("\n".join(page(section) for section in sections()), entries(Run), sep="\n")
