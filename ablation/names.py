"""Names of settings in the file system, and options as overrides of train.py."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.yaml_files import dump_yaml
from engine.runtime.errors import as_config_error
from models.assignment import numbers_of

OF_ROWS = {"paper", "match"}
"""Keys of an item of `runs` that are no options of train.py."""

MOST_ENTRIES = 1000
"""Numbers of list entries in a key are below this."""

MAX_BYTES = 255
"""Longest name of a directory in nearly every file system, in bytes."""


def to_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns the overrides of train.py for a setting.

    Raises:
        ConfigError: see `expand`.
    """
    given = {option: to_text(value) for option, value in options.items() if option not in OF_ROWS}
    return [f"{key}={text}" for option, text in given.items() for key in expand(option)]


def expand(option: str) -> list[str]:
    """Returns the options that one key of a sweep sets: ``attention.0-2.window_size`` is that of three entries.

    Raises:
        ConfigError: numbers of entries that fall, or come twice.
    """
    keys = [""]
    for part in option.split("."):
        parts = [part]
        if re.fullmatch(r"[0-9 ]+([-,][0-9 ]+)+", part):
            with as_config_error():
                parts = [str(number) for number in numbers_of(part, MOST_ENTRIES, option)]
        keys = [f"{key}.{each}" if key else each for key in keys for each in parts]
    return keys


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
