"""Models of timm and transformers as models of a run, with a mechanism in the place of their attention.

create_model("timm:vit_small_patch16_dinov3", attention={"name": "eva", "window_size": 4}, img_size=512, num_classes=10)
create_model("hf:facebook/dinov2-small", attention="lara")

A name and plain options describe a host completely, so that checkpoints need nothing else: the configuration of a model
of transformers becomes a part of its options. Its weights come by `init.weights`. No code of a hub is run.
"""

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, cast

import timm
import torch
from timm.layers import resample_abs_pos_embed, to_2tuple
from timm.models import adapt_input_conv
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from attention import Grid, OptionError
from attention.options import Options, nearest, option, parse_options, refuse
from models.assignment import Mechanism
from models.base import NO_DECAY
from models.block import compiled
from models.convert import grid_of
from models.host_layers import first_line, with_mixin
from models.hosts import Call, attention_calls, on_meta, replace_calls, run_on_meta
from models.of_transformers import HF, RESERVED, class_of, configuration, fetched_configuration

TIMM = "timm:"
"""Prefix of an architecture of timm."""

MAX_NUMBERS, MAX_PARAMETERS = 2**34, 2**13
"""Numbers, and tensors of them, that a host may have."""

MAX_SIZE = 2**20
"""Largest number among the options of a host."""


class HostConfig(Options):
    """Options of a model of timm or transformers."""

    name: str = option("", "timm:ARCHITECTURE or hf:NAME")
    img_size: int | tuple[int, int] | None = option(None, "height and width of images; null: the model's own", low=1)
    num_classes: int = option(1000, "number of classes; 0: no classifier", low=0, high=2**20)
    in_chans: int = option(3, "channels of images", low=1, high=2**10)
    kwargs: dict[str, Any] | None = option(None, "options of timm's constructor or of transformers' configuration")

    @property
    def depths(self) -> list[int]:
        """The number of attention layers."""
        return [len(host_calls(self))]

    @property
    def num_heads(self) -> list[int]:
        """The number of heads of each attention layer; empty for a model without layers that can be replaced."""
        with suppress(OptionError):
            return [call.num_heads for call in host_calls(self)]
        return []


class Hosted(nn.Module):
    """Mixin of a host's class: what models of a run have. Names of weights are the host's."""

    host: ClassVar[type[nn.Module]]  # the host's own class
    compiled_sizes: Collection[int] = ()

    def logits(self, x: Tensor) -> Tensor:
        """Images (B, C, height, width) -> logits (B, num_classes)."""
        return cast(Tensor, self.host.forward(self, x))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.compiled_logits if x.shape[0] in self.compiled_sizes else type(self).logits
        return cast(Tensor, logits(self, x))

    def compile_blocks(self, batch_sizes: Collection[int], **options: Any) -> int:
        """Compiles the model as a whole for batches of these sizes; returns the number of graphs of a mode."""
        self.compiled_logits = compiled(type(self).logits, **options)
        self.compiled_sizes = frozenset(batch_sizes)
        return len(self.compiled_sizes)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: the host's, embeddings, and tables of mechanisms."""
        own: set[str] = getattr(super(), "no_weight_decay", set)()
        return {*own} | {name for name, _ in self.named_parameters() if name.endswith(NO_DECAY)}

    def fitting(self, state: Mapping[str, Tensor], grid: Grid | None = None) -> dict[str, Tensor]:
        """The weights of a model of this architecture for other image sizes and channels, by timm's own functions.

        Args:
            grid: (H, W) of the position embeddings, which timm would take for a square; None: not known.
        """
        fit, own, fitted = getattr(inspect.getmodule(self.host), "checkpoint_filter_fn", None), grid_of(self), {**state}
        positions = fitted.pop("pos_embed", None) if grid and own else None
        if fit is not None:
            fitted = fit(fitted, self)
        if positions is not None and grid and own:
            if grid != own and positions.ndim == 3:
                num_prefix = positions.shape[1] - math.prod(grid)
                positions = resample_abs_pos_embed(positions, own, grid, num_prefix_tokens=num_prefix)
            fitted["pos_embed"] = positions
        first = next((n for n, m in self.named_modules() if isinstance(m, nn.Conv2d)), "")
        key, here = f"{first}.weight", self.state_dict()
        if key in fitted and fitted[key].shape[1] != here[key].shape[1]:
            fitted[key] = adapt_input_conv(here[key].shape[1], fitted[key], min(3, fitted[key].shape[1]))
        return fitted


