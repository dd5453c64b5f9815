"""Weights of other models: of timm's hub, of other programs, of other runs. Files need not be trusted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from engine.checkpoint import WEIGHTS, ForeignCheckpoint, find_weights
from engine.checkpoint_format import read_foreign
from engine.config import MissingOptions, parse_run
from engine.errors import UserError, one_line
from engine.files import read_regular
from engine.schema import Run
from models import create_model

TIMM = "timm:"
"""What names of timm's hub begin with."""

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where training scripts keep weights in their files, the first there is counts: timm's order, averaged ones first."""

EXPECTED = f"expected a run directory, a checkpoint, a .safetensors or .pth file of weights, or {TIMM}NAME"
"""Remedy of a wrong source."""


class Source(NamedTuple):
    """Weights of another model.

    Attributes:
        state: name -> weight. model: their model, where known; it may be on the meta device.
        images: `mean` and `std` by which its images were normalised, as far as known.
    """

    state: dict[str, Tensor]
    model: nn.Module | None = None
    images: Mapping[str, Sequence[float]] = {}


def read_weights(name: str) -> Source:
    """The weights that `init.weights` names: those of averaged weights where there are both kinds.

    Of a run directory they are of the best checkpoint. A file need not be trusted: no code in it is run.

    Raises:
        UserError: no such file or name, or no weights in it.
    """
    if name.startswith(TIMM):
        model = load_timm(name.removeprefix(TIMM))
        return Source(model.state_dict(), model, {key: model.pretrained_cfg[key] for key in ("mean", "std")})
    path = Path(name).expanduser().resolve()
    try:
        _, checkpoint, kinds = find_weights(path, "best", None)[-1]
        there = parse_run(checkpoint["config"], str(path))
    except (ForeignCheckpoint, MissingOptions):  # a new run says itself what its model is
        return Source(_read_foreign(path))
    except UserError as error:
        raise UserError(f"{error}; {EXPECTED}") from None
    return source_of(there, checkpoint[WEIGHTS[kinds[-1]]])


def source_of(run: Run, state: dict[str, Tensor]) -> Source:
    """The weights `state` of a run's model."""
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
    return Source(clean_state_dict(state), model, {"mean": run.data.mean, "std": run.data.std})


def load_timm(name: str) -> Any:  # nn.Module, whose attributes are tensors or modules to type checkers
    """The model of timm's hub under this name, whose weights timm downloads or takes from its cache.

    Raises:
        UserError: timm cannot load it.
    """
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # timm's own and many of the hub's
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        remedy = f"see timm.list_pretrained(); offline, name a folder that holds it: {TIMM}local-dir:FOLDER"
        raise UserError(f"{TIMM}{name}: timm cannot load it ({reason}); {remedy}") from None


def _read_foreign(path: Path) -> dict[str, Tensor]:
    """The weights in a file of another program."""
    content = read_regular(path)
    try:
        found = read_foreign(content)
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        remedy = "save its weights alone, with torch.save(model.state_dict(), FILE)"
        raise UserError(f"{path}: cannot be loaded safely ({reason}); {remedy}") from None
    state = next((found[key] for key in NESTED if isinstance(found.get(key), Mapping)), found)
    if not state or not all(
        isinstance(key, str) and key.isprintable() and torch.is_tensor(x) for key, x in state.items()
    ):
        raise UserError(f"{path}: holds no weights, but {one_line(', '.join(map(repr, found)), 100)}; {EXPECTED}")
    return clean_state_dict(state)
