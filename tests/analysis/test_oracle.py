"""Decompositions recover planted parts and are optimal where theory says so; the oracle's budgets and figures."""

import itertools
import math

import pytest
import torch
from PIL import Image

import analyze
from analysis import oracle
from analysis.budgets import split_budget
from analysis.decompositions import keep_largest, robust_pca, truncate
from analysis.matrices import Layer, capture
from analysis.oracle import Row, compressible, decomposition_fits, scatterbrain_fits, share_of
from attention import create_attention
from attention.parts.geometry import merge_heads
from engine.runtime.errors import UserError
from engine.runtime.ownership import MARKER
from models import create_model
from tests.analysis.models import read_rows, refusal, save_model, save_pyramid

TINY = ["model.depth=2", "model.embed_dim=24", "model.img_size=24", "model.num_heads=2"]
DEIT = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def planted():
    """A (50, 60) matrix of rank 2, and 60 entries of a sparse one."""
    low = torch.randn(50, 2, dtype=torch.float64) @ torch.randn(2, 60, dtype=torch.float64)
    sparse = torch.zeros_like(low)
    sparse.view(-1)[torch.randperm(low.numel())[:60]] = 3 * torch.randn(60, dtype=torch.float64).sign()
    return low, sparse


def test_planted_parts_are_recovered(planted):
    found = robust_pca(sum(planted))
    for part, expected in zip(found, planted, strict=True):
        assert (part - expected).norm() <= 1e-6 * expected.norm()
    assert torch.linalg.matrix_rank(found[0]) == 2
    assert torch.equal(found[1] != 0, planted[1] != 0)


def test_robust_pca_minimises_its_objective():
    """On a matrix without planted parts, the optimum of another weight is worse."""
    a = torch.randn(12, 9, dtype=torch.float64)

    def objective(weight: float, low: torch.Tensor, sparse: torch.Tensor) -> float:
        torch.testing.assert_close(low + sparse, a, rtol=0, atol=1e-5)
        return (torch.linalg.svdvals(low).sum() + weight * sparse.abs().sum()).item()

    for weight, other in itertools.permutations((0.2, 12**-0.5, 0.4), 2):
        assert objective(weight, *robust_pca(a, weight)) < objective(weight, *robust_pca(a, other)) - 1e-3
    assert torch.equal(robust_pca(a)[0], robust_pca(a, 12**-0.5)[0])


def test_robust_pca_says_that_it_has_not_converged(planted):
    with pytest.raises(RuntimeError, match="after 3 steps"):
        robust_pca(sum(planted), max_steps=3)


def test_truncation_is_optimal():
    """Its squared error is the tail of the squared singular values; no other row space of that rank does better."""
    a = torch.randn(9, 12, dtype=torch.float64)
    error = (a - truncate(a, 4)).norm()
    assert torch.linalg.matrix_rank(truncate(a, 4)) == 4
    torch.testing.assert_close(error, torch.linalg.svdvals(a)[4:].norm(), rtol=1e-12, atol=0)
    for _ in range(50):
        basis = torch.linalg.qr(torch.randn(12, 4, dtype=torch.float64)).Q
        assert (a - a @ basis @ basis.mT).norm() > error


def test_the_largest_entries_are_optimal():
    """The support is the best of its size. Ties for the last place are dropped, so that the budget holds."""
    a = torch.randn(2, 4, dtype=torch.float64)
    kept = keep_largest(a, 3)
    assert (kept != 0).sum() == 3
    supports = itertools.combinations(range(8), 3)
    assert (a - kept).norm() == min((a.flatten().index_fill(0, torch.tensor(s), 0)).norm() for s in supports)
    assert keep_largest(torch.tensor([2.0, 1, 1, -3]), 3).tolist() == [2, 0, 0, -3]
    assert not keep_largest(a, 0).any()


def process1(samples: int, beta: float, tokens: int) -> Layer:
    """Scatterbrain's Process 1 (arXiv:2110.15343): clusters of tokens z about random centres, exp(beta z_n . z_m).

    The covariances I / sqrt(d) are read as standard deviations, which place the clusters on the unit sphere.
    """
    centres = torch.randn(samples, 1, math.ceil(tokens / 4), 256, dtype=torch.float64)
    z = centres.repeat_interleave(4, 2)[:, :, :tokens]
    x = (z + 0.3 * torch.randn(z.shape, dtype=z.dtype)) * 256**-0.5 * (beta * 16) ** 0.5
    return Layer(f"beta {beta:.2f}", x, x, (1, tokens))


