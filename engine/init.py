"""The weights that a run starts from: those of another model as far as they fit, and a table of what became of them."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.layers import resample_patch_embed, resize_rel_pos_bias_table_simple, to_2tuple
from timm.models import adapt_input_conv, clean_state_dict
from torch import Tensor, nn

from attention import Attention, Grid
from engine.checkpoint import WEIGHTS, ForeignCheckpoint, find_weights, list_checkpoints
from engine.checkpoint_format import read_foreign
from engine.config import MissingOptions, parse_run
from engine.distributed import World
from engine.errors import UserError, one_line
from engine.files import read_regular
from engine.schema import Run
from engine.weights import describe_misfits, list_not_finite
from models import create_model
from models.convert import from_released, from_timm_pvt, resample_pos_embed

TIMM = "timm:"
"""What names of timm's hub begin with."""

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where training scripts keep weights in their files, the first there is counts: timm's order, averaged ones first."""

HEAD = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")

SHARED = re.compile(r"(^|\.)blocks\.\d+\.(?!attn\.(?!qkv\.|proj\.))")
"""What every mechanism has in a block: all but its attention's weights beside the projections."""


class Source(NamedTuple):
    """Weights of another model.

    Attributes:
        state: name -> weight. grid: (H, W) of its position embeddings, where known.
        images: `mean` and `std` by which its images were normalised, as far as known.
    """

    state: dict[str, Tensor]
    grid: Grid | None = None
    images: Mapping[str, Sequence[float]] = {}


def create_initial_model(run: Run, output: Path, world: World) -> nn.Module:
    """The model of `run` with the weights that `init` names, unless the run in `output` has weights of its own.

    The primary rank prints what became of every weight.

    Raises:
        UserError: weights that cannot be read or do not fit the model, or with `init.strict` not all of them.
    """
    model = create_model(attention=run.attention, **run.model)
    name = run.init.weights
    if name is None or list_checkpoints(output):
        return model
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
        for key, value in source.images.items():
            if list(value) != list(getattr(run.data, key)):
                hint = f"is {list(getattr(run.data, key))}, that of these weights was {list(value)}"
                print(f"warning: data.{key} {hint}: data.{key}={list(value)} keeps it", file=sys.stderr, flush=True)
    return model


def read_weights(name: str) -> Source:
    """The weights that `init.weights` names: those of averaged weights where there are both kinds.

    Of a run directory they are of the best checkpoint. A file need not be trusted: no code in it is run.

    Raises:
        UserError: no such file or name, or no weights in it.
    """
    if name.startswith(TIMM):
        model = load_timm(name.removeprefix(TIMM))
        return Source(model.state_dict(), images={key: model.pretrained_cfg[key] for key in ("mean", "std")})
    path = Path(name).expanduser().resolve()
    try:
        _, checkpoint, kinds = find_weights(path, "best", None)[-1]
        there = parse_run(checkpoint["config"], str(path))
    except (ForeignCheckpoint, MissingOptions):  # a new run says itself what its model is
        return Source(_read_foreign(path))
    sides, patch_size = to_2tuple(there.model["img_size"]), there.model.get("patch_size", 1)
    grid = sides[0] // patch_size, sides[1] // patch_size
    state = clean_state_dict(checkpoint[WEIGHTS[kinds[-1]]])
    return Source(state, grid, {"mean": there.data.mean, "std": there.data.std})


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
        raise UserError(f"{path}: holds no weights, but {one_line(', '.join(map(repr, found)), 100)}")
    return clean_state_dict(state)


def fit_weights(model: nn.Module, source: Source, place: str) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """What of `source` is to be loaded into `model`, and what becomes of each weight.

    Returns:
        The state dict to load, and kind -> names: loaded (as it is), adapted (resampled, or the part that is used),
        fresh (the model's own: what the source does not have), drawn (likewise, random numbers of attention), re-made
        (a head, for other classes), dropped (of the source: what the model has no place for).
    Raises:
        UserError: the source is no model of these blocks, or not finite; the message begins with `place`.
    """
    expected = model.state_dict()
    try:
        original = from_timm_pvt(from_released(source.state))
        state = original | _cut_projections(original, model)
        blocks = [{name: x for name, x in tensors.items() if SHARED.search(name)} for tensors in (state, expected)]
        if misfits := describe_misfits(*blocks):
            remedy = "choose the model (model.name, model.depth, ...) that the weights were made for"
            raise UserError(f"{place}: weights of another architecture: {misfits}; {remedy}")
        state |= _resample(state, model, source.grid)
    except (AssertionError, LookupError, RuntimeError, ValueError) as error:  # shapes that no such model has
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise UserError(f"{place}: weights that cannot be adapted to the model ({reason})") from None
    taken = {name: x for name, x in state.items() if name in expected and x.shape == expected[name].shape}
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
        "fresh": [name for name in absent if name not in remade and (name in parameters or ".attn." not in name)],
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
    """Position embeddings, patch embedding and bias tables in the sizes of `model`, by timm's functions."""
    changed = {"pos_embed": resample_pos_embed(dict(state), model, grid)["pos_embed"]} if "pos_embed" in state else {}
    patches, key = model.patch_embed.proj, "patch_embed.proj.weight"
    if isinstance(patches, nn.Conv2d) and key in state:
        weight = adapt_input_conv(patches.in_channels, state[key], state[key].shape[1])
        changed[key] = resample_patch_embed(weight, list(patches.kernel_size))
    for name, layer in _attention_layers(model):
        key, config = f"{name}.position_bias.table", layer.config
        if key in state and (config.position_bias, config.layout) == ("table", "2d"):
            table, shape = state[key][0], layer.position_bias.table.shape[1:]
            side = math.isqrt(len(table))
            if side % 2 and side**2 == len(table) and table.shape != shape and table.shape[1] == shape[1]:
                window = (math.isqrt(shape[0]) + 1) // 2
                changed[key] = resize_rel_pos_bias_table_simple(table.float(), (window, window), shape)[None]
    return changed


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
