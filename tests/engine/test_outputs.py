"""Files of validate.py, and evaluation on other data, against independent computations."""

import csv
import io
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.transforms import Bbox
from torch import nn

from attention import OptionError
from engine.checkpoints.adapt import restore_model
from engine.data.arrays import DigitsReader
from engine.data.augment import create_transform
from engine.data.images import BrokenImage
from engine.data.loaders import show_images
from engine.data.splits import Images
from engine.evaluation.label_matching import ClassSubset, Flipped, match_classes
from engine.evaluation.predictions import PredictionTable
from engine.reporting import outputs
from engine.reporting.plots import in_style
from engine.run.load import dump_run, load_run
from engine.runtime.errors import UserError
from engine.runtime.files import check_output, write_file
from models import create_model
from models.convert import resample_weights

ROOT = Path(__file__).parents[2]
NAMES = ["zero", "o,ne", "$two$", "three", "four", "five", "six", "seven", "\x1b[0m", "馬"]
OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=8", "model.in_chans=1"]
OPTIONS += ["model.stem=linear", "model.num_heads=2"]


@pytest.fixture(scope="module")
def run():
    return load_run(ROOT / "configs/quickstart.yaml", [*OPTIONS, "attention=softmax"])


def make_records(run, seed: int, omitted: int = 5) -> tuple[PredictionTable, np.ndarray]:
    """Returns predictions of random logits for the held-out digits, without one unreadable image, and the logits."""
    images = Images(DigitsReader("val"))
    images.mode = "L"
    index = np.delete(np.arange(len(images)), omitted)
    logits = np.random.default_rng(seed).normal(size=(len(index), 10))
    label = images.reader.labels[index].astype(np.int64)
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    classes = np.argsort(-logits, 1)[:, :5]
    loss, probability = -log_prob[np.arange(len(index)), label], np.exp(np.take_along_axis(log_prob, classes, 1))
    found = (index, label, loss, classes, probability)
    return PredictionTable(show_images(images, run), NAMES, *map(torch.from_numpy, found)), logits


@pytest.fixture(scope="module")
def records(run):
    return make_records(run, 1)


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def test_predictions_name_every_image_once(records):
    found, logits = records
    rows = rows_of(outputs.predictions_csv(found))
    files = [f"{label}/{index}.pgm" for index, label in enumerate(DigitsReader("val").labels) if index != 5]
    assert [row["file"] for row in rows] == files
    assert [row["label"] for row in rows] == [NAMES[int(file[0])] for file in files]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for i in range(1, 6):
        place = [NAMES.index(row[f"class_{i}"]) for row in rows]
        np.testing.assert_array_equal(place, np.argsort(-logits, 1)[:, i - 1])
        shown = [float(row[f"probability_{i}"]) for row in rows]
        np.testing.assert_allclose(shown, probabilities[np.arange(359), place], rtol=1e-12)


def confusion(found: PredictionTable, logits: np.ndarray) -> np.ndarray:
    counts = np.zeros((10, 10), int)
    np.add.at(counts, (found.label.numpy(), logits.argmax(1)), 1)
    return counts


def test_quality_of_classes(records):
    """Precision, recall and F1 from the confusion matrix, and right predictions from the logits."""
    found, logits = records
    counts = confusion(found, logits)
    right, labels, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    precision, recall = right / predicted, right / labels
    expected = {"precision": precision, "recall": recall, "f1": 2 * precision * recall / (precision + recall)}
    rows = rows_of(outputs.classes_csv(found))
    for column, values in expected.items():
        np.testing.assert_allclose([float(row[column]) for row in rows], 100 * values, rtol=1e-12)
    assert [int(row["support"]) for row in rows] == labels.tolist()
    correct = [int(row["correct"]) for row in rows_of(outputs.predictions_csv(found))]
    assert correct == (logits.argmax(1) == found.label.numpy()).astype(int).tolist()


