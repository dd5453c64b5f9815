"""A small trained model, made once for all tests of analyses."""

from pathlib import Path

import pytest

from analysis import error, maps, replace
from analysis.drop_in import layer_inputs
from analysis.trained import Trained, read_sample
from tests.analysis.models import SMALL, load_model, save_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a model on 4x4 tokens, with queries and keys of variance about 1."""
    return save_model(tmp_path_factory.mktemp("analysis"), SMALL, scale=10)


@pytest.fixture(scope="session")
def trained(checkpoint) -> Trained:
    return load_model(checkpoint)


@pytest.fixture(scope="session")
def inputs(trained):
    return layer_inputs(trained, read_sample(trained, 5).images)


@pytest.fixture(autouse=True)
def unrendered(request, monkeypatch) -> None:
    """Figures are drawn, but rendered only in stress tests, because each takes a second."""
    if "stress" not in request.keywords:
        for module in (error, maps, replace):
            monkeypatch.setattr(module, "encode", lambda figure: b"")
