"""Equal budgets: the size of every setting's mechanism is solved for a cost that is the same for all."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ablation.measured import Measurement, Measurements, device_of, list_places, machine_of, measure_layers
from attention import ATTENTION, AttentionFactory, LayerContext
from attention.options import OptionError, option, to_yaml
from attention.sizes import NoSize, Size, solve_size
from engine.config.schema import Run
from engine.runtime.errors import ConfigError
from models import layer_contexts, parse_model, split_name
from models.costs import count_costs

TOLERANCE = 0.02
"""Largest relative deviation from the target that counts as equal."""

BATCH_SIZE = 32
"""Images of a pass that is measured, by default."""

PROPORTIONAL = 0.1
"""Shortest pass (seconds) whose time may be extrapolated in proportion to cost; shorter ones are mostly overhead."""

MAX_PASS_SECONDS = 10.0
"""Longest pass (seconds) that a target may need."""

MOST_SIZES = 16
"""Most sizes of a mechanism that are measured."""

FACTORS = (2.0, 4.0, 16.0, 256.0)
"""Factors by which the MACs of the next size are multiplied or divided, until sizes on both sides of the target are
measured."""

UNITS = {"time": "ms", "memory": "MiB"}
"""Measured costs -> their units."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The target, one of these."""

    layer_macs: float | None = option(
        None, "multiply-accumulates of an attention layer beyond its four C x C projections, for one image", above=0
    )
    token_macs: float | None = option(None, "layer_macs divided by the number of tokens", above=0)
    model_macs: float | None = option(None, "multiply-accumulates of the whole model, for one image", above=0)
    time: float | None = option(
        None,
        "milliseconds of an attention layer, forward and backward, for a pass of `batch_size` images; measured here",
        above=0,
    )
    memory: float | None = option(
        None, "MiB at the peak of the same pass, beyond weights and input; measured here", above=0
    )
    batch_size: int | None = option(None, f"with time and memory, images of a pass; null: {BATCH_SIZE}", low=1)

    @property
    def given(self) -> dict[str, float]:
        """The targets that are not null: one, after `check`."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "batch_size"}

    @property
    def is_measured(self) -> bool:
        """Whether the cost is measured, not counted."""
        return self.kind in UNITS

    @property
    def unit(self) -> str:
        """Unit of a measured cost, after a space; empty for one that is counted."""
        return f" {UNITS[self.kind]}" if self.is_measured else ""

    @property
    def kind(self) -> str:
        """The option that is given."""
        return next(iter(self.given))

    @property
    def target(self) -> float:
        return self.given[self.kind]

    def check(self) -> None:
        """Raises an OptionError unless one target is given."""
        if len(self.given) != 1:
            targets = ", ".join(name for name in vars(self) if name != "batch_size")
            raise OptionError("match", f"expected one of {targets}, got {to_yaml(self.given)}")
        if self.batch_size is not None and not self.is_measured:
            raise OptionError("match.batch_size", f" = {self.batch_size}: acts with time and memory only; leave it out")


@dataclass(frozen=True)
class Matched:
    """The solved size of a setting.

    Attributes:
        option, value: the mechanism's option, and the valid value with the nearest cost. reached: that cost.
        override: the option of train.py that sets it.
        error: relative standard error of a measured cost. machine: name of the machine on which it was measured.
    """

    match: Match
    option: str
    value: int
    reached: float
    override: str
    error: float = 0.0
    machine: str = ""

    @property
    def deviation(self) -> float:
        """Deviation from the target, a share of it."""
        return self.reached / self.match.target - 1

    @property
    def is_equal(self) -> bool:
        """Whether the deviation is at most `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE


class OutOfReach(ConfigError):
    """A setting that has no size with the wanted cost, or none near it."""


def solve(match: Match, run: Run, measurements: Measurements) -> Matched:
    """Solves the size of the mechanism of `run`, which `load_unbuilt` has read, for the target of `match`.

    Args:
        measurements: takes those of a target that is measured.
    Raises:
        OutOfReach: the mechanism has no size, or all its costs are above the target, or all below it, by more than
            `TOLERANCE`.
        OptionError: attention is a list, or an option cannot be honoured.
    """
    if isinstance(run.attention, list):
        problem = "match sets the size of one mechanism, and this is a list; write match: false beside it to keep it"
        raise OptionError("attention", f"{problem}, or give one mechanism")
    factory = AttentionFactory.from_options(run.attention)
    contexts, solver = layer_contexts(*split_name(run.model)), measure_size if match.is_measured else count_size
    try:
        found, is_in_range = solver(match, run, factory, contexts, measurements)
    except NoSize as error:
        raise OutOfReach(str(error)) from None
    if not is_in_range and not found.is_equal:
        side = "above" if found.deviation > 0 else "below"
        problem = f"every size is {side} the target; the nearest, {found.option} = {found.value}, has {match.kind}"
        reached = f"{found.reached:.4g}{match.unit}, {found.deviation:+.1%}"
        raise OutOfReach(f"attention({factory.name}): {problem} = {reached}")
    return found


def count_size(
    match: Match, run: Run, factory: AttentionFactory, contexts: Sequence[LayerContext], _: Measurements
) -> tuple[Matched, bool]:
    """Returns the size with the nearest multiply-accumulates, and whether the target is between those of two sizes."""
    name, options = split_name(run.model)
    model = {"name": name, **vars(parse_model(name, options))}
    per_layer, others = 1.0, 0.0  # target quantity = per_layer * cost of a layer + others
    if match.kind == "token_macs":
        per_layer = len(contexts) / sum(context.num_tokens for context in contexts)
    elif match.kind == "model_macs":
        per_layer, others = len(contexts), count_costs(model, "softmax").macs - len(contexts) * softmax_macs(contexts)
    mechanism = ATTENTION[factory.name]
    size = solve_size(mechanism, contexts, factory.config, (match.target - others) / per_layer)
    assert mechanism.size_option is not None
    reached = per_layer * size.macs
    if match.kind == "model_macs":  # counted, as costs of layers leave out prefix tokens
        given = {"name": run.attention} if isinstance(run.attention, str) else run.attention
        reached = count_costs(model, {**given, mechanism.size_option: size.value}).macs
    override = to_override(run.attention, mechanism.size_option, size.value)
    return Matched(match, mechanism.size_option, size.value, reached, override), size.is_in_range


def softmax_macs(contexts: Sequence[LayerContext]) -> float:
    """Returns the multiply-accumulates of a layer of softmax attention beyond its projections: the mean over layers."""
    config = AttentionFactory.from_options("softmax").config
    return fmean(ATTENTION["softmax"].cost(context, config).macs for context in contexts)


def measure_size(
    match: Match, run: Run, factory: AttentionFactory, contexts: Sequence[LayerContext], measurements: Measurements
) -> tuple[Matched, bool]:
    """Returns the size with the nearest measured cost, and whether the target is between those of two sizes.

    Names on stderr each size that it measures.

    Raises:
        OptionError: a pass with the cost of the target takes more than `MAX_PASS_SECONDS`, in proportion to one that is
            measured.
    """
    mechanism, batch_size = ATTENTION[factory.name], match.batch_size or BATCH_SIZE
    nearest = functools.cache(functools.partial(solve_size, mechanism, contexts, factory.config))
    nearest(0.0)  # refuses a mechanism without a size
    name, machine = mechanism.size_option, machine_of(device_of(run))
    assert name is not None
    question = {
        "cost": match.kind,
        "attention": factory.name,
        "options": {**dataclasses.asdict(factory.config), name: None},
        "layers": [*list_places(contexts).items()],
        "batch_size": batch_size,
        "amp": run.train.amp,
        "kernels": run.train.kernels,
    }

    def measure(value: int) -> Measurement:
        print(
            f"match.{match.kind} = {match.target:g}{match.unit}: measuring {factory.name} with {name} = {value}",
            file=sys.stderr,
            flush=True,
        )
        config = dataclasses.replace(factory.config, **{name: value})
        return measure_layers(match.kind, mechanism, config, contexts, batch_size, run)

    def take(value: int) -> Measurement:
        return measurements.take(question, value, functools.partial(measure, value), machine)

    def cost(value: int) -> float:
        found = take(value)
        seconds = found.seconds * match.target / found.cost
        if found.cost < match.target and found.seconds > PROPORTIONAL and seconds > MAX_PASS_SECONDS:
            limit = f"lower it until that is at most {MAX_PASS_SECONDS:g} s"
            problem = f"a pass would take about {seconds:,.0f} s; {limit}"
            known = f"measured: {name} = {value}, {found.cost:.4g}{match.unit}"
            raise OptionError(f"match.{match.kind}", f" = {match.target:g}{match.unit}: {problem}; {known}")
        return found.cost

    start = softmax_macs(contexts) / 4
    value, is_in_range = find_size(match.target, nearest, cost, start, TOLERANCE)
    found, override = take(value), to_override(run.attention, name, value)
    machine = measurements.machine(question)
    return Matched(match, name, value, found.cost, override, found.error, machine), is_in_range


def find_size(
    target: float, nearest: Callable[[float], Size], cost: Callable[[int], float], start: float, tolerance: float
) -> tuple[int, bool]:
    """Returns the measured size whose cost is nearest to `target`, and whether another's is on its other side.

    Sizes are tried by their multiply-accumulates, by which costs are interpolated.

    Args:
        nearest: multiply-accumulates of a layer -> the valid size nearest to them. cost: measures a size.
        start: multiply-accumulates of the first size. tolerance: share of the target within which the search ends.
    """
    found: dict[int, tuple[float, float]] = {}  # size -> multiply-accumulates, cost
    candidates: Sequence[float] = [start]
    below = above = None
    while len(found) < MOST_SIZES:
        size = next((size for macs in candidates if (size := nearest(macs)).value not in found), None)
        if size is None:
            break
        found[size.value] = size.macs, cost(size.value)
        if abs(found[size.value][1] / target - 1) <= tolerance:
            break
        below = max((pair for pair in found.values() if pair[1] <= target), default=None)
        above = min((pair for pair in found.values() if pair[1] > target), default=None)
        if below is None or above is None:
            macs = size.macs
            candidates = [macs / f for f in (*FACTORS, math.inf)] if below is None else [macs * f for f in FACTORS]
        else:
            share = (target - below[1]) / (above[1] - below[1])  # 0 if the larger size does not fit into memory
            candidates = [below[0] + share * (above[0] - below[0]), (below[0] + above[0]) / 2]
    best = min(found, key=lambda size: abs(found[size][1] - target))
    return best, below is not None and above is not None


def to_override(attention: Any, name: str, value: int) -> str:
    """Returns the override that sets the size `name` of the mechanism that the option `attention` gives."""
    if isinstance(attention, str):  # no mapping, whose options could be set
        return f"attention={{name: {attention}, {name}: {value}}}"
    return f"attention.{name}={value}"
