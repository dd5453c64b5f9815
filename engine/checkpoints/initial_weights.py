"""Initial weights of a run: those weights of another model that fit, and a table of the outcome."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from torch import nn

from engine.checkpoints.adapt import fit_weights, list_heads, list_other_options, merge_layers, summarize, table
from engine.checkpoints.identify import list_checkpoints
from engine.checkpoints.progress import Weights
from engine.checkpoints.weight_sources import describe_unnamed, read_weights
from engine.config.schema import Run
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import describe_difference, numbers_of, one_line
from models import create_model
from models.convert import assume_grid, grid_of
from models.freeze import describe_freeze, freeze, head_names


def create_initial_model(run: Run, output: Path, world: World, classes: Sequence[str] | None = None) -> nn.Module:
    """Creates the model of `run` with the weights that `init` names, unless the run in `output` has checkpoints.

    Freezes what `train.freeze` names. The primary rank prints the outcome of every weight and how many are trained.

    Args:
        classes: names of the data's classes, see `fit_weights`.
    Raises:
        UserError: weights cannot be read or do not fit the model, or with `init.strict` not all of them fit.
    """
    model = create_model(attention=run.attention, **run.model)
    is_resumed = bool(list_checkpoints(output))
    initial = [name for name, _ in model.named_parameters()]
    if run.init.weights is not None and not is_resumed:
        initial = load_initial_weights(model, run, world, classes)
    if (frozen := freeze(model, run.train.freeze)) and world.is_primary:
        print(f"train.freeze: {describe_freeze(model, frozen)}", flush=True)
        if random := [] if is_resumed else [name for name in frozen if name in initial]:
            names = one_line(", ".join(merge_layers(random)), 200)
            hint = f"{len(random)} of the frozen parameters stay at their random initial values: {names}"
            print(f"warning: train.freeze: {hint}", file=sys.stderr, flush=True)
    return model


def load_initial_weights(
    model: nn.Module, run: Run, world: World, classes: Sequence[str] | None = None, weights: Weights | None = None
) -> list[str]:
    """Loads the weights that `init` names, see `read_weights`, and prints their outcome, see `create_initial_model`.

    Returns the names of the parameters that keep their initial values.
    """
    name = run.init.weights
    assert name is not None, "there is nothing to load"
    place = f"init.weights={name}"
    try:
        source = read_weights(name, weights)
    except UserError as error:
        raise UserError(f"init.weights: {error}") from None
    state, outcome = fit_weights(model, source, place, classes)
    if run.init.strict and (rest := summarize(outcome)):
        raise UserError(f"{place}: init.strict=true, but not all is loaded as it is: {rest}")
    head = state.keys() & head_names(model)
    others = [] if source.model is None else list_other_options(source.model, model, bool(head))
    if run.init.strict and others:
        raise UserError(f"{place}: init.strict=true, but {'; '.join(others)}")
    model.load_state_dict(state, strict=False)
    if world.is_primary:
        print("\n".join([place, f"  source   {source.origin}", *table(outcome)]), flush=True)
        if source.model is None and source.num_heads is None:
            print(f"  heads    not known from this file; model.num_heads={list_heads(model)} is taken", flush=True)
        positions, grid = source.state.get("pos_embed"), grid_of(model)
        if source.model is None and positions is not None and positions.ndim == 3 and grid:
            assumed = "x".join(map(str, assume_grid(source.state, grid)))
            print(f"  grid     of positions not known from this file; {assumed} is taken", flush=True)
        if classes is not None and (note := describe_classes(head, source.classes, classes)):
            print(f"  classes  {note}", flush=True)
        for line in others:
            print(f"warning: {line}", file=sys.stderr, flush=True)
        for key, value in source.images.items():
            if list(value) != list(getattr(run.data, key)):
                hint = f"is {list(getattr(run.data, key))}, that of these weights was {list(value)}"
                print(f"warning: data.{key} {hint}: data.{key}={list(value)} keeps it", file=sys.stderr, flush=True)
    return [*outcome["fresh"], *outcome["re-made"]]


def describe_classes(head: Collection[str], there: Sequence[str] | None, here: Sequence[str]) -> str:
    """Returns how the classes of the weights `head` of a classifier were matched with the data's; "" if names are the
    same, or without weights."""
    if not head:
        return ""
    if there is None:
        return describe_unnamed(here)
    if numbers_of(here, there):
        return "the data's numbers, taken for positions in the weights' names"
    if list(there) != list(here):
        return f"matched by name: {describe_difference(there, here, ('the weights', 'the data'))}"
    return "numbers, taken for the same on both sides" if all(map(str.isdecimal, here)) else ""
