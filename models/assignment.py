"""The mechanism of every block: `attention` as one mapping, or as a list whose entries name their blocks.

    attention:
      - {blocks: 0-8, name: eva, window_size: 7, num_landmarks: 49}
      - {blocks: [9, 10, 11], name: softmax}

In a pyramid an entry names its stage, and the blocks in it unless it has the whole stage. A list without places assigns
one mechanism to each stage, and has one entry per stage.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from attention import Attention, AttentionFactory, OptionError
from attention.options import Options, collecting, option, parse_options, refuse, to_yaml

Mechanism = str | Mapping[str, Any]
"""A mechanism's name, or a mapping with its name and options; in a list also with its `Place`."""

Budget = int | Mapping[str, int] | Sequence[int | Mapping[str, int]]
"""Size of all mechanisms that have one, or a size for each of them, in the order of the entries of `attention`: a value
of its `size_option`, or several options with their values."""

LayerFactory = Callable[..., Attention]
"""Function that builds a block's attention layer from the fields of a `LayerContext`."""


class Place(Options):
    """Blocks that an entry of a list names."""

    stage: int | None = option(None, "stage of a pyramid, counted from 0", low=0)
    blocks: int | str | tuple[int, ...] | None = option(
        None,
        "blocks of the model, or of the stage, counted from 0: `3`, `0-8`, `0-3, 7` or a list; null: all of the stage",
    )


class Entry(NamedTuple):
    """A mechanism of a model, and the blocks that have it.

    Attributes:
        options: name and options of the mechanism, with the `Place` if it names one; blocks as `text_of` writes them.
        layers: numbers of the blocks, counted through all stages.
        factory: the parsed mechanism.
    """

    options: dict[str, Any]
    layers: tuple[int, ...]
    factory: AttentionFactory


def assign(
    model: str, attention: Mechanism | Sequence[Mechanism] | Sequence[Entry], depths: Sequence[int]
) -> list[Entry]:
    """The entries of `attention` for a model with `depths` blocks in its stages; every block is in one of them.

    A single mechanism given to a pyramid serves all stages but the last, which keeps softmax, as in the papers.
    Entries that were assigned before are returned.

    Args:
        model: its name, for messages.
    Raises:
        OptionError: unknown mechanism or option, wrong type or value, a block that is in no entry, in two of them, or
            not in the model.
    """
    if isinstance(attention, list) and attention and isinstance(attention[0], Entry):
        return attention
    stages, given = _stages(depths), parse_entries(attention)
    places, is_single = [place for place, *_ in given], isinstance(attention, str | Mapping)
    if is_single and places[0]:
        problem = "belongs to an entry of a list, attention: [{blocks: 0-8, name: ...}, ...]; leave it out"
        raise OptionError(f"attention.{next(iter(places[0]))}", problem)
    if is_single and len(stages) > 1:
        given = [*given * (len(stages) - 1), *parse_entries("softmax")]
    if is_single or (not any(places) and len(given) == len(stages) > 1):
        return [Entry({**own}, tuple(stage), parsed) for (_, own, parsed), stage in zip(given, stages, strict=True)]
    if not places or not all(places):
        lists = f"of {len(stages)}, or of mappings that name their stage" if len(stages) > 1 else ""
        lists = lists or "of mappings that name their blocks"
        raise OptionError("attention", f"{model} takes one mechanism or a list {lists}, got {attention!r}")
    entries: list[Entry] = []
    for i, (place, mechanism, factory) in enumerate(given):
        written, layers = _read_place(place, stages, f"attention[{i}].")
        for j, other in enumerate(entries):
            if both := {*layers} & {*other.layers}:
                problem = f"{_describe(both, stages)} in attention[{j}] as well; every block has one mechanism"
                raise OptionError(f"attention[{i}]", problem)
        entries.append(Entry({**written, **mechanism}, layers, factory))
    if missing := {*range(sum(depths))}.difference(*(entry.layers for entry in entries)):
        raise OptionError("attention", f"no entry has {_describe(missing, stages)}; every block has one mechanism")
    return entries


def as_option(entries: Sequence[dict[str, Any]], attention: Any) -> Any:
    """The option `attention` with these entries: a list, unless one mechanism was given for a model of one stage, or
    none."""
    if attention is None:
        return None
    return entries[0] if len(entries) == 1 and isinstance(attention, str | Mapping) else entries


