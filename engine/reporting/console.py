"""Values of records as the console shows them."""

from collections.abc import Mapping
from typing import Any

from engine.checkpoints.progress import Resumption
from engine.runtime.text import one_line

SHOWN = {
    "top1": "top-1 {:.2f} %",
    "top5": "top-5 {:.2f} %",
    "loss": "loss {:.4f}",
    "ema_top1": "EMA top-1 {:.2f} %",
    "ema_top5": "EMA top-5 {:.2f} %",
    "ema_loss": "EMA loss {:.4f}",
    "best_top1": "best top-1 {:.2f} %",
    "best_ema_top1": "best EMA top-1 {:.2f} %",
    "best_loss": "best loss {:.4f}",
    "best_ema_loss": "best EMA loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "gradient {:.2f}",
    "parameters": "{:,} parameters",
    "macs": "{:,} MACs",
    "images_per_second": "{:.0f} images/s",
    "mfu": "MFU {:.1f} %",
    "memory_mb": "{:.0f} MB",
    "data_wait": "{:.0f} % waiting for data",
    "num_skipped": "not finite, skipped ({} of the run)",
}
"""Format of each value that the console shows; it shows no other values."""


def format_values(values: Mapping[str, Any]) -> str:
    """Formats those of `values` that are in `SHOWN`, on one line."""
    return "  ".join(form.format(values[name]) for name, form in SHOWN.items() if name in values)


def describe_resumption(resumption: Resumption, where: str, others: Mapping[str, tuple[Any, Any]] = {}) -> str:
    """Returns the text that says from which checkpoint a run resumes, `where` that is in the run, and what differs.

    Args:
        others: name -> value before and now, besides options and data; equal values are left out.
    """
    pairs = {**resumption.differences, **{name: pair for name, pair in others.items() if pair[0] != pair[1]}}
    lines = [f"  {name}: {_short(before)} -> {_short(now)}" for name, (before, now) in pairs.items()]
    source = f"resumes from {resumption.checkpoint}  {where}; "
    return "\n".join([source + ("differences:" if lines else "nothing differs"), *lines])


def _short(value: Any) -> str:
    return one_line(str(value), 60)
