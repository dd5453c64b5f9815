"""The weights that a run starts from: those of another model as far as they fit, and a table of what became of them."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import resample_patch_embed, to_2tuple
from timm.models import adapt_input_conv, clean_state_dict
from torch import Tensor, nn

from attention import Attention, Grid
from engine.checkpoint import WEIGHTS, ForeignCheckpoint, Weights, find_weights, list_checkpoints
from engine.checkpoint_format import read_foreign
from engine.config import MISSING, MissingOptions, parse_run
from engine.distributed import World
from engine.errors import UserError, one_line
from engine.files import read_regular
from engine.freeze import describe_freeze, freeze
from engine.schema import Run
from engine.weights import (
    build_model,
    check_state,
    describe_blocks,
    describe_misfits,
    list_not_finite,
    load_weights,
)
from models import create_model
from models.convert import from_released, from_timm_pvt, resample_bias_tables, resample_pos_embed

TIMM = "timm:"
"""What names of timm's hub begin with."""

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where training scripts keep weights in their files, the first there is counts: timm's order, averaged ones first."""

HEAD = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")

EXPECTED = f"expected a run directory, a checkpoint, a .safetensors or .pth file of weights, or {TIMM}NAME"
OF_ANOTHER = "choose the model (model.name, model.depth, ...) that the weights were made for"
"""Remedies of a wrong source."""

SHARED = re.compile(r"(^|\.)blocks\.\d+\.(?!attn\.(?!qkv\.|proj\.))|^patch_embed\.backbone\.")
"""What every mechanism has in a block: all but its attention's weights beside the projections. And the convolutions
before the patches of a hybrid, which no model here has."""


class Source(NamedTuple):
    """Weights of another model.

    Attributes:
        state: name -> weight. model: their model, where known; it may be on the meta device.
        images: `mean` and `std` by which its images were normalised, as far as known.
    """

    state: dict[str, Tensor]
    model: nn.Module | None = None
    images: Mapping[str, Sequence[float]] = {}


def create_initial_model(run: Run, output: Path, world: World) -> nn.Module:
    """The model of `run` with the weights that `init` names, unless the run in `output` has weights of its own.

    What `train.freeze` names is frozen. The primary rank prints what became of every weight, and how many are trained.

    Raises:
        UserError: weights that cannot be read or do not fit the model, or with `init.strict` not all of them.
    """
    model = create_model(attention=run.attention, **run.model)
    is_resumed = bool(list_checkpoints(output))
    initial = [name for name, _ in model.named_parameters()]
    if run.init.weights is not None and not is_resumed:
        initial = _load_initial_weights(model, run, world)
    if (frozen := freeze(model, run.train.freeze)) and world.is_primary:
        print(f"train.freeze: {describe_freeze(model, frozen)}", flush=True)
        if random := [] if is_resumed else [name for name in frozen if name in initial]:
            names = one_line(", ".join(_merge_layers(random)), 200)
            hint = f"{len(random)} of the frozen parameters stay at their random initial values: {names}"
            print(f"warning: train.freeze: {hint}", file=sys.stderr, flush=True)
    return model


def _load_initial_weights(model: nn.Module, run: Run, world: World) -> list[str]:
    """Loads the weights that `init` names, and returns the names of the model's that stay as they were."""
    name = run.init.weights
    place = f"init.weights={name}"
    try:
        source = read_weights(name)
    except UserError as error:
        raise UserError(f"init.weights: {error}") from None
    state, outcome = fit_weights(model, source, place)
    if run.init.strict and any(names for kind, names in outcome.items() if kind != "loaded"):
        raise UserError(f"{place}: init.strict=true, but not all is loaded as it is: {_summary(outcome)}")
    model.load_state_dict(state, strict=False)
    if world.is_primary:
        print("\n".join([place, *_table(outcome)]), flush=True)
        if source.model is None:
            print(f"  heads    not known from this file; model.num_heads={list_heads(model)} is taken", flush=True)
        for key, value in source.images.items():
            if list(value) != list(getattr(run.data, key)):
                hint = f"is {list(getattr(run.data, key))}, that of these weights was {list(value)}"
                print(f"warning: data.{key} {hint}: data.{key}={list(value)} keeps it", file=sys.stderr, flush=True)
    return [entry.split(" ")[0] for entry in outcome["fresh"] + outcome["re-made"]]