def with_budget(attention: Any, budget: Budget, key: str = "train.budgets") -> Any:
    """The option `attention` with the size `budget`, which messages call `key`.

    Raises:
        OptionError: no mechanism has a size, or `budget` is no size, or has sizes for another number of them.
    """
    return as_option([{**entry, **sizes} for entry, sizes in entry_sizes(attention, budget, key)], attention)


def entry_sizes(
    attention: Any, budget: Budget, key: str = "train.budgets"
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The entries of `attention`, each with the options of its size; see `with_budget`."""
    given = [attention] if isinstance(attention, str | Mapping) else attention or []
    entries: list[Mapping[str, Any]] = [{"name": entry} if isinstance(entry, str) else entry for entry in given]
    options = [factory.size_option for factory in factories_of([{"name": x["name"]} for x in entries])]
    count = len(options) - options.count(None)
    sizes = [*budget] if isinstance(budget, list | tuple) else [budget] * count
    if not count or len(sizes) != count:
        problem = f"mechanisms of attention that have a size: {count}; give a size, or one for each of them"
        raise OptionError(key, f" = {to_yaml(budget)}: {problem}")
    if any(type(x) is not int for size in sizes for x in (size.values() if isinstance(size, Mapping) else [size])):
        raise OptionError(key, f" = {to_yaml(budget)}: sizes are whole numbers, or mappings of options to them")
    found = list[tuple[Mapping[str, Any], Mapping[str, Any]]]()
    for entry, name in zip(entries, options, strict=True):
        size: Any = sizes.pop(0) if name else {}
        size = {str(name): size} if isinstance(size, int) else size
        if wrong := next((x for x in size if x in Place.__dataclass_fields__ or isinstance(entry.get(x), float)), ""):
            raise OptionError(key, f" = {to_yaml(budget)}: {wrong} is no size of attention; leave it out")
        found.append((entry, size))
    return found


def single_layers(depths: Sequence[int]) -> range:
    """Numbers of the layers that a single mechanism gets: all, in a pyramid all but those of the last stage."""
    return range(sum(depths[:-1] or depths))


def layer_factories(entries: Iterable[Entry]) -> list[LayerFactory]:
    """The factory of every block; the context of its layer counts the earlier blocks with the same mechanism."""
    by_layer = {layer: entry.factory for entry in entries for layer in entry.layers}
    counts: Counter[str] = Counter()
    factories: list[LayerFactory] = []
    for layer in sorted(by_layer):
        factory = by_layer[layer]
        factories.append(functools.partial(factory, num_same_before=counts[factory.name]))
        counts[factory.name] += 1
    return factories


def replace(
    entries: Iterable[Entry], depths: Sequence[int], place: Mapping[str, Any], mechanism: Mapping[str, Any], prefix: str
) -> list[Entry]:
    """`entries` with another mechanism in the blocks of `place`: that is the last entry.

    Raises:
        OptionError: a place that is not there; `prefix`, before stage or blocks, begins the message.
    """
    stages = _stages(depths)
    written, layers = _read_place(place, stages, prefix)
    kept = []
    for entry in entries:  # each is of one stage
        if rest := [layer for layer in entry.layers if layer not in layers]:
            s = next(s for s, stage in enumerate(stages) if rest[0] in stage)
            own: dict[str, Any] = {"stage": s} if len(stages) > 1 else {}
            own["blocks"] = text_of(layer - stages[s].start for layer in rest)
            kept.append(Entry({**own, **split_place(entry.options)[1]}, tuple(rest), entry.factory))
    return [*kept, Entry({**written, **mechanism}, layers, AttentionFactory.from_options(mechanism))]


def split_place(entry: Mechanism) -> tuple[dict[str, Any], dict[str, Any]]:
    """The place that an entry names, empty without one, and its mechanism with its options; nothing is checked."""
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    return {name: options.pop(name) for name in Place.__dataclass_fields__ if name in options}, options


def factories_of(attention: Mechanism | Sequence[Mechanism] | None) -> list[AttentionFactory]:
    """The parsed mechanism of every entry; none of a model with its own attention."""
    return [AttentionFactory.from_options(mechanism) for mechanism in mechanisms_of(attention)]


def mechanisms_of(attention: Mechanism | Sequence[Mechanism] | None) -> list[dict[str, Any]]:
    """Name and options of the mechanism of every entry, without places; none of a model with its own attention."""
    entries = [attention] if isinstance(attention, str | Mapping) else attention or []
    return [split_place(entry)[1] for entry in entries]


def numbers_of(blocks: int | str | Sequence[int], depth: int, key: str) -> list[int]:
    """The numbers of blocks below `depth` that `blocks` names: ``3``, ``[3, 4]``, ``"0-2"`` or ``"0-2, 5"``.

    Raises:
        OptionError: another form, a block that does not exist or occurs twice, or no block; `key` begins the message.
    """
    if isinstance(blocks, str):
        found = [re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part) for part in blocks.split(",")]
        ranges = [(int(part[1]), int(part[2] or part[1])) for part in found if part]
        if not all(found) or any(first > last for first, last in ranges):
            raise OptionError(key, f" = {blocks!r}: expected a number, a range as 0-8, or several of them as 0-3, 7")
    else:
        ranges = [(number, number) for number in ([blocks] if isinstance(blocks, int) else blocks)]
    if outside := [number for pair in ranges for number in pair if not 0 <= number < depth]:
        raise OptionError(key, f" = {blocks!r}: there is no block {outside[0]}; there are 0 to {depth - 1}")
    counts = Counter(number for first, last in ranges for number in range(first, last + 1))
    if twice := [number for number, count in counts.items() if count > 1]:
        raise OptionError(key, f" = {blocks!r}: names block {twice[0]} twice; name every block once")
    if not counts:
        raise OptionError(key, f" = {blocks!r}: names no block; leave the entry out")
    return sorted(counts)


def text_of(numbers: Iterable[int]) -> str:
    """Ascending numbers as `numbers_of` reads them: ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_entries(attention: Any) -> list[tuple[dict[str, Any], dict[str, Any], AttentionFactory]]:
    """Place, mechanism, and parsed mechanism of every entry of `attention`; an empty list for other values.

    Raises:
        OptionError: all mechanisms and options that are wrong; places are not checked.
    """
    is_single, parsed, problems = isinstance(attention, str | Mapping), [], list[OptionError]()
    entries = [attention] if is_single else attention if isinstance(attention, Sequence) else []
    for i, entry in enumerate(entries):
        with collecting(problems):
            place, mechanism = split_place(entry) if isinstance(entry, str | Mapping) else ({}, entry)
            factory = AttentionFactory.from_options(mechanism, "attention" if is_single else f"attention[{i}]")
            parsed.append((place, mechanism, factory))
    refuse(problems)
    return parsed


def _stages(depths: Sequence[int]) -> list[range]:
    """The layers of every stage."""
    return [range(end - depth, end) for depth, end in zip(depths, accumulate(depths), strict=True)]


def _read_place(
    place: Mapping[str, Any], stages: Sequence[range], prefix: str
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A place as it is written out, and the layers in it."""
    parsed, written = parse_options(Place, place, prefix.removesuffix(".")), {}
    if len(stages) > 1:
        if parsed.stage is None or parsed.stage >= len(stages):
            given = "null" if parsed.stage is None else parsed.stage
            raise OptionError(f"{prefix}stage", f" = {given}: name a stage, 0 to {len(stages) - 1}")
        written["stage"] = parsed.stage
    elif parsed.stage is not None:
        raise OptionError(f"{prefix}stage", f" = {parsed.stage}: this model has no stages; leave it out")
    stage = stages[parsed.stage or 0]
    if parsed.blocks is None and written:
        return written, tuple(stage)
    if parsed.blocks is None:
        raise OptionError(f"{prefix}blocks", " = null: name blocks, such as 0-8")
    numbers = numbers_of(parsed.blocks, len(stage), f"{prefix}blocks")
    return {**written, "blocks": text_of(numbers)}, tuple(stage[number] for number in numbers)


def _describe(layers: Iterable[int], stages: Sequence[range]) -> str:
    """``blocks 3-5``, in a pyramid ``blocks 0-1 of stage 2``."""
    texts = []
    for s, stage in enumerate(stages):
        if numbers := [layer - stage.start for layer in sorted(layers) if layer in stage]:
            texts.append(f"block{'s' * (len(numbers) > 1)} {text_of(numbers)}" + f" of stage {s}" * (len(stages) > 1))
    return " and ".join(texts)
