"""Budgets on a command line, ``--budget KEY=LIMIT``."""

import math
from collections.abc import Mapping

from attention.options import OptionError, nearest


def parse_budget(text: str, meanings: Mapping[str, str]) -> tuple[str, float]:
    """Parses ``"ms=5"`` as a key and a limit.

    Args:
        meanings: key -> what a budget of it limits.
    Raises:
        OptionError: an unknown key, or a limit that is not a number above 0.
    """
    key, _, value = text.partition("=")
    if key not in meanings:
        raise OptionError("--budget", f"{text!r}: unknown budget{nearest(key, meanings)}; write ms=5")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise OptionError("--budget", f"{text!r}: {value!r} is not a number above 0; {key} is {meanings[key]}")
    return key, limit
