"""Values of records as the console shows them."""

from collections.abc import Mapping
from typing import Any

from engine.evaluation.evaluate import RECALL
from engine.runtime.text import one_line

SHOWN = {
    "top1": "top-1 {:.2f} %",
    "top5": "top-5 {:.2f} %",
    "balanced_accuracy": "balanced {:.2f} %",
    "loss": "loss {:.4f}",
    "not_finite": "{:,} images not finite",
    "ema_top1": "EMA top-1 {:.2f} %",
    "ema_top5": "EMA top-5 {:.2f} %",
    "ema_balanced_accuracy": "EMA balanced {:.2f} %",
    "ema_loss": "EMA loss {:.4f}",
    "ema_not_finite": "EMA: {:,} images not finite",
    "best_top1": "best top-1 {:.2f} %",
    "best_ema_top1": "best EMA top-1 {:.2f} %",
    "best_balanced_accuracy": "best balanced {:.2f} %",
    "best_ema_balanced_accuracy": "best EMA balanced {:.2f} %",
    "best_loss": "best loss {:.4f}",
    "best_ema_loss": "best EMA loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "gradient {:.2f}",
    "parameters": "{:,} parameters",
    "macs": "{:,} MACs",
    "images_per_second": "{:.0f} images/s",
    "memory_mb": "{:.0f} MB",
    "data_wait": "{:.0f} % waiting for data",
    "num_skipped": "not finite, skipped ({} of the run)",
}
"""Format of each value that the console shows; it shows no other values."""


def format_values(values: Mapping[str, Any]) -> str:
    """Formats those of `values` that are in `SHOWN`, and the lowest recall of a class, on one line."""
    texts = [form.format(values[name]) for name, form in SHOWN.items() if name in values]
    if recalls := {name.removeprefix(RECALL): value for name, value in values.items() if name.startswith(RECALL)}:
        worst = min(recalls, key=recalls.__getitem__)
        texts.append(f"lowest recall {recalls[worst]:.2f} % ({one_line(worst, 30)})")
    return "  ".join(texts)
