"""DeiT and PVT-v2, which receive attention as a factory and never learn a mechanism's name.

model = create_model("deit_tiny_p8", attention={"name": "eva", "window_size": 7, "num_landmarks": 49}, num_classes=1000)

`MODELS` maps names to (family, size options). To check options without building a model, `parse_model(name, options)`
returns the family's `Config`. All names are registered with timm: `timm.create_model(name, attention=..., **options)`
builds the same model. `replace_attention` gives other models of timm, and those of transformers, another attention.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, Literal, overload

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, is_model, register_model
from timm.models._input import update_model_args
from torch import nn

from attention import Attention, AttentionFactory, LayerContext, OptionError
from attention.options import nearest, parse_options, refuse
from models.assignment import (
    Budget,
    Entry,
    Mechanism,
    assign,
    factories_of,
    layer_factories,
    parse_entries,
    single_layers,
    with_budget,
)
from models.base import Backbone
from models.convert import resample_weights
from models.deit import Deit
from models.hosted import TIMM, create_host, host_calls, is_host, parse_host
from models.hosts import replace_attention
from models.objective_parts import WITH_PARTS
from models.pvt import Pvt

_DEIT_WIDTHS = {
    "tiny": {"embed_dim": 192, "num_heads": 3},
    "small": {"embed_dim": 384, "num_heads": 6},
    "base": {"embed_dim": 768, "num_heads": 12},
}
_PVT_SIZES = {
    "b0": {"embed_dims": (32, 64, 160, 256), "depths": (2, 2, 2, 2)},
    "b1": {"depths": (2, 2, 2, 2)},
    "b2": {"depths": (3, 4, 6, 3)},
    "b3": {"depths": (3, 4, 18, 3)},
    "b4": {"depths": (3, 8, 27, 3)},
    "b5": {"depths": (3, 6, 40, 3), "mlp_ratios": (4, 4, 4, 4)},
}

_ENCODER = {"embed_dim": 192, "depth": 8}
"""Encoder for timing by sequence length in the papers: EVA appendix E.4 with two heads, LARA H.5 with three."""

DeitName = Literal[
    "deit", "deit_tiny_p16", "deit_tiny_p8", "deit_tiny_p4", "deit_small_p16", "deit_small_p8", "deit_small_p4",
    "deit_base_p16", "deit_base_p8", "deit_base_p4", "encoder_8x192_2heads", "encoder_8x192_3heads",
]  # fmt: skip
PvtName = Literal[
    "pvtv2_b0", "pvtv2_b1", "pvtv2_b2", "pvtv2_b3", "pvtv2_b4", "pvtv2_b5", "pvtv2_b0_2xheads", "pvtv2_b1_2xheads",
    "pvtv2_b2_2xheads", "pvtv2_b3_2xheads", "pvtv2_b4_2xheads", "pvtv2_b5_2xheads",
]  # fmt: skip

MODELS: dict[str, tuple[type[Backbone], dict[str, Any]]] = {
    "deit": (Deit, {}),
    **{f"deit_{size}_p{p}": (Deit, {"patch_size": p, **o}) for size, o in _DEIT_WIDTHS.items() for p in (16, 8, 4)},
    **{f"encoder_8x192_{h}heads": (Deit, {"num_heads": h, **_ENCODER}) for h in (2, 3)},
    **{f"pvtv2_{size}": (Pvt, o) for size, o in _PVT_SIZES.items()},
    **{f"pvtv2_{size}_2xheads": (Pvt, {"num_heads": (2, 4, 10, 16), **o}) for size, o in _PVT_SIZES.items()},
}


@overload
def create_model(name: DeitName, attention: Mechanism | Sequence[Mechanism] = ..., **options: Any) -> Deit: ...
@overload
def create_model(name: PvtName, attention: Mechanism | Sequence[Mechanism] = ..., **options: Any) -> Pvt: ...
@overload
def create_model(name: str, attention: Mechanism | Sequence[Mechanism] | None = ..., **options: Any) -> nn.Module: ...
def create_model(
    name: str,
    attention: Mechanism | Sequence[Mechanism] | None = "softmax",
    *,
    budget: Budget | None = None,
    **options: Any,
) -> nn.Module:
    """Builds a model; type checkers know the class, `Deit` or `Pvt`, by its name.

    Args:
        name: key of `MODELS`, or another model, ``timm:ARCHITECTURE`` or ``hf:NAME``, see `models.hosted`.
        attention: a mechanism, by its name or as a mapping with its options, or a list of mechanisms that name their
            blocks, see `models.assignment`. For PVT-v2 one mechanism serves all stages except the last, which keeps
            softmax; a list of four has one for each stage. None leaves another model's own attention.
        budget: size of the mechanisms, such as the number of landmarks, or one for each of them: an element of the
            option `train.budgets` of a run. None: the sizes of `attention`.
        options: fields of the family's `Config`, which override the size's; also options of `timm.create_model` and of
            timm's models: device, dtype, and attn_drop_rate for the option `attn_drop` of every mechanism.
    Raises:
        OptionError: unknown model, mechanism or option, wrong type or value, or a geometry that cannot be honoured.
    """
    if budget is not None:
        attention = with_budget(attention if parse_entries(attention) else None, budget, "budget")
    if is_host(name):
        return create_host(name, attention, **options)
    family_of(name)
    model = _entrypoint(name)(attention=attention, **options)
    of_call = {"device", "dtype", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
    update_model_args(model, attention=attention, **{k: v for k, v in options.items() if k not in of_call})
    return model


def parse_model(name: str, options: Mapping[str, Any]) -> Any:
    """The family's `Config` for model `name`, with `options` overriding those of its size.

    Raises:
        OptionError: unknown model or option, wrong type or value; keys begin with ``model.``.
    """
    if is_host(name):
        return parse_host(name, options)
    family, problems = family_of(name), list[OptionError]()
    for option in options:
        having = {f.__name__ for f, _ in MODELS.values() if option in {field.name for field in fields(f.Config)}}
        if having and family.__name__ not in having:
            problem = f"an option of {', '.join(having)}, which {name} is not; leave it out, or choose another model"
            problems.append(OptionError(f"model.{option}", problem))
    refuse(problems)
    config = parse_options(family.Config, {**MODELS[name][1], **options}, "model")
    for option, with_part in WITH_PARTS.items():
        if getattr(config, option, False):
            with_part.check(config)
    return config


def split_name(model: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Splits the option `model` of a run into name and other options; an OptionError says that the name is no text."""
    options = dict(model)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise OptionError("model.name", f"expected the name of a model, got {name!r}")
    return name, options