def test_regimes_of_process1_come_in_the_order_of_theorem_1():
    """Rising beta passes three regimes: low rank suffices; only both together suffice; entries suffice."""
    suffices = []
    for times in (0.1, 0.45, 1.5):
        a = process1(1, times * math.log(120), tokens=120).matrices[0, 0]
        fits = decomposition_fits(a, robust_pca(a)[0], 16)
        suffices.append({method for method, fit in fits.items() if fit.error < 0.15})
    both = {"robust PCA"}
    assert suffices == [{"low rank"} | both, both, {"sparse"} | both]


@pytest.mark.parametrize("budget", [8, 13, 30])
def test_every_method_keeps_to_the_budget_and_both_parts_are_no_worse_than_one(budget):
    layer = process1(2, 2.5, tokens=60)
    fits = decomposition_fits(layer.matrices[0, 0], robust_pca(layer.matrices[0, 0])[0], budget)
    assert fits["robust PCA"].error <= min(fits["low rank"].error, fits["sparse"].error)
    mechanism = scatterbrain_fits(layer, layer.matrices, budget, 1)
    for fit in (*fits.values(), *itertools.chain(*mechanism)):
        assert 2 * fit.rank + fit.density * 60 <= budget + 1e-9
        assert 2 * fit.rank + fit.density * 60 > budget - 2


@pytest.mark.parametrize("grid", [(6, 5), (1, 30)], ids=str)
@pytest.mark.parametrize("budget", [8, 13, 29])
def test_a_budget_is_split_by_entropy(budget, grid):
    """Rows with one entry leave one sample to low rank; uniform rows leave one token to the window."""
    entropies = 0.0, 0.5, 1.7, 2.9, math.log(30)
    found = [split_budget(budget, entropy / math.log(30), grid) for entropy in entropies]
    samples = [options["num_samples"] for options in found]
    entries = [options["window_size"] ** (1 if grid[0] == 1 else 2) for options in found]
    assert samples == sorted(samples)
    assert samples[0] < samples[-1]
    assert entries[-1] == 1 <= samples[0]
    assert all(budget - 1 <= 2 * rank + size <= budget for rank, size in zip(samples, entries, strict=True))
    for options in found:
        create_attention("scatterbrain", dim=4, num_heads=1, grid=grid, **options)


def test_flat_matrices_get_more_samples_than_sharp_ones():
    flat, sharp = (process1(1, times * math.log(60), tokens=60) for times in (0.1, 2))
    assert 0.95 < share_of(flat) <= 1
    assert share_of(sharp) < 0.4
    options = [split_budget(16, share_of(layer), layer.grid) for layer in (flat, sharp)]
    assert options[0] == {"num_samples": 7, "window_size": 2, "layout": "1d"}
    assert options[1]["num_samples"] < 4


@pytest.mark.parametrize("num_prefix", [0, 3])
def test_scatterbrain_is_exact_where_all_tokens_are_alike_and_nowhere_else(num_prefix):
    q, k = torch.randn(2, 2, 3, 20 + num_prefix, 4, dtype=torch.float64)
    for layer, exact in ((Layer("", 0 * q, 0 * k, (4, 5)), True), (Layer("", q, k, (4, 5)), False)):
        fits = scatterbrain_fits(layer, layer.matrices, 8 + 2 * num_prefix, 2)
        assert (len(fits), len(fits[0])) == (2, 3)
        assert all((fit.error < 1e-9) == exact for fit in itertools.chain(*fits))


def test_the_matrices_are_those_of_the_model():
    """Matrix times values, projected, equals the output of the layer, prefix tokens included."""
    model = create_model("deit", attention="softmax", class_token=True, **DEIT).double().eval()
    outputs = {}
    for name, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda attn, inputs, y, name=name: outputs.update({name: (*inputs[:2], y)}))
    layers = capture(model, torch.randn(2, 3, 16, 24, dtype=torch.float64))
    assert [(layer.name, layer.grid) for layer in layers] == [("layer 0", (4, 6)), ("layer 1", (4, 6))]
    for layer, block, (x, grid, y) in zip(layers, model.blocks, outputs.values(), strict=True):
        *_, v = block.attn.project(x, grid)
        torch.testing.assert_close(block.attn.proj(merge_heads(layer.matrices @ v)), y, rtol=0, atol=1e-12)


def test_what_is_not_softmax_is_said(capsys):
    images = torch.randn(1, 3, 16, 24, dtype=torch.float64)
    mixed = create_model("deit", attention={"name": "eva", "window_size": 2, "num_landmarks": 4}, **DEIT).double()
    assert len(capture(mixed.eval(), images)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attention(eva): its queries and keys were not trained for softmax")
    assert not capture(create_model("deit", attention="synthesizer", **DEIT).double().eval(), images)
    assert capsys.readouterr().err.startswith("layer 0: left out, as it has no key for every one")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("oracle"), TINY))


