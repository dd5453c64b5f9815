"""Grids of three axes, (T, H, W): what they share with images, and refusals. Their twins are among the other cases."""

import pytest
import torch

from attention import OptionError, create_attention
from models import create_model
from tests.support.comparisons import assert_equal
from tests.support.inputs import draw, layer
from tests.support.partition import chosen

SIZES = {"local": {"window_size": 2}, "eva": {"window_size": 2, "num_landmarks": 6}, "lara": {"num_landmarks": 6}}
ORDERLESS = (
    "softmax",
    "performer",
    "ra",
    "linear",
    "t2r",
    "rfa",
    "dpfp",
    "efficient",
    "hydra",
    "relu_linear",
    "xca",
    "abc",
)


def of_clips(options, frames: int):
    side = options.get("window_size")
    return {**options, "window_size": (frames, side, side)} if side else options


@pytest.mark.parametrize(
    "name", chosen([*SIZES, *ORDERLESS], [*SIZES, "softmax", "performer", "ra", "linear"].__contains__)
)
def test_a_clip_of_one_frame_is_an_image(name):
    options, x = SIZES.get(name, {}), draw(2, 25, 16)
    image, clip = (
        layer(name, grid, num_prefix_tokens=1, **given)
        for grid, given in (((4, 6), options), ((1, 4, 6), of_clips(options, 1)))
    )
    clip.load_state_dict(image.state_dict())
    assert_equal(clip(x, (1, 4, 6)), image(x, (4, 6)))


def test_windows_of_one_frame_are_windows_of_images():
    image, clip = layer("local", (4, 6), window_size=3), layer("local", (5, 4, 6), window_size=(1, 3, 3))
    clip.load_state_dict(image.state_dict())
    x = draw(10, 24, 16)
    assert_equal(clip(x.view(2, 120, 16), (5, 4, 6)), image(x, (4, 6)).view(2, 120, 16))


@pytest.mark.parametrize(("name", "options"), [(name, SIZES[name] | {"num_landmarks": 8}) for name in ("eva", "lara")])
def test_time_is_an_axis_as_the_others(name, options):
    """On cubes, a rotation of the axes rotates the output."""
    options = options if name == "lara" else {**options, "position_bias": "none"}
    attn, x = layer(name, (4, 4, 4), **options), draw(2, 4, 4, 4, 16)
    y, turned = (attn(x.flatten(1, 3)).view_as(x) for x in (x, x.permute(0, 3, 1, 2, 4)))
    assert_equal(turned.permute(0, 2, 3, 1, 4), y)


@pytest.mark.parametrize("options", [SIZES["lara"], {"window_size": 2, "num_landmarks": 4, "partition": "complement"}])
def test_one_graph_for_grids_of_any_size(options):
    attn = layer("eva" if "partition" in options else "lara", (4, 6), **options)
    compiled, x = torch.compile(attn, backend="eager", fullgraph=True), draw(1, 24, 16)
    for grid in ((4, 6), (6, 4), (3, 8)):
        assert_equal(compiled(x, grid), attn(x, grid))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sra"}, r"^attention\(sra\) has no form for clips \(4, 4, 4\) .* take local, eva, lara"),
        ({"name": "performer", "local": True}, "no form for clips .* with these options; .* local and causal false"),
        ({"name": "linear", "causal": True}, "no form for clips .* with these options; .* local and causal false"),
        ({"name": "eva", "window_size": (2, 4)}, r"^attention\(eva\).window_size = \[2, 4\]: give one side, .* 3 axes"),
        ({"name": "local", "window_size": (), "fit": True}, r"^attention\(local\).window_size = \[\]: give one side"),
        ({"name": "local", "window_size": (2, 5, 2)}, r"window_size = \(2, 5, 2\): larger .* at most \(2, 4, 2\)"),
        ({"name": "neighborhood", "fit": True}, r"^attention\(neighborhood\) has no form for clips"),
        ({"name": "eva", "window_size": (0, 4, 4)}, r"window_size = \[0, 4, 4\]: give one side"),
        ({"name": "eva", "window_size": (2,), "partition": "complement"}, r"window_size = \[2\]: give one side"),
        ({"name": "local", "window_size": 2, "position_bias": "t5"}, "position_bias = t5: for square windows of ima"),
        ({"name": "eva", "window_size": 2, "num_landmarks": 7}, "does not divide the 4x4x4 grid into frames x rows x"),
        ({"name": "lara", "num_landmarks": 8, "released": True}, "released_pools = True: pools rows and columns"),
        ({"name": "local", "grid": (4, 4, 4, 4)}, "grid = .* expected 2 values, .* or 3 for clips"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(OptionError, match=message):
        create_attention(**{"dim": 16, "num_heads": 2, "grid": (4, 4, 4), **options})


def test_a_model_of_film_strips():
    """Tokens of frames one below the other are in the order of a clip's; windows of one frame do not see the others."""
    sizes = {"img_size": (32, 8), "patch_size": 4, "embed_dim": 16, "num_heads": 2, "depth": 2, "num_classes": 3}
    windows = {"name": "local", "window_size": [1, 2, 2]}
    model = create_model("deit", attention=windows, frames=4, **sizes).eval()
    x = torch.randn(1, 3, 32, 8)
    changed = torch.cat([x[:, :, :8] + 1, x[:, :, 8:]], 2)
    y, other = model.forward_features(x), model.forward_features(changed)
    assert torch.equal(y[:, 4:], other[:, 4:])
    assert not torch.equal(y[:, :4], other[:, :4])
    for wrong in ({"frames": 3}, {"frames": 2, "stem": "conv"}, {"frames": 2, "dynamic_img_size": True}):
        with pytest.raises(OptionError, match=r"model.frames = \d: needs a height of whole frames and patches"):
            create_model("deit", attention=windows, **sizes, **wrong)
    with pytest.raises(TypeError, match=r"give the frames, rows and columns of the tokens, three ints"):
        model.blocks[0].attn(torch.randn(1, 16, 16), (8, 2))
