"""Tables in LaTeX, with booktabs."""

import re
from collections.abc import Sequence

ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}

NUMBER = re.compile(r"([+-]?\d[\d.]*(?:e[+-]?\d+)?)(?: ± (\d[\d.]*))?(?= |$)")


def latex_table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table; columns of numbers are aligned to the right."""
    is_number = [all(NUMBER.match(cell) or not cell for cell in column) for column in zip(*rows, strict=True)]
    head = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{escape(caption)}}}",
        f"  \\begin{{tabular}}{{{''.join('r' if right else 'l' for right in is_number)}}}",
        "    \\toprule",
    ]
    lines = [" & ".join(map(to_cell, line)) for line in (titles, *rows)]
    lines = [f"    {lines[0]} \\\\", "    \\midrule", *(f"    {line} \\\\" for line in lines[1:])]
    return "\n".join([*head, *lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def to_cell(text: str) -> str:
    """Formats a cell: a number, or mean and deviation, in mathematics, so that signs are; the rest is escaped."""
    if not (found := NUMBER.match(text)):
        return escape(text)
    mean, deviation = found.groups()
    return f"${mean}" + (f" \\pm {deviation}" if deviation else "") + "$" + escape(text[found.end() :])


def escape(text: str) -> str:
    """Returns `text` as LaTeX that prints it."""
    return "".join(ESCAPES.get(character, character) for character in text).replace("±", "$\\pm$")
