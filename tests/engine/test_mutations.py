"""Configurations with one fault each: all are refused in one line that names the file, and the line if it is known."""

import dataclasses
import math
import os
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


def wrong_section(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    value = rng.choice([None, 5, "no such", [], [[]], [1, 2, 3, 4], True])
    section = rng.choice([name for name in options if name != "plugins"])  # none of them are needed
    fault = change(options, (section,), value)
    if section == "attention" and value == [[]] and fault.line is not None:
        return fault._replace(line=fault.line + 1)  # that of the list's entry
    return fault._replace(line=None) if value == [1, 2, 3, 4] else fault  # as many as a pyramid has stages


def out_of_range(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    choices = []
    for path, field, _ in options_of(run):
        value = options
        for name in path:
            value = value[name]
        choices += [(path, value) for value in beyond(field, value)]
    return change(options, *rng.choice(choices))


def duplicate(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    lines = write_options(options).decode().splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if re.match(r" *\w+:", line) and not line.startswith("-")])
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = next(
        (i for i in range(at + 1, len(lines)) if len(lines[i]) - len(lines[i].lstrip(" ")) <= indent), len(lines)
    )
    while end < len(lines) and lines[end].startswith(" " * indent + "- "):  # PyYAML does not indent lists
        end += 1
        while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > indent:
            end += 1
    key = lines[at].split(":")[0]
    lines.insert(end, f"{key}: {rng.choice(['1', 'null', '{}', '[]', 'again'])}")
    return Fault("\n".join(lines).encode(), end + 1)


TAGS = (
    *("!!python/object/apply:os.system ['false']", "!!python/name:os.system ''"),
    *("!!python/object/new:type [x, [], {}]", "!!int abc", "!!int ''", "!!float x", "!!bool perhaps", "!!null x"),
    *("!!timestamp x", "!!binary AAA=", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!seq x", "!!map x"),
    *("!local x", "!<tag:example.org,2000:x> x", "!!merge <<"),
)
SCALARS = (
    *("2020-13-45", "0x_", "0b_", "010", "1:30", "1" + ":59" * 3000, "0x" + "f" * 9000, "9" * 5000, '"\\Uffffffff"'),
    *('"\\ud800"', '"\\z"'),
)
SYNTAX = (
    *("x: [1", "x: {a: 1", "\tx: 1", "x", "x: 'open", "x: *nowhere", "- x", "--- \nx: 1", "? [a]\n: 1", "<<: {x: 1}"),
    *("x: &x [*x]", "1: 2", "true: 1", "null: 1", "x: @", "x: `", "x: %", "x: |3-9\n a", "%YAML 9.9", "x: \x07"),
    *("\ufeffx: 1", "x: 1: 2", "x: >\n\x85\x00"),
)


def tag(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    """A tag, or a value that YAML reads as something that no one meant, in place of an option's value."""
    path, _, _ = rng.choice(
        [found for found in options_of(run) if found[0][0] != "attention" or "name" not in found[0]]
    )
    content = change(options, path, "PLACE").content.decode()
    line = content[: content.index("PLACE")].count("\n") + 1
    return Fault(content.replace("PLACE", rng.choice(TAGS + SCALARS)).encode(), line)


def syntax(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    return Fault(write_options(options) + rng.choice(SYNTAX).encode("utf-8", "surrogatepass") + b"\n")


def alias_bomb(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    width, depth = rng.randint(3, 12), rng.randint(8, 30)
    opening, closing = rng.choice(["[]", ["{a: ", "}"]]) if width < 4 else "[]"
    levels = [f"x0: &x0 {opening}0{closing}"]
    for level in range(1, depth):
        many = ", ".join([f"*x{level - 1}"] * width)
        levels.append(f"x{level}: &x{level} [{many}]")
    bomb = "\n".join(levels) + "\n"
    text = write_options(options).decode()
    return Fault((text + bomb if rng.random() < 0.5 else bomb + text).encode())


def depth(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    levels = rng.choice([51, 200, 1000, 5000])
    opening, closing = rng.choice([("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")])
    tail = "x:\n " + opening * levels + "1" + closing * rng.choice([levels, 0])
    return Fault(write_options(options) + tail.encode())


def encoding(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    """A byte order mark, another encoding, or a byte that is no text."""
    content = write_options(options)
    at = rng.randrange(len(content))
    byte = rng.choice([b"\0", b"\xff", b"\x80", b"\x1b", b"\x7f", b"\xed\xa0\x80"])
    return rng.choice(
        [
            Fault(b"\xef\xbb\xbf" + content, 1),
            Fault(content.decode().encode("utf-16")),
            Fault(content.decode().encode("utf-32")),
            Fault(content.decode().encode("utf-16-le")),
            Fault(content[:at] + byte + content[at:], content[:at].count(b"\n") + 1),
        ]
    )


def large(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    filling = rng.choice([b"# " + b"x" * 2**15, b"x: [" + b"1," * 2**14 + b"]", b"\n" * 2**15, b"x: " + b"y" * 2**21])
    return Fault(write_options(options) + filling)


CONTRADICTIONS = (
    {"schedule.warmup_epochs": 400, "schedule.epochs": 300},
    {"schedule.warmup_lr": 100.0, "schedule.warmup_epochs": 1, "schedule.epochs": 2},
    {"schedule.min_lr": 100.0, "schedule.sched": "cosine"},
    {"augment.scale": [0.9, 0.1]},
    {"augment.ratio": [3.0, 0.1]},
    {"optim.betas": [0.9, 1.0]},
    {"train.total_batch_size": 7, "train.grad_accum_steps": 2},
    {"train.total_batch_size": 9, "train.grad_accum_steps": 1, "augment.mixup": 0.8},
    {"train.total_batch_size": 1, "train.grad_accum_steps": 4},
    {"augment.auto_augment": "rand-x9"},
    {"augment.auto_augment": "no-such-policy"},
    {"model.img_size": 225},
    {"model.num_heads": 7},
    {"model.embed_dim": 10**15},
    {"model.depth": 1000},
    {"model.img_size": 10**6},
    {"data.workers": 10**6},
    {"data.crop_pct": 0.002},
    {"train.timeout_minutes": 1e300},
    {"attention": "no such mechanism"},
    {"attention": {"name": "eva", "num_landmarks": 10**9}},
    {"attention": {"name": "softmax", "window_size": 7}},
    {"attention": ["softmax", "softmax"]},
    {"base": "absent.yaml"},
    {"base": "."},
    {"base": "pipe"},
    {"base": "zero"},
    {"base": "run.yaml"},
    {"base": 5},
)


def contradiction(run: Run, options: dict[str, Any], rng: random.Random) -> Fault:
    changes = rng.choice(CONTRADICTIONS)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            options[section] = {**options[section], name: value}
        else:
            options[section] = value
    return Fault(write_options(options))


FAULTS = (typo, wrong_type, wrong_section, out_of_range, duplicate, tag)
FAULTS += (syntax, alias_bomb, depth, encoding, large, contradiction)


@pytest.fixture
def folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    return tmp_path


def refuse_all(folder: Path, num_faults: int, configs: list[Path]) -> str:
    runs = {path: load_run(path) for path in configs}
    rng, slowest, path = random.Random(0), 0.0, folder / "run.yaml"
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
def test_200_faults_are_refused(folder, figure):
    figure("F1", refuse_all(folder, 200, CONFIGS[::20]))


@pytest.mark.stress
def test_2000_faults_are_refused(folder, figure):
    figure("F1", refuse_all(folder, 2000, CONFIGS))
