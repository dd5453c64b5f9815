"""Fits the weights of another model to a model: resamples some, leaves out some, and reports the outcome of each."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import resample_patch_embed, to_2tuple
from timm.models import adapt_input_conv
from torch import Tensor, nn

from attention import Attention, Grid
from attention.options import to_yaml
from engine.checkpoints.files import WEIGHTS, Weights, trained_config
from engine.checkpoints.weight_sources import Source, source_of
from engine.checkpoints.weights import build_model, check_state, describe_misfits, list_not_finite, load_weights
from engine.config.schema import Run
from engine.run.described import parse_described
from engine.run.load import MISSING, flatten
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error, numbers_of, one_line
from models import convert, create_model, parse_model, split_name
from models.assignment import Budget, factories_of, text_of, with_budget
from models.budgets import cut_weights
from models.freeze import head_names
from models.hosted import Hosted

OF_ANOTHER = "choose the model (model.name, model.depth, ...) that the weights were made for"
"""Remedy of weights that do not fit."""

SHARED = re.compile(r"(^|\.)blocks\.\d+\.(?!attn\.(?!qkv\.|proj\.))|^patch_embed\.backbone\.")
"""Weights that every mechanism has in a block: all except the weights of attention beside its projections. It also
matches the stem of a hybrid, so that hybrid models are refused."""

SHARED_OF_HOST = re.compile(r"(^|\.)(blocks|layers?)\.\d+\.(?!.*\.core\.)")
"""The same for models of timm and transformers, where the mechanism's weights are in `core`."""

OUTCOMES = ("loaded", "adapted", "fresh", "drawn", "re-made", "dropped")

Outcome = dict[str, dict[str, str]]
"""Each of `OUTCOMES` -> names of weights -> in words, shapes that differ, or why one was not taken (else "")."""


def restore_model(run: Run, checkpoint: Mapping, weights: Weights) -> tuple[nn.Module, str]:
    """Builds the model of `run` with one kind of weights of a checkpoint, resampled if its images had another size.

    Returns:
        The model, and lines that name a size of attention that it was not trained for, and resampled weights.
    Raises:
        UserError: weights that do not fit, or cannot be resampled, or of another number of attention heads.
    """
    stated = {key: x for key, x in checkpoint["config"]["model"].items() if key in run.model}  # without removed options
    there = parse_model(*split_name({key: run.model[key] if x == MISSING else x for key, x in stated.items()}))
    place, state = WEIGHTS[weights], checkpoint[WEIGHTS[weights]]
    is_part, budget, note = _compare_sizes(run, checkpoint["config"].get("attention"))
    if to_yaml(run.train.budgets) != to_yaml((checkpoint["config"].get("train") or {}).get("budgets")):
        raise UserError("train.budgets: the sizes for which a checkpoint was trained cannot be changed; leave it out")
    if to_2tuple(there.img_size) == to_2tuple(run.model["img_size"]):
        try:
            model = build_model(run, state, place, is_part)
        except UserError as error:
            raise UserError("; ".join(filter(None, [note, str(error)]))) from None
        check_heads(there.num_heads, parse_model(*split_name(run.model)).num_heads, "the checkpoint")
        return model, note
    trained = parse_described(checkpoint["config"], "the checkpoint's configuration")
    if budget is not None:  # its weights are a part of those of the largest
        trained = replace(trained, attention=with_budget(trained.attention, budget))
    former = one_line(str(trained_config(checkpoint)["model"].get("img_size", trained.model["img_size"])), 20)
    title = f"model.img_size = {run.model['img_size']}, trained at {former}"
    state = check_state(trained, state, place, is_part)
    model = create_model(attention=run.attention, **run.model)
    taken, outcome = fit_weights(model, source_of(trained, state), place)
    if rest := summarize(outcome | {"adapted": {}}):
        raise UserError(f"{place}: {title}: not all weights can be resampled: {rest}")
    load_weights(model, taken, place)
    resampled = f"{title}; resampled: {_join(outcome['adapted']) or 'nothing'}"
    return model, "\n".join(filter(None, [note, resampled]))


