"""Options as earlier versions wrote them, which configurations and checkpoints may still hold."""

import warnings
from collections.abc import Mapping
from typing import Any

from attention.options import OptionError

SAMPLING = {
    "draws": "omega_sampling",
    "eval_draws": "eval_omega_sampling",
    "sampling": "feature_redraw",
    "redraw_every": "feature_redraw_interval",
}
RENAMED = {"performer": SAMPLING, "scatterbrain": {**SAMPLING, "complement": "leave_one_out"}}
"""Mechanism -> former name of an option -> its name now."""


def modernise(name: str, options: Mapping[str, Any], path: str) -> tuple[str, dict[str, Any]]:
    """A mechanism's name and options in the words of today; says what has another name now.

    Args:
        path: of the mechanism in the user's configuration, to begin messages with.
    Raises:
        OptionError: an option under both of its names.
    """
    options = dict(options)
    if name == "scatterbrain" and options.pop("support", "local") == "lsh":
        name, options = "scatterbrain_lsh", _hashed(options)
        warnings.warn(f"{path}: scatterbrain with support: lsh is now scatterbrain_lsh", FutureWarning, stacklevel=3)
    elif name == "scatterbrain":
        options.pop("num_rounds", None)  # of hashing alone
    renamed = {old: new for old, new in RENAMED.get(name.removesuffix("_lsh"), {}).items() if old in options}
    for old, new in renamed.items():
        if new in options:
            raise OptionError(f"{path}({name}).{old}", f"is now {new}, which is given too; leave {old} out")
        options[new] = options.pop(old)
        warnings.warn(f"{path}({name}).{old} is now {new}", FutureWarning, stacklevel=3)
    return name, options


def _hashed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of support: lsh, whose clusters were as large as the windows that they took the place of."""
    side, layout = options.pop("window_size", 7), options.pop("layout", "2d")
    without_effect = ("overlap", "position_bias", "complement")
    kept = {key: value for key, value in options.items() if key not in without_effect}
    return {**kept, "cluster_size": side**2 if layout == "2d" and isinstance(side, int) else side}
