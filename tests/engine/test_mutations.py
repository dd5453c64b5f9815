"""Configurations with one misspelt name or wrong value each: all are refused in one line that names its place."""

import dataclasses
import math
import random
import re
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import yaml

from attention import AttentionFactory
from engine.config.schema import Run
from engine.run.load import dump_run, load_run
from engine.runtime.errors import ConfigError
from models import parse_model

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*/*.yaml"))
CONFIGS = [path for path in CONFIGS if path.parent.name != "ablation"]


class Fault(NamedTuple):
    """A file with a fault, and the line that the message must name; None: any line will do."""

    content: bytes
    line: int | None = None


def options_of(run: Run) -> Iterator[tuple[tuple[str | int, ...], dataclasses.Field, Any]]:
    """Path, field and type of every option."""
    sections = {(name,): getattr(run, name) for name in ("init", "data", "augment", "optim", "schedule", "train")}
    model = dict(run.model)
    sections["model",] = parse_model(model.pop("name"), model)
    stages = enumerate(run.attention) if isinstance(run.attention, list) else [(None, run.attention)]
    for stage, options in stages:
        path = ("attention",) if stage is None else ("attention", stage)
        options = {name: value for name, value in options.items() if name not in ("stage", "blocks")}
        sections[path] = AttentionFactory.from_options(options).config
    for path, section in sections.items():
        types_of = typing.get_type_hints(type(section))
        for field in dataclasses.fields(section):
            yield (*path, field.name), field, types_of[field.name]


def wrong_values(kind: Any) -> list[Any]:
    """Values that an option of type `kind` must refuse."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [argument for argument in typing.get_args(kind) if argument is not type(None)]
        return [value for value in wrong_values(kinds[0]) if value is not None] if len(kinds) == 1 else [{"no": "such"}]
    table = {
        bool: ["perhaps", 1, 0.5, None, [True], {}],
        int: ["seven", "7.0", 1.5, True, None, [1], {}, 2**63, 10**400],
        float: ["fast", "1e-3.0", True, None, [1.0], {}, math.inf, math.nan, 10**400],
        str: [5, 0.5, True, [], ["a"], {}, "\0", "\x1b[31m"],
        Literal: ["no such choice", 123456, ["bf16"], {}],
        tuple: [5, "x", None, {}, [], ["a"] * 9, [None]],
    }
    return table.get(typing.get_origin(kind) or kind, [{"no": "such"}])


def beyond(field: dataclasses.Field, value: Any) -> list[Any]:
    """`value` moved out of each of its bounds."""
    low, high, above = (field.metadata.get(name) for name in ("low", "high", "above"))
    bounds = [
        bound for bound in (low and low - 1, low == 0 and -1, high and high + 1, above) if bound not in (None, False)
    ]
    number = (lambda bound: float(bound)) if isinstance(value, float) else (lambda bound: bound)
    if isinstance(value, list | tuple):
        return [[*value[:-1], bound] for bound in bounds if value and isinstance(value[-1], int | float)]
    return [number(bound) for bound in bounds] if isinstance(value, int | float) and not isinstance(value, bool) else []


def misspelt(word: str, rng: random.Random) -> str:
    """`word` with a letter lost, doubled, changed, or two exchanged."""
    at = rng.randrange(len(word))
    other = {
        0: word[:at] + word[at + 1 :],
        1: word[: at + 1] + word[at:],
        2: word[:at] + rng.choice("abcxyz_-.[0") + word[at + 1 :],
        3: word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
    }[rng.randrange(4)]
    return other if other != word else word + "s"


def write_options(options: dict[str, Any]) -> bytes:
    return yaml.safe_dump(options, sort_keys=False, allow_unicode=True, width=10_000).encode()


def line_of(content: bytes, path: tuple[str | int, ...]) -> int:
    """The line of the key at the end of `path`."""
    node = yaml.compose(content.decode(), yaml.SafeLoader)
    for name in path:
        if isinstance(name, int):
            node, mark = node.value[name], node.value[name].start_mark
        else:
            key, node = next((key, value) for key, value in node.value if key.value == name)
            mark = key.start_mark
    return mark.line + 1


def change(options: dict[str, Any], path: tuple[str | int, ...], value: Any) -> Fault:
    """The file with another value at `path`."""
    container = options
    for name in path[:-1]:
        container = container[name]
    container[path[-1]] = value
    content = write_options(options)
    try:
        return Fault(content, line_of(content, path))
    except yaml.YAMLError:  # a character that is none in YAML
        return Fault(content)


def typo(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    """A section, an option or the name of a mechanism, model or optimiser, misspelt."""
    path, _, _ = rng.choice(list(options_of(run)))
    depth = rng.choice([1, len(path)])
    if rng.random() < 0.2:
        named = rng.choice(
            [("model", "name"), ("optim", "opt"), path[:-1] if path[0] == "attention" else ("optim", "opt")]
        )
        named = (*named, "name") if named[0] == "attention" else named
        value = options
        for name in named:
            value = value[name]
        return change(options, named, misspelt(value, rng) + "_")
    container = options
    for name in path[: depth - 1]:
        container = container[name]
    old = path[depth - 1]
    new = misspelt(old, rng)
    while new in container or not new:
        new += "x"
    renamed = {new if key == old else key: value for key, value in container.items()}
    container.clear()
    container.update(renamed)
    content = write_options(options)
    required = depth == 1 and old in ("model", "attention")  # whose absence may be seen first
    return Fault(content, None if required else line_of(content, (*path[: depth - 1], new)))


def wrong_type(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    path, _, kind = rng.choice(list(options_of(run)))
    return change(options, path, rng.choice(wrong_values(kind)))


def out_of_range(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    choices = []
    for path, field, _ in options_of(run):
        value = options
        for name in path:
            value = value[name]
        choices += [(path, value) for value in beyond(field, value)]
    return change(options, *rng.choice(choices))


FAULTS = (typo, wrong_type, out_of_range)


def refuse_all(path: Path, num_faults: int, configs: list[Path]) -> str:
    runs = {path: load_run(path) for path in configs}
    rng, slowest = random.Random(0), 0.0
    for i in range(num_faults):
        make = FAULTS[i % len(FAULTS)]
        config = rng.choice(configs)
        fault = make(runs[config], dump_run(runs[config]), rng)
        path.write_bytes(fault.content)
        began = time.perf_counter()
        try:
            load_run(path)
        except ConfigError as error:
            message = str(error)
        else:
            content = fault.content[-3000:].decode(errors="replace")
            pytest.fail(f"{make.__name__} {i} of {config} was accepted:\n{content}")
        slowest = max(slowest, time.perf_counter() - began)
        place = rf"{re.escape(str(path))}{'' if fault.line is None else f':{fault.line}'}(:\d+)?: \S"
        assert re.match(place, message), (make.__name__, i, fault.line, message)
        assert message.replace("\n", "").isprintable(), (make.__name__, message)
        assert len(message) <= 500
    return f"{num_faults}/{num_faults} faults refused, no traceback, the slowest in {slowest:.2f} s"


@pytest.mark.complete
def test_100_faults_are_refused(tmp_path, figure):
    figure("F1", refuse_all(tmp_path / "run.yaml", 100, CONFIGS[::20]))


@pytest.mark.stress
def test_1000_faults_are_refused(tmp_path, figure):
    figure("F1", refuse_all(tmp_path / "run.yaml", 1000, CONFIGS))
