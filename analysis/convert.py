"""One command from a trained model to a faster one: search, alignment, fine-tuning, a comparison, and an export.

python analyze.py convert runs/softmax --budget macs=0.7 --output runs/faster
python analyze.py convert runs/softmax --budget ms=40 --attention eva linear --finetune 5 --output runs/faster

A mechanism for each layer is searched, and aligned, as by `analyze.py search`, in DIR/search; what is chosen is trained
further as by `train.py`, in DIR/tuned. The same command continues an interrupted one, and repeats no finished part.
Images that are all of one class, which the model does not have, are without labels: nothing is fine-tuned for them.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis import search
from analysis.certificate import Certificate, count_changed
from analysis.costs import ROUNDS, forward
from analysis.trained import UNLABELLED, Trained, find_columns, load_trained
from analysis.tune import check_apart
from bench.timing import MAX_ERROR, Quartiles, cpu_clock, time_rounds
from engine.checkpoints.export import export
from engine.checkpoints.files import NOISE, open_weights
from engine.data.loaders import create_val_loader
from engine.data.splits import open_split
from engine.objectives.classification import rank_classes
from engine.objectives.distillation import digest_weights
from engine.reporting.tables import as_cells, compact_table
from engine.runtime.distributed import World, autocast, precision
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.memory import peak_bytes
from engine.runtime.ownership import make_output
from engine.runtime.provenance import device_name
from engine.runtime.reading import MAX_TEXT, parse_json, read_bounded
from engine.runtime.terminal import progress
from models import depths_of
from models.assignment import assign, text_of
from models.costs import count_costs

STATE, EXPORT = "convert.json", "model.safetensors"
"""Files of the directory: the options of the command and its finished parts; the export."""


def main(args: argparse.Namespace) -> None:
    """Runs the parts that `args.output` does not have. args.train: the function of train.py's arguments."""
    search.read_budgets(args.budget)
    if len(args.budget) > 1:
        raise UserError(f"--budget {' '.join(args.budget)}: a model is converted for one; give one")
    trained = load_trained(args)
    columns, note = find_columns(trained, open_split(trained.run.data, "val_split"))
    is_labelled = note != UNLABELLED
    if args.finetune and not is_labelled:
        raise UserError(f"--finetune {args.finetune}: {UNLABELLED}; leave it out")
    is_tuned = is_labelled and args.finetune != 0
    check_apart(trained)
    make_output(args.output, ["report.md", "report.csv", STATE, EXPORT])
    options = {name: x for name, x in vars(args).items() if name not in ("question", "output", "train")}
    options |= {"checkpoint": f"{args.checkpoint}, {digest_weights(trained.source.state)[:16]}"}
    state = read_state(args.output, options)

    def keep(**values: Any) -> None:
        state.update(values)
        write_file(args.output / STATE, json.dumps(state, indent=1).encode())

    if "point" not in state:
        print(f"convert 1/3: a mechanism for each layer, {args.output}/search", file=sys.stderr, flush=True)
        found = search.main(argparse.Namespace(**vars(args) | {"output": args.output / "search"}))
        if not found:
            raise UserError(f"--budget {args.budget[0]}: nothing within it was measured; raise --evaluations")
        [(path, certificate)] = found.values()
        keep(point=path.stem, choices=certificate.choices)
    point = args.output / "search" / "front" / state["point"]
    sources = {"aligned": point.with_suffix(".safetensors")}
    if is_tuned:
        sources["fine-tuned"] = args.output / "tuned"
        if "tuned" not in state or not sources["fine-tuned"].exists():
            print(f"convert 2/3: training, {args.output}/tuned", file=sys.stderr, flush=True)
            epochs = [] if args.finetune is None else [f"schedule.epochs={args.finetune}"]
            args.train([f"{point}.yaml", "--output", str(args.output / "tuned"), *epochs])
            keep(tuned=True)
    if not all((args.output / name).exists() for name in ("report.md", EXPORT)):
        print("convert 3/3: all models on all validation images, and an export", file=sys.stderr, flush=True)
        plain = vars(args) | {"overrides": [], "weights": None, "select": "best"}
        models = {
            name: load_trained(argparse.Namespace(**plain | {"checkpoint": path}), reads_images=False)
            for name, path in sources.items()
        }
        rows = compare({"original": trained, **models}, columns, is_labelled, args.batch_size)
        chosen = max(rows[1:], key=lambda row: (row["top1"], row["model"]))
        _, checkpoint, kind, *_ = open_weights(sources[chosen["model"]])
        if chosen["model"] == "fine-tuned" and trained.classes:  # names, where the data have numbers
            checkpoint |= {"classes": [trained.classes[column] for column in columns]}
        export(str(args.output / EXPORT), models[chosen["model"]].run, checkpoint, kind)
        write_file(args.output / "report.csv", dicts_to_csv(rows))
        text = report(rows, chosen, trained, None if is_labelled else state["choices"], args)
        write_file(args.output / "report.md", text.encode())
    print(read_bounded(args.output / "report.md", MAX_TEXT).decode())


