"""Loads weights into a model after a check, without any allocation, that they fit."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.config.schema import Run
from engine.objectives import choose_objective
from engine.runtime.errors import UserError
from models import create_model
from models.budgets import cut_weights


def build_model(run: Run, state: Mapping[str, Any], source: str, is_part: bool = False) -> nn.Module:
    """Builds the model that `run` describes, with the weights `state`; is_part: see `check_fit`.

    `run` may come from an untrusted file: nothing is allocated before `state` is known to fit, see `load_weights`.
    """
    state = check_state(run, state, source, is_part)
    model = create_model(attention=run.attention, **run.model)
    load_weights(model, state, source)
    return model


def check_predicts_classes(run: Run, source: str, of_metrics: bool = False) -> None:
    """Refuses, by a UserError, a model that predicts no classes of images, see `Objective.prediction_refusal`."""
    if problem := choose_objective(run).prediction_refusal(source, of_metrics):
        raise UserError(f"{source}: {problem}")


def check_state(run: Run, state: Mapping[str, Any], source: str, is_part: bool = False) -> dict[str, torch.Tensor]:
    """Returns what `check_fit` does, for the model that `run` describes, without allocating that."""
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
    return check_fit(model, state, source, is_part)


def load_weights(model: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Loads `state` into `model`; names may carry the prefixes of torch's wrappers.

    Raises:
        UserError: names or shapes that do not fit, a model that takes far more memory than the weights, or weights that
            are not finite; the message begins with `source`.
    """
    model.load_state_dict(check_fit(model, state, source))


def check_fit(model: nn.Module, state: Mapping[str, Any], source: str, is_part: bool = False) -> dict[str, Any]:
    """Returns `state` without the prefixes of torch's wrappers, checked to fit `model`, perhaps on the meta device.

    is_part: the weights are of the same attention, perhaps with larger windows, of whose tables the model takes a part.
    """
    state = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in state.items()}
    state = cut_weights(state, model, is_part)
    problems = describe_misfits(state, model.state_dict())
    if not problems:
        _check_memory(model, state, source)
        problems = _describe({"not finite": list_not_finite(model, state)})
    if problems:
        raise UserError(f"{source}: the checkpoint's weights do not fit: {problems}")
    return state


def describe_misfits(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """Describes where names and shapes in `state` differ from `expected`; "" if nowhere."""
    return _describe(
        {
            "missing": [name for name in expected if name not in state],
            "unexpected": [name for name in state if name not in expected],
            "of another shape": [
                f"{name} {tuple(state[name].shape)} for {tuple(expected[name].shape)}"
                for name in expected
                if name in state and state[name].shape != expected[name].shape
            ],
        }
    )


def _describe(problems: Mapping[str, list[str]]) -> str:
    """Returns ``2 missing: head.weight, head.bias; 1 unexpected: fc.weight``, at most five names per problem."""
    return "; ".join(
        f"{len(names)} {problem}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
        for problem, names in problems.items()
        if names
    )


def _check_memory(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Refuses weights that share memory and so would need far more of it in a model."""
    needed = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    held = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in state.values()}.values())
    if needed > 4 * held + 2**28:  # saved weights may have fewer bits; unsaved tables take some memory
        raise UserError(f"{source}: the model takes {needed:,} bytes, but the checkpoint holds {held:,} for it")


def list_not_finite(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Lists the parameters and buffers in `state` that are not finite; NaN in a buffer of one number is "unknown"."""
    parameters = {name for name, _ in model.named_parameters()}
    return [name for name, x in state.items() if (x.ndim or name in parameters) and not x.isfinite().all()]