class OfTransformers(Hosted):
    """A model of transformers with its classifier, or with one of the pooled output where it has none.

    interpolates: position embeddings are resampled in each forward pass, for images of another size than the weights'.
    """

    classifier: nn.Module
    interpolates: bool

    def logits(self, x: Tensor) -> Tensor:
        given = {"interpolate_pos_encoding": True} if self.interpolates else {}
        output = self.host.forward(self, x, **given)
        return cast(Tensor, output.logits if hasattr(output, "logits") else self.classifier(output.pooler_output))

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        getattr(self, f"activation_checkpointing_{'enable' if enable else 'disable'}")()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^.*(?:embeddings|pre_layrnorm)\.", "blocks": r"^.*?\blayers?\.(\d+)\."}


def is_host(name: str) -> bool:
    """True for names of models of timm and transformers."""
    return name.startswith((TIMM, HF))


def parse_host(name: str, options: Mapping[str, Any]) -> HostConfig:
    """The options of host `name`; nothing is fetched.

    Raises:
        OptionError: unknown host or option, wrong type or value, a model of transformers without its configuration, see
            `described`.
    """
    problem = f"unknown option of {name}; options of the model itself belong in model.kwargs"
    refuse([OptionError(f"model.{key}", problem) for key in options if key not in HostConfig.__dataclass_fields__])
    config: HostConfig = parse_options(HostConfig, {**options, "name": name}, "model")
    kwargs = config.kwargs or {}
    _check("model.kwargs", kwargs)
    if name.startswith(HF):
        config = dataclasses.replace(config, kwargs=configuration(kwargs))
    elif not timm.is_model(architecture := name.removeprefix(TIMM).partition(".")[0]):
        known = [TIMM + known for known in timm.list_models()]
        raise OptionError("model.name", f"{name!r} is no architecture of timm{nearest(name, known)}")
    elif timm.model_entrypoint(architecture).__module__.partition(".")[0] != "timm":
        raise OptionError("model.name", f" = {name!r}: registered with timm by other code; leave out {TIMM!r}")
    own_size = _own_size(config)
    return dataclasses.replace(config, img_size=config.img_size or own_size)