def read_state(directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the directory keeps, or the options alone; a UserError: of other options, or the file is damaged."""
    path, remedy = directory / STATE, "delete it, and give the command again"
    if not path.exists():
        return {"options": options}
    state = parse_json(read_bounded(path, MAX_TEXT), path, remedy)
    if not isinstance(state, dict) or not isinstance(former := state.get("options"), dict):
        raise UserError(f"{path}: no file of convert; {remedy}")
    for name, value in options.items():
        if former.get(name) != value:
            key = {"checkpoint": "RUN", "overrides": "key.path=value"}.get(name, f"--{name.replace('_', '-')}")
            problem = f"{value} differs from {former.get(name)}, of the conversion in {directory}"
            raise UserError(f"{key}: {problem}; give that again, or name another --output")
    return state


def compare(
    models: Mapping[str, Trained], columns: Sequence[int], is_labelled: bool, batch_size: int
) -> list[dict[str, Any]]:
    """Returns a row for each model: its accuracy on all validation images, and its costs for a batch on this device.

    Args:
        columns: outputs of the classes. is_labelled: else the predictions of the model "original" stand for labels.
    """
    run, device = models["original"].run, models["original"].device
    found: dict[str, list[Tensor]] = {name: [] for name in [*models, "labels"]}
    loader = create_val_loader(run, World(device), img_size=run.model["img_size"])
    first = torch.empty(0)
    with torch.inference_mode(), progress("evaluation", len(loader.sampler), "images") as bar:
        for images, labels in loader:
            images = images.to(device)
            first = images if not len(first) else first
            for name, each in models.items():
                with autocast(run.train.amp, device):
                    found[name].append(rank_classes(each.model(images)[:, columns], 1)[:, 0].cpu())
            found["labels"].append(labels.cpu())
            bar.update(len(labels))
    predicted = {name: torch.cat(parts) for name, parts in found.items()}
    own = predicted["original"]
    labels = predicted["labels"] if is_labelled else own
    batch = first.repeat(-(-batch_size // len(first)), 1, 1, 1)[:batch_size]
    calls = {name: forward(each.model, batch, run.train) for name, each in models.items()}
    times, rows = time_rounds(calls, ROUNDS, device, clock=cpu_clock()), []
    for name, each in models.items():
        right, ms = (predicted[name] == labels).double(), 1e3 * Quartiles.of(times.seconds[name]).median
        gain = 100 * (right - (own == labels).double())
        entries = assign(each.run.model["name"], each.run.attention, depths_of(each.run.model))
        rows.append(
            {
                "model": name,
                "images": len(labels),
                "top1": 100 * right.mean().item(),
                "difference": gain.mean().item(),
                "standard_error": gain.std(correction=0).item() / math.sqrt(len(labels)),
                "changed": count_changed(own, predicted[name]),
                "macs": count_costs(each.run.model, each.run.attention).macs,
                "ms": ms,
                "images_per_second": 1e3 * batch_size / ms,
                "is_noisy": times.noisy(times.speedup(name, "original")),
                "peak_mib": peak_bytes(calls[name], device) / 2**20,
                "layers": "; ".join(f"{text_of(entry.layers)} {entry.options['name']}" for entry in entries),
            }
        )
    return rows


def report(
    rows: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, Any],
    trained: Trained,
    choices: int | None,
    args: argparse.Namespace,
) -> str:
    """Returns the report in Markdown. chosen: row of the export. choices: see `Certificate`; None: there are labels."""
    table = [as_cells(row, "top-1 (%)" if choices is None else "unchanged (%)") for row in rows]
    arithmetic = f"{torch.get_num_threads()} threads, {precision(trained.run.train.amp, trained.device)}"
    where = f"{device_name(trained.device)}, {arithmetic}"
    lines = [f"# {args.checkpoint} within {args.budget[0]}", "", compact_table(table), ""]
    lines += [f"- {chosen['images']:,} validation images; differences with their standard errors, paired by image."]
    lines += [f"- Times and peaks are of {args.batch_size} images: {where}. A ~ marks noisy times."]
    if chosen["ms"] > (1 + MAX_ERROR) * rows[0]["ms"]:
        lines += [f"- **Warning: the {chosen['model']} model is slower than the original on this device.**"]
    if choices is not None:
        lines += [f"- {UNLABELLED}.", f"- {Certificate(chosen['images'], chosen['changed'], choices)}."]
    elif abs(chosen["difference"]) < NOISE * chosen["standard_error"]:
        lines += ["- The difference in top-1 is within noise."]
    path = args.output / EXPORT
    load = f"from engine.evaluation.inference import load; model, transform, classes = load({str(path)!r})"
    lines += [f"- The {chosen['model']} model is exported:", "", "```python", load, "```", ""]
    return "\n".join([*lines, "![Loss against cost, the front by number](search/front.png)", ""])
