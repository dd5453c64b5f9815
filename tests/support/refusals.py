"""Refusals of scripts and of data, as a user reads them."""

from collections.abc import Callable, Sequence

import pytest

from attention.options import OptionError
from engine.config.schema import Data
from engine.data.splits import open_split


def refusal(main: Callable[[list[str]], object], arguments: Sequence, capsys: pytest.CaptureFixture) -> str:
    """Calls a script that must end with status 2 and write nothing to stdout; returns what it writes to stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert not output.out
    return output.err


def assert_split_refused(problem: str, split: str = "train", key: str = "", **options) -> None:
    """Asserts that a split is refused in one line, which the pattern `problem` finds.

    Args:
        key: The option that is named; "": that of the split. options: of `Data`.
    """
    with pytest.raises(OptionError, match=problem) as caught:
        open_split(Data(**options), f"{split}_split")
    assert caught.value.key == (key or f"data.{split}_split")
    assert "\n" not in str(caught.value)