def depths_of(model: Mapping[str, Any]) -> Sequence[int]:
    """The number of attention layers in each stage of the option `model` of a run; other people's have one stage.

    Raises:
        OptionError: see `parse_model`.
    """
    depths: Sequence[int] = parse_model(*split_name(model)).depths
    return depths


def layer_contexts(name: str, options: Mapping[str, Any] = {}) -> list[LayerContext]:
    """Contexts of the layers that one mechanism gets in model `name` with these `options`, in the order of blocks.

    These are all layers. In a pyramid the last stage keeps softmax, and its layers are left out.

    Raises:
        OptionError: unknown model or option, wrong type or value.
    """
    if is_host(name):
        calls = host_calls(parse_host(name, options))
        return [LayerContext(layer=layer, depth=len(calls), **call.place()) for layer, call in enumerate(calls)]
    config, contexts = parse_model(name, options), []
    softmax = AttentionFactory.from_options("softmax")

    def record(**context: Any) -> Attention:
        contexts.append(LayerContext(**context))
        return softmax(**context)

    family: Callable[..., Backbone] = family_of(name)
    with torch.device("meta"):
        family(config, [record] * sum(config.depths))
    return [contexts[number] for number in single_layers(config.depths)]


def family_of(name: str) -> type[Backbone]:
    """The family of model `name`; an OptionError refuses an unknown one."""
    if name not in MODELS:
        meant = f"; did you mean {TIMM + name!r}?" if is_model(name) else nearest(name, MODELS)
        if is_model(name) and name.startswith("eva"):
            meant += " Its EvaAttention is softmax attention, and not the mechanism eva"
        raise OptionError("model.name", f"unknown model {name!r}{meant}")
    return MODELS[name][0]


def published_attention(name: str) -> str:
    """The mechanism of the published weights of model `name`; other people's models have softmax.

    Raises:
        OptionError: unknown model.
    """
    return "softmax" if is_host(name) else family_of(name).published_attention


def _build(
    name: str, attention: Mechanism | Sequence[Mechanism] = "softmax", attn_drop_rate: float = 0.0, **options: Any
) -> Backbone:
    config = parse_model(name, options)
    entries = assign(name, attention, config.depths)
    if attn_drop_rate:
        changed = [{**entry.options, "attn_drop": attn_drop_rate} for entry in entries]
        entries = [Entry(x, entry.layers, *factories_of(x)) for x, entry in zip(changed, entries, strict=True)]
    with_parts = (model for option, model in WITH_PARTS.items() if getattr(config, option, False))
    family: Callable[..., Backbone] = next(with_parts, family_of(name))
    return family(config, layer_factories(entries))


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    """timm's constructor of model `name`."""
    family, sizes = MODELS[name]

    def construct(
        pretrained: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pretrained_cfg_overlay: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> nn.Module:
        overlay = _layer_names(**options) | dict(pretrained_cfg_overlay or {})
        with nullcontext() if device is None else torch.device(device):
            features = {"out_indices": family.feature_indices, "feature_cls": "getter"}
            model = build_model_with_cfg(
                functools.partial(_build, name),
                name,
                pretrained,
                pretrained_cfg_overlay=overlay,
                pretrained_filter_fn=resample_weights,
                feature_cfg=features,
                **options,
            )
        return model if dtype is None else model.to(dtype)

    construct.__name__ = name
    size = ", ".join(f"{option}={value}" for option, value in sizes.items()) or "its defaults"
    construct.__doc__ = f"{family.__name__} with {size}; see `models.create_model` for attention and options."
    return construct


def _layer_names(stem: str = "linear", vocab_size: int = 0, dist_token: bool = False, **others: Any) -> dict[str, Any]:
    """Entries of timm's pretrained_cfg for the layers that other channels or classes change, where an option of a DeiT
    gives them other names."""
    names: dict[str, Any] = {"classifier": ("head", "head_dist")} if dist_token else {}
    if vocab_size:
        return names | {"first_conv": None}
    return names | ({"first_conv": "patch_embed.proj.0"} if stem == "conv" else {})


_CFG: dict[str, Any] = {"input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic"}
_CFG |= {"first_conv": "patch_embed.proj", "classifier": "head"}
_OF_FAMILY: dict[Any, dict[str, Any]] = {Deit: {"fixed_input_size": True}, Pvt: {"pool_size": (7, 7)}}
default_cfgs = generate_default_cfgs({name: _CFG | _OF_FAMILY[family] for name, (family, _) in MODELS.items()})
for _name in MODELS:
    register_model(_entrypoint(_name))

__all__ = [
    "MODELS",
    "create_model",
    "depths_of",
    "is_host",
    "layer_contexts",
    "parse_model",
    "published_attention",
    "replace_attention",
    "split_name",
]
