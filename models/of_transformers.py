"""Configurations and classes of models of transformers, without any code of a hub."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from attention import OptionError
from attention.options import nearest
from models.host_layers import first_line

HF = "hf:"
"""Prefix of a name of the Hugging Face hub, or of a folder, with a model of transformers."""

RESERVED = {
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "name_or_path"),
    *("scriptable", "exportable", "no_jit", "features_only", "auto_map", "attn_implementation", "quantization_config"),
    *("img_size", "num_classes", "in_chans"),
    *("architectures", "transformers_version", "id2label", "label2id", "num_labels", "torch_dtype", "dtype"),
    *("problem_type", "text_config"),
}
"""Options that choose files, code or graphs, that `HostConfig` has, or that change no model of images."""

FAMILIES = "vit deit dinov2 dinov2_with_registers dinov3_vit siglip_vision_model clip_vision_model ijepa vit_msn"
TYPES = (*FAMILIES.split(), "siglip", "clip")
"""Types of models that are taken: a file may name no other, some of which fetch or read what their options name."""


def class_of(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of transformers for a configuration, one with a classifier if there is one, and the configuration."""
    with _quiet() as transformers:
        config = transformers.CONFIG_MAPPING[options["model_type"]](**options)
        autos = transformers.AutoModelForImageClassification, transformers.AutoModel
        found = next(auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping)
    return found[0] if isinstance(found, tuple) else found, config


def fetched_configuration(name: str) -> tuple[dict[str, Any], dict[int, str]]:
    """The configuration of a model of the hub or of a folder, without what no model here has; and its class names.

    A masked autoencoder (vit_mae) is its encoder, a vit; one of images and texts (siglip, clip) its vision model.

    Raises:
        OptionError: it cannot be had, or is of another type than `TYPES`.
    """
    with _quiet() as transformers:
        try:
            found = transformers.AutoConfig.from_pretrained(name.removeprefix(HF), trust_remote_code=False)
        except Exception as error:  # of the hub, or of a file
            remedy = "name a model of the hub that can be fetched, or a folder with its config.json"
            problem = f" = {name}: has no configuration ({first_line(error)}); {remedy}"
            raise OptionError("model.name", problem) from None
    is_whole = found.model_type in ("siglip", "clip") and "ForImageClassification" not in str(found.architectures)
    taken = found.vision_config if is_whole else found  # with its trained pooling
    kind = "vit" if found.model_type == "vit_mae" else taken.model_type  # the encoder, with its weights' names
    options = {**taken.to_diff_dict(), "model_type": kind}
    return configuration(options, None), dict(found.id2label or {})


def configuration(options: Mapping[str, Any], key: str | None = "model.kwargs") -> dict[str, Any]:
    """The entries of a configuration that describe an architecture.

    Raises:
        OptionError: it is of another type than `TYPES`, or has unknown options, which `key` = None leaves out.
    """
    if (kind := options.get("model_type")) not in TYPES:
        problem = f" = {kind!r}: no type of models that is taken; choose of {', '.join(TYPES)}"
        raise OptionError(f"{key or 'model'}.model_type", problem)
    with _quiet() as transformers:
        return _known(options, transformers.CONFIG_MAPPING[kind](), key)


def pretrained_host(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the hub or of a folder with its published weights, and those of them that were in its files.

    Raises:
        OptionError: see `fetched_configuration`. OSError, ValueError and others of transformers: the weights cannot be
            loaded.
    """
    options, labels = fetched_configuration(name)
    kind, config = class_of(options | {"id2label": labels, "num_labels": len(labels)})
    given = {"attn_implementation": "sdpa", "trust_remote_code": False, "output_loading_info": True}
    with _quiet():
        model, info = kind.from_pretrained(name.removeprefix(HF), config=config, **given)
    return model, {key: x for key, x in model.state_dict().items() if key not in info["missing_keys"]}


def image_statistics(name: str) -> dict[str, Any]:
    """The `mean` and `std` by which the image processor of a model of transformers normalises; {} without one."""
    with suppress(OSError), _quiet() as transformers:
        options, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name.removeprefix(HF))
        if not options.get("do_normalize", True):
            return {"mean": [0.0] * 3, "std": [1.0] * 3}
        found = {key: options.get(f"image_{key}") for key in ("mean", "std")}
        return {key: [x] * 3 if isinstance(x, float | int) else x for key, x in found.items() if x is not None}
    return {}


def _known(options: Mapping[str, Any], default: Any, key: str | None) -> dict[str, Any]:
    """The options that the `default` configuration has too and that describe an architecture, see `configuration`."""
    known = {}
    for name, value in options.items():
        if name in RESERVED or name.startswith("_") or (key is None and not hasattr(default, name)):
            continue
        if not hasattr(default, name):
            raise OptionError(f"{key}.{name}", f"unknown option{nearest(name, default.to_dict())}")
        if hasattr(inner := getattr(default, name), "to_diff_dict"):
            if not isinstance(value, Mapping):
                raise OptionError(f"{key}.{name}", f"expected a mapping of options, got {value!r}")
            known[name] = _known(value, inner, key and f"{key}.{name}")
        else:
            known[name] = value
    return known


@contextmanager
def _quiet() -> Iterator[Any]:
    """Context with the package transformers, which prints no bars, and no reports on weights and configurations there.

    Raises:
        OptionError: it is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        remedy = "pip install 'efficient-attention-vision[hf]' (in a checkout: pip install -e '.[hf]')"
        raise OptionError("model.name", f"models of {HF} need the package transformers; {remedy}") from None
    logging = transformers.logging
    with ExitStack() as former:
        former.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            former.callback(logging.enable_progress_bar)
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        yield transformers
