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
from engine.checkpoints.files import NOISE, choose_weights
from engine.data.loaders import create_val_loader
from engine.data.splits import open_split
from engine.objectives.classification import rank_classes
from engine.objectives.distillation import digest_weights
from engine.reporting.tables import compact_table
from engine.runtime.arguments import Count
from engine.runtime.distributed import World, autocast
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.memory import peak_bytes
from engine.runtime.ownership import make_output
from engine.runtime.provenance import device_name
from engine.runtime.reading import MAX_TEXT, parse_json, read_bounded
from engine.runtime.terminal import progress
from models import depths_of, is_host
from models.assignment import assign, text_of
from models.costs import count_costs

STATE = "convert.json"
"""File of the directory with the options of the command and the results of its finished parts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    search.add_arguments(parser)
    text = "epochs of training with labels after the search (a tenth of the model's); 0: none"
    parser.add_argument("--finetune", type=Count(0), metavar="EPOCHS", help=text)


def main(args: argparse.Namespace) -> None:
    """Runs the parts that `args.output` does not have. args.train: the function of train.py's arguments."""
    if len(args.budget) > 1:
        raise UserError(f"--budget {' '.join(args.budget)}: a model is converted for one; give one")
    trained = load_trained(args)
    columns, note = find_columns(trained, open_split(trained.run.data, "val_split"))
    is_tuned = args.finetune != 0 and note != UNLABELLED
    if is_tuned:
        check_apart(trained)
    make_output(args.output, ["report.md", "report.csv", STATE])
    state = State(args, digest_weights(trained.source.state))
    if "point" not in state.values:
        print(f"convert 1/3: a mechanism for each layer, {args.output}/search", file=sys.stderr, flush=True)
        found = search.main(argparse.Namespace(**vars(args) | {"output": args.output / "search"}))
        if not found:
            raise UserError(f"--budget {args.budget[0]}: nothing within it was measured; raise --evaluations")
        [(path, certificate)] = found.values()
        state.keep(point=path.stem, choices=certificate.choices)
    point = args.output / "search" / "front" / state.values["point"]
    sources = {"original": trained.path, "aligned": point.with_suffix(".safetensors")}
    if is_tuned:
        sources["fine-tuned"] = args.output / "tuned"
        if "tuned" not in state.values:
            print(f"convert 2/3: training, {args.output}/tuned", file=sys.stderr, flush=True)
            epochs = [] if args.finetune is None else [f"schedule.epochs={args.finetune}"]
            args.train([f"{point}.yaml", "--output", str(args.output / "tuned"), *epochs])
            state.keep(tuned=True)
    if "rows" not in state.values:
        print("convert 3/3: all models on all validation images, and an export", file=sys.stderr, flush=True)
        plain = vars(args) | {"overrides": [], "weights": None, "select": "best"}
        others = {
            name: load_trained(argparse.Namespace(**plain | {"checkpoint": path}), reads_images=False)
            for name, path in list(sources.items())[1:]
        }
        rows = compare({"original": trained, **others}, columns, note == UNLABELLED, args.batch_size)
        chosen = max(rows[1:], key=lambda row: (row["top1"], row["model"]))["model"]
        state.keep(rows=rows, chosen=chosen, export=write_export(args.output, others[chosen], sources[chosen]))
    text = report(state.values, args, trained, note == UNLABELLED)
    write_file(args.output / "report.md", text.encode())
    write_file(args.output / "report.csv", dicts_to_csv(state.values["rows"]))
    print(text)


