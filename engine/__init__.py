"""Engine of the scripts, in rooms: data, checkpoints, training and what they share."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

for _name in ("attention", "models"):  # `python -m` looks into the current directory first
    _spec = find_spec(_name)
    if _spec and _spec.origin and Path(_spec.origin).resolve() != _ROOT / _name / "__init__.py":
        _remedy = f"rename it, or run this in a directory without a module {_name}"
        raise ImportError(f"{_spec.origin} stands in the place of this project's {_name} ({_ROOT / _name}): {_remedy}")
