"""Hosts that `replace_attention` takes, and why not the others: ``python -m models.census [PATTERN...]``.

A pattern is one of timm's names with wildcards, such as ``vit_*dinov3*``, or ``hf:`` and a model type of transformers,
such as ``hf:dinov2``. Without one, the command goes through all architectures of timm and ten types of transformers.
Models are built on the meta device, without weights; the complete census takes ten minutes.
"""

import sys
from collections import Counter

import timm
import torch

from models import MODELS
from models.hosts import attention_calls
from models.of_transformers import FAMILIES, HF


def verdict(name: str) -> tuple[bool, str]:
    """Whether `replace_attention` takes a model, and its attention layers or the reason."""
    try:
        with torch.device("meta"):
            if name.startswith(HF):
                from transformers import AutoConfig, AutoModel

                model = AutoModel.from_config(AutoConfig.for_model(name.removeprefix(HF)))
            else:
                model = timm.create_model(name)
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
    of_timm = [name for name in patterns if not name.startswith(HF)]
    names = [name for name in timm.list_models(of_timm or "*") if name not in MODELS] if of_timm or not patterns else []
    names += [name for name in patterns or map(HF.__add__, [*FAMILIES.split(), "vit_mae"]) if name.startswith(HF)]
    if not names:
        sys.exit(f"error: {' '.join(patterns)}: no architecture of timm has such a name; `timm.list_models()` has all")
    taken = 0
    for name in names:
        is_taken, reason = verdict(name)
        taken += is_taken
        print(f"{name}: {'' if is_taken else 'refused: '}{reason}", flush=True)
    print(f"{taken} of {len(names)} architectures")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv[1:])
