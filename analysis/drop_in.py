"""A trained model on images of its validation data, and other mechanisms in the place of its own, without training."""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.utils.data import default_collate

from analysis.implied import attention_inputs, attention_layers
from attention import Attention, AttentionFactory, Grid, OptionError
from engine.checkpoint import find_weights
from engine.classes import ClassSubset, match_classes
from engine.config import Tree, find_config, override, parse_run, read_yaml
from engine.data import ImageLoader, choose_batch_size, classes_of, create_val_loader
from engine.distributed import World, init_distributed
from engine.errors import UserError
from engine.fit import build_models, fit_weights
from engine.schema import Run
from engine.sources import Source, source_of
from models import create_model

EVERY_MECHANISM = "configs/ablation/mechanisms.yaml"
"""Every mechanism with options for a 14x14 grid: what a name alone stands for."""

PART = 8
"""Images whose attended values are computed at one time."""

Mode = Literal["evaluation", "sampled"]
Spread = tuple[float, float | None]
"""Mean and standard deviation over draws; None: of a single one."""


@dataclass(frozen=True)
class Reference:
    """A trained model and images of its validation data.

    Attributes:
        run: its configuration. source: its weights. model: in evaluation mode. images: (B, C, H, W), on the CPU.
        classes: theirs, (B,). columns: which of the model's outputs each class is. device: where it computes.
    """

    run: Run
    source: Source
    model: nn.Module
    images: Tensor
    classes: Tensor
    columns: list[int]
    device: torch.device


def add_arguments(parser: argparse.ArgumentParser, num_images: int) -> None:
    """Adds what the questions about other mechanisms have in common."""
    parser.add_argument("checkpoint", type=Path, metavar="RUN", help="directory of a run, checkpoint or export")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="options in place of the run's (right after RUN)"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        metavar="NAME",
        help=f"a mechanism as {EVERY_MECHANISM} has it, or '{{name: eva, window_size: 7}}' (all of that file)",
    )
    parser.add_argument(
        "--draws", type=int, default=3, help="of all that is random and not trained, by seeds from 0 on (3)"
    )
    parser.add_argument(
        "--mode", choices=("evaluation", "sampled"), default="evaluation", help="noise: as kept or its mean, or fresh"
    )
    parser.add_argument(
        "--images", type=int, default=num_images, help=f"of the validation data, evenly spaced ({num_images})"
    )
    parser.add_argument("--output", type=Path, default=Path(), help="directory of table and figure (the present one)")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses, before anything is computed, what the command line cannot mean.

    Raises:
        UserError: a number below 1, or a directory that cannot be made.
    """
    for name in ("draws", "images"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} = {getattr(args, name)} is below the least valid value 1")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {args.output}: cannot be made: {error.strerror}") from None


def read_mechanisms(texts: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """What --attention names -> the options of each mechanism.

    Raises:
        ConfigError, OptionError: no YAML, or an unknown mechanism or option.
    """
    cases = read_yaml(find_config(EVERY_MECHANISM)).values["runs"]
    known = {case["attention"]["name"]: case["attention"] for case in cases}
    found = {}
    for text in known if texts is None else texts:
        tree = Tree({}, {})
        override(tree, f"attention={text}")
        options = tree.values["attention"]
        AttentionFactory.from_options(options, "--attention")
        found[text] = known.get(options, {"name": options}) if isinstance(options, str) else options
    return found


def load_reference(path: Path, overrides: Sequence[str], num_images: int) -> Reference:
    """The best model in a run directory, a checkpoint or an export, averaged where such weights are kept.

    Args:
        num_images: how many of the validation images, evenly spaced; all, where there are fewer.
    Raises:
        UserError, OptionError: see validate.py.
    """
    found, checkpoint, kinds = find_weights(path, "best", None)[-1]
    kind = kinds[-1]
    run = parse_run(checkpoint["config"], str(found), ["data.workers=0", *overrides])
    device = init_distributed(run.train.device).device
    models, resampled = build_models(run, checkpoint, [kind])
    img_size = to_2tuple(run.model["img_size"])
    images = create_val_loader(run, World(torch.device("cpu")), img_size=img_size, num_classes=None).dataset
    columns, note = match_classes(checkpoint.get("classes"), classes_of(images), run.model["num_classes"])
    for line in filter(None, [resampled, note]):
        print(line, file=sys.stderr)
    count = min(num_images, len(images))
    loader = ImageLoader(
        images,
        choose_batch_size(img_size),
        stack=default_collate,
        limit=0,
        remedy="python -m engine.verify ROOT lists the broken images of a data set",
        sampler=[i * len(images) // count for i in range(count)],
        num_workers=run.data.workers,
    )
    pixels, classes = map(torch.cat, zip(*loader, strict=True))
    model = models[kind].to(device).eval()
    return Reference(run, source_of(run, model.state_dict()), model, pixels, classes, columns, device)


def drop_in(
    reference: Reference, attention: Mapping[str, Any], seed: int, mode: Mode, state: Mapping[str, Tensor] | None = None
) -> tuple[nn.Module, int]:
    """The trained model with another mechanism, and how many of the mechanism's parameters are not trained.

    These, and the random numbers that it keeps for evaluation, are drawn by `seed`; all others are the trained ones.

    Args:
        mode: evaluation: as in evaluation, noise is the one that is kept, or its mean. sampled: attention layers sample
            as in training, and nothing else does.
        state: weights in place of the reference's.
    Raises:
        OptionError: the mechanism cannot be built on this grid, or needs projections that the run does not have.
    """
    torch.manual_seed(seed)
    model = create_model(**reference.run.model | {"attention": attention})
    for layer, own in zip(attention_layers(model), attention_layers(reference.model), strict=True):
        if own.num_projections not in (3, layer.num_projections):
            problem = f" needs {layer.num_projections} projections of tokens, but {own.name()} of the run makes"
            raise OptionError(f"attention({layer.name()})", f"{problem} {own.num_projections}; give another run")
    source = reference.source if state is None else reference.source._replace(state=dict(state))
    taken, outcome = fit_weights(model, source, "the reference")
    model.load_state_dict(taken, strict=False)
    model = model.to(reference.device).eval()
    for layer in attention_layers(model):
        layer.training = mode == "sampled"
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return model, sum(sizes[name.split(" ")[0]] for name in outcome["fresh"])


@torch.no_grad()
def top1(model: nn.Module, reference: Reference) -> float:
    """Percent of the reference's images whose class has the highest logit."""
    model = ClassSubset(model, reference.columns).to(reference.device)
    parts = reference.images.split(choose_batch_size(tuple(reference.images.shape[2:])))
    found = torch.cat([model(part.to(reference.device)).argmax(1).cpu() for part in parts])
    return 100 * (found == reference.classes).double().mean().item()