def test_calibration(records):
    """Bins, means and the expected calibration error, by loops; and both ends of their range."""
    found, logits = records
    confidence, right = found.probability[:, 0].tolist(), (logits.argmax(1) == found.label.numpy()).tolist()
    error, bins = 0.0, outputs.calibrate(found)
    for m in range(15):
        inside = [(c, r) for c, r in zip(confidence, right, strict=True) if m / 15 < c <= (m + 1) / 15]
        assert bins.counts[m] == len(inside)
        if inside:
            means = [sum(column) / len(inside) for column in zip(*inside, strict=True)]
            error += len(inside) / 359 * abs(means[0] - means[1])
            assert (bins.confidence[m], bins.accuracy[m]) == pytest.approx(means, rel=1e-12)
    assert bins.error == pytest.approx(error, rel=1e-12)
    sure = found._replace(probability=torch.ones_like(found.probability), classes=found.label[:, None])
    assert outputs.calibrate(sure).error == 0
    wrong = sure._replace(classes=(sure.classes + 1) % 10)
    assert outputs.calibrate(wrong).error == 1
    lost = sure._replace(classes=torch.full_like(sure.classes, -1), probability=sure.probability * torch.nan)
    assert outputs.calibrate(lost).error == 0
    assert all(outputs.calibration_picture(x).startswith(b"\x89PNG") for x in (found, lost))


@pytest.fixture
def as_figures(monkeypatch):
    """Returns figures without encoding them, which takes longest."""
    monkeypatch.setattr(outputs, "encode", lambda figure: figure)
    monkeypatch.setattr(outputs, "GRID", 3)


@pytest.mark.usefixtures("as_figures")
def test_the_picture_of_the_confusion_matrix(records):
    axes, counts = outputs.confusion_picture(records[0]).axes[0], confusion(*records)
    np.testing.assert_allclose(axes.images[0].get_array(), counts / counts.sum(1, keepdims=True))
    assert [text.get_text() for text in axes.texts] == [str(n) if n else "" for n in counts.flat]
    assert axes.get_title() == f"top-1 {100 * np.trace(counts) / 359:.2f} %"
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [*NAMES[:8], "\\x1b[0m", "馬"]
    assert not any(tick.get_parse_math() for tick in [*axes.get_xticklabels(), *axes.get_yticklabels()])


@pytest.mark.parametrize("count", [50, 51])
@in_style
def test_up_to_50_classes_have_their_names_which_do_not_overlap(count, as_figures):
    classes = torch.arange(count)
    found = PredictionTable(
        None, [f"n{i:08}" for i in classes], classes, classes, classes * 0.0, classes[:, None].flip(0), None
    )
    figure = outputs.confusion_picture(found)
    figure.draw_without_rendering()
    for ticks in (figure.axes[0].get_xticklabels(), figure.axes[0].get_yticklabels()):
        boxes = [tick.get_window_extent() for tick in ticks]
        assert [tick.get_text() for tick in ticks] == (found.names if count == 50 else [])
        assert not [pair for pair in pairwise(boxes) if Bbox.intersection(*pair)]
    assert not figure.axes[0].texts


@pytest.mark.usefixtures("as_figures")
def test_the_worst_mistakes_come_first(records, run):
    found, logits = records
    label, predicted = found.label.numpy(), logits.argmax(1)
    wrong = [i for i in np.argsort(-found.loss.numpy()) if label[i] != predicted[i]]
    figure = outputs.mistakes_picture(found)
    assert " ".join(figure.get_suptitle().split()).endswith(f"The worst 9 of {len(wrong)} mistakes")
    images = Images(DigitsReader("val"))
    images.mode, images.transform = "L", create_transform(run, 8, is_training=False, as_bytes=False)
    names = [*NAMES[:8], "\\x1b[0m", "馬"]
    for axes, i in zip(figure.axes, wrong[:9], strict=True):
        probability = np.exp(logits[i].max()) / np.exp(logits[i]).sum()
        file = f"{found.indices[i]}.pgm"
        assert axes.get_title() == f"{file}\n{names[label[i]]}\n→ {names[predicted[i]]} {probability:.3f}"
        seen = images[int(found.indices[i])][0] * np.mean(run.data.std) + np.mean(run.data.mean)
        np.testing.assert_allclose(axes.images[0].get_array(), 255 * seen[0], atol=0.01)


