"""What several test files use."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.launcher import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def figure(capsys: pytest.CaptureFixture) -> Callable[[str, str], None]:
    """Prints the figure that a row of the stress suite reached."""

    def tell(row: str, text: str) -> None:
        with capsys.disabled():
            print(f"{row:<4}{text}", flush=True)

    return tell