def _compare_sizes(run: Run, trained: Any) -> tuple[bool, Budget | None, str]:
    """Compares the option `attention` of `run` with that of a model, `trained`, which nobody has checked.

    Returns:
        Whether sizes alone differ; the item of `train.budgets` with the sizes of `run`; a line that names those for
        which the model was not trained.
    """
    options = {"window_size", "overlap", *(factory.size_option for factory in factories_of(run.attention))}
    for each in run.train.budgets or ():
        options.update(*(x for x in (each if isinstance(each, tuple) else [each]) if isinstance(x, Mapping)))

    def split(attention: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = flatten(attention, "attention")
        sizes = {path: x for path, x in flat.items() if path.split(".")[-1] in options}
        return sizes, {path: x for path, x in flat.items() if path not in sizes}

    (here, others), (there, their_others) = split(run.attention), split(trained)
    names = [{path: x for path, x in rest.items() if path.endswith(".name")} for rest in (others, their_others)]
    if here.keys() != there.keys() or names[0] != names[1] or MISSING in there.values():
        return False, None, ""
    budgets = () if here == there else run.train.budgets or ()
    budget = next((x for x in budgets if split(with_budget(trained, x))[0] == here), None)
    note = ""
    if here != there and budget is None:
        sets = [split(with_budget(trained, x))[0] for x in budgets] or [there]
        paths = [path for path, size in here.items() if any(each[path] != size for each in sets)]
        known = dict.fromkeys(", ".join(to_yaml(each[path]) for path in paths) for each in sets)
        known = known if len(paths) == 1 else {f"({text})": None for text in known}
        sizes = " and ".join(f"{path} = {here[path]}" for path in paths)
        note = f"{sizes}: the model was not trained for it, but for {', '.join(known)}"
    return others == their_others, budget, note


def fit_weights(
    model: nn.Module, source: Source, place: str, classes: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], Outcome]:
    """Fits the weights of `source` to `model`, without loading them.

    Args:
        classes: names in the order of the model's classifier, by which the rows of the source's are matched if it has
            names too; None: both have the same.
    Returns:
        The state dict to load, and outcome -> weights: loaded (unchanged), adapted (resampled, or a part is used),
        fresh (the model's initial value, because the source has none or one of another meaning), drawn (random
        numbers of attention, which the source does not have, or has learned), re-made (a head of other classes),
        dropped (weights of the source without a place in the model).
    Raises:
        UserError: the source has other blocks or attention heads, or is not finite; the message begins with
            `place`.
    """
    original, state, reasons = _adapt(model, source, place, classes)
    expected = model.state_dict()
    taken = {
        name: x
        for name, x in state.items()
        if name in expected and x.shape == expected[name].shape and name not in reasons
    }
    if bad := list_not_finite(model, taken):
        raise UserError(f"{place}: {len(bad)} weights are not finite: {', '.join(bad[:5])}")
    outcome: Outcome = {kind: {} for kind in OUTCOMES}
    head = head_names(model)
    for name, x in taken.items():
        shapes = f"{tuple(original[name].shape)} -> {tuple(x.shape)}"
        is_same = x is original[name]
        outcome["loaded" if is_same else "adapted"][name] = "" if is_same else shapes
    parameters = {name for name, _ in model.named_parameters()}
    for name in (name for name in expected if name not in taken):
        is_drawn = name not in parameters and (".attn." in name or ".core." in name)
        kind = "re-made" if name in head and name in state else "drawn" if is_drawn else "fresh"
        outcome[kind][name] = f"({reasons[name]})" if name in reasons else ""
    outcome["dropped"] = {name: "" for name in state if name not in taken and name not in outcome["re-made"]}
    return taken, outcome