def test_an_image_that_broke_since_its_evaluation_is_named(run):
    found, _ = make_records(run, 0)
    found.images.reader.header = b"no image"
    with pytest.raises(BrokenImage, match=r"^\d/\d+\.pgm: "):
        outputs.mistakes_picture(found)


@pytest.mark.usefixtures("as_figures")
@pytest.mark.parametrize(("count", "tiles"), [(0, 1), (1, 1), (2, 2), (4, 6)])
def test_few_mistakes_have_no_blank_columns(records, count, tiles):
    found, _ = records
    right = found._replace(label=found.predicted.clone())
    right.label[:count] = (right.label[:count] + 1) % 10
    figure = outputs.mistakes_picture(right)
    assert " ".join(figure.get_suptitle().split()).endswith(f"The worst {count} of {count} mistakes")
    assert [len(axes.images) for axes in figure.axes] == [1] * count + [0] * (tiles - count)
    assert not any(axes.axison for axes in figure.axes)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x.txt", "x.txt: --confusion writes .csv or .png; name such a file"),
        ("x", "x: --confusion writes .csv or .png; name such a file"),
        ("no/x.csv", "no/x.csv: no directory 'no'"),
        ("dir.csv", "dir.csv: cannot be written: Is a directory"),
        (f"{'x' * 300}.csv", "cannot be written: File name too long"),
        ("/proc/x.csv", "/proc/x.csv: cannot be written: "),
    ],
)
def test_what_cannot_be_written_is_refused_before(tmp_path, monkeypatch, name, problem):
    monkeypatch.chdir(tmp_path)
    Path("dir.csv").mkdir()
    with pytest.raises(UserError) as caught:
        check_output(Path(name), "--confusion", (".csv", ".png"))
    assert problem in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["dir.csv"]


def test_what_can_be_written_is_unchanged_until_it_is(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_bytes(b"before")
    check_output(path, "--confusion", (".csv",))
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"x\.csv: cannot be written: No space left on device; what was there is unch"):
        write_file(path, b"after")
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"before", [path])


def test_a_file_is_named_once(tmp_path):
    options = {name.replace("-", "_"): None for name in outputs.OUTPUTS}
    twice = SimpleNamespace(**options | {"per_class": tmp_path / "x.csv", "predictions": tmp_path / "x.csv"})
    with pytest.raises(UserError, match=r"x\.csv: named twice; choose another --predictions"):
        outputs.chosen_outputs(twice)


WNIDS = ["n01", "n02", "n03", "n04"]
REORDERED = "classes: those of the checkpoint in another order, matched by name"
OTHERS = "warning: the classes are not those of the training: only in the checkpoint: "
IN_ORDER = "not known from this file; the 4 of its classifier are taken for the data's, in order"


@pytest.mark.parametrize(
    ("known", "here", "columns", "note"),
    [
        (WNIDS, WNIDS, [0, 1, 2, 3], ""),
        (WNIDS, ["n04", "n02"], [3, 1], "classes: the data has 2 of the checkpoint's 4; the logits of the others"),
        (WNIDS, ["n02", "n01", "n04", "n03"], [1, 0, 3, 2], REORDERED),
        (WNIDS, ["3", "0", "1", "2"], [3, 0, 1, 2], "classes: the data's names, 0 to 3, are taken for positions in"),
        (WNIDS, ["000", "001", "002", "003"], [0, 1, 2, 3], "classes: the data's names, 0 to 3, are taken"),
        (["3", "2", "1", "0"], ["0", "1", "2", "3"], [3, 2, 1, 0], REORDERED),
        (["10", "11", "12", "3"], ["0", "1", "2", "3"], [0, 1, 2, 3], OTHERS),
        (WNIDS, ["1", "2", "3", "4"], [0, 1, 2, 3], OTHERS),
        (WNIDS, ["n01", "n02", "n03", "x"], [0, 1, 2, 3], OTHERS),
        (None, ["a", "b", "c", "d"], [0, 1, 2, 3], f"classes: {IN_ORDER}"),
        (None, ["2", "1", "0", "3"], [0, 1, 2, 3], f"classes: {IN_ORDER}\n"),  # the order that data.classes gives
        (
            None,
            ["c2", "c10", "e", "f"],
            [0, 1, 2, 3],
            f"classes: {IN_ORDER}; warning: torchvision's ImageFolder has 'c10'",
        ),
        (None, ["c10", "c2", "e", "f"], [0, 1, 2, 3], f"classes: {IN_ORDER}\n"),  # as torchvision sorts them
    ],
)
def test_classes_of_other_data(known, here, columns, note):
    found, line = match_classes(known, here, 4)
    assert found == columns
    assert f"{line}\n".startswith(note)
    assert (bool(line), line.count("\n")) == (bool(note), 0)


