"""analyze.py maps on a tiny model: its weights, its figures, and what it refuses."""

import math
from itertools import pairwise

import pytest
import torch
from PIL import Image

import analyze
from analysis.implied import NoMatrix, attention_inputs
from analysis.maps import LayerMaps, describe_layer, draw, key_grid
from engine.runtime.ownership import MARKER
from models import create_model
from tests.analysis.models import refusal, save_model

OPTIONS = ["model.depth=2", "model.embed_dim=24", "model.num_heads=2", "model.img_size=12", "model.patch_size=4"]
OPTIONS += ["model.stem=linear", "model.class_token=true"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a checkpoint of random weights and a picture."""
    place = tmp_path_factory.mktemp("maps")
    save_model(place, OPTIONS)
    Image.linear_gradient("L").save(place / "photo.png")
    (place / "text.png").write_text("no image")
    return place


def describe(model, grid=(3, 3), query=0):
    images = torch.linspace(-1, 1, 3 * 16 * math.prod(grid)).view(1, 3, 4 * grid[0], 4 * grid[1]).double()
    layers, _ = attention_inputs(model.double().eval(), images)
    return layers, [describe_layer(layer, query) for layer in layers]


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 24, "num_heads": 2, "depth": 2, "num_classes": 3}
    return create_model("deit", **sizes | options)


def test_command(place, tmp_path, capsys):
    images, output = [str(place / "photo.png")], tmp_path / "maps"
    analyze.main(["maps", str(place), *images, "--attention", "softmax", "xca", "--output", str(output)])
    shown = capsys.readouterr()
    refusal = "attention(xca) has no attention matrix: it mixes the channels of its values, or has weights for each"
    assert shown.out.splitlines() == [str(output / "softmax/1_photo.png"), str(output / "xca/1_photo.png"), refusal]
    written = sorted(str(path.relative_to(output)) for path in output.rglob("*.*") if path.name != MARKER)
    assert written == ["softmax/1_photo.png", "xca/1_photo.png"]


def test_numbers_are_those_of_the_weights():
    layers, (found, _) = describe(small(class_token=True), (3, 5), query=4)
    q, k, _ = layers[0].layer.project(layers[0].x, (3, 5))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)[0].detach()
    torch.testing.assert_close(found.weights, weights[:, 4], rtol=0, atol=1e-9)
    assert (found.grid, found.keys, found.num_prefix_tokens) == ((3, 5), (3, 5), 1)


def test_figures_show_the_weights_of_the_grid():
    _, maps = describe(small(class_token=True), (3, 5), query=4)
    figure = draw(maps, "title")
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    expected = [head[1:].view(3, 5) / head[1:].max() for layer in maps for head in layer.weights]
    for array, weights in zip(shown, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(array.data), weights)
    assert [patch.get_xy() for patch in figure.axes[0].patches] == [(2.5, -0.5)] * 2  # token 4 is row 0, column 3


@pytest.mark.parametrize("grid", [(32, 4), (2, 40)])
def test_numbers_of_a_narrow_grid_do_not_overlap(grid):
    figure = draw([LayerMaps(grid, grid, 0, 4, torch.rand(3, grid[0] * grid[1]))], "")
    figure.draw_without_rendering()
    for axes in (axes for axes in figure.axes if axes.images):
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            boxes = [text.get_window_extent() for text in axis.get_ticklabels()]
            ends = sorted(sorted(getattr(box, f"interval{side}")) for box in boxes)
            assert all(end < start for (_, end), (start, _) in pairwise(ends)), (grid, side)


def test_a_layer_without_a_matrix_says_so_in_the_figure():
    _, maps = describe(small(attention={"name": "transformer_ls", "window_size": 3}), (3, 5))
    assert all(isinstance(found, NoMatrix) for found in maps)
    texts = "".join(text.get_text() for axes in draw(maps, "").axes for text in axes.texts)
    assert "attention(transformer_ls) has no attention matrix:\nits outputs are not linear" in texts


def test_a_pyramid_has_maps_of_fewer_keys():
    sizes = {"embed_dims": (8, 8, 8, 8), "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1), "img_size": (64, 96)}
    torch.manual_seed(0)
    _, maps = describe(create_model("pvtv2_b0", attention="sra", num_classes=3, **sizes), (16, 24))
    assert [(found.grid, found.keys) for found in maps[:2]] == [((16, 24), (2, 3)), ((8, 12), (2, 3))]
    assert isinstance(maps[0], LayerMaps)


def test_a_mechanism_that_the_grid_cannot_have_is_left_out_with_the_reason(place, tmp_path, capsys):
    analyze.main(["maps", str(place), str(place / "photo.png"), "--output", str(tmp_path), "--attention", "lara"])
    assert "left out: attention(lara).num_landmarks = 49" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_keys", "grid", "expected"), [(15, (3, 5), (3, 5)), (6, (16, 24), (2, 3)), (49, (28, 20), (7, 7))]
)
def test_key_grid(num_keys, grid, expected):
    assert key_grid(num_keys, grid) == expected


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["text.png"], "text.png: not an image"),
        (["none.png"], "none.png: No such file"),
        (["photo.png", "--attention", "evva"], "unknown mechanism 'evva'; did you mean 'eva'"),
        (["photo.png", "--attention", "{name: eva, windw: 3}"], "attention(eva).windw"),
        (["photo.png", "--query", "3"], "--query 3: expected ROW,COLUMN"),
        (["photo.png", "--query", "3,0"], "--query 3,0: outside the 3x3 grid; at most 2,2"),
        (["photo.png", "--output", "photo.png"], "--output photo.png: cannot be made"),
    ],
)
def test_refusals(place, tmp_path, capsys, monkeypatch, arguments, problem):
    monkeypatch.chdir(place)
    output = [] if "--output" in arguments else ["--output", str(tmp_path)]
    assert problem in refusal(capsys, "maps", ".", *output, *arguments)
    assert {path.name for path in tmp_path.iterdir()} <= {MARKER}