@torch.no_grad()
def layer_inputs(reference: Reference, num_images: int) -> list[tuple[Tensor, Grid]]:
    """Tokens (B, N, C) and grid that every attention layer of the trained model gets, of evenly spaced images."""
    count = min(num_images, len(reference.images))
    chosen = torch.arange(count) * len(reference.images) // count
    found, _ = attention_inputs(reference.model, reference.images[chosen].to(reference.device))
    return [(x, grid) for _, x, grid in found]


@torch.no_grad()
def attended(layer: Attention, x: Tensor, grid: Grid) -> Tensor:
    """What a layer does with tokens (B, N, C) between its projections: attended values (B, h, N, d)."""
    return torch.cat([layer.attend_all(layer.project(part, grid), grid) for part in x.split(PART)])


def normalised_error(y: Tensor, expected: Tensor) -> float:
    """Mean squared error, as a multiple of the mean square of what is expected: 0 if equal, 1 for zeros."""
    y, expected = y.double(), expected.double()
    return ((y - expected).square().mean() / expected.square().mean()).item()


def layer_errors(
    layers: Sequence[Attention], inputs: Sequence[tuple[Tensor, Grid]], expected: Sequence[Tensor]
) -> list[float]:
    """The `normalised_error` of what each layer makes of its inputs."""
    return [
        normalised_error(attended(layer, *given), y) for layer, given, y in zip(layers, inputs, expected, strict=True)
    ]


def mean_and_deviation(values: Iterable[float]) -> Spread:
    """Of one value for each draw."""
    values = list(values)
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def quote(values: Spread | None, form: str) -> str:
    """``"1.20 ± 0.10"``, mean and standard deviation."""
    if values is None:
        return ""
    mean, deviation = values
    return f"{mean:{form}}" if deviation is None else f"{mean:{form}} ± {deviation:{form}}"


def describe(attention: Mapping[str, Any]) -> str:
    """The options of a mechanism as text."""
    return ", ".join(f"{name}={value}" for name, value in attention.items() if name != "name")


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of texts; columns that are empty are left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
