"""Plain options (YAML, keyword arguments) -> frozen dataclasses, strictly.

Every mechanism, model family and section of a run states its options as a dataclass whose fields are made with
`option`: name, type, default, meaning and range are in one place, and `parse_options` refuses any value that does not
fit them.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, dataclass_transform


class OptionError(ValueError):
    """An option that cannot be honoured. The message is one line: the key, the value and the remedy.

    Attributes:
        key: dotted path of the offending option, e.g. ``"attention(eva).window_size"``.
    """

    def __init__(self, key: str, problem: str):
        super().__init__(f"{key}{problem}" if problem.startswith(" ") else f"{key}: {problem}")
        self.key = key


class UnknownOptionError(OptionError, TypeError):
    """An option that does not exist; also a TypeError, like any unknown keyword argument."""


class OptionErrors(OptionError):
    """Several options that cannot be honoured; the key is that of the first of `problems`."""

    def __init__(self, problems: Sequence[OptionError]):
        super().__init__(problems[0].key, "")
        self.args, self.problems = ("; ".join(map(str, problems)),), problems


@contextmanager
def collecting(problems: list[OptionError]) -> Iterator[None]:
    """Context whose `OptionError` is added to `problems`, and each of several by itself."""
    try:
        yield
    except OptionError as error:
        problems += error.problems if isinstance(error, OptionErrors) else [error]


def refuse(problems: Sequence[OptionError]) -> None:
    """Raises the only one of `problems`, or all as `OptionErrors`, each once; nothing if there is none."""
    if problems := [*{str(problem): problem for problem in problems}.values()]:
        raise problems[0] if len(problems) == 1 else OptionErrors(problems)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """Base of a mechanism's or a model's `Config`: makes its subclasses frozen dataclasses of keyword arguments.

    The values below hold for a mechanism without the option; only a subclass that declares one has the option.
    """

    attn_drop: float = 0.0
    causal: bool = False
    fit: bool = False
    layout: Any = "2d"
    local: bool = False
    overlap: int = 0
    released: bool = False

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    chosen: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field with a default, a meaning (with its unit) and the range low <= value <= high, above < value <
    below.

    Args:
        chosen: function of the parsed dataclass; `parse_options` calls it to replace a null value of this option.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"meaning": meaning, "chosen": chosen, **limits})


def released_option() -> Any:
    """The field `released`: one switch for everything in which a mechanism's released code differs from its paper.

    The options that it switches are null by default; their `chosen` rules depend on it.
    """
    return option(False, "give options that are null the values of the released code")


def causal_option() -> Any:
    """The field `causal` of a mechanism without windows."""
    return option(False, "tokens attend to no later token, in raster order")


def local_option(default: bool = False) -> Any:
    """The field `local`, by which `Attention` adds a mechanism's local term."""
    return option(default, "add a depthwise convolution of the values over the grid")


def attn_drop_option() -> Any:
    """The field `attn_drop`, see `Attention.attn_drop`."""
    return option(0.0, "dropout rate of the attention weights", low=0, high=1)


def fit_option(**largest: Callable[[Any, Any, Any], tuple[Any, str]]) -> Any:
    """The field `fit` of a mechanism with options that a small grid may not allow.

    largest: by option, a function of its value, the layer's context and the dataclass: the largest value up to this one
        that the grid allows, None for one that `fit` does not mend, and the error's text. See `Attention.too_large`.
    """
    made = option(False, "reduce sizes that are too large for the grid to the largest that fit")
    return dataclasses.field(default=False, metadata={**made.metadata, "largest": largest})


def nearest(word: object, choices: Iterable[object]) -> str:
    """``"; did you mean 'window_size'?"`` for the choice with the most similar spelling; else choices, 30 at most."""
    known = sorted(map(str, choices))
    spellings = {choice.lower(): choice for choice in known}
    match = difflib.get_close_matches(str(word).lower(), spellings, n=1)
    if not match:
        return f"; known: {', '.join(known[:30]) or 'none'}" + f", ... ({len(known):,})" * (len(known) > 30)
    return f"; did you mean {spellings[match[0]]!r}?"


