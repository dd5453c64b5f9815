"""analyze.py partition: propositions 1 and 2 of EVA's paper, by closed forms and on a model."""

import csv
import itertools

import pytest
import torch

import analyze
from analysis import partition
from analysis.partition import estimate, group_weights, members, optimal_coefficients, weighted_error
from attention.parts.groups import bin_counts, bins
from tests.analysis.models import save_model, save_pyramid
from tests.support.comparisons import assert_equal
from tests.support.inputs import CPU, B, d, draw, h, one_head, tokens

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]


def error(counts: tuple[int, int], beta=None) -> torch.Tensor:
    """J of every query for a partition into bins; by the optimal coefficients if none are given."""
    groups = bins(GRID, counts, CPU)
    weights = group_weights(Q, K, groups)
    beta = optimal_coefficients(weights, V, groups) if beta is None else beta
    return weighted_error(weights, members(V, groups), beta)


def test_by_hand():
    """Keys of weight 1/4 with values 0, 1, 2, 3: one group has their variance, two have 1/4, four have none."""
    q, k, v, found = one_head(1), one_head(0, 0, 0, 0), one_head(0, 1, 2, 3), []
    for count in (1, 2, 4):
        groups = bins((1, 4), (1, count), CPU)
        weights = group_weights(q, k, groups)
        assert_equal(weights, torch.full_like(weights, 0.25))
        beta = optimal_coefficients(weights, v, groups)
        found.append(weighted_error(weights, members(v, groups), beta).item())
    assert found == pytest.approx([1.25, 0.25, 0.0])


def test_weights_are_those_of_softmax():
    groups = bins(GRID, (3, 2), CPU)
    weights, expected = group_weights(Q, K, groups), (Q @ K.mT * d**-0.5).softmax(-1)
    for group, index in enumerate(groups.members[0]):
        assert_equal(weights[:, :, group], expected[..., index])


def test_refining_a_partition_never_raises_the_error_and_ends_at_zero():
    """Proposition 2 for nested partitions: the law of total variance."""
    errors = [error(counts) for counts in ((1, 1), (2, 1), (2, 2), (6, 2), (6, 4))]
    for coarse, fine in itertools.pairwise(errors):
        assert (fine <= coarse + 1e-12).all()
        assert (fine < coarse - 1e-6).any()
    assert_equal(errors[-1], torch.zeros(B, h, N, dtype=torch.float64))


@pytest.mark.parametrize(
    ("coarse", "fine", "divided"),
    [(1, 4, True), (4, 16, True), (16, 196, True), (1, 49, True), (49, 196, True), (4, 49, False), (16, 49, False)],
)
def test_which_steps_divide_the_groups_of_14x14_tokens(coarse, fine, divided):
    """The steps of docs/results_error.md: every finer group lies in one coarser group."""
    found = []
    for count in (coarse, fine):
        index, valid, *_ = bins((14, 14), bin_counts(count, (14, 14), ""), CPU)
        found.append([set(each[real].tolist()) for each, real in zip(index[0], valid[0], strict=True)])
    assert all(any(each <= whole for whole in found[0]) for each in found[1]) == divided


def test_the_optimal_coefficients_have_the_least_error():
    """Proposition 2: at a distance e from them J grows by the group's weight times e^2."""
    groups = bins(GRID, (2, 2), CPU)
    weights = group_weights(Q, K, groups)
    beta, step = optimal_coefficients(weights, V, groups), draw(B, h, 4, N, d, seed=9)
    expected = error((2, 2)) + (weights.sum(-1) * step.square().sum(-1)).sum(2)
    assert_equal(error((2, 2), beta + step), expected)
    shared = (weights.sum(-1)[..., None] * beta).sum(2, keepdim=True).expand_as(beta)
    assert_equal(error((2, 2), shared), error((1, 1)))  # the best coefficient of all keys


def test_values_as_coefficients_leave_nothing_to_chance():
    """Proposition 1: g_m - beta_m h_m is 0 at any sample, so that what remains is the exact term."""
    groups = bins(GRID, GRID, CPU)
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert_equal(estimate(Q, K, V, groups), members(V, groups)[:, :, :, 0])


def test_the_estimate_is_softmax_of_the_features_of_a_group(monkeypatch):
    groups = bins(GRID, (2, 2), CPU)
    noise = draw(B, h, 1, 4, d, seed=8)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    found = estimate(Q, K, V, groups)
    q, k = Q * d**-0.25, K * d**-0.25
    for group, index in enumerate(groups.members[0]):
        omega = q[:, :, index].mean(2) + k[:, :, index].mean(2) + noise[:, :, 0, group]
        xi = torch.exp((k[:, :, index] * omega[:, :, None]).sum(-1) - k[:, :, index].square().sum(-1) / 2)
        assert_equal(found[:, :, group], (xi[..., None] * V[:, :, index]).sum(2) / xi.sum(-1, keepdim=True))


def test_on_a_model(tmp_path, capsys):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    arguments = "--images", "3", "--draws", "2", "--groups", "1", "4", "16", "--output", str(tmp_path)
    analyze.main(["partition", str(checkpoint), *arguments])
    with (tmp_path / "partition.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    optimal = [float(row["mean"]) for row in rows if row["measurement"] == "optimal"]
    assert optimal[0] > optimal[1] > optimal[2]
    assert {row["measurement"] for row in rows} == {"optimal", "estimated", "mean", "output"}
    assert max(float(row["mean"]) for row in rows if row["groups"] == "16") < 1e-12
    for row in rows:
        if row["measurement"] == "estimated":
            (least,) = [
                each
                for each in rows
                if (each["layer"], each["groups"], each["measurement"])
                == (*(row[x] for x in ("layer", "groups")), "optimal")
            ]
            assert float(row["mean"]) >= float(least["mean"]) - 1e-12
    assert "| layer | groups |" in capsys.readouterr().out
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_a_pyramid_has_groups_of_each_layers_own_grid(tmp_path):
    checkpoint = save_pyramid(tmp_path)
    arguments = "--images", "1", "--draws", "1", "--groups", "1", "4", "--output", str(tmp_path)
    analyze.main(["partition", str(checkpoint), *arguments])
    with (tmp_path / "partition.csv").open(newline="") as file:
        found = {(row["layer"], row["groups"]): row for row in csv.DictReader(file) if row["measurement"] == "optimal"}
    optimal = {key: float(row["mean"]) for key, row in found.items()}
    assert sorted(optimal) == [(layer, groups) for layer in "1234" for groups in "14"]
    assert all(optimal[layer, "4"] < optimal[layer, "1"] for layer in "1234")
    assert optimal["4", "4"] < 1e-12  # four tokens


def test_numbers_of_groups_are_checked_for_every_grid_before_any_work(tmp_path, monkeypatch, capsys):
    """The nearest number is one that all grids have."""
    checkpoint = save_pyramid(tmp_path)
    monkeypatch.setattr(partition, "measure", lambda *args: pytest.fail("work"))
    with pytest.raises(SystemExit) as ended:
        analyze.main(["partition", str(checkpoint), "--groups", "1", "64", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--groups = 64 does not divide the 2x2 grid" in (problem := capsys.readouterr().err)
    assert problem.strip().endswith("nearest valid: 4")


def test_a_number_of_groups_that_the_grid_does_not_have_is_refused(tmp_path, capsys):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    with pytest.raises(SystemExit) as ended:
        analyze.main(["partition", str(checkpoint), "--groups", "5", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--groups = 5" in capsys.readouterr().err
