"""The front door of `attention` as a library: signature, options for programs, `python -m attention`."""

import dataclasses
import inspect
import typing

import pytest
import yaml

import attention
from attention import ATTENTION, LayerContext, OptionError, create_attention, options_of
from attention.__main__ import main, table
from attention.option_tables import describe
from engine.config.schema import Run
from models import MODELS

FACTORY = {"name"}
"""Keywords of `create_attention` that are neither of the context nor of a mechanism."""


def test_the_signature_has_every_field_of_the_context():
    parameters = inspect.signature(create_attention).parameters
    given = {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    kinds, expected = typing.get_type_hints(create_attention), typing.get_type_hints(LayerContext)
    assert parameters.keys() - given.keys() == FACTORY | {"options"}
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
    window, layout = (options_of("eva")[name] for name in ("window_size", "layout"))
    assert (window.kind, window.default, window.low, window.high, window.choices) == (int, 7, 0, None, ())
    assert (layout.kind, layout.choices) == (typing.Literal["1d", "2d"] | None, ("1d", "2d"))
    assert (window.values, layout.values) == ("integer, ≥ 0", "one of `1d`, `2d`, or null")
    assert (layout.follows, window.follows) == (True, False)
    with pytest.raises(OptionError, match=r"attention.name: unknown mechanism 'evaa'; did you mean 'eva'\?"):
        options_of("evaa")


def test_tables_show_values_as_yaml_reads_them():
    sections = [kind for kind in typing.get_type_hints(Run).values() if dataclasses.is_dataclass(kind)]
    configs = [*(family.Config for family, _ in MODELS.values()), *(ATTENTION[name].Config for name in ATTENTION)]
    shown = [about for cls in [*sections, *configs] for about in describe(cls).values()]
    for value in [choice for about in shown for choice in (about.default, *about.choices)]:
        read = yaml.safe_load(attention.options.to_yaml(value))
        assert read == (list(value) if isinstance(value, tuple) else value)
        assert type(read) is type(value) or isinstance(value, tuple)


def test_a_mechanism_in_full(capsys):
    main(["eva"])
    printed = capsys.readouterr().out
    assert printed.startswith("EVA (Zheng et al. 2023, arXiv:2302.04542): a window exactly, and c groups of tokens")
    assert "\nCost: 2 N (|E| + c) C multiply-accumulates" in printed
    assert "\n| `window_size` | integer, ≥ 0 | `7` | side of the window E in tokens; 0: no window |\n" in printed
    assert all(f"| `{name}` |" in printed for name in options_of("eva"))
    main([])
    assert capsys.readouterr().out == table() + "\n"
    for arguments, status in {("sofmax",): 2, ("eva", "lara"): 2, ("--eva",): 2, ("-h",): 0}.items():
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status
    assert "attention.name: unknown mechanism 'sofmax'; did you mean 'softmax'?" in capsys.readouterr().err
