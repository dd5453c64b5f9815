"""Every mechanism has its file of facts, and every such file its mechanism."""

from pathlib import Path

import pytest

from attention import ATTENTION, NAMES
from tests.support.facts import FACTS, REQUIRED, load


def test_every_facts_file_belongs_to_a_mechanism():
    files = {path.stem.removeprefix("test_") for path in (Path(__file__).parents[1] / "mechanisms").glob("test_*.py")}
    assert files == {*NAMES.split()}
    assert {*ATTENTION} == {*FACTS}


def test_a_missing_file_is_named():
    with pytest.raises(LookupError, match=r"tests/mechanisms/test_absent.py does not exist: the mechanism 'absent'"):
        load("absent")


@pytest.mark.parametrize("constant", REQUIRED)
def test_a_missing_constant_is_named(constant, monkeypatch):
    monkeypatch.delattr(FACTS["softmax"], constant)
    with pytest.raises(LookupError, match=rf"tests/mechanisms/test_softmax.py lacks {constant}, "):
        load("softmax")


@pytest.mark.parametrize("constant", ["CASES", "SYMMETRIES", "GROWTH"])
def test_an_empty_list_is_no_fact(constant, monkeypatch):
    monkeypatch.setattr(FACTS["softmax"], constant, [])
    with pytest.raises(LookupError, match=rf"tests/mechanisms/test_softmax.py lacks {constant}, "):
        load("softmax")


def test_a_case_of_another_mechanism_is_refused(monkeypatch):
    monkeypatch.setattr(FACTS["softmax"], "CASES", FACTS["linear"].CASES)
    with pytest.raises(LookupError, match=r"tests/mechanisms/test_softmax.py: CASES holds one of 'linear'"):
        load("softmax")