def _adapt(
    model: nn.Module, source: Source, place: str, classes: Sequence[str] | None
) -> tuple[Mapping[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Adapts the weights of `source` to the sizes of `model`, see `fit_weights`.

    Returns:
        The weights under the model's names before and after, and name -> reason of those that are not to be taken.
    """
    expected, is_host = model.state_dict(), isinstance(model, Hosted)
    grid = None if source.model is None else convert.grid_of(source.model)
    try:
        original, shared = source.state, SHARED_OF_HOST if is_host else SHARED
        if not is_host:
            original = convert.from_timm_pvt(convert.from_released(source.state))
        state = (
            model.fitting(original, grid) if isinstance(model, Hosted) else original | _cut_projections(original, model)
        )
        blocks = [{name: x for name, x in tensors.items() if shared.search(name)} for tensors in (state, expected)]
        if misfits := describe_misfits(*blocks):
            raise UserError(f"{place}: weights of another architecture ({one_line(misfits, 300)}); {OF_ANOTHER}")
        theirs = source.num_heads if source.model is None else list_heads(source.model)
        if theirs is not None:
            check_heads(theirs, list_heads(model), place)
        if not is_host:
            state |= _resample(state, model, grid)
        tables, reasons = convert.resample_bias_tables(state, model, source.model)
        state |= tables | convert.resample_position_tables(state, model, source.model)
        if source.has_sizes:
            cut = cut_weights(original, model)
            parts = {name: x for name, x in cut.items() if name in state and x.shape != original[name].shape}
            state, reasons = state | parts, {name: why for name, why in reasons.items() if name not in parts}
        heads, strange = match_heads(state, expected, source.classes, classes, head_names(model))
        learned = set() if source.model is None else {name for name, _ in source.model.named_parameters()}
        learned_there = {name: "learned there" for name, _ in model.named_buffers() if name in learned}
        return original, state | heads, reasons | strange | learned_there
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:  # a malformed model
        problem = f"weights that cannot be adapted to the model ({describe_error(error)})"
        raise UserError(f"{place}: {problem}; {OF_ANOTHER}") from None


def match_heads(
    state: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    there: Sequence[str] | None,
    here: Sequence[str] | None,
    names: Sequence[str],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Matches the rows of the classifiers in `state` by the names of their classes, or to numbers of the data.

    Args:
        initial: weights of the new model, which classes without a row keep.
        there, here: names of the classes of `state` and of the new model; None: not known, and nothing is matched.
        names: of the classifiers' weights.
    Returns:
        Classifiers with the rows that have a name in common, and name -> reason of those without one.
    """
    numbers = numbers_of(here or (), there or ())
    if there is None or here is None or list(there) == list(here) or numbers == [*range(len(there))]:
        return {}, {}
    count = Counter(there)
    row = {name: index for index, name in enumerate(there) if count[name] == 1}
    rows = torch.tensor(numbers or [row.get(name, -1) for name in here])
    known, matched = rows >= 0, {}
    heads = [name for name in names if name in state and name in initial and len(state[name]) == len(there)]
    if not known.any():
        return {}, dict.fromkeys(heads, "of other classes")
    for name in heads:
        if state[name].shape[1:] == initial[name].shape[1:]:
            matched[name] = initial[name].clone()
            matched[name][known] = state[name][rows[known]].to(matched[name])
    return matched, {}


def _cut_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Returns the rows of `qkv` for layers with fewer projections: values, or queries (also as keys) and values."""
    changed = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Attention) or layer.num_projections == 3:
            continue
        for key in (f"{name}.qkv.weight", f"{name}.qkv.bias"):
            if key in state and state[key].shape[:1] == (3 * layer.proj.in_features,):
                q, _, v = state[key].chunk(3)
                changed[key] = torch.cat([q, v][-layer.num_projections :])
    return changed


def _resample(state: Mapping[str, Tensor], model: nn.Module, grid: Grid | None) -> dict[str, Tensor]:
    """Resamples position embeddings and patch embedding to the sizes of `model`, by timm's functions."""
    key = "pos_embed"
    changed = {key: convert.resample_pos_embed(dict(state), model, grid)[key]} if key in state else {}
    patches, key = model.get_submodule("patch_embed.proj"), "patch_embed.proj.weight"
    if isinstance(patches, nn.Conv2d) and key in state:
        weight = adapt_input_conv(patches.in_channels, state[key], state[key].shape[1])
        changed[key] = resample_patch_embed(weight, list(patches.kernel_size))
    return changed


def list_heads(model: nn.Module) -> int | list[int]:
    """Returns `num_heads` of the blocks of a model, ours, timm's or of transformers; with several stages a list."""
    config = getattr(model, "config", None)
    if (heads := getattr(getattr(config, "vision_config", config), "num_attention_heads", None)) is not None:
        return cast(int, heads)
    layers = {name.rpartition("blocks.")[0]: layer for name, layer in model.named_modules() if name.endswith(".attn")}
    heads = [getattr(layer, "num_heads", 0) for layer in layers.values()]
    return heads[0] if len(heads) == 1 else heads


def check_heads(there: int | Sequence[int], here: int | Sequence[int], place: str) -> None:
    """Refuses weights of another number of attention heads than the model's, or the stages' numbers.

    Raises:
        UserError: they differ; `place` begins the message.
    """
    theirs, own = ([*heads] if isinstance(heads, Sequence) else heads for heads in (there, here))
    if theirs != own:
        problem = f"weights of a model with num_heads={theirs}, but model.num_heads={own}: they would load, and"
        raise UserError(f"{place}: {problem} mean something else; set model.num_heads={theirs}")


WEIGHTLESS: dict[str, Callable[[nn.Module], Any]] = {
    "global_pool": lambda model: getattr(model, "global_pool", None),
    "mlp_relu": lambda model: any(n.endswith(".mlp.relu") and isinstance(x, nn.ReLU) for n, x in model.named_modules()),
    "pad_token": lambda model: getattr(getattr(model, "config", None), "pad_token", None),
    "frames": lambda model: getattr(getattr(model, "config", None), "frames", 1),
}
"""Options of models, beside the number of heads, that change what is computed and no weight -> function that reads
their value from a model, ours or timm's."""


def list_other_options(source: nn.Module, model: nn.Module, has_head: bool) -> list[str]:
    """Returns a line for each of the `WEIGHTLESS` options that differs between two models, with the remedy.

    The pooling counts only with a classifier of the source (`has_head`): a new one learns from any pooling.
    """
    lines = []
    for option, read in WEIGHTLESS.items():
        there, here = json.dumps(read(source)), json.dumps(read(model))
        if there != here and (has_head or option != "global_pool"):
            key = f"model.{'kwargs.' * isinstance(model, Hosted)}{option}"
            lines.append(f"model.{option} is {here}, that of these weights was {there}: '{key}={there}' keeps it")
    if isinstance(model, Hosted):
        pairs, theirs = defaultdict[tuple[str, str], list[str]](list), _functions(source)
        for name, own in _functions(model).items():
            pairs[theirs.get(name, own), own].append(name)
        differing = {pair: _join(dict.fromkeys(names, "")) for pair, names in pairs.items() if pair[0] != pair[1]}
        remedy = "give model.kwargs the options of that model"
        lines += [
            f"{names}: {own} here, {other} in the model of these weights; {remedy}"
            for (other, own), names in differing.items()
        ]
    return lines


def _functions(model: nn.Module) -> dict[str, str]:
    """Returns what parts of a model compute that its weights do not say: activations, and the epsilon of norms."""
    leaves = ((name, part) for name, part in model.named_modules() if not [*part.children()])
    parts = {name: part for name, part in leaves if not re.search("Drop|Identity", type(part).__name__)}
    norms = {name: f"eps {part.eps}" for name, part in parts.items() if hasattr(part, "eps")}
    return {name: repr(part) for name, part in parts.items() if not part.state_dict()} | norms


def table(outcome: Outcome) -> list[str]:
    """Returns a line per outcome: the number of weights, and their names unless they are loaded unchanged."""
    return [
        f"  {kind:<8}{len(entries):>5}  {'' if kind == 'loaded' else _join(entries)}".rstrip()
        for kind, entries in outcome.items()
    ]


def summarize(outcome: Outcome) -> str:
    """Returns one line about the weights that are not loaded unchanged."""
    return "; ".join(
        f"{len(entries)} {kind} ({one_line(_join(entries), 100)})"
        for kind, entries in outcome.items()
        if entries and kind != "loaded"
    )


def _join(entries: Mapping[str, str]) -> str:
    return ", ".join(merge_layers(f"{name} {note}".rstrip() for name, note in entries.items()))


LAYER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.)")
"""Number of a layer in the name of a weight."""


def merge_layers(names: Iterable[str]) -> list[str]:
    """Merges names that differ in numbers alone: ``blocks.0-8, 11.attn.omega (10)``."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(LAYER.sub("*", name), []).append(name)
    return [_merge(same) for same in alike.values()]


def _merge(names: Sequence[str]) -> str:
    columns = zip(*(map(int, LAYER.findall(name)) for name in names), strict=True)
    texts = (text_of(sorted({*numbers})) for numbers in columns)
    merged = LAYER.sub(lambda _: next(texts), names[0])
    return f"{merged} ({len(names)})" if len(names) > 1 else merged
