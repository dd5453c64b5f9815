"""Fixtures of several test files."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.launcher import ForkServer


@pytest.fixture(scope="session", autouse=True)
def without_pictures() -> Iterator[None]:
    """Runs draw no predictions, which takes seconds; tests/engine/test_recorder.py does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.reporting.recorder.Recorder.predictions", lambda recorder, predictions: None)
        yield


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def figure(capsys: pytest.CaptureFixture) -> Callable[[str, str], None]:
    """Prints the result that a row of the stress suite measured."""

    def show(row: str, text: str) -> None:
        with capsys.disabled():
            print(f"{row:<4}{text}", flush=True)

    return show