class State:
    """Options of the command and results of its finished parts, kept in the directory.

    Raises:
        UserError: the directory has those of another command, or the file is damaged.
    """

    def __init__(self, args: argparse.Namespace, weights: str):
        self.path = args.output / STATE
        options = {name: x for name, x in vars(args).items() if name not in ("question", "output", "train")}
        options |= {"checkpoint": str(args.checkpoint), "weights of the model": weights}
        self.values: dict[str, Any] = {"options": options}
        if not self.path.exists():
            return
        remedy = "delete it, and give the command again"
        kept = parse_json(read_bounded(self.path, MAX_TEXT), self.path, remedy)
        if not isinstance(kept, dict) or not isinstance(kept.get("options"), dict):
            raise UserError(f"{self.path}: not a file of convert; {remedy}")
        for name, value in options.items():
            if (former := kept["options"].get(name)) != value:
                key = {"checkpoint": "RUN", "overrides": "key.path=value"}.get(name, f"--{name.replace('_', '-')}")
                key = name if " " in name else key
                problem = f"{value} differs from {former}, of the conversion in {args.output}"
                raise UserError(f"{key}: {problem}; give that again, or name another --output")
        self.values = kept

    def keep(self, **values: Any) -> None:
        """Adds the results of a part."""
        self.values |= values
        write_file(self.path, json.dumps(self.values, indent=1).encode())


def compare(
    models: Mapping[str, Trained], columns: Sequence[int], is_unlabelled: bool, batch_size: int
) -> list[dict[str, Any]]:
    """Returns a row for each model: its accuracy on all validation images, and its costs for a batch on this device.

    Args:
        models: the first is the original. columns: outputs of the classes. is_unlabelled: its predictions stand for
            labels.
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
    labels = own if is_unlabelled else predicted["labels"]
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


def write_export(output: Path, trained: Trained, source: Path) -> str:
    """Exports a model in timm's layout, or a model of others as a file; returns the line of Python that loads it."""
    is_file = is_host(trained.run.model["name"])
    target = str(output / "model") + (".safetensors" if is_file else "/")
    _, checkpoint, kind, _ = choose_weights(source)
    export(target, trained.run, checkpoint, kind)
    if is_file:
        return f'from engine.evaluation.inference import load; model, transform, classes = load("{target}")'
    return f'import models, timm; model = timm.create_model("local-dir:{target.rstrip("/")}", pretrained=True)'


def report(values: Mapping[str, Any], args: argparse.Namespace, trained: Trained, is_unlabelled: bool) -> str:
    """Returns the report in Markdown."""
    original, *_ = rows = values["rows"]
    chosen = next(row for row in rows if row["model"] == values["chosen"])
    where = f"{device_name(trained.device)}, {torch.get_num_threads()} threads, {trained.run.train.amp or 'fp32'}"
    table = [
        {
            "model": row["model"],
            "unchanged (%)" if is_unlabelled else "top-1 (%)": f"{row['top1']:.2f}",
            "difference": "" if row is original else f"{row['difference']:+.2f} ± {row['standard_error']:.2f}",
            "MACs (M)": f"{row['macs'] / 1e6:.1f}",
            "ms": "~" * row["is_noisy"] + f"{row['ms']:.3g}",
            "images/s": "~" * row["is_noisy"] + f"{row['images_per_second']:.0f}",
            "peak (MiB)": f"{row['peak_mib']:.1f}",
            "layers": row["layers"],
        }
        for row in rows
    ]
    lines = [f"# {args.checkpoint} within {args.budget[0]}", "", compact_table(table), ""]
    lines += [f"- {original['images']:,} validation images; differences with their standard errors, paired by image."]
    lines += [f"- Times and peaks are of {args.batch_size} images: {where}. A ~ marks noisy times."]
    if chosen["ms"] > (1 + MAX_ERROR) * original["ms"]:
        lines += [f"- **warning: the {chosen['model']} model is slower than the original on this device.**"]
    if is_unlabelled:
        lines += [f"- {UNLABELLED}.", f"- {Certificate(chosen['images'], chosen['changed'], values['choices'])}."]
    elif abs(chosen["difference"]) < NOISE * chosen["standard_error"]:
        lines += ["- The difference in top-1 is within noise."]
    lines += [f"- All that was measured is in [search.csv](search/search.csv); {values['point']} was chosen."]
    lines += [f"- The {chosen['model']} model is exported:", "", "```", values["export"], "```", ""]
    return "\n".join([*lines, "![Loss against cost, the front by number](search/front.png)", ""])
