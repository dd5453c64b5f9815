"""Every mechanism has its file of facts, and every such file its mechanism."""

from pathlib import Path
from typing import get_args

import pytest

from attention import ATTENTION, Name
from tests.support.facts import FACTS, REQUIRED, load


def test_every_facts_file_belongs_to_a_mechanism():
    files = {path.stem.removeprefix("test_") for path in (Path(__file__).parents[1] / "mechanisms").glob("test_*.py")}
    assert files == {*get_args(Name)}
    assert {*ATTENTION} == {*FACTS}


@pytest.mark.parametrize("constant", REQUIRED)
def test_a_missing_constant_is_named(constant, monkeypatch):
    monkeypatch.delattr(FACTS["softmax"], constant)
    with pytest.raises(LookupError, match=rf"tests/mechanisms/test_softmax.py lacks {constant}, "):
        load("softmax")
