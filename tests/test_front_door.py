"""The front door of `attention` as a library: signature, options for programs, `python -m attention`."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import attention
from attention import ATTENTION, LayerContext, OptionError, create_attention, options_of
from attention.__main__ import main, table
from attention.option_tables import describe
from engine.config.schema import SECTIONS
from models import MODELS

ROOT = Path(__file__).parents[1]


def test_the_signature_has_every_field_of_the_context():
    parameters = inspect.signature(create_attention).parameters
    given = {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    kinds, expected = typing.get_type_hints(create_attention), typing.get_type_hints(LayerContext)
    assert parameters.keys() - given.keys() == {"name", "options"}
    assert [*given] == [field.name for field in dataclasses.fields(LayerContext)]
    for field in dataclasses.fields(LayerContext):
        if field.name == "shared":  # a dict of its own for every call
            assert (given["shared"].default, kinds["shared"]) == (None, expected["shared"] | None)
            continue
        required = field.default is dataclasses.MISSING
        assert given[field.name].default == (inspect.Parameter.empty if required else field.default), field.name
        assert kinds[field.name] == expected[field.name]
        assert f"{field.name}:" in create_attention.__doc__ or f"{field.name}, " in create_attention.__doc__


@pytest.mark.parametrize("missing", ["dim", "num_heads", "grid"])
def test_what_is_missing_is_named(missing):
    given = {"dim": 16, "num_heads": 2, "grid": (14, 14)}
    del given[missing]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        create_attention("eva", **given)


def test_layers_get_the_context():
    shared = {}
    place = {"grid": (4, 6), "num_prefix_tokens": 2, "layer": 3, "depth": 5, "qkv_bias": False, "proj_drop": 0.25}
    attn = create_attention("linformer", dim=12, num_heads=3, sharing="layers", shared=shared, **place)
    assert (attn.num_heads, attn.head_dim, attn.num_prefix_tokens, attn.proj_drop.p) == (3, 4, 2, 0.25)
    assert attn.qkv.bias is None
    assert [*shared.values()] == [attn]
    halves = [create_attention("transnormer", dim=12, num_heads=3, grid=(8, 9), layer=i, depth=2) for i in (0, 1)]
    assert [half.in_windows for half in halves] == [True, False]


@pytest.mark.parametrize("name", ATTENTION)
def test_a_name_of_the_context_and_a_mechanism_has_one_default(name):
    """`create_attention` gives such a keyword to the mechanism, whether the user gave it or not."""
    context = {field.name: field.default for field in dataclasses.fields(LayerContext)}
    for option, about in options_of(name).items():
        assert option not in context or about.default == context[option]


@pytest.mark.parametrize("name", ATTENTION)
def test_options_are_described(name):
    described, config = options_of(name), ATTENTION[name].Config()
    assert [*described] == [field.name for field in dataclasses.fields(config)]
    for option, about in described.items():
        assert about.meaning
        assert about.follows or getattr(config, option) == about.default
        assert not about.choices or about.default in about.choices or about.default is None


def test_an_option_for_a_program():
    groups, layout = (options_of("eva")[name] for name in ("num_landmarks", "layout"))
    assert (groups.kind, groups.default, groups.low, groups.high, groups.choices) == (int, 49, 0, None, ())
    assert (layout.kind, layout.choices) == (typing.Literal["1d", "2d"] | None, ("1d", "2d"))
    assert (groups.values, layout.values) == ("integer, ≥ 0", "one of `1d`, `2d`, or null")
    assert (layout.follows, groups.follows) == (True, False)
    with pytest.raises(OptionError, match=r"attention.name: unknown mechanism 'evaa'; did you mean 'eva'\?"):
        options_of("evaa")


def test_tables_show_values_as_yaml_reads_them():
    configs = [*(family.Config for family, _ in MODELS.values()), *(ATTENTION[name].Config for name in ATTENTION)]
    shown = [about for cls in [*SECTIONS.values(), *configs] for about in describe(cls).values()]
    for value in [choice for about in shown for choice in (about.default, *about.choices)]:
        read = yaml.safe_load(attention.options.to_yaml(value))
        assert read == (list(value) if isinstance(value, tuple) else value)
        assert type(read) is type(value) or isinstance(value, tuple)


def test_a_mechanism_in_full(capsys):
    assert {*attention.__all__} <= {*dir(attention)}
    main(["eva"])
    printed = capsys.readouterr().out
    assert printed.startswith("EVA (Zheng et al. 2023, arXiv:2302.04542): a window exactly, and c groups of tokens")
    assert "\nCost: 2 N (|E| + c) C multiply-accumulates" in printed
    assert "\n| `window_size` | list of integers or integer, ≥ 0 | `7` | side of the window E in tokens, or" in printed
    assert all(f"| `{name}` |" in printed for name in options_of("eva"))
    main([])
    assert capsys.readouterr().out == table() + "\n"
    for arguments, status in {("sofmax",): 2, ("eva", "lara"): 2, ("--eva",): 2, ("-h",): 0}.items():
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status
    assert "attention.name: unknown mechanism 'sofmax'; did you mean 'softmax'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["softmax", "eva", "linformer"])
def test_the_grid_of_construction_need_not_be_given(name):
    attn, x = create_attention(name, dim=16, num_heads=2, grid=(7, 14)).eval(), torch.randn(2, 98, 16)
    assert torch.equal(attn(x), attn(x, (7, 14)))
    with pytest.raises(ValueError, match="got 97 tokens, but 0 prefix tokens and a 7x14 grid make 98"):
        attn(torch.randn(2, 97, 16))


SHAPES = {  # shape of x, grid -> the error's type and what it says
    ((2, 16, 4, 6), (4, 6)): (ValueError, "(2, 16, 4, 6); give its tokens, x.flatten(2).mT for (B, C, H, W), and the"),
    ((2, 4, 6, 16), (4, 6)): (ValueError, "x.flatten(1, 2) for (B, H, W, C), and the grid (4, 6)"),
    ((24, 16), (4, 6)): (ValueError, "got x of shape (24, 16), but tokens are (B, N, C) with C = 16; add the axis"),
    ((16,), (4, 6)): (ValueError, "got x of shape (16,), but tokens are (B, N, C) with C = 16"),
    ((2, 24, 15), (4, 6)): (ValueError, "got tokens of 15 channels, but the layer has dim = 16; give tokens of that"),
    ((2, 25, 16), (4, 6)): (ValueError, "got 25 tokens, but 0 prefix tokens and a 4x6 grid make 24; give the (H, W)"),
    ((2, 16, 24), (4, 6)): (ValueError, "got tokens of 24 channels, but the layer has dim = 16"),
    ((2, 24, 16), 24): (TypeError, "got the grid 24; give the rows and columns of the tokens, two ints (H, W)"),
    ((2, 24, 16), (4.0, 6.0)): (TypeError, "got the grid (4.0, 6.0); give"),
    ((2, 24, 16), (24,)): (TypeError, "got the grid (24,); give"),
    ((2, 24, 16), torch.Size((2, 16, 4, 6))): (TypeError, "got the grid torch.Size([2, 16, 4, 6]); give"),
    ((2, 24, 16), torch.ones(1, 1)): (
        TypeError,
        "got the grid a tensor (1, 1): there is no cross-attention; give the rows",
    ),
    ((2, 24, 16), "46"): (TypeError, "got the grid '46'; give"),
}


@pytest.mark.parametrize(("given", "error"), SHAPES.items(), ids=str)
@pytest.mark.parametrize("name", ["softmax", "eva", "sra"])
def test_inputs_of_another_shape_say_what_to_give(name, given, error):
    (shape, grid), (kind, message) = given, error
    attn = create_attention(name, dim=16, num_heads=2, grid=(14, 14))
    with pytest.raises(kind) as refused:
        attn(torch.randn(shape), grid)
    assert str(refused.value).startswith(f"attention({name}): got ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("P", [0, 2])
def test_the_remedy_for_an_image_is_right(P):
    attn = create_attention("local", dim=16, num_heads=2, grid=(14, 14), num_prefix_tokens=P).eval()
    image = torch.randn(2, 16, 8, 9)
    with pytest.raises(ValueError, match=f"give its tokens{f' after {P} prefix tokens' * bool(P)}, ") as refused:
        attn(image, (8, 9))
    tokens, grid = re.search(r", x\.(.*) for .* the grid \((.*)\)", str(refused.value)).groups()
    tokens, grid = {"flatten(2).mT": image.flatten(2).mT}[tokens], [int(side) for side in grid.split(",")]
    x = torch.cat([torch.randn(2, P, 16), tokens], 1)
    y = attn(x, grid)  # a list, as LayerContext takes one
    assert torch.equal(y, attn(x, image.shape[2:]))
    assert torch.equal(y[:, P + 5 * 9 + 7], attn(x, (8, 9))[:, P:].mT.unflatten(2, (8, 9))[:, :, 5, 7])


@pytest.mark.complete
def test_mechanisms_are_imported_when_they_are_asked_for():
    """A run imports those of its model, and Triton's kernels where a GPU or the path asks for them."""
    lines = [
        "import sys, train",
        "from attention import ATTENTION, kernels, options_of",
        "own = lambda: [name for name in sys.modules if name.startswith('attention.')]",
        "loaded = lambda: [name for name in own() if '.mechanisms.' in name or '.triton_' in name]",
        "assert 'eva' in ATTENTION and len(list(ATTENTION)) > 40 and not loaded()",
        "options_of('softmax')",
        "assert loaded() == ['attention.mechanisms.softmax']",
        "context = kernels.use('triton')",
        "context.__enter__()",
        "options_of('local')",  # its ops are imported last, and bring their kernels
        "assert [*kernels._triton] == ['joint_softmax', 'packed_attention']",
    ]
    lines = lines if find_spec("triton") else lines[:7]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.complete
def test_a_reader_that_has_enough_of_the_table_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run([sys.executable, "-m", "attention"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (run.stderr, run.returncode) == (b"", 0)
