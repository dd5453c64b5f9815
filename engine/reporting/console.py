"""Values of records as the console shows them."""

from collections.abc import Mapping
from typing import Any

from engine.evaluation.evaluate import RECALL
from engine.runtime.text import one_line

SCORES = {
    "top1": "top-1 {:.2f} %",
    "top5": "top-5 {:.2f} %",
    "balanced_accuracy": "balanced {:.2f} %",
    "loss": "loss {:.4f}",
    "not_finite": "{:,} images not finite",
}
"""Format of each value of an evaluation."""

KINDS = {"": "", "ema_": "EMA ", "best_": "best ", "best_ema_": "best EMA "}
"""Beginning of the name of a value -> beginning of its text."""

SHOWN = {
    **{f"{kind}{name}": f"{text}{form}" for kind, text in KINDS.items() for name, form in SCORES.items()},
    "lr": "lr {:.2e}",
    "grad_norm": "gradient {:.2f}",
    "parameters": "{:,} parameters",
    "macs": "{:,} MACs",
    "images_per_second": "{:.0f} images/s",
    "memory_mb": "{:.0f} MB",
    "data_wait": "{:.0f} % waiting for data",
}
"""Format of each value that the console shows; it shows no other values."""


def format_values(values: Mapping[str, Any]) -> str:
    """Formats those of `values` that are in `SHOWN`, and the lowest recall of a class, on one line."""
    texts = [form.format(values[name]) for name, form in SHOWN.items() if name in values]
    if recalls := {name.removeprefix(RECALL): value for name, value in values.items() if name.startswith(RECALL)}:
        worst = min(recalls, key=recalls.__getitem__)
        texts.append(f"lowest recall {recalls[worst]:.2f} % ({one_line(worst, 30)})")
    return "  ".join(texts)