def read_weights(name: str) -> Source:
    """The weights that `init.weights` names: those of averaged weights where there are both kinds.

    Of a run directory they are of the best checkpoint. A file need not be trusted: no code in it is run.

    Raises:
        UserError: no such file or name, or no weights in it.
    """
    if name.startswith(TIMM):
        model = load_timm(name.removeprefix(TIMM))
        return Source(model.state_dict(), model, {key: model.pretrained_cfg[key] for key in ("mean", "std")})
    path = Path(name).expanduser().resolve()
    try:
        _, checkpoint, kinds = find_weights(path, "best", None)[-1]
        there = parse_run(checkpoint["config"], str(path))
    except (ForeignCheckpoint, MissingOptions):  # a new run says itself what its model is
        return Source(_read_foreign(path))
    except UserError as error:
        raise UserError(f"{error}; {EXPECTED}") from None
    return _own_source(there, checkpoint[WEIGHTS[kinds[-1]]])


def _own_source(run: Run, state: Mapping[str, Tensor]) -> Source:
    """The weights `state` of a run's model."""
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
    return Source(clean_state_dict(state), model, {"mean": run.data.mean, "std": run.data.std})


def build_models(
    run: Run, checkpoint: Mapping[str, Any], kinds: Sequence[Weights]
) -> tuple[dict[Weights, nn.Module], str]:
    """The models of `run` with `kinds` of weights of a checkpoint, resampled where its images had another size.

    Returns:
        Kind -> model, and a line that says what was resampled ("": nothing, as the size is the same).
    Raises:
        UserError: weights that do not fit, or cannot be resampled.
    """
    img_size = to_2tuple(checkpoint["config"]["model"].get("img_size", MISSING))
    if img_size in (to_2tuple(run.model["img_size"]), to_2tuple(MISSING)):
        return {kind: build_model(run, checkpoint[WEIGHTS[kind]], WEIGHTS[kind]) for kind in kinds}, ""
    trained = parse_run(checkpoint["config"], "the checkpoint's configuration")
    title, models = f"model.img_size = {run.model['img_size']}, trained at {trained.model['img_size']}", {}
    for kind in kinds:
        place, state = WEIGHTS[kind], checkpoint[WEIGHTS[kind]]
        check_state(trained, state, place)
        models[kind] = create_model(attention=run.attention, **run.model)
        taken, outcome = fit_weights(models[kind], _own_source(trained, state), place)
        if rest := _summary({name: names for name, names in outcome.items() if name != "adapted"}):
            raise UserError(f"{place}: {title}: not all weights can be resampled: {rest}")
        load_weights(models[kind], taken, place)
    return models, f"{title}; resampled: {', '.join(_merge_layers(outcome['adapted'])) or 'nothing'}"


def load_timm(name: str) -> nn.Module:
    """The model of timm's hub under this name, whose weights timm downloads or takes from its cache.

    Raises:
        UserError: timm cannot load it.
    """
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # timm's own and many of the hub's
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        remedy = f"see timm.list_pretrained(); offline, name a folder that holds it: {TIMM}local-dir:FOLDER"
        raise UserError(f"{TIMM}{name}: timm cannot load it ({reason}); {remedy}") from None


def _read_foreign(path: Path) -> dict[str, Tensor]:
    """The weights in a file of another program."""
    content = read_regular(path)
    try:
        found = read_foreign(content)
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        remedy = "save its weights alone, with torch.save(model.state_dict(), FILE)"
        raise UserError(f"{path}: cannot be loaded safely ({reason}); {remedy}") from None
    state = next((found[key] for key in NESTED if isinstance(found.get(key), Mapping)), found)
    if not state or not all(
        isinstance(key, str) and key.isprintable() and torch.is_tensor(x) for key, x in state.items()
    ):
        raise UserError(f"{path}: holds no weights, but {one_line(', '.join(map(repr, found)), 100)}; {EXPECTED}")
    return clean_state_dict(state)


