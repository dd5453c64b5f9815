"""Configurations and classes of models of transformers, without any code of a hub."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from attention import OptionError

HF = "hf:"
"""Prefix of a name of the Hugging Face hub, or of a folder, with a model of transformers."""

RESERVED = {
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "name_or_path"),
    *("scriptable", "exportable", "no_jit", "features_only", "auto_map", "attn_implementation", "quantization_config"),
    *("img_size", "num_classes", "in_chans"),
}
"""Options of constructors that choose files, code or graphs, or that `HostConfig` has."""

WITHOUT_EFFECT = {
    *("architectures", "transformers_version", "id2label", "label2id", "num_labels", "torch_dtype", "dtype"),
    "problem_type",
}
"""Entries of a transformers configuration that change no model of images here."""


def class_of(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of transformers for a configuration, one with a classifier if there is one, and the configuration."""
    transformers = _transformers()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    kind, others = options["model_type"], {key: x for key, x in options.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **others)
    if hasattr(config, "mask_ratio"):
        raise OptionError("model.kwargs.model_type", f" = {kind!r} hides patches; its encoder is of the type vit")
    name = names.get(kind)
    if name is None:
        return transformers.AutoModel._model_mapping[type(config)], config
    return getattr(transformers, name if isinstance(name, str) else name[0]), config


def fetched_configuration(name: str) -> dict[str, Any]:
    """The plain configuration of a model of transformers, of the hub or of a folder.

    Raises:
        OptionError: it cannot be had.
    """
    try:
        found = _transformers().AutoConfig.from_pretrained(name.removeprefix(HF), trust_remote_code=False)
    except OptionError:
        raise
    except Exception as error:  # of the hub, or of a file
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedy = "name a model of the hub that can be fetched, or a folder with its config.json"
        raise OptionError("model.name", f" = {name}: has no configuration ({reason}); {remedy}") from None
    return configuration(name, found.to_diff_dict() | {"model_type": found.model_type})


def configuration(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration that describe an architecture.

    Raises:
        OptionError: transformers does not know its type.
    """
    if (kind := options["model_type"]) not in _transformers().CONFIG_MAPPING:
        raise OptionError("model.kwargs.model_type", f" = {kind!r} of {name} is no type of models of transformers")
    return cast(dict[str, Any], _without(options))


def _without(options: Any) -> Any:
    """A configuration without the entries that act on no architecture."""
    if not isinstance(options, Mapping):
        return [_without(x) for x in options] if isinstance(options, list | tuple) else options
    ignored = RESERVED | WITHOUT_EFFECT
    return {key: _without(x) for key, x in options.items() if key not in ignored and not key.startswith("_")}


def pretrained_host(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers with its published weights, and those of them that were in its files.

    Args:
        name: of the hub, or a folder; with or without the prefix `HF`.
    Raises:
        OptionError: see `parse_host`. OSError, ValueError and others of transformers: the weights cannot be loaded.
    """
    kind, config = class_of(fetched_configuration(name))
    options = {"attn_implementation": "sdpa", "trust_remote_code": False, "output_loading_info": True}
    model, info = kind.from_pretrained(name.removeprefix(HF), config=config, **options)
    return model, {key: x for key, x in model.state_dict().items() if key not in info["missing_keys"]}


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        remedy = "pip install 'efficient-attention-vision[hf]' (in a checkout: pip install -e '.[hf]')"
        raise OptionError("model.name", f"models of {HF} need the package transformers; {remedy}") from None
