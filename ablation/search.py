"""Settings from ranges: points of a scrambled Sobol sequence, which are more even than random points."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from attention.options import OptionError

DRAWS_PER_TRIAL = 100
"""Most points drawn per wanted setting, because points coincide if an option has few values."""


def sample(axes: Mapping[str, Any], trials: int, seed: int) -> list[dict[str, Any]]:
    """Returns `trials` different settings, option -> value. Fewer trials with the same seed give the first of them.

    Args:
        axes: option -> ``{"range": [low, high]}``, ``{"log_range": [low, high]}``, or a list of choices. Values
            between two integers are integers, others have four digits.
    Raises:
        OptionError: a malformed range, or fewer combinations than trials.
    """
    for key, axis in axes.items():
        check_axis(f"grid.{key}", axis)
    engine, settings = torch.quasirandom.SobolEngine(len(axes), scramble=True, seed=seed), {}
    for _ in range(DRAWS_PER_TRIAL * trials):
        point = engine.draw(dtype=torch.float64)[0].tolist()
        setting = {key: value_at(place, axis) for place, (key, axis) in zip(point, axes.items(), strict=True)}
        settings.setdefault(repr(setting), setting)
        if len(settings) == trials:
            return list(settings.values())
    raise OptionError("trials", f" = {trials}, but grid has fewer combinations; choose at most {len(settings)}")


def check_axis(key: str, axis: Any) -> None:
    """Refuses an axis that is neither a range nor a list of choices."""
    if isinstance(axis, list) and axis:
        return
    (kind, bounds), *more = axis.items() if isinstance(axis, dict) and axis else [(None, None)]
    if more or kind not in ("range", "log_range"):
        raise OptionError(key, f"expected a list, range: [LOW, HIGH] or log_range: [LOW, HIGH], got {axis!r}")
    is_pair = isinstance(bounds, list) and len(bounds) == 2
    if not is_pair or any(isinstance(bound, bool) or not isinstance(bound, int | float) for bound in bounds):
        raise OptionError(f"{key}.{kind}", f"expected two numbers, got {bounds!r}")
    if not bounds[0] < bounds[1] < math.inf or (kind == "log_range" and bounds[0] <= 0):
        rising = "two rising numbers" + " above 0" * (kind == "log_range")
        raise OptionError(f"{key}.{kind}", f"expected {rising}, got {bounds!r}")


def value_at(place: float, axis: Any) -> Any:
    """Returns the value of an axis at `place`, from 0 to 1."""
    if isinstance(axis, list):
        return axis[int(place * len(axis))]
    ((kind, (low, high)),) = axis.items()
    is_whole = isinstance(low, int) and isinstance(high, int)
    if is_whole and kind == "range":
        return low + int(place * (high - low + 1))
    value = low * (high / low) ** place if kind == "log_range" else low + (high - low) * place
    return round(value) if is_whole else float(f"{value:.4g}")
