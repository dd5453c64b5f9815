"""How far mechanisms are from softmax attention, on queries, keys and values of a trained model: LARA's figure 1."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analysis import drop_in as shared
from analysis.drop_in import Reference
from analysis.implied import attention_layers
from attention import ATTENTION, Attention, Grid, OptionError
from bench.figures import line_style
from bench.memory import peak_bytes
from engine.errors import UserError
from engine.files import to_csv, write_file
from engine.outputs import encode

NUM_IMAGES = 16
"""Images by default: of 14x14 tokens and three heads, 9,408 outputs of a layer."""


def whole(budget: int, num_tokens: int) -> int:
    """The budget itself."""
    return budget


def side(budget: int, num_tokens: int) -> int:
    """The side of a square of so many tokens."""
    root = math.isqrt(budget)
    if root**2 != budget:
        raise OptionError(f"--budgets {budget}", f"no square; nearest: {root**2}, {(root + 1) ** 2}")
    return root


def reach(budget: int, num_tokens: int) -> int:
    """The radius of a band of so many tokens, the token itself beside them."""
    return budget // 2


def ratio(budget: int, num_tokens: int) -> int:
    """The side ratio that leaves so many of the tokens."""
    root = max(1, math.isqrt(num_tokens // budget))
    if root**2 * budget != num_tokens:
        raise OptionError(f"--budgets {budget}", f"no square ratio leaves so many of {num_tokens} tokens")
    return root


SIZES = {
    "num_landmarks": whole,
    "num_samples": whole,
    "num_features": whole,
    "num_clusters": whole,
    "cluster_size": whole,
    "chunk_size": whole,
    "block_size": whole,
    "rank": whole,
    "radius": reach,
    "window_size": side,
    "pool_size": side,
    "reduction": ratio,
}
"""Options that say how large an approximation is -> their value for a budget; of a mechanism, the first it has."""


@dataclass(frozen=True)
class Row:
    """What was measured of a mechanism at a budget and temperature.

    Attributes:
        name: as on the command line. options: with that of the budget. budget: None where it has no option of its size.
        entropies: of softmax's weights, of each layer, in nats. errors: of each draw and layer, see `normalised_error`.
        untrained: parameters. peak: bytes that the first layer allocates at one time for `PART` images.
        problem: why there is no result.
    """

    name: str
    options: str
    budget: int | None
    temperature: float
    entropies: Sequence[float]
    errors: Sequence[Sequence[float]] = ()
    untrained: int = 0
    peak: int | None = None
    problem: str = ""

    def spread(self, layer: int | None = None) -> shared.Spread | None:
        """Mean and standard deviation over draws, of one layer or of the mean over layers."""
        if not self.errors:
            return None
        return shared.mean_and_deviation(mean(found) if layer is None else found[layer] for found in self.errors)


@dataclass(frozen=True)
class Softmax:
    """What mechanisms are compared with: softmax attention of a trained model's queries, keys and values.

    Attributes:
        temperature: that logits are divided by. state: weights whose queries are divided by it. inputs: of every
            attention layer: tokens (B, N, C), those of the trained model, and grid. outputs: attended values.
        entropies: of the weights of each layer, in nats, mean over queries and heads.
    """

    temperature: float
    state: Mapping[str, Tensor]
    inputs: Sequence[tuple[Tensor, Grid]]
    outputs: Sequence[Tensor]
    entropies: Sequence[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_arguments(parser, NUM_IMAGES)
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[16, 49, 196],
        help="sizes of each: its landmarks, samples, tokens of a window, ... (16 49 196)",
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0], help="logits are divided by them (1)")


def main(args: argparse.Namespace) -> None:
    shared.check_arguments(args)
    for name in ("budgets", "temperatures"):
        if (least := min(getattr(args, name))) <= 0:
            raise UserError(f"--{name} {least:g}: must be greater than 0")
    mechanisms = shared.read_mechanisms(args.attention)
    reference = shared.load_reference(args.checkpoint, args.overrides, args.images)
    inputs, rows = shared.layer_inputs(reference, args.images), []
    with tqdm(total=len(args.temperatures) * len(mechanisms), leave=False, disable=None, dynamic_ncols=True) as bar:
        for temperature in args.temperatures:
            softmax = attend_by_softmax(reference, inputs, temperature)
            for name, attention in mechanisms.items():
                bar.set_description(f"{name}, temperature {temperature:g}")
                rows += measure(reference, softmax, name, attention, args)
                bar.update()
    title = f"{args.checkpoint}: error against softmax of the same queries, keys and values; {len(inputs[0][0])} images"
    title += f"; {args.mode} mode, without training, mean ± standard deviation over draws: {args.draws}"
    print(f"{title}\n\n{shared.markdown([readable(row) for row in rows])}")
    setting = args.mode, len(inputs[0][0]), args.draws
    lines = (line for row in rows for line in values(row, setting))
    write_file(args.output / "error.csv", to_csv(HEADER, lines))
    write_file(args.output / "error.png", draw(title, rows))


@torch.no_grad()
def attend_by_softmax(reference: Reference, inputs: Sequence[tuple[Tensor, Grid]], temperature: float) -> Softmax:
    """Softmax attention with the weights of a trained model.

    Raises:
        OptionError: they do not make queries, keys and values.
    """
    state = dict(reference.source.state)
    for name, x in state.items():
        if name.endswith((".attn.qkv.weight", ".attn.qkv.bias")):
            q, *others = x.chunk(3)
            state[name] = torch.cat([q / temperature, *others])
    model, _ = shared.drop_in(reference, {"name": "softmax"}, 0, "evaluation", state)
    layers = attention_layers(model)
    outputs = [shared.attended(layer, *given) for layer, given in zip(layers, inputs, strict=True)]
    entropies = [entropy(layer, *given) for layer, given in zip(layers, inputs, strict=True)]
    return Softmax(temperature, state, inputs, outputs, entropies)


@torch.no_grad()
def entropy(layer: Attention, x: Tensor, grid: Grid) -> float:
    """Of the weights of softmax attention, in nats, mean over queries and heads; log N if all are equal."""
    found = []
    for part in x.split(shared.PART):
        q, k, _ = layer.project(part, grid)
        found.append(torch.special.entr((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)).sum(-1).mean((1, 2)))
    return torch.cat(found).mean().item()


def measure(
    reference: Reference, softmax: Softmax, name: str, attention: Mapping[str, Any], args: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a mechanism, one for each budget."""
    for budget in args.budgets if size_option(attention) else [None]:
        row = partial(Row, name, budget=budget, temperature=softmax.temperature, entropies=softmax.entropies)
        options, errors = attention, []
        try:
            if budget is not None:
                options = with_budget(attention, budget, math.prod(softmax.inputs[0][1]))
            for seed in range(args.draws):
                model, untrained = shared.drop_in(reference, options, seed, args.mode, softmax.state)
                layers = attention_layers(model)
                errors.append(shared.layer_errors(layers, softmax.inputs, softmax.outputs))
        except OptionError as error:
            yield row(shared.describe(options), problem=str(error))
            continue
        x, grid = softmax.inputs[0]
        peak = peak_bytes(partial(shared.attended, layers[0], x[: shared.PART], grid), reference.device)
        yield row(shared.describe(options), errors=errors, untrained=untrained, peak=peak)


