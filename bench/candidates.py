"""Candidates of a recommendation: mechanisms with options, their sizes, and the shapes of calls of their layers."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from attention import ATTENTION, AttentionFactory, Grid, LayerContext, OptionError
from attention.costs import projections, total
from attention.fitting import fitted
from attention.options import to_yaml
from models.costs import Costs

FACTORS = 1 / 4, 1 / 2, 1, 2, 4
"""Sizes of a mechanism relative to its default."""
STARTING_SIZE = 8
"""Size that stands for a default of null, which depends on the network."""


class Shape(NamedTuple):
    """Tokens, channels, heads and images of a call of an attention layer."""

    grid: Grid
    dim: int
    num_heads: int
    batch: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens N of an image."""
        return math.prod(self.grid)

    def __str__(self) -> str:
        return f"{self.grid[0]}x{self.grid[1]} tokens, {self.dim} channels, {self.num_heads} heads"


@dataclass(frozen=True)
class Candidate:
    """A mechanism with options.

    Attributes:
        name: the mechanism. options: given options, name -> plain value; others have their defaults.
    """

    name: str
    options: dict[str, Any]

    @property
    def options_text(self) -> str:
        """The given options as ``"window_size=7,num_landmarks=49"``."""
        return ",".join(f"{key}={to_yaml(value)}" for key, value in self.options.items())

    @property
    def entry(self) -> str:
        """The candidate as an entry of ``benchmark.py --attention``."""
        return f"{self.name}:{self.options_text}" if self.options else self.name

    @cached_property
    def factory(self) -> AttentionFactory:
        """The mechanism with checked options."""
        return AttentionFactory.from_options({"name": self.name, **self.options})

    @cached_property
    def family(self) -> "Candidate":
        """The candidate without its size option, and without options that have their default values."""
        default, size = AttentionFactory.from_options(self.name).config, ATTENTION[self.name].size_option
        own = {
            key: x
            for key, x in self.options.items()
            if key != size and getattr(self.factory.config, key) != getattr(default, key)
        }
        return Candidate(self.name, own)

    @property
    def size(self) -> int | None:
        """Value of the mechanism's size option; None if it has none, or if the network determines it."""
        option = ATTENTION[self.name].size_option
        return getattr(self.factory.config, option) if option else None

    @property
    def modelled_as(self) -> str:
        """The family's entry: its sizes share a model, and a size that the network determines has its own."""
        return f"{self.family.entry} sized" if self.size else self.family.entry

    def with_size(self, size: Any) -> "Candidate":
        """Returns the mechanism with another value of its size option."""
        return Candidate(self.name, {**self.options, ATTENTION[self.name].size_option: size})

    def is_valid(self, shape: Shape) -> bool:
        """Returns whether the layer can be built for a shape; nothing is allocated."""
        try:
            with torch.device("meta"):
                self.factory(dim=shape.dim, num_heads=shape.num_heads, grid=shape.grid)
        except OptionError:
            return False
        return True

    def costs(self, shape: Shape) -> Costs:
        """Returns parameters and MACs of the layer for one image, by the mechanism's formulas."""
        context = LayerContext(dim=shape.dim, num_heads=shape.num_heads, grid=shape.grid)
        mechanism = ATTENTION[self.name]
        beyond = mechanism.cost(context, fitted(mechanism, context, self.factory.config))
        return Costs(*total(projections(context, 4), beyond))


def sizes_of(family: Candidate, shape: Shape) -> list[Candidate]:
    """Returns a mechanism at its default size and at multiples of it, by `FACTORS`, that its layer accepts at a shape.

    A refused size is replaced by the next one: filters have odd sides.
    """
    option = ATTENTION[family.name].size_option
    if option is None:
        return [family] if family.is_valid(shape) else []
    sizes = [family] if family.size is None and family.is_valid(shape) else []
    for factor in FACTORS:
        size = max(1, round((family.size or STARTING_SIZE) * factor))
        valid = (each for each in map(family.with_size, (size, size + 1)) if each.is_valid(shape))
        sizes += itertools.islice(valid, 1)
    return distinct(sizes)


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the first of all candidates that have the same options, given or by default."""
    return list({(each.name, each.factory.config): each for each in reversed(list(candidates))}.values())[::-1]
