"""Facts of mechanisms from outside, see tests/conftest.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

OUTSIDE: dict[str, ModuleType] = {}
"""Mechanism -> its facts."""


def add_facts(path: Path) -> None:
    """Adds a file of facts, as those in tests/mechanisms, to `OUTSIDE`.

    Raises:
        LookupError: it has no CASES.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None, f"{path}: no Python file"
    sys.modules[path.stem] = facts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(facts)
    if not getattr(facts, "CASES", []):
        raise LookupError(f"{path} lacks CASES, a list of Case (tests/support/cases.py), the ordinary one first")
    OUTSIDE[facts.CASES[0].name] = facts
