"""Settings from ranges: points of a scrambled Sobol sequence, which are more even than random points."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attention.options import OptionError
from engine.runtime.errors import ConfigError

DRAWS_PER_TRIAL = 100
"""Most points drawn per wanted setting, because points coincide if an option has few values."""

REFUSED_PER_TRIAL = 5
"""Most points per wanted setting that may be no valid run."""


def sample(
    axes: Mapping[str, Any], trials: int, seed: int, check: Callable[[dict[str, Any]], None] = lambda setting: None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns `trials` different settings, option -> value, and the errors of points that `check` has refused.

    Fewer trials with the same seed give the first of the settings. The next point takes the place of a refused one.

    Args:
        axes: option -> ``{"range": [low, high]}``, ``{"log_range": [low, high]}``, or a list of choices. Values
            between two integers are integers, others have four digits.
        check: raises a ConfigError for a setting that is no valid run.
    Raises:
        OptionError: a malformed range, fewer combinations than trials, or too many refused points.
    """
    for key, axis in axes.items():
        check_axis(f"grid.{key}", axis)
    engine = torch.quasirandom.SobolEngine(len(axes), scramble=True, seed=seed)
    settings: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for _ in range(DRAWS_PER_TRIAL * trials):
        point = engine.draw(dtype=torch.float64)[0].tolist()
        setting = {key: value_at(place, axis) for place, (key, axis) in zip(point, axes.items(), strict=True)}
        if (name := repr(setting)) in settings or name in refused:
            continue
        try:
            check(setting)
        except ConfigError as error:
            refused[name] = str(error)
            if len(refused) > REFUSED_PER_TRIAL * trials:
                break
            continue
        settings[name] = setting
        if len(settings) == trials:
            return list(settings.values()), list(refused.values())
    found = f"grid has fewer combinations; choose at most {len(settings)}"
    if refused:
        points = len(settings) + len(refused)
        found = f"{len(settings)} of {points} points of grid are valid runs; the last is not: {[*refused.values()][-1]}"
    raise OptionError("trials", f" = {trials}, but {found}")


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