def fit_weights(model: nn.Module, source: Source, place: str) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """What of `source` is to be loaded into `model`, and what becomes of each weight.

    Returns:
        The state dict to load, and kind -> names: loaded (as it is), adapted (resampled, or the part that is used),
        fresh (the model's own: what the source does not have, or has in another sense), drawn (likewise, random
        numbers of attention), re-made (a head, for other classes), dropped (of the source: what the model has no
        place for).
    Raises:
        UserError: the source is no model of these blocks and attention heads, or not finite; the message begins with
            `place`.
    """
    expected = model.state_dict()
    try:
        original = from_timm_pvt(from_released(source.state))
        state = original | _cut_projections(original, model)
        blocks = [{name: x for name, x in tensors.items() if SHARED.search(name)} for tensors in (state, expected)]
        if misfits := describe_misfits(*blocks):
            there, here = (describe_blocks(tensors) for tensors in (state, expected))
            problem = f"weights of another architecture: {there}, where the model has {here} ({one_line(misfits, 200)})"
            raise UserError(f"{place}: {problem}; {OF_ANOTHER}")
        if source.model is not None and (there := list_heads(source.model)) != (here := list_heads(model)):
            problem = f"weights of a model with num_heads={there}, but model.num_heads={here}: they would load, and"
            raise UserError(f"{place}: {problem} mean something else; set model.num_heads={there}")
        state |= _resample(state, model, getattr(getattr(source.model, "patch_embed", None), "grid_size", None))
        tables, others = resample_bias_tables(state, model, source.model)
        state |= tables
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:  # as no such model has
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise UserError(f"{place}: weights that cannot be adapted to the model ({reason}); {OF_ANOTHER}") from None
    taken = {
        name: x
        for name, x in state.items()
        if name in expected and x.shape == expected[name].shape and name not in others
    }
    if bad := list_not_finite(model, taken):
        raise UserError(f"{place}: {len(bad)} weights are not finite: {', '.join(bad[:5])}")
    parameters = dict(model.named_parameters())
    absent = [name for name in expected if name not in taken]
    remade = [name for name in absent if name in HEAD and name in state]
    outcome = {
        "loaded": [name for name, x in taken.items() if x is original[name]],
        "adapted": [
            f"{name} {tuple(original[name].shape)} -> {tuple(x.shape)}"
            for name, x in taken.items()
            if x is not original[name]
        ],
        "fresh": [
            f"{name} ({others[name]})" if name in others else name
            for name in absent
            if name not in remade and (name in parameters or ".attn." not in name)
        ],
        "drawn": [name for name in absent if name not in parameters and ".attn." in name],
        "re-made": remade,
        "dropped": [name for name in state if name not in taken and name not in remade],
    }
    return taken, outcome


def _cut_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The rows of `qkv` that a mechanism uses which makes fewer projections: of values, and of queries as keys."""
    changed = {}
    for name, layer in _attention_layers(model):
        for key in (f"{name}.qkv.weight", f"{name}.qkv.bias"):
            if key in state and state[key].shape[:1] == (3 * layer.proj.in_features,) and layer.num_projections < 3:
                q, _, v = state[key].chunk(3)
                changed[key] = torch.cat([q, v][-layer.num_projections :])
    return changed


def _resample(state: Mapping[str, Tensor], model: nn.Module, grid: Grid | None) -> dict[str, Tensor]:
    """Position embeddings and patch embedding in the sizes of `model`, by timm's functions."""
    changed = {"pos_embed": resample_pos_embed(dict(state), model, grid)["pos_embed"]} if "pos_embed" in state else {}
    patches, key = model.patch_embed.proj, "patch_embed.proj.weight"
    if isinstance(patches, nn.Conv2d) and key in state:
        weight = adapt_input_conv(patches.in_channels, state[key], state[key].shape[1])
        changed[key] = resample_patch_embed(weight, list(patches.kernel_size))
    return changed


def list_heads(model: nn.Module) -> int | list[int]:
    """The attention heads of a model, ours or timm's: `num_heads` of its blocks, a list of one per stage."""
    layers = {name.rpartition("blocks.")[0]: layer for name, layer in model.named_modules() if name.endswith(".attn")}
    heads = [getattr(layer, "num_heads", 0) for layer in layers.values()]
    return heads[0] if len(heads) == 1 else heads


def _attention_layers(model: nn.Module) -> list[tuple[str, Attention]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]


def _table(outcome: Mapping[str, list[str]]) -> list[str]:
    """A line per kind: its number of weights, and but for those loaded as they are their names."""
    return [
        f"  {kind:<8}{len(names):>5}  {'' if kind == 'loaded' else ', '.join(_merge_layers(names))}".rstrip()
        for kind, names in outcome.items()
    ]


def _summary(outcome: Mapping[str, list[str]]) -> str:
    """What is not loaded as it is, in one line."""
    return "; ".join(
        f"{len(names)} {kind} ({one_line(', '.join(_merge_layers(names)), 100)})"
        for kind, names in outcome.items()
        if names and kind != "loaded"
    )


def _merge_layers(names: Iterable[str]) -> list[str]:
    """Names, those of all layers as one: ``blocks.*.attn.omega (12)``."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
