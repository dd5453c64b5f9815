"""The mutation run: a mutant that a test sees is killed, and another one survives."""

import pytest

from tests.support.mutants import MUTATED, ROOT, TESTS, killer, mutants_of, suite_of

SOURCE = b'''"""A module: 1 + 1."""
def area(width: int, height: int) -> int:
    if width < 0:
        raise ValueError(f"{width + 1}")
    return width * height
'''


def test_a_file_has_its_mutants():
    found = [(mutant.kind, mutant.new) for mutant in mutants_of("area.py", SOURCE)]
    assert found == [("comparison", "(width <= 0)"), ("constant", "(1)"), ("arithmetic", "(width / height)")]


@pytest.mark.complete
def test_a_mutant_is_killed_or_survives(tmp_path):
    (tmp_path / "area.py").write_bytes(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_area.py").write_text("import area\ndef test_area():\n    assert area.area(2, 3) == 6\n")
    bound, _, product = mutants_of("area.py", SOURCE)
    assert killer(tmp_path, bound, 60, ["tests"]) is None
    assert killer(tmp_path, product, 60, ["tests"]) == "tests/test_area.py::test_area"
    assert (tmp_path / "area.py").read_bytes() == SOURCE


def test_every_file_of_the_run_has_tests():
    for pattern in MUTATED:
        files = [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
        assert files, pattern
        assert all(suite_of(file, ROOT) for file in files)
    assert suite_of("attention/mechanisms/eva.py", ROOT)[0] == "tests/mechanisms/test_eva.py"
    assert suite_of("engine/training/resume.py", ROOT)[0] == "tests/engine/test_resume.py"
    names = [word for _, words in TESTS for word in words if word.startswith("tests/") and "\\" not in word]
    assert [name for name in names if not (ROOT / name).exists()] == []
