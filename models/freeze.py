"""Frozen weights, which a run does not train; BatchNorm layers whose weights are frozen keep their statistics."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from attention.options import OptionError, nearest

BACKBONE = "backbone"
"""Value in place of a pattern that freezes everything but the classifier."""


def freeze(model: nn.Module, patterns: str | Sequence[str] | None) -> list[str]:
    """Excludes parameters of `model` from training; an optimiser made afterwards does not receive them.

    Args:
        patterns: shell patterns (``blocks.[0-5]``) of names of parameters or of the modules that hold them, or
            `BACKBONE`.
    Returns:
        The names of the frozen parameters.
    Raises:
        OptionError: a pattern matches nothing, or all parameters are frozen.
    """
    parameters = dict(model.named_parameters())
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    frozen = {name for pattern in patterns for name in _match(pattern, model)}
    if frozen == {*parameters}:
        problem = f" = {', '.join(patterns)} freezes every parameter; leave some to be trained, such as the classifier"
        raise OptionError("train.freeze", problem)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return [name for name in parameters if name in frozen]


def head_names(model: Any) -> list[str]:
    """The names of the classifier's weights; a distilled model has two classifiers."""
    found = model.get_classifier()
    weights = {id(weight) for part in (found if isinstance(found, tuple) else (found,)) for weight in part.parameters()}
    return [name for name, weight in model.named_parameters() if id(weight) in weights]


def _match(pattern: str, model: nn.Module) -> list[str]:
    """The names of the parameters that one pattern matches."""
    names = [name for name, _ in model.named_parameters()]
    if pattern == BACKBONE:
        head = head_names(model)
        return [name for name in names if name not in head]
    found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
    if not found:
        depth = pattern.count(".") + 1
        known = {".".join(name.split(".")[:depth]) for name in names} | {BACKBONE}
        raise OptionError("train.freeze", f" = {pattern!r} matches no parameter{nearest(pattern, known)}")
    return found


def describe_freeze(model: nn.Module, frozen: Sequence[str]) -> str:
    """``2 parameters (1,930 numbers) are trained, 150 (5,524,416) are frozen``."""
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    kept = [sizes[name] for name in frozen]
    count, total = len(sizes) - len(kept), sum(sizes.values()) - sum(kept)
    return f"{count} parameters ({total:,} numbers) are trained, {len(kept)} ({sum(kept):,}) are frozen"


def set_train_mode(model: nn.Module) -> None:
    """Sets training mode, except for BatchNorm layers whose parameters are all frozen, which keep their statistics."""
    model.train()
    trained = trained_batch_norms(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and name not in trained:
            module.eval()


def trained_batch_norms(model: nn.Module) -> list[str]:
    """Returns the names of the BatchNorm layers that normalise by the statistics of a batch in training."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return [name for name, x in layers if not x.affine or any(weight.requires_grad for weight in x.parameters())]
