"""Options as earlier versions wrote them, which configurations and checkpoints may still hold."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attention.options import OptionError, option, parse_options

SAMPLING = {
    "draws": "omega_sampling",
    "eval_draws": "eval_omega_sampling",
    "sampling": "feature_redraw",
    "redraw_every": "feature_redraw_interval",
}
RENAMED = {
    "performer": SAMPLING,
    "ra": {"hyperbolic": "features"},
    "scatterbrain": {**SAMPLING, "complement": "leave_one_out"},
    "scatterbrain_lsh": SAMPLING,
}
"""Mechanism -> former name of an option -> its name now."""
REWORDED = {"hyperbolic": ((False, "positive"), (True, "hyperbolic"))}
"""Former name of an option -> pairs of a value and what it is called now; others are called the same."""


@dataclass(frozen=True, kw_only=True)
class HashedSupport:
    """Options of `scatterbrain` that had another meaning, or none, with ``support: lsh``."""

    support: Literal["local", "lsh"]
    window_size: int = option(7, "clusters were as large as the windows that they replaced", low=1)
    layout: Literal["1d", "2d"] = option("2d", "of these windows")
    overlap: Literal[0] = option(0, "had no meaning")
    position_bias: Literal["none"] = option("none", "had no meaning")
    complement: Literal["merge"] = option("merge", "had no meaning")


def modernise(name: str, options: Mapping[str, Any], path: str) -> tuple[str, dict[str, Any]]:
    """A mechanism's name and options in the words of today; warns of what has another name now.

    Args:
        path: of the mechanism in the user's configuration, to begin messages with.
    Raises:
        OptionError: an option under both of its names, or one that was invalid under its former name.
    """
    options = dict(options)
    if name == "scatterbrain" and "support" in options:
        if options["support"] == "local":
            options = {key: value for key, value in options.items() if key not in ("support", "num_rounds")}
        else:
            name, options = "scatterbrain_lsh", _hashed(options, f"{path}({name})")
            message = f"{path}: scatterbrain with support: lsh is now scatterbrain_lsh"
            warnings.warn(message, FutureWarning, stacklevel=3)
    for old, new in RENAMED.get(name, {}).items():
        if old in options:
            if new in options:
                raise OptionError(f"{path}({name}).{old}", f"is now {new}, which is given too; leave {old} out")
            value = options.pop(old)
            options[new] = next((now for then, now in REWORDED.get(old, ()) if value is then), value)
            warnings.warn(f"{path}({name}).{old} is now {new}", FutureWarning, stacklevel=3)
    return name, options


def _hashed(options: dict[str, Any], path: str) -> dict[str, Any]:
    """The options of `scatterbrain_lsh` for those of support: lsh."""
    former = HashedSupport.__dataclass_fields__
    old = parse_options(HashedSupport, {key: value for key, value in options.items() if key in former}, path)
    kept = {key: value for key, value in options.items() if key not in former}
    return {**kept, "cluster_size": old.window_size if old.layout == "1d" else old.window_size**2}