@pytest.mark.parametrize(
    ("here", "count", "problem"),
    [
        (["n01", "x"], 4, "model.num_classes = 4, but the images have 2 classes; only in the"),
        (["0", "1", "2"], 4, "model.num_classes = 4, but the images have 3 classes; only in the"),
        ([*WNIDS, "n05"], 4, "model.num_classes = 4, but the images have 5 classes; only in the"),
        (WNIDS, 6, "model.num_classes = 6, but the checkpoint names 4 classes; set it to that"),
    ],
)
def test_another_number_of_classes_is_refused_where_names_do_not_say_which(here, count, problem):
    with pytest.raises(OptionError, match=problem):
        match_classes(WNIDS, here, count)


def test_the_mean_over_an_image_and_its_mirror_image():
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.randn(4, 1, 3, 4)
    mirrored = torch.stack([torch.tensor([[[*reversed(row)] for row in image[0].tolist()]]) for image in images])
    torch.testing.assert_close(Flipped(model)(images), (model(images) + model(mirrored)) / 2)
    torch.testing.assert_close(Flipped(model)(images.flip(-1)), Flipped(model)(images))


def test_a_subset_has_the_logits_of_its_classes():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ClassSubset(torch.nn.Identity(), [6, 0, 2])(logits), logits[:, [6, 0, 2]])


@pytest.mark.parametrize(
    ("attention", "img_size"),
    [
        ("softmax", "16"),
        ("{name: eva, window_size: 2, num_landmarks: 4}", "[8, 24]"),
        ("{name: local, window_size: 2}", "16"),
    ],
)
def test_images_of_another_size(attention, img_size):
    options = [*OPTIONS, "model.patch_size=2", f"attention={attention}"]
    path = ROOT / "configs/quickstart.yaml"
    small, large = (load_run(path, [*options, *more]) for more in ([], [f"model.img_size={img_size}"]))
    torch.manual_seed(0)
    state = create_model(attention=small.attention, **small.model).state_dict()
    checkpoint = {"config": dump_run(small), "model": {f"module.{name}": x for name, x in state.items()}}
    model, line = restore_model(large, checkpoint, "plain")
    expected = create_model(attention=large.attention, **large.model).eval()
    expected.load_state_dict(resample_weights(state, expected))
    images = torch.randn(2, 1, *expected.patch_embed.img_size)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), expected(images), rtol=1e-5, atol=1e-6)
    tokens = expected.pos_embed.shape[1]
    resampled = f"pos_embed (1, 16, 24) -> (1, {tokens}, 24)"
    assert line == f"model.img_size = {large.model['img_size']}, trained at 8; resampled: {resampled}"
    assert restore_model(small, checkpoint, "plain")[1] == ""


def test_weights_that_cannot_be_resampled_are_refused():
    options = [*OPTIONS, "attention={name: linformer, num_landmarks: 4}"]
    path = ROOT / "configs/quickstart.yaml"
    small, large = (load_run(path, [*options, f"model.img_size={size}"]) for size in (8, 16))
    model = create_model(attention=small.attention, **small.model)
    checkpoint = {"config": dump_run(small), "model": model.state_dict()}
    problem = "^model: model.img_size = 16, trained at 8: not all weights can be resampled: 1 fresh .blocks.0.attn.proj"
    with pytest.raises(UserError, match=problem):
        restore_model(large, checkpoint, "plain")