def size_option(attention: Mapping[str, Any]) -> str | None:
    """The option that a budget sets."""
    options = ATTENTION[attention["name"]].Config.__dataclass_fields__
    return next((name for name in SIZES if name in options), None)


def with_budget(attention: Mapping[str, Any], budget: int, num_tokens: int) -> dict[str, Any]:
    """The options of a mechanism of the size `budget`.

    Raises:
        OptionError: none of its sizes is.
    """
    name = size_option(attention)
    changed = {name: SIZES[name](budget, num_tokens)}
    if attention["name"] == "ra":
        changed["num_eval_samples"] = budget
    return {**attention, **changed}


def readable(row: Row) -> dict[str, str]:
    """Title of a column -> its text."""
    layers = {f"layer {i + 1}": shared.quote(row.spread(i), ".3g") for i in range(len(row.entropies))}
    return {
        "attention": row.name,
        "options": row.options,
        "budget": "" if row.budget is None else str(row.budget),
        "temperature": f"{row.temperature:g}",
        "entropy (nats)": f"{mean(row.entropies):.2f}",
        "error": shared.quote(row.spread(), ".3g"),
        **layers,
        "untrained parameters": f"{row.untrained:,}" if row.untrained else "",
        "peak (MiB)": "" if row.peak is None else f"{row.peak / 2**20:.1f}",
        "cannot be built": row.problem,
    }


HEADER = (
    *("attention", "options", "mode", "images", "draws", "budget", "temperature", "layer", "entropy"),
    *("error", "error_std", "untrained_parameters", "peak_bytes", "problem"),
)


def values(row: Row, setting: Sequence[Any]) -> Iterator[list[Any]]:
    """The rows of the CSV file: one for each layer, counted from 1."""
    for layer, nats in enumerate(row.entropies):
        found = row.spread(layer) or (None, None)
        place = [row.name, row.options, *setting, row.budget, row.temperature, layer + 1, nats]
        yield [*place, *found, row.untrained, row.peak, row.problem]


def draw(title: str, rows: Sequence[Row]) -> bytes:
    """Error against budget: a panel for each temperature, a line for each mechanism, a point where it has no size."""
    temperatures = dict.fromkeys(row.temperature for row in rows)
    names = dict.fromkeys(row.name for row in rows if row.errors)
    figure = Figure(figsize=(max(8, 1 + 4.5 * len(temperatures)), 6 + 0.16 * len(names)), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True)
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        here = [row for row in rows if row.temperature == temperature and row.errors]
        for number, name in enumerate(names):
            style = line_style(number) | {"label": name, "capsize": 2}
            points = [(row.budget, *row.spread()) for row in here if row.name == name]
            if not points:
                continue
            x, y, deviation = zip(*points, strict=True)
            if x == (None,):
                x, style["linestyle"] = (max([1, *(row.budget or 1 for row in rows)]) * 1.5,), "none"
            axes.errorbar(x, y, yerr=[d or 0 for d in deviation], **style)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=1e-3)  # an error may be zero
        budgets = sorted({row.budget for row in rows if row.budget})
        axes.set_xticks(budgets, map(str, budgets))
        axes.minorticks_off()
        axes.set_title(f"temperature {temperature:g}: entropy {mean(here[0].entropies):.2f} nats" if here else "")
        axes.grid(alpha=0.4)
    panels[0].set_ylim(-2e-4, 1.5 * panels[0].get_ylim()[1])
    x_label = "budget: landmarks, samples, tokens of a window or cluster\n(right of the last: no such size)"
    panels[len(panels) // 2].set_xlabel(x_label)
    panels[0].set_ylabel("normalised mean squared error of attended values")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=max(3, 3 * len(panels)))
    return encode(figure)
