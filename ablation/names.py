"""Names of settings in the file system, and options as overrides of train.py."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.yaml_files import dump_yaml

OF_ROWS = {"paper", "match"}
"""Keys of an item of `runs` that are no options of train.py."""

MAX_BYTES = 255
"""Longest name of a directory in nearly every file system, in bytes."""


def to_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns the overrides of train.py for a setting."""
    return [f"{option}={to_text(value)}" for option, value in options.items() if option not in OF_ROWS]


def to_directory(name: str, values: Sequence[str]) -> str:
    """Returns the name of the directory of a run: the setting's `name`, and the overrides that its `values` are.

    In a name beyond the `MAX_BYTES` that file systems allow, a hash takes the place of what does not fit.
    """
    whole = ",".join([name, *values])
    if len(whole.encode()) <= MAX_BYTES:
        return whole
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    end = ",".join([f"-{digest}", *values])
    return name.encode()[: MAX_BYTES - len(end)].decode(errors="ignore") + end


def to_name(texts: Sequence[str]) -> str:
    """Returns the name of a directory for the overrides `texts`."""
    return re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", ",".join(texts)).replace(":", "="))


def to_text(value: Any) -> str:
    """Formats `value` as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()