def test_table_rows_and_figure(checkpoint, tmp_path, capsys):
    options = ["--images", "2", "--budgets", "16", "8", "--draws", "2", "--output", str(tmp_path)]
    analyze.main(["oracle", checkpoint, *options, "data.crop_pct=0.9"])
    rows = read_rows(tmp_path / "oracle.csv")
    assert len(rows) == 2 * 2 * 2 * (2 * len(oracle.METHODS))  # layers, images, heads
    assert all(0 <= float(row["entropy"]) <= math.log(36) for row in rows)
    chosen = [float(row["error"]) for row in rows if row["layer"] == "layer 1" and row["budget"] == "8"]
    text = capsys.readouterr().out
    sparse = chosen[1 :: len(oracle.METHODS)]
    assert f"| {sum(sparse) / len(sparse):.3f} ± " in text
    with Image.open(tmp_path / "oracle.png") as image:
        assert image.size[0] > 1000


def test_too_many_images_are_refused_in_one_line(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    problem = "error: --images 361: there are 360 validation images; give at most as many"
    assert refusal(capsys, "oracle", checkpoint, "--images", "361").strip() == problem
    assert {path.name for path in tmp_path.iterdir()} <= {MARKER}


@pytest.mark.complete
def test_layers_of_a_pyramid_that_a_budget_does_not_compress_are_left_out(tmp_path, capsys):
    pyramid = save_pyramid(tmp_path)
    short = ["model.img_size=32"]  # rows of 64, 16, 4 and 1
    options = ["--images", "1", "--draws", "1", "--budgets", "8", "16", "--output", str(tmp_path)]
    analyze.main(["oracle", str(pyramid), *options, *short])
    text = capsys.readouterr()
    notes = [line for line in text.err.splitlines() if "left out" in line]
    assert notes == [
        f"layer {number}: left out, as its rows of {length} {able}"
        for number, length, able in (
            (1, 16, "can have budgets of 8 to 15"),
            *((number, length, "are not longer than any budget") for number, length in ((2, 4), (3, 1))),
        )
    ]
    assert {row["layer"] for row in read_rows(tmp_path / "oracle.csv")} == {"layer 0"}


def named(name: str, grid: tuple[int, int], prefix: int = 0) -> Layer:
    x = torch.randn(1, 2, math.prod(grid) + prefix, 4, dtype=torch.float64)
    return Layer(name, x, x, grid)


def test_budgets_are_those_that_every_remaining_layer_can_have(capsys):
    layers = [named("a", (6, 5)), named("b", (4, 3)), named("c", (2, 4), prefix=1), named("d", (1, 3))]
    assert [layer.name for layer in compressible(layers, [8])] == ["a", "b"]
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["c", "d"]
    assert [layer.name for layer in compressible(layers, [8, 12])] == ["a"]
    for budgets in ([8, 30], [7, 12]):
        with pytest.raises(UserError, match=f"^--budgets {budgets[0]} {budgets[1]}: no layer is left; give others"):
            compressible(layers, budgets)
    assert "a: left out, as its rows of 30 can have budgets of 8 to 29\n" in capsys.readouterr().err


def test_figure_and_tables_show_the_rows():
    """Mean and deviation of two matrices by budget, each matrix by its entropy, with errors clipped at the floor."""
    found = ((8, 0, 0.2), (8, 1, 0.4), (16, 0, 0.1), (16, 1, 1e-9))
    fits = [(budget, "robust PCA", i, error) for budget, i, error in found]
    others = (method for method in oracle.METHODS if method != "robust PCA")
    fits += [(budget, method, i, 0.5) for method in others for budget in (8, 16) for i in (0, 1)]
    rows = [Row("layer 1", i, 0, 3.0 + i, budget, method, 2, 0.25, error) for budget, method, i, error in fits]
    by_budget, by_entropy = oracle.draw("", rows).axes
    x, y = by_budget.containers[2].lines[0].get_data()
    assert x == pytest.approx([8, 16])
    assert y == pytest.approx([0.3, (0.1 + 1e-9) / 2])
    bar = by_budget.containers[2].lines[2][0].get_segments()[0]
    assert bar[:, 1] == pytest.approx([0.3 - 0.02**0.5, 0.3 + 0.02**0.5])
    assert by_entropy.collections[2].get_offsets().tolist() == [[3.0, 0.1], [4.0, oracle.FLOOR]]
    assert oracle.errors(rows)[0]["robust PCA"] == "0.300 ± 0.141"
    assert oracle.errors(rows)[0]["entropy (nats)"] == "3.50 ± 0.71"
