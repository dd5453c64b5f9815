"""The registry of mechanisms: name -> class. `register` adds one; attention/plugins.py imports those from outside."""

import dataclasses
from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from . import Name
from .options import OptionError, Options, nearest

if TYPE_CHECKING:
    from .base import Attention


class Mechanisms(UserDict[str, "type[Attention]"]):
    """Name of a mechanism -> its class. Imports a mechanism of this package, and torch, when its class is needed.

    Until then None is in its place. The file `sparse_transformer.py` has the class `SparseTransformer`.
    """

    def __getitem__(self, name: str) -> "type[Attention]":
        if self.data[name] is None:
            title = "".join(word.capitalize() for word in name.split("_"))
            self.data[name] = checked(getattr(import_module(f".mechanisms.{name}", __package__), title))
        return self.data[name]


ATTENTION = Mechanisms(dict.fromkeys(get_args(Name)))
"""All mechanisms: those of this package, and those that were registered."""

KEYS_OF_ENTRIES = ("name", "stage", "blocks")
"""Keys of a configuration that stand beside the options of a mechanism: its name, and where a network has it."""

Mechanism = TypeVar("Mechanism", bound="type[Attention]")


class UnknownMechanism(OptionError):
    """A mechanism that is neither built in nor registered.

    Attributes:
        name: the requested name.
    """

    def __init__(self, key: str, name: Any, reason: str = ""):
        meant = nearest(name, ATTENTION).partition("; known")[0] or "; `python -m attention` lists all"
        super().__init__(key, f"unknown mechanism {name!r}{meant}{reason or ' (--plugin loads one of your own)'}")
        self.name = name


def register(cls: Mechanism) -> Mechanism:
    """Adds a mechanism to `ATTENTION` and returns it; a class decorator.

    It is registered under the class's name in snake case, see `Attention.name`: ``RowAttention`` is ``row_attention``.
    A class that is defined again at the same place, as in a notebook's cell that runs again, replaces the earlier one.

    Raises:
        TypeError: the class lacks a part of a mechanism; the message names the part to write.
        ValueError: another class has the name.
    """
    name = checked(cls).name()
    known = ATTENTION.get(name)
    if known is not None and (is_built_in(known) or _place(known) != _place(cls)):
        problem = f"would be the mechanism {name!r}, but {_place(known)} has that name; rename the class"
        raise ValueError(f"register: {_place(cls)} {problem}")
    ATTENTION[name] = cls
    return cls


def checked(cls: Mechanism) -> Mechanism:
    """Returns the class; raises the TypeError of `register` if it is no complete mechanism."""
    from .base import Attention

    if not (isinstance(cls, type) and issubclass(cls, Attention)):
        raise TypeError(f"register: {cls!r} is no mechanism; write `class RowAttention(attention.Attention): ...`")
    if problem := _config_problem(cls) or _method_problem(cls):
        raise TypeError(f"register: {cls.__qualname__} {problem}")
    return cls


def is_built_in(cls: "type[Attention]") -> bool:
    """True for a mechanism of this package."""
    return cls.__module__.startswith(f"{__package__}.mechanisms.")


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _config_problem(cls: "type[Attention]") -> str:
    """The problem with the options of a mechanism, and its remedy; "" if there is none."""
    from .base import LayerContext

    config: Any = getattr(cls, "Config", None)
    is_options = isinstance(config, type) and issubclass(config, Options)
    if not is_options:
        example = "class Config(Options): window_size: int = option(7, 'side of a window, tokens', low=1)"
        return (
            f"has no options; write `{example}` inside it, or `class Config(Options): pass`"
            " (from attention.options import Options, option)"
        )
    types, common = get_type_hints(config), get_type_hints(Options)
    taken = {*KEYS_OF_ENTRIES, *(x.name for x in dataclasses.fields(LayerContext))} - {"reduction"}
    for field in dataclasses.fields(config):
        if field.name in taken:
            return f"has an option {field.name}, a key of its own beside a mechanism's options; rename the option"
        if common.get(field.name, Any) not in (Any, types[field.name]):
            kind = common[field.name].__name__
            return f"has an option {field.name} that is no {kind}, which it is in all mechanisms; rename the option"
        if "meaning" not in field.metadata:
            kind, default = getattr(field.type, "__name__", field.type), field.default
            value = "DEFAULT" if default is dataclasses.MISSING else repr(default)
            line = f"{field.name}: {kind} = option({value}, 'its meaning, with its unit')"
            return f"has an option {field.name} that is no option(); write `{line}` (from attention.options)"
    return ""


def _method_problem(cls: "type[Attention]") -> str:
    """The missing or wrong method of a mechanism, and its remedy; "" if there is none."""
    from .base import Attention

    if cls.attend is Attention.attend:
        return "defines no attend; write `def attend(self, q, k, v, grid): ...`, which returns (B, h, N, d)"
    if getattr(cls.cost, "__func__", None) is getattr(Attention.cost, "__func__", ()):
        signature = "@classmethod def cost(cls, context, config): return Cost(parameters=..., macs=...)"
        return f"defines no cost; write `{signature}` (from attention.base import Cost; see Attention.cost)"
    return ""
