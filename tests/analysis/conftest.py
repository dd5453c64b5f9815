"""A small trained model, made once for all tests of analyses."""

from functools import partial
from pathlib import Path

import pytest

from analysis import convert, costs, error, front, maps, replace
from analysis.drop_in import layer_inputs
from analysis.trained import Trained, read_sample
from bench.timing import time_rounds
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
    """Figures are drawn, but rendered only in stress tests, because each takes a second; times may be noisy."""
    if "stress" not in request.keywords:
        for module in (error, front, maps, replace):
            monkeypatch.setattr(module, "encode", lambda figure: b"")
        for module in (convert, costs):
            monkeypatch.setattr(module, "time_rounds", partial(time_rounds, sample_seconds=0))
