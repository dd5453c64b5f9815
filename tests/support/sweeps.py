"""Sweeps of tests, read beside their file."""

from pathlib import Path

import pytest

from ablation.schema import Ablation
from ablation.settings import Setting
from ablation.sweep import read_ablation
from engine.runtime.errors import ConfigError


def read(config: Path) -> tuple[Ablation, list[Setting], list[str]]:
    """Reads a sweep whose runs go to the directory `out` beside it."""
    return read_ablation(config, [], config.parent / "out", ["python"])


def refusal(config: Path) -> str:
    """Returns the one line that refuses a sweep, without the directory of the file."""
    with pytest.raises(ConfigError) as caught:
        read(config)
    text = str(caught.value).replace(f"{config.parent}/", "")
    assert "\n" not in text
    return text