def described(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of host `name` with the configuration of a model of transformers, see `fetched_configuration`."""
    kwargs = options.get("kwargs") or {}
    if not name.startswith(HF) or not isinstance(kwargs, Mapping) or "model_type" in kwargs:
        return {**options}
    return {**options, "kwargs": {**fetched_configuration(name)[0], **kwargs}}


def create_host(name: str, attention: Mechanism | Sequence[Mechanism] | None = "softmax", **options: Any) -> nn.Module:
    """Builds a host with random weights, see `models.create_model`; `options` are fields of `HostConfig`."""
    config = parse_host(name, described(name, options))
    model = _build(config)
    if attention is not None:
        replace_calls(model, host_calls(config), attention)
    if attention is None or not next(model.parameters()).is_meta:
        _freeze_unused(model, config.img_size)
    return model


def _freeze_unused(model: nn.Module, img_size: Any) -> None:
    """Excludes weights that no logit depends on from training: mask tokens, norms of unused outputs, ..."""
    probe = on_meta(model).train()
    with torch.enable_grad():
        run_on_meta(probe, img_size).sum().backward()
    for weight, probed in zip(model.parameters(), probe.parameters(), strict=True):
        weight.requires_grad_(probed.grad is not None)


def host_calls(config: HostConfig) -> list[Call]:
    """The attention layers of a host, see `attention_calls`."""
    if (key := repr(config)) not in _CALLS:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            _CALLS[key] = attention_calls(_build(config), config.img_size)
    return _CALLS[key]


_CALLS: dict[str, list[Call]] = {}
"""Options of a host, as text -> its attention layers."""


def _build(config: HostConfig) -> nn.Module:
    """A host with its own attention."""
    is_of_timm = config.name.startswith(TIMM)
    sizes = f"more than {MAX_PARAMETERS:,} parameters, or {MAX_NUMBERS:,} numbers; lower its sizes"
    try:
        with bounded(MAX_PARAMETERS, MAX_NUMBERS, ValueError(sizes)):
            model = _build_of_timm(config) if is_of_timm else _build_of_transformers(config)
    except Exception as error:  # the host's own
        problem = f"{config.name} cannot be built with these options ({first_line(error)})"
        raise OptionError("model", problem) from None
    model.in_chans, model.num_classes = config.in_chans, config.num_classes
    model.__class__ = with_mixin(Hosted if is_of_timm else OfTransformers, cast(Any, type(model)))
    return cast(nn.Module, model)


def _build_of_timm(config: HostConfig) -> Any:
    name = config.name.removeprefix(TIMM)
    given = {"num_classes": config.num_classes, "in_chans": config.in_chans, **(config.kwargs or {})}
    if timm.get_pretrained_cfg_value(name, "fixed_input_size") and to_2tuple(config.img_size) != _own_size(config):
        given["img_size"] = config.img_size  # others take any size without the option
    return timm.create_model(name, **given)


def _build_of_transformers(config: HostConfig) -> Any:
    kind, there = class_of({**(config.kwargs or {}), "num_labels": max(1, config.num_classes)})
    getattr(there, "vision_config", there).num_channels = config.in_chans
    model = kind._from_config(there, attn_implementation="sdpa")
    if not config.num_classes or not hasattr(model, "classifier"):
        model.classifier = nn.Linear(there.hidden_size, config.num_classes) if config.num_classes else nn.Identity()
    accepts = any("interpolate_pos_encoding" in inspect.signature(m.forward).parameters for m in model.modules())
    model.interpolates = accepts and to_2tuple(config.img_size) != _own_size(config)
    return model


def _check(key: str, value: Any) -> None:
    """Refuses what is no plain option of an architecture, in nested mappings and lists too."""
    if (name := key.rpartition(".")[2]) in RESERVED or name.startswith("_"):
        raise OptionError(key, "chooses no architecture; leave it out")
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for inner, x in value.items():
            _check(f"{key}.{inner}", x)
    elif not isinstance(value, str | int | float | None) or (isinstance(value, int) and abs(value) > MAX_SIZE):
        raise OptionError(key, f" = {value!r}: expected text, a mapping, or numbers up to {MAX_SIZE}")


def _own_size(config: HostConfig) -> tuple[int, int]:
    """(height, width) of the images that a host's description names."""
    if config.name.startswith(HF):
        kwargs: Any = config.kwargs
        size = kwargs.get("vision_config", kwargs).get("image_size", 224)
        if not (type(size) is int or (isinstance(size, list | tuple) and [*map(type, size)] == [int, int])):
            problem = f" = {size!r}: expected a number of pixels, or height and width"
            raise OptionError("model.kwargs.image_size", problem)
    else:
        try:
            _, *size = cast(Any, timm.get_pretrained_cfg_value(config.name.removeprefix(TIMM), "input_size"))
        except RuntimeError as error:  # a tag of other weights
            raise OptionError("model.name", f" = {config.name}: {error}") from None
    return cast(tuple[int, int], to_2tuple(size))


def bounded(parameters: int, numbers: int, error: Exception) -> RemovableHandle:
    """Context in which a model of more than so many parameters, or numbers in them, raises `error` when built."""
    left = [parameters, numbers]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        left[0] -= 1
        left[1] -= 0 if parameter is None else parameter.numel()
        if min(left) < 0:
            raise error

    return register_module_parameter_registration_hook(count)
