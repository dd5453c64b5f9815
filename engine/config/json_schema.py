"""JSON Schema of configuration files (configs/schema.json), with which editors complete, explain and check them.

It holds what the dataclasses of a run state for every option: name, type, choices, range, default and meaning. Rules
across several options, or that need the data, are checked when a run is loaded.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, Literal

from attention import ATTENTION
from engine.config.schema import Run
from models import MODELS
from models.assignment import Place
from models.base import Backbone

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}

LIMITS = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
"""Limit of `attention.options.option` -> its name in JSON Schema."""

PLACE = [field.name for field in fields(Place)]

Schema = dict[str, Any]


def schema_text() -> str:
    """Returns the content of the file."""
    return json.dumps(run_schema(), indent=1, ensure_ascii=False) + "\n"


def run_schema() -> Schema:
    """Returns the schema of a configuration file; no option is required, since a `base` may give it."""
    base = {"type": "string", "description": "configuration that holds the options that are not given here"}
    kinds = typing.get_type_hints(Run).items()
    sections = {name: _of_options(kind) for name, kind in kinds if isinstance(kind, type) and is_dataclass(kind)}
    entry = {"$ref": "#/definitions/mechanism"}
    mechanism = {"allOf": [entry, {"properties": dict.fromkeys(PLACE, False)}]}
    placed = {"allOf": [entry, {"anyOf": [{"required": [name]} for name in PLACE]}, {"type": "object"}]}
    stages = {"type": "array", "items": mechanism, "minItems": 4, "maxItems": 4}
    entries = {"type": "array", "items": placed, "minItems": 1}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of a training run",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "base": base,
            "model": _model(),
            "attention": {"anyOf": [mechanism, stages, entries]},
            **sections,
            "plugins": _of_options(Run)["properties"]["plugins"],
        },
        "definitions": {"mechanism": _mechanism(), **_of_options(Place)["properties"]},
    }


def _model() -> Schema:
    """Returns the schema of a model of any family; the name is not required, since a `base` may give it."""
    names: dict[type[Backbone], list[str]] = {}
    for name, (family, _) in MODELS.items():
        names.setdefault(family, []).append(name)
    return {"anyOf": [_of_options(family.Config, {"enum": known}, family) for family, known in names.items()]}


def _mechanism() -> Schema:
    """Returns the schema of a mechanism, with the place that it may name as an entry of a list."""
    place, kinds = {name: {"$ref": f"#/definitions/{name}"} for name in PLACE}, []
    for name, mechanism in ATTENTION.items():
        schema = _of_options(mechanism.Config, {"const": name}, mechanism)
        kinds.append({**schema, "properties": {**place, **schema["properties"]}, "required": ["name"]})
    return {"oneOf": [{"enum": [*ATTENTION]}, *kinds]}


def _of_options(cls: type, name: Schema | None = None, described: type | None = None) -> Schema:
    """Returns the schema of the options of the dataclass `cls`, with a schema for `name` if given.

    The description is the first line of the docstring of `described`, by default `cls`.
    """
    kinds = typing.get_type_hints(cls)
    options = {field.name: _option(field, kinds[field.name]) for field in fields(cls) if "meaning" in field.metadata}
    return {
        "type": "object",
        "description": str((described or cls).__doc__).partition("\n")[0],
        "additionalProperties": False,
        "properties": options if name is None else {"name": name, **options},
    }


def _option(field: Field[Any], kind: Any) -> Schema:
    limits = {word: field.metadata[limit] for limit, word in LIMITS.items() if field.metadata[limit] is not None}
    return {**_values(kind, limits), "default": field.default, "description": field.metadata["meaning"]}


def _values(kind: Any, limits: Mapping[str, float]) -> Schema:
    """Returns the schema of the values of a type; `limits` apply to numbers."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_values(argument, limits) for argument in arguments]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _values(arguments[0], limits)}
    if origin is tuple:
        items = [_values(argument, limits) for argument in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": TYPES[kind], **(limits if kind in (int, float) else {})}
