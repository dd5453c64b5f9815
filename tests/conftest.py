"""Fixtures of several test files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launcher import ForkServer
from tests.support.outside import OUTSIDE, add_facts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mechanisms from outside")
    group.addoption("--plugin", action="append", default=[], metavar="MODULE", help="module or .py file of mechanisms")
    text = (
        "file of facts of such a mechanism, as in tests/mechanisms; all tests that run are its own, and those in FILE"
    )
    group.addoption("--mechanism-facts", action="append", default=[], metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Loads plugins and facts before a suite asks for them."""
    plugins, files = config.getoption("--plugin"), config.getoption("--mechanism-facts")
    if plugins:
        from attention.plugins import load_plugin

        for plugin in plugins:
            load_plugin(plugin)
    for file in files:
        add_facts(Path(file))
        config.args.append(file)


SLOW = {"fork_server", "interpreted"}
"""Fixtures whose tests run in `make test-all` alone unless they are marked `quick`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow fixtures, and keeps the tests of the mechanisms whose facts are given."""
    for item in items:
        if SLOW.intersection(getattr(item, "fixturenames", ())) and not item.get_closest_marker("quick"):
            item.add_marker("complete")
        if item.get_closest_marker("gpu"):
            from torch.cuda import is_available

            item.add_marker(pytest.mark.skipif(not is_available(), reason="needs a CUDA device"))
    files = [Path(file).resolve() for file in config.getoption("--mechanism-facts")]
    if files:
        theirs = [item for item in items if item.path in files or any(name in item.name for name in OUTSIDE)]
        config.hook.pytest_deselected(items=[item for item in items if item not in theirs])
        items[:] = theirs


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