def parse_options(cls: type, options: Mapping[str, Any], path: str = "") -> Any:
    """Builds the dataclass `cls` from plain `options`.

    Args:
        cls: dataclass type; fields typed bool, int, float, str, ``Literal``, ``tuple``, ``X | None`` or a dataclass.
        options: option name -> plain value. Lists become tuples and ints floats; nothing else is converted.
            Null options with a `chosen` rule, see `option`, get the value that the rule returns.
        path: dotted path of this mapping in the user's configuration, with which error messages begin.
    Raises:
        OptionError: unknown name (an UnknownOptionError), missing required option, wrong type, value outside its
            choices or range; `OptionErrors`: several of these.
    """
    if not isinstance(options, Mapping):
        raise OptionError(path, f"expected a mapping of options, got {options!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    types_of = typing.get_type_hints(cls)
    values, problems = {}, list[OptionError]()
    for name, value in options.items():
        key = f"{path}.{name}" if path else str(name)
        with collecting(problems):
            if name not in fields:
                raise UnknownOptionError(key, f"unknown option{nearest(name, fields)}")
            values[name] = _check(types_of[name], value, key)
            _check_range(values[name], fields[name].metadata, key)
    if not any(isinstance(x, UnknownOptionError) and x.key.rpartition(".")[0] == path for x in problems):
        for name, field in fields.items():  # of which an unknown one may be a wrong spelling
            if name not in options and field.default is dataclasses.MISSING is field.default_factory:
                problems.append(OptionError(f"{path}.{name}" if path else name, "required, but not given"))
    refuse(problems)
    parsed = cls(**values)
    rules = {name: rule for name, field in fields.items() if (rule := field.metadata.get("chosen"))}
    return dataclasses.replace(parsed, **{n: rule(parsed) for n, rule in rules.items() if getattr(parsed, n) is None})


def check_fields(values: Any) -> dict[str, Any]:
    """The values of a dataclass by name, as `parse_options` converts them.

    Raises:
        OptionError: the first value that does not fit the type of its field, or the range in the field's metadata.
    """
    types_of, checked = typing.get_type_hints(type(values)), {}
    for field in dataclasses.fields(values):
        checked[field.name] = _check(types_of[field.name], getattr(values, field.name), field.name)
        _check_range(checked[field.name], field.metadata, field.name)
    return checked


def _check(kind: Any, value: Any, key: str, others: tuple[str, ...] = ()) -> Any:
    """Returns `value` as the type `kind`, or raises an OptionError, which names `others` as choices, too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in arguments and type(value) in map(type, arguments):
            return value
        raise OptionError(key, f"{value!r} is not a choice{nearest(value, (*arguments, *others))}")
    if origin in (types.UnionType, typing.Union):
        has_null = type(None) in arguments
        if value is None and has_null:
            return None
        choices = [choice for argument in arguments for choice in typing.get_args(argument)]
        if has_null and isinstance(value, str) and value.lower() in ("", "none") and value not in choices:
            raise OptionError(key, f"{value!r} is text, and names nothing; write null for none")
        kinds = [argument for argument in arguments if argument is not type(None)]
        problems = list[OptionError]()
        for argument in kinds:
            with collecting(problems):
                return _check(argument, value, key, ("null",) * has_null)
        raise max(reversed(problems), key=lambda problem: len(problem.key))  # of the kind that fits best
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise OptionError(key, f"expected a list, got {value!r}")
        variadic = len(arguments) == 2 and arguments[1] is Ellipsis
        if not variadic and len(value) != len(arguments):
            raise OptionError(key, f"expected {len(arguments)} values, got {value!r}")
        of_items = [arguments[0]] * len(value) if variadic else arguments
        items = enumerate(zip(of_items, value, strict=True))
        return tuple(_check(kind, item, f"{key}[{i}]") for i, (kind, item) in items)
    if origin is dict and isinstance(value, Mapping) and arguments[1] in (int, str):  # measured numbers may be anything
        for name, item in value.items():
            _check(arguments[1], item, f"{key}.{name}")
        return value  # itself, which layers may share
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return parse_options(kind, value, key)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(key, "expected a number of at most 64 bits")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is Any or (
        isinstance(value, kind := origin or kind) and not (isinstance(value, bool) and kind is not bool)
    ):
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(key, f"{value} is not a finite number")
        return value
    raise OptionError(key, f"expected {kind.__name__}, got {value!r}{_spelling(kind, value)}")


def _spelling(kind: type, value: Any) -> str:
    """Advice on the spelling of a number that YAML 1.1 reads as text; empty for other values."""
    if kind is float and isinstance(value, str):
        try:
            return f", text to YAML; write {to_yaml(float(value))}"
        except ValueError:
            return ""
    return ""


def to_yaml(value: Any) -> str:
    """A plain value as a configuration writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_yaml, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as text
    return text or "''"


def _check_range(value: Any, limits: Mapping[str, Any], key: str) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
        if low is not None and item < low:
            raise OptionError(key, f" = {item} is below the least valid value {low}")
        if high is not None and item > high:
            raise OptionError(key, f" = {item} is above the largest valid value {high}")
        if above is not None and item <= above:
            raise OptionError(key, f" = {item} must be greater than {above}")
        if below is not None and item >= below:
            raise OptionError(key, f" = {item} must be less than {below}")
