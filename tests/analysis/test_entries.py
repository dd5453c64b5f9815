"""analyze.py entries: errors of single entries of attention matrices."""

import csv

import pytest
import torch

import analyze
from analysis.drop_in import drop_in, layer_inputs
from analysis.entries import NUM_BINS, Bins, logits_of
from analysis.implied import implied_matrix
from analysis.trained import read_sample
from models.base import attention_layers
from tests.analysis.models import load_model, save_model

OPTIONS = ["model.depth=2", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]
LOCAL = {"name": "local", "window_size": 2, "position_bias": "none"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a model on 4x4 tokens, with queries and keys of variance about 1."""
    return save_model(tmp_path_factory.mktemp("entries"), OPTIONS, scale=10)


def test_bins_are_tenths_by_logit_and_their_errors_make_up_the_whole():
    logits = torch.randn(2, 3, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bins, matrix = Bins(logits), torch.full_like(logits, 1 / 20)
    assert bins.logits == sorted(bins.logits)
    assert {len(part) for part in bins.parts} == {2400 // NUM_BINS}
    whole = (20 * (matrix - logits.softmax(-1))).square().mean().item()
    assert sum(error**2 for error in bins.errors(matrix)) / NUM_BINS == pytest.approx(whole)
    assert max(bins.errors(logits.softmax(-1))) == 0


def test_rows_are_those_of_the_implied_matrix(checkpoint, tmp_path, capsys):
    """XCA has no matrix."""
    names = "softmax", "{name: local, window_size: 2, position_bias: none}", "{name: performer, num_samples: 8}", "xca"
    arguments = "--images", "3", "--draws", "2", "--output", str(tmp_path)
    analyze.main(["entries", str(checkpoint), *arguments, "--attention", *names])
    with (tmp_path / "entries.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {name: [float(row["error"]) for row in rows if row["attention"] == name] for name in names[:3]}
    assert all(len(errors) == 2 * NUM_BINS for errors in found.values())
    assert max(found["softmax"]) < 1e-12
    assert min(found[names[2]]) > 1e-3
    trained = load_model(checkpoint)
    (x, grid), *_ = layer_inputs(trained, read_sample(trained, 3).images)
    models = [drop_in(trained, {"name": "softmax"}, 0)[0], drop_in(trained, LOCAL, 0)[0]]
    softmax, local = (attention_layers(model.double())[0] for model in models)
    matrix = implied_matrix(local, local.project(x.double(), grid), grid)
    assert found[names[1]][:NUM_BINS] == pytest.approx(Bins(logits_of(softmax, (x.double(), grid))).errors(matrix))
    assert "attention(xca) has no attention matrix" in capsys.readouterr().out
    assert (tmp_path / "entries.png").read_bytes().startswith(b"\x89PNG")


def test_mechanisms_with_fewer_keys_than_tokens_are_left_out(checkpoint, tmp_path, capsys):
    fewer, every = ("{name: sra, reduction: 2}", "{name: linear_sra, pool_size: 2}"), "softmax"
    arguments = "--images", "1", "--draws", "1", "--output", str(tmp_path)
    analyze.main(["entries", str(checkpoint), *arguments, "--attention", *fewer, every])
    with (tmp_path / "entries.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["attention"] for row in rows if row["problem"]] == list(fewer)
    assert [row["attention"] for row in rows if row["error"]] == [every] * 2 * NUM_BINS
    text = capsys.readouterr().out
    for name in "sra", "linear_sra":
        assert f"attention({name}) has no weight for every pair of tokens: it has fewer keys than tokens" in text
