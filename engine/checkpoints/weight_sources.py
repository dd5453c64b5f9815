"""Weights of other models: from timm's hub, other programs or other runs. Files need not be trusted."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from engine.checkpoints.files import WEIGHTS, Weights, open_weights
from engine.checkpoints.format import check_plain
from engine.checkpoints.identify import CONFIG, FOREIGN, Found, Kind, damaged, identify
from engine.checkpoints.local_dir import PREPROCESSING, read_description, read_label_names
from engine.checkpoints.released import Arguments, Unsupported
from engine.config.schema import Run
from engine.run.described import parse_described
from engine.run.load import MissingOptions
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error, numbers_of, one_line
from models import MODELS, create_model, parse_model
from models.hosted import TIMM, bounded
from models.of_transformers import HF, image_statistics, pretrained_host

NESTED: dict[str, Weights] = {"state_dict_ema": "ema", "model_ema": "ema", "state_dict": "plain", "model": "plain"}
"""Keys of the weights in files of training scripts -> their kind, in timm's order. The first found counts."""

LIGHTNING = "model."
"""Prefix of all names in files of Lightning, after the attribute that usually holds the model."""

LOCAL = "local-dir:"
"""Beginning of the names of directories in timm's layout."""

MORE_WEIGHTS, MORE_BYTES = 1_000, 2**26
"""Parameters, and bytes of them at four times the bits of the file, that a model may have more than its weights."""

EXPECTED = f"expected a run directory, a checkpoint, a .safetensors or .pth file of weights, {TIMM}NAME or {HF}NAME"
"""Remedy for a wrong source."""


class Source(NamedTuple):
    """Weights of another model.

    Attributes:
        state: name -> weight. model: their model if it is known; it may be on the meta device.
        images: `mean` and `std` by which its images were normalised; those that are known.
        classes: names in the order of its classifier; None: not known.
        origin: source of the weights, and which of its weights were taken, in words.
        num_heads: of its blocks, with several stages a list, where the source states it and `model` is None.
        has_sizes: it was trained with `train.budgets`, so that smaller layers take parts of its weights.
    """

    state: dict[str, Tensor]
    model: nn.Module | None = None
    images: Mapping[str, Sequence[float]] = {}
    classes: Sequence[str] | None = None
    origin: str = ""
    num_heads: int | Sequence[int] | None = None
    has_sizes: bool = False


def read_weights(name: str, weights: Weights | None = None) -> Source:
    """Reads the weights that `init.weights` names, of a run those of `open_weights`; a file need not be trusted.

    Raises:
        UserError: no such file or name, or no weights of this kind in it.
    """
    try:
        found = identify(name, follow_links=True)
    except UserError as error:
        raise UserError(f"{error}; {EXPECTED}") from None
    if found.kind is Kind.HUB or is_of_timm(found):
        if weights == "ema":
            raise UserError(f"{name}: holds no ema weights")
        model = load_timm(name.removeprefix(TIMM) if found.kind is Kind.HUB else f"{LOCAL}{found.path.parent}")
        config = model.pretrained_cfg
        images = {key: config[key] for key in ("mean", "std")}
        return Source(model.state_dict(), model, images, read_label_names(config, name), found.kind.value)
    if found.kind is Kind.TRANSFORMERS:
        return _read_transformers(name)
    if found.kind in FOREIGN:
        return _read_state(found, weights)
    try:
        path, checkpoint, kind, note, _ = open_weights(found, weights=weights)
        run, state = parse_described(checkpoint["config"], str(found.path)), checkpoint[WEIGHTS[kind]]
        taken = WEIGHTS[kind] + (f" in {path.name}" if found.kind is Kind.RUN else "")
        origin = f"{found.kind.value}: its {taken}{f', {note}' if note else ''}"
        return source_of(run, state)._replace(classes=checkpoint.get("classes"), origin=origin)
    except UserError as error:
        if found.kind is Kind.RELEASED and isinstance(error, Unsupported | MissingOptions):
            return _read_state(found, weights)  # a new run describes its model itself
        raise UserError(f"{error}; {EXPECTED}") from None


def is_of_timm(found: Found) -> bool:
    """Returns whether `found` is a directory that describes a model of timm's own, none of `MODELS`."""
    there = read_description(found.path.parent) if found.kind is Kind.LOCAL_DIR else None
    return isinstance(there, dict) and str(there.get("architecture")) not in MODELS


def source_of(run: Run, state: dict[str, Tensor]) -> Source:
    """Returns the weights `state` of a run's model."""
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
    images = {"mean": run.data.mean, "std": run.data.std}
    return Source(clean_state_dict(state), model, images, has_sizes=run.train.budgets is not None)


def load_timm(name: str) -> Any:  # nn.Module, whose attributes are tensors or modules to type checkers
    """Creates the model of timm's hub of this name; timm downloads its weights or takes them from its cache.

    Raises:
        UserError: timm cannot load it, or a directory (``local-dir:``) describes a larger model than its weights.
    """
    try:
        with _bounded_by(Path(name.removeprefix(LOCAL))) if name.startswith(LOCAL) else nullcontext():
            return timm.create_model(name, pretrained=True)
    except UserError:
        raise
    except Exception as error:  # errors of timm, and many of the hub
        remedy = f"see timm.list_pretrained(); offline, name a folder that holds it: {TIMM}local-dir:FOLDER"
        raise UserError(f"{TIMM}{name}: timm cannot load it ({describe_error(error)}); {remedy}") from None


