"""Weights of other models: from timm's hub, other programs or other runs. Files need not be trusted."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from engine.checkpoints.files import WEIGHTS, choose_weights
from engine.checkpoints.identify import FOREIGN, TIMM, Found, Kind, identify
from engine.checkpoints.released import Unsupported
from engine.config.load import MissingOptions, parse_run
from engine.config.schema import Run
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error, one_line
from models import create_model

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys of the weights in files of training scripts, in timm's order, averaged ones first. The first found counts."""

EXPECTED = f"expected a run directory, a checkpoint, a .safetensors or .pth file of weights, or {TIMM}NAME"
"""Remedy for a wrong source."""


class Source(NamedTuple):
    """Weights of another model.

    Attributes:
        state: name -> weight. model: their model if it is known; it may be on the meta device.
        images: `mean` and `std` by which its images were normalised, as far as they are known.
        classes: names in the order of its classifier; None: not known.
        origin: what the weights were read from, and which of its weights they are, in words.
    """

    state: dict[str, Tensor]
    model: nn.Module | None = None
    images: Mapping[str, Sequence[float]] = {}
    classes: Sequence[str] | None = None
    origin: str = ""


def read_weights(name: str) -> Source:
    """Reads the weights that `init.weights` names, averaged ones if both kinds exist.

    In a run directory, the best checkpoint has them. A file need not be trusted: no code in it is run.

    Raises:
        UserError: no such file or name, or no weights in it.
    """
    try:
        found = identify(name, follow_links=True)
    except UserError as error:
        raise UserError(f"{error}; {EXPECTED}") from None
    if found.kind is Kind.HUB:
        model = load_timm(name.removeprefix(TIMM))
        config = model.pretrained_cfg
        images = {key: config[key] for key in ("mean", "std")}
        return Source(model.state_dict(), model, images, config.get("label_names"), found.kind.value)
    if found.kind in FOREIGN:
        return _read_state(found)
    try:
        path, checkpoint, kinds = choose_weights(found, "best", None)[-1]
        run, state = parse_run(checkpoint["config"], str(found.path)), checkpoint[WEIGHTS[kinds[-1]]]
        taken = WEIGHTS[kinds[-1]] + (f" in {path.name}" if found.kind is Kind.RUN else "")
        origin = f"{found.kind.value}: its {taken}"
        return source_of(run, state)._replace(classes=checkpoint.get("classes"), origin=origin)
    except UserError as error:
        if found.kind is Kind.RELEASED and isinstance(error, Unsupported | MissingOptions):
            return _read_state(found)  # a new run describes its model itself
        raise UserError(f"{error}; {EXPECTED}") from None


def source_of(run: Run, state: dict[str, Tensor]) -> Source:
    """Returns the weights `state` of a run's model."""
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
    return Source(clean_state_dict(state), model, {"mean": run.data.mean, "std": run.data.std})


def load_timm(name: str) -> Any:  # nn.Module, whose attributes are tensors or modules to type checkers
    """Creates the model of timm's hub of this name; timm downloads its weights or takes them from its cache.

    Raises:
        UserError: timm cannot load it.
    """
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # errors of timm, and many of the hub
        remedy = f"see timm.list_pretrained(); offline, name a folder that holds it: {TIMM}local-dir:FOLDER"
        raise UserError(f"{TIMM}{name}: timm cannot load it ({describe_error(error)}); {remedy}") from None


def _read_state(found: Found) -> Source:
    """Reads the weights alone from a file of another program."""
    content = found.values()
    kept = [key for key in NESTED if isinstance(content.get(key), Mapping)]
    state = content[kept[0]] if kept else content
    are_weights = (isinstance(k, str) and k.isprintable() and torch.is_tensor(x) for k, x in state.items())
    if not state or not all(are_weights):
        names = one_line(", ".join(map(repr, content)), 100)
        raise UserError(f"{found.path}: holds no weights, but {names}; {EXPECTED}")
    clean = clean_state_dict(dict(state))
    origin = found.kind.value + (f": its {', not its '.join(kept)}" if kept else "")
    if len(clean) == len(state) and (prefixes := {*map(str.removesuffix, state, clean)} - {""}):
        origin += f"; names without {' or '.join(sorted(prefixes))}"
    return Source(clean, origin=origin)
