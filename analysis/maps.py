"""Attention matrices of every layer and head on images, and their statistics.

    python analyze.py maps runs/softmax photo.jpg --output maps
    python analyze.py maps runs/softmax photos/ --attention eva '{name: local, window_size: 4}'

Each matrix is the one by which a layer multiplies its values (`analysis.implied`), in evaluation mode in float64.
With --attention, other mechanisms use the run's weights, without training.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor, nn

from analysis import command_line
from analysis.drop_in import drop_in
from analysis.implied import LayerInput, NoMatrix, attention_inputs
from analysis.laboratory import to_file_name
from analysis.layer_maps import LayerMaps, Row, describe_layer, layers_csv, list_problems, tabulate
from analysis.map_figures import draw_layers, draw_maps, draw_rollout
from analysis.trained import Trained, load_trained, read_images
from attention import Grid, OptionError
from engine.data.folders import FileReader, list_files
from engine.data.splits import Images
from engine.reporting.plots import encode
from engine.runtime.errors import UserError
from engine.runtime.files import write_file
from engine.runtime.ownership import make_output
from engine.runtime.text import one_line
from models.base import attention_layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image, folder of images, or - for a list on stdin")
    command_line.add_mechanisms(parser, "the run's own")
    query = "the patch, from 0,0, whose weights are shown (the class token if there is one, else the centre)"
    parser.add_argument("--query", metavar="ROW,COLUMN", help=query)


def main(args: argparse.Namespace) -> None:
    place, files = parse_query(args.query), list_files(args.images)
    mechanisms = command_line.read_mechanisms(args.attention) if args.attention else {"": None}
    trained = load_trained(args, reads_images=False)
    images, _ = read_images(Images(FileReader(files)), range(len(files)), trained.run)
    make_output(args.output, ["maps.csv", "maps.png"])
    rows = []
    with command_line.progress("maps", len(files) * len(mechanisms), "images") as bar:
        for text, options in mechanisms.items():
            name = text or ", ".join(dict.fromkeys(layer.core.name() for layer in attention_layers(trained.model)))
            bar.set_postfix_str(name)
            try:
                model = drop_in(trained, options, 0)[0] if text else trained.model
            except OptionError as error:
                layers = range(1, 1 + len(attention_layers(trained.model)))
                rows += [Row(name, file, layer, NoMatrix(str(error))) for file in files for layer in layers]
                bar.update(len(files))
                continue
            title = f"attention {name}" + (" in place of the run's, without training" if text else "")
            directory = args.output / to_file_name(name)
            for number, (file, image) in enumerate(zip(files, images, strict=True), start=1):
                start = f"{one_line(Path(file).name, 40)}, {title}"
                layers, figures = examine(model.double(), trained, image, place, start)
                paths = {shows: directory / f"{number}_{Path(file).stem}_{shows}.png" for shows in figures}
                make_output(directory, [path.name for path in paths.values()])
                names = [text or layer.core.name() for layer in attention_layers(model)]  # which may differ
                pairs = enumerate(zip(names, layers, strict=True), start=1)
                rows += [Row(own, file, index, found) for index, (own, found) in pairs]
                for shows, figure in figures.items():
                    write_file(paths[shows], encode(figure))
                bar.update()
    print(tabulate(rows))
    for problem in list_problems(rows):
        print(f"left out: {problem}", file=sys.stderr)
    write_file(args.output / "maps.csv", layers_csv(rows))
    write_file(args.output / "maps.png", encode(draw_layers(rows)))
    by_mechanism = "by mechanism of every image its maps (query, mean) and their rollout"
    print(f"{args.output}: maps.csv, maps.png, and {by_mechanism}")


def examine(
    model: nn.Module, trained: Trained, image: Tensor, place: Grid | None, title: str
) -> tuple[list[LayerMaps | NoMatrix], dict[str, Figure]]:
    """Returns the attention statistics of a model in float64 on an image (C, H, W), and its figures.

    Args:
        trained: the model with its own attention. place: see `choose_queries`.
    """
    inputs, logits = attention_inputs(model, image[None].to(trained.device).double())
    queries, query = choose_queries(inputs, place, getattr(model, "cls_token", None) is not None)
    layers = [describe_layer(*pair) for pair in zip(inputs, queries, strict=True)]
    probability, index = logits[0].softmax(-1).max(-1)
    predicted = trained.classes[index] if trained.classes else f"class {index}"
    title += f"\npredicted: {one_line(predicted, 40)} ({100 * probability:.1f} %)"
    return layers, {
        "query": draw_maps(layers, "of_query", f"What does {query} attend to?\n{title}"),
        "mean": draw_maps(layers, "of_all", f"What do all queries attend to, on average?\n{title}"),
        "rollout": draw_rollout(layers, image, query, f"What reaches a token through all layers?\n{title}"),
    }


def parse_query(text: str | None) -> Grid | None:
    """Parses ``"3,4"`` as (3, 4).

    Raises:
        UserError: the text has another form.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5}),(\d{1,5})", text)
    if not found:
        raise UserError(f"--query {text}: expected ROW,COLUMN of a patch, such as 3,4")
    return int(found[1]), int(found[2])


def choose_queries(layers: Sequence[LayerInput], place: Grid | None, class_token: bool) -> tuple[list[int], str]:
    """Returns the index of a query among each layer's P + N tokens, and its description.

    Args:
        place: row and column of a patch of the first layer; later layers with fewer tokens take the token at the same
            place. None: the class token, or the centre patch.
    Raises:
        UserError: the patch is outside the grid.
    """
    if place is None and class_token:
        return [0] * len(layers), "the class token"
    H, W = layers[0].grid
    row, column = place or (H // 2, W // 2)
    if not (row < H and column < W):
        raise UserError(f"--query {row},{column}: outside the {H}x{W} grid; at most {H - 1},{W - 1}")
    grids = [(layer.attn.num_prefix_tokens, *layer.grid) for layer in layers]
    found = [P + (row * h // H) * w + column * w // W for P, h, w in grids]
    return found, f"the patch in row {row}, column {column} (framed)"