def _read_transformers(name: str) -> Source:
    """Reads a model of transformers, of the hub or of a folder."""
    try:
        (model, state), images = pretrained_host(name), image_statistics(name)
    except Exception as error:  # errors of transformers, and many of the hub
        remedy = "name a model of the hub that can be fetched, or a folder of its config.json and weights"
        raise UserError(f"{name}: transformers cannot load it ({describe_error(error)}); {remedy}") from None
    labels = getattr(cast(Any, model.config), "id2label", None) or {}
    classes = [str(labels[number]) for number in sorted(labels)]
    is_named = any(text != f"LABEL_{number}" for number, text in enumerate(classes))
    return Source(state, model, images, classes if is_named else None, Kind.TRANSFORMERS.value)


def _bounded_by(directory: Path) -> AbstractContextManager[Any]:
    """Context in which a model with more parameters than the weights in `directory` is refused while it is made."""
    found = identify(directory, follow_links=True)
    read_description(directory)
    weights = [x for x in found.values().values() if torch.is_tensor(x)]
    problem = "describes a larger model than the weights beside it are for; take both from the same model"
    error = UserError(f"{directory / CONFIG}: {problem}")
    return bounded(len(weights) + MORE_WEIGHTS, sum(x.nbytes for x in weights) + MORE_BYTES, error)


def describe_unnamed(classes: Sequence[str]) -> str:
    """Returns a note that a classifier without class names is taken for that of the data's `classes`."""
    note = f"not known from this file; the {len(classes)} of its classifier are taken for the data's, in order"
    wrong = next((pair for pair in pairwise(classes) if pair[0] > pair[1]), None)
    if wrong and numbers_of(classes, [""] * len(classes)) is None:  # numbers are positions
        note += f"; warning: torchvision's ImageFolder has {wrong[1]!r} before {wrong[0]!r}, see data.classes"
    return note


def _read_state(found: Found, weights: Weights | None) -> Source:
    """Reads the weights alone from a file of another program."""
    content = found.values()
    kept = [key for key in NESTED if isinstance(content.get(key), Mapping)]
    kept.sort(key=lambda key: weights not in (None, NESTED[key]))
    if weights and weights != (NESTED[kept[0]] if kept else "plain"):
        raise UserError(f"{found.path}: holds no {weights} weights")
    state = content[kept[0]] if kept else content
    if not state or not all(isinstance(k, str) and k.isprintable() and torch.is_tensor(x) for k, x in state.items()):
        names = one_line(", ".join(map(repr, content)), 100)
        raise UserError(f"{found.path}: holds no weights, but {names}; {EXPECTED}")
    clean = clean_state_dict(dict(state))
    if all(name.startswith(LIGHTNING) for name in clean):
        clean = {name.removeprefix(LIGHTNING): x for name, x in clean.items()}
    origin = found.kind.value + (f": its {', not its '.join(kept)}" if kept else "")
    if len(clean) == len(state) and (prefixes := {*map(str.removesuffix, state, clean)} - {""}):
        origin += f"; names without {' or '.join(sorted(prefixes))}"
    options, images = read_timm_arguments(found)
    given: dict[str, Sequence[float]] = {key: x for key, x in images.items() if key in ("mean", "std")}
    return Source(clean, None, given, origin=origin, num_heads=options.get("num_heads"))


def read_timm_arguments(found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what the arguments in a checkpoint of timm's train.py state; nothing of any other file.

    Returns:
        The options of the model under the names of its constructor, with attention if it is one of `MODELS`, and
        options of `Data`.
    Raises:
        UserError: they are no plain values.
    """
    if found.kind is not Kind.TIMM:
        return {}, {}
    args, arch = Arguments(found.values().get("args")).values, str(found.values()["arch"])
    kwargs = args.get("model_kwargs")
    try:
        names = ("gp", "img_size", "in_chans", "input_size", "model_kwargs", *PREPROCESSING)
        check_plain([args.get(name) for name in names])
        options = {"global_pool": args.get("gp"), "img_size": args.get("img_size"), "in_chans": args.get("in_chans")}
        if args.get("input_size") is not None:
            options["in_chans"], *options["img_size"] = args["input_size"]
        if isinstance(kwargs, Mapping):
            is_own = arch in MODELS
            options |= {"num_heads": parse_model(arch, {}).num_heads, "attention": "softmax"} if is_own else {}
            options |= kwargs
        images = {name: args[name] for name in PREPROCESSING if args.get(name)}  # timm's default interpolation is ""
        for name in {"mean", "std"} & images.keys():
            values = [float(x) for x in images[name]]
            images[name] = values * 3 if len(values) == 1 and options["in_chans"] != 1 else values  # as timm does
        heads = options.get("num_heads")
        if heads is not None and not all(type(number) is int for number in ([heads] if type(heads) is int else heads)):
            raise ValueError("num_heads that are no numbers")
    except (TypeError, ValueError) as error:
        raise damaged(found.path, error) from None
    return {name: value for name, value in options.items() if value is not None}, images
