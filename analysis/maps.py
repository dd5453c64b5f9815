"""What attends to what: the attention matrices of every layer and head on images, and what they say in numbers.

    python analyze.py maps runs/softmax photo.jpg --output maps
    python analyze.py maps runs/softmax photos/ --attention eva '{name: local, window_size: 4}'

Matrices are those that layers multiply their values by (`analysis.implied`), in evaluation, in float64. With
--attention the run's weights serve other mechanisms, without training.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

from analysis.drop_in import read_mechanisms
from analysis.implied import LayerInput, NoMatrix, attention_inputs, attention_layers
from analysis.layer_maps import LayerMaps, Row, describe_layer, layers_csv, list_problems, tabulate
from analysis.map_figures import draw_layers, draw_maps, draw_rollout
from attention import Grid
from engine.bar import progress_bar
from engine.errors import UserError, one_line
from engine.files import open_regular, write_file
from engine.images import BrokenImage, decode
from engine.inference import Trained, load
from engine.outputs import encode
from engine.readers import list_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="RUN", help="directory of a run, or a checkpoint file")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image, folder of images, or - for a list on stdin")
    parser.add_argument(
        "--attention",
        nargs="+",
        metavar="NAME",
        help="mechanisms in place of the run's, with its weights: eva, or '{name: eva, window_size: 7}'",
    )
    parser.add_argument(
        "--query",
        metavar="ROW,COLUMN",
        help="the patch, from 0,0, whose weights are shown (the class token where there is one, else the centre)",
    )
    parser.add_argument("--output", type=Path, default=Path("maps"), metavar="DIR", help="directory to write to (maps)")


def main(args: argparse.Namespace) -> None:
    place = parse_query(args.query)
    mechanisms = read_mechanisms(args.attention) if args.attention else {"": None}
    pictures = [(file, read_image(file)) for file in list_files(args.images)]
    make_directory(args.output)
    rows = []
    with progress_bar("maps", len(pictures) * len(mechanisms), leave=False) as bar:
        for text, options in mechanisms.items():
            torch.manual_seed(0)  # what the weights hold nothing for is drawn
            trained = load(args.checkpoint, attention=options)
            trained.model.double()
            name = text or ", ".join(dict.fromkeys(layer.name() for layer in attention_layers(trained.model)))
            model = f"attention {name}" + (" in place of the run's, without training" if text else "")
            directory = args.output / re.sub(r"[^\w.=]+", "-", name).strip("-")
            for number, (file, picture) in enumerate(pictures, start=1):
                layers, figures = examine(trained, picture, place, f"{one_line(Path(file).name, 40)}, {model}")
                make_directory(directory)
                rows += [Row(name, file, index, found) for index, found in enumerate(layers, start=1)]
                for shows, figure in figures.items():
                    write_file(directory / f"{number}_{Path(file).stem}_{shows}.png", encode(figure))
                bar.update()
    print(tabulate(rows))
    for problem in list_problems(rows):
        print(f"left out: {problem}", file=sys.stderr)
    write_file(args.output / "layers.csv", layers_csv(rows))
    write_file(args.output / "layers.png", encode(draw_layers(rows)))
    print(f"{args.output}: layers.csv, layers.png, and of every image its maps (query, mean) and their rollout")


def examine(
    trained: Trained, picture: Image.Image, place: Grid | None, title: str
) -> tuple[list[LayerMaps | NoMatrix], dict[str, Figure]]:
    """What the layers of a model in float64 attend to in a picture, and its figures.

    Args:
        place: see `choose_queries`.
    """
    image = trained.transform(picture)[None].double()
    inputs, logits = attention_inputs(trained.model, image)
    queries, query = choose_queries(inputs, place, getattr(trained.model, "cls_token", None) is not None)
    layers = [describe_layer(*pair) for pair in zip(inputs, queries, strict=True)]
    probability, index = logits[0].softmax(-1).max(-1)
    title += f"\npredicted: {one_line(trained.classes[index], 40)} ({100 * probability:.1f} %)"
    return layers, {
        "query": draw_maps(layers, "of_query", f"{title}; weights of {query}"),
        "mean": draw_maps(layers, "of_all", f"{title}; weights of all queries, mean"),
        "rollout": draw_rollout(layers, image[0], query, title),
    }


def parse_query(text: str | None) -> Grid | None:
    """``"3,4"`` -> (3, 4).

    Raises:
        UserError: anything else.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5}),(\d{1,5})", text)
    if not found:
        raise UserError(f"--query {text}: expected ROW,COLUMN of a patch, such as 3,4")
    return int(found[1]), int(found[2])


def read_image(file: str) -> Image.Image:
    """The picture in a file.

    Raises:
        BrokenImage: it is none, or cannot be read.
    """
    try:
        with open_regular(file) as content:
            return decode(content)
    except BrokenImage as error:
        raise BrokenImage(f"{file}: {error}") from None
    except OSError as error:
        raise BrokenImage(f"{file}: {error.strerror or error}") from None


def make_directory(path: Path) -> Path:
    """`path`, a directory from now on.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {path}: cannot be made: {error.strerror}") from None
    return path


def choose_queries(layers: Sequence[LayerInput], place: Grid | None, class_token: bool) -> tuple[list[int], str]:
    """The index of a query among each layer's P + N tokens, and which one it is.

    Args:
        place: row and column of a patch of the first layer, for which later layers with fewer tokens take the one
            there; None: the class token, or the centre patch.
    Raises:
        UserError: the patch is outside the grid.
    """
    if place is None and class_token:
        return [0] * len(layers), "the class token"
    H, W = layers[0].grid
    row, column = place or (H // 2, W // 2)
    if not (row < H and column < W):
        raise UserError(f"--query {row},{column}: outside the {H}x{W} grid; at most {H - 1},{W - 1}")
    found = [attn.num_prefix_tokens + (row * h // H) * w + column * w // W for attn, _, (h, w) in layers]
    return found, f"the patch in row {row}, column {column} (framed)"
