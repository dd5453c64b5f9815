"""Configurations and classes of models of transformers, without any code of a hub."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from attention import OptionError
from attention.options import nearest

HF = "hf:"
"""Prefix of a name of the Hugging Face hub, or of a folder, with a model of transformers."""

RESERVED = {
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "name_or_path"),
    *("scriptable", "exportable", "no_jit", "features_only", "auto_map", "attn_implementation", "quantization_config"),
    *("img_size", "num_classes", "in_chans"),
}
"""Options of constructors that choose files, code or graphs, or that `HostConfig` has."""

TYPES = (
    *("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "ijepa", "vit_msn"),
    *("siglip", "siglip_vision_model", "clip", "clip_vision_model"),
)
"""Types of models that are taken: a file may name no other, some of which fetch or read what their options name."""

WITHOUT_EFFECT = {
    *("architectures", "transformers_version", "id2label", "label2id", "num_labels", "torch_dtype", "dtype"),
    *("problem_type", "text_config"),
}
"""Entries of a configuration that change no model of images here."""


def class_of(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of transformers for a configuration, one with a classifier if there is one, and the configuration."""
    transformers = _transformers()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    with _quiet():
        config = transformers.CONFIG_MAPPING[options["model_type"]](**options)
    if (name := names.get(options["model_type"])) is None:
        return transformers.AutoModel._model_mapping[type(config)], config
    return getattr(transformers, name if isinstance(name, str) else name[0]), config


def fetched_configuration(name: str) -> dict[str, Any]:
    """The plain configuration of a model of transformers, of the hub or of a folder.

    Raises:
        OptionError: it cannot be had, or is of another type than `TYPES`.
    """
    found = _fetched(name)
    kind = found.model_type
    return _without(_known(found.to_diff_dict() | {"model_type": kind}, _default(kind, f"model.name = {name}"), None))


def configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that describe an architecture.

    Raises:
        OptionError: it is of another type than `TYPES`, or has other options.
    """
    default = _default(options["model_type"], "model.kwargs.model_type")
    return _without(_known(options, default, "model.kwargs"))


def merged(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the `others`, which win; nested mappings are merged."""
    both = {**options, **others}
    for key in options.keys() & others.keys():
        if isinstance(options[key], Mapping) and isinstance(others[key], Mapping):
            both[key] = merged(options[key], others[key])
    return both


def pretrained_host(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers with its published weights, and those of them that were in its files.

    Args:
        name: of the hub, or a folder, after the prefix `HF`.
    Raises:
        OptionError: see `fetched_configuration`. OSError, ValueError and others of transformers: the weights cannot be
            loaded.
    """
    labels = _fetched(name).id2label or {}
    kind, config = class_of(fetched_configuration(name) | {"id2label": dict(labels), "num_labels": len(labels)})
    options = {"attn_implementation": "sdpa", "trust_remote_code": False, "output_loading_info": True}
    with _quiet():
        model, info = kind.from_pretrained(name.removeprefix(HF), config=config, **options)
    return model, {key: x for key, x in model.state_dict().items() if key not in info["missing_keys"]}


def image_statistics(name: str) -> dict[str, Any]:
    """The `mean` and `std` by which the image processor of a model of transformers normalises; {} without one."""
    processing = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    with suppress(OSError), _quiet():
        options, _ = processing.get_image_processor_dict(name.removeprefix(HF))
        return {key: options[f"image_{key}"] for key in ("mean", "std") if f"image_{key}" in options}
    return {}


def _fetched(name: str) -> Any:
    """The configuration of the hub or of a folder."""
    transformers = _transformers()
    try:
        with _quiet():
            return transformers.AutoConfig.from_pretrained(name.removeprefix(HF), trust_remote_code=False)
    except Exception as error:  # of the hub, or of a file
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedy = "name a model of the hub that can be fetched, or a folder with its config.json"
        raise OptionError("model.name", f" = {name}: has no configuration ({reason}); {remedy}") from None


def _default(kind: Any, key: str) -> Any:
    """The default configuration of a type."""
    if kind not in TYPES:
        raise OptionError(key, f" = {kind!r}: no type of models that is taken; choose of {', '.join(TYPES)}")
    with _quiet():
        return _transformers().CONFIG_MAPPING[kind]()


def _known(options: Mapping[str, Any], default: Any, key: str | None) -> dict[str, Any]:
    """The options that the `default` configuration has too. Others are refused under `key`, or with None left out."""
    known = {}
    for name, value in options.items():
        if not hasattr(default, name):
            if key is not None:
                raise OptionError(f"{key}.{name}", f"unknown option{nearest(name, default.to_dict())}")
        elif hasattr(inner := getattr(default, name), "to_diff_dict"):
            if not isinstance(value, Mapping):
                raise OptionError(f"{key}.{name}", f"expected a mapping of options, got {value!r}")
            known[name] = _known(value, inner, key and f"{key}.{name}")
        else:
            known[name] = value
    return known


def _without(options: Any) -> Any:
    """A configuration without the entries that act on no architecture."""
    if not isinstance(options, Mapping):
        return [_without(x) for x in options] if isinstance(options, list | tuple) else options
    ignored = RESERVED | WITHOUT_EFFECT
    return {key: _without(x) for key, x in options.items() if key not in ignored and not key.startswith("_")}


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which transformers prints no bars, and no reports on weights and configurations; errors are raised."""
    logging = _transformers().logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        remedy = "pip install 'efficient-attention-vision[hf]' (in a checkout: pip install -e '.[hf]')"
        raise OptionError("model.name", f"models of {HF} need the package transformers; {remedy}") from None
