"""Hosts that `replace_attention` takes, and why not the others: ``python -m models.census [PATTERN...]``.

A pattern is one of timm's names with wildcards, such as ``vit_*dinov3*``, or ``hf:`` and a model type of transformers,
such as ``hf:dinov2``. Without one, the command goes through all architectures of timm and `FAMILIES` of transformers.
Models are built on the meta device, without weights; the complete census takes ten minutes.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import timm
import torch
from torch import nn

from models import MODELS
from models.hosts import attention_calls

FAMILIES = (
    "vit deit dinov2 dinov2_with_registers dinov3_vit siglip_vision_model clip_vision_model ijepa vit_msn vit_mae"
)
"""Model types of transformers that the census goes through."""


def of_transformers(model_type: str) -> nn.Module:
    """The model of a type of transformers, with the default options of its configuration."""
    from transformers import AutoConfig, AutoModel

    model: nn.Module = AutoModel.from_config(AutoConfig.for_model(model_type))
    return model


def verdict(build: Callable[[], nn.Module]) -> tuple[bool, str]:
    """Whether `replace_attention` takes a model, and its attention layers or the reason."""
    try:
        with torch.device("meta"):
            model = build()
        calls = attention_calls(model)
    except (ValueError, RuntimeError, ImportError) as error:
        return False, str(error).partition("\n")[0]
    classes = Counter(type(model.get_submodule(call.name)).__name__ for call in calls)
    layers = ", ".join(f"{count} {name}" for name, count in classes.items())
    if problem := next((f"{call.name} {call.problem}" for call in calls if call.problem), None):
        return False, f"{layers}: {problem}"
    order = "" if all(call.has_order for call in calls) else ", for mechanisms that ignore the order of tokens"
    return True, f"{layers}{order}"


def main(patterns: list[str]) -> None:
    types = [name.removeprefix("hf:") for name in patterns if name.startswith("hf:")]
    of_timm = [name for name in patterns if not name.startswith("hf:")]
    names = [] if types and not of_timm else [name for name in timm.list_models(of_timm or "*") if name not in MODELS]
    hosts: dict[str, Callable[[], nn.Module]] = {name: partial(timm.create_model, name) for name in names}
    for name in types if patterns else FAMILIES.split():
        hosts[f"hf:{name}"] = partial(of_transformers, name)
    if not hosts:
        sys.exit(f"error: {' '.join(patterns)}: no architecture of timm has such a name; `timm.list_models()` has all")
    taken = 0
    for name, build in hosts.items():
        is_taken, reason = verdict(build)
        taken += is_taken
        print(f"{name}: {'' if is_taken else 'refused: '}{reason}", flush=True)
    print(f"{taken} of {len(hosts)} architectures")


if __name__ == "__main__":
    main(sys.argv[1:])
