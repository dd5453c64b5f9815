"""All that the tests know of each mechanism: the constants of tests/mechanisms/test_<name>.py, over the registry.

A mechanism from outside has its facts in a file that pytest's option --mechanism-facts names, see tests/conftest.py. A
facts file that is missing, or lacks a required constant, ends every uniform suite with an error that names both.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest

from attention import ATTENTION
from tests.support.cases import Case
from tests.support.growth import Growth
from tests.support.outside import OUTSIDE

REQUIRED = {
    "CASES": "a list of Case: what the uniform suites run over, the ordinary one first",
    "EFFECTS": "for every option, options that give it its context and a value other than there (grid 5 x 7)",
    "SYMMETRIES": "a list of (rearrangements of tokens that commute with the layer, options), see symmetry.py",
}
OPTIONAL = {
    "GROWTH": "a list of Growth: orders of multiply-accumulates and of memory, where both are not linear",
    "SYMBOLS": "what the letters of the docstring's formula of cost are at default options, beside N, C, h and d; "
    "some are functions of N",
    "REFUSED": "a list of (options, pattern of the message): refused for 16 channels, 2 heads, a grid of 14 x 14",
    "EVERYTHING": "a list of options under which every token of a 4 x 6 grid attends to every token exactly",
    "SYMMETRIES_IN_LAW": "a list as SYMMETRIES: what commutes with the distribution of the outputs in training",
    "RELEASED": "for layers of the released code (tests/data/released/attention), the options that reproduce them",
    "VISION": "for released modules (tests/data/vision), options and the function of their weights that reproduce them",
    "LEARNED": "what it learns or draws beside the projections, by default: names that softmax weights do not have",
    "UNSIZED": "true where no option says how large its approximation is (analysis/budgets.py)",
    "NO_MATRIX": "why it has no attention matrix: words of the refusal",
}


def load(name: str) -> ModuleType:
    """The facts of a mechanism.

    Raises:
        LookupError: the file does not exist or lacks a required constant.
    """
    file, module = f"tests/mechanisms/test_{name}.py", f"tests.mechanisms.test_{name}"
    if name not in OUTSIDE and importlib.util.find_spec(module) is None:
        remedy = f"; constants: {', '.join(REQUIRED)} (tests/support/facts.py); or name it with --mechanism-facts"
        raise LookupError(f"{file} does not exist: the mechanism {name!r} needs a file of facts for its tests{remedy}")
    facts = OUTSIDE.get(name) or importlib.import_module(module)
    file = file if name not in OUTSIDE else facts.__file__
    for constant, meaning in REQUIRED.items():
        if getattr(facts, constant, []) == []:
            raise LookupError(f"{file} lacks {constant}, {meaning}")
    for constant, usual in {"GROWTH": [Growth(1, 1)], "SYMBOLS": {}}.items():
        vars(facts).setdefault(constant, usual)
    for case in facts.CASES:
        if case.name != name:
            raise LookupError(f"{file}: CASES holds one of {case.name!r}")
    return facts


FACTS = {name: load(name) for name in ATTENTION}


def rows(constant: str) -> list[tuple[str, Any]]:
    """(mechanism, row) for every row of a list or key of a dict, of every mechanism that has the constant."""
    assert constant in REQUIRED | OPTIONAL
    return [(name, row) for name, facts in FACTS.items() for row in getattr(facts, constant, ())]


def stated(constant: str) -> dict[str, Any]:
    """Mechanism -> the constant, of every mechanism that has it."""
    assert constant in REQUIRED | OPTIONAL
    return {name: getattr(facts, constant) for name, facts in FACTS.items() if hasattr(facts, constant)}


CASES: list[Case] = [case for _, case in rows("CASES")]

ORDINARY = [facts.CASES[0] for facts in FACTS.values()]
"""The first case of every mechanism."""


def light(cases: list[Case], *also: str) -> list[Any]:
    """Parameters of a test: the first of every mechanism's cases, and those with an option in `also`; others run in the
    stress suite.
    """
    first = {case.name: case for case in reversed(cases)}.values()
    are_light = [case in first or not case.options.keys().isdisjoint(also) for case in cases]
    marks = [[] if is_light else [pytest.mark.stress] for is_light in are_light]
    return [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]
