"""Predicts the classes of images with a trained model: the most probable classes and their probabilities.

    python predict.py runs/eva photo.jpg other.png             # a run directory, or any checkpoint or exported file
    python predict.py eva.safetensors photos/ --top 1 --output predictions.csv
    find photos -name '*.jpg' | python predict.py runs/eva - --output predictions.csv

Images are prepared as in validation, and predictions keep their order. A folder stands for all images below it. A path
that does not exist is refused; a file that cannot be read as an image is named, counted and left out.

Exit status: 0 all images have a prediction, 1 some have none: a file was not read, or the logits are not finite; 2 the
input was refused.
"""

import sys
from collections.abc import Sequence
from itertools import chain

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.evaluation.command_lines:parse_predict")

from tqdm import tqdm

from engine.data.folders import list_files
from engine.evaluation.command_lines import parse_predict
from engine.evaluation.inference import Prediction, create_loader, load, predict
from engine.evaluation.predictions import top_columns
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import to_csv, write_file
from engine.runtime.memory import refuse_too_large
from engine.runtime.ownership import check_file
from engine.runtime.terminal import progress
from engine.runtime.text import one_line


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_predict(arguments)
    with refuse_bad_input():
        if args.output:
            check_file(args.output, "--output", [".csv"])
        device = init_distributed(args.device).device
        files = list_files(args.images)
        trained = load(args.checkpoint, weights=args.weights, select=args.select, overrides=args.set)
    loader, predictions, not_finite = create_loader(trained, files, args.batch_size), [], 0
    bar = progress("prediction", len(files), "images")
    with refuse_bad_input(), refuse_too_large("lower --batch-size"), bar:
        trained.model.to(device)
        for prediction in predict(trained, loader, args.top):
            if args.output:
                predictions.append(prediction)
            else:
                tqdm.write(one_line_prediction(prediction))
            not_finite += not prediction.classes
            bar.update()
    if args.output:
        with refuse_bad_input():
            write_file(args.output, predictions_csv(predictions))
    if loader.broken:
        print(f"left out: {len(loader.broken):,} of {len(files):,} files are no readable images", file=sys.stderr)
    if not_finite:
        print(f"no prediction: the logits of {not_finite:,} images are not finite", file=sys.stderr)
    if loader.broken or not_finite:
        sys.exit(1)


def one_line_prediction(prediction: Prediction) -> str:
    """Returns a prediction as one line, safe to print whatever the names hold."""
    if not prediction.classes:
        return f"{one_line(prediction.file)}: no prediction, as the logits are not finite"
    pairs = zip(prediction.classes, prediction.probabilities, strict=True)
    return "  ".join([f"{one_line(prediction.file)}:", *(f"{one_line(name, 60)} {100 * p:.2f} %" for name, p in pairs)])


def predictions_csv(predictions: Sequence[Prediction]) -> bytes:
    """Returns a row for each image: file, class_1, probability_1, class_2, ...; nothing more without a prediction."""
    header = ["file", *top_columns(max((len(row.classes) for row in predictions), default=0))]
    rows = ([row.file, *chain(*zip(*row[1:], strict=True))] for row in predictions)
    return to_csv(header, (row + [""] * (len(header) - len(row)) for row in rows))


if __name__ == "__main__":
    main()
