"""Class names in two Unicode normalisations, as macOS (NFD) and other systems (NFC) write them, are the same names."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attention.options import OptionError
from engine.checkpoints.files import load_checkpoint, save_checkpoint
from engine.config.schema import Data
from engine.data import prepare
from engine.data.identity import identify_split
from engine.data.splits import classes_of, open_split
from tests.engine.test_predict import make_checkpoint

NAMES = ["chat", "e2", "zèbre", "Ångström 9", "Ångström 10", "éléphant"]
"""Classes in NFC and in their order, which would be another in NFD."""

KINDS = ["folder", "csv", "cache"]


def write_split(root: Path, form: str, kind: str, names=NAMES, split: str = "train") -> Data:
    """Writes ten images of every class, and returns the options of the split."""
    files = []
    for label, name in enumerate(names):
        for number in range(10):
            folder = root / split / unicodedata.normalize(form, name)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / unicodedata.normalize(form, f"é{number}.png")
            rng = np.random.default_rng((label, number))
            Image.fromarray((40 * label + rng.integers(20, size=(8, 8))).astype(np.uint8)).save(path)
            files.append(path.relative_to(root / split))
    if kind == "csv":
        rows = [f"{split}/{path},{path.parts[0]}" for path in files]
        (root / f"{split}.csv").write_text("\n".join(["file,label", *rows]))
    elif kind == "cache":
        prepare.main([str(root), str(root / kind), "--splits", split, "--workers", "0"])
        return Data(dataset=kind, root=str(root / kind))
    return Data(dataset=kind, root=str(root))


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_the_same_in_both(kind, tmp_path):
    """Classes, their order, the order of images, and the identity, by which a run resumes."""
    splits = [open_split(write_split(tmp_path / form, form, kind), "train_split") for form in ("NFC", "NFD")]
    assert [classes_of(images) for images in splits] == [NAMES] * 2
    assert splits[0].reader.labels.tolist() == splits[1].reader.labels.tolist()
    assert identify_split("train", splits[0]) == identify_split("train", splits[1])


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_names_that_become_one_are_refused(kind, tmp_path):
    for form in ("NFC", "NFD"):
        data = write_split(tmp_path, form, "folder", ["été"])
    if kind == "csv":
        rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in (tmp_path / "train").rglob("*.png")]
        (tmp_path / "train.csv").write_text("\n".join(["file,label", *sorted(rows, reverse=True)]))
    data = Data(dataset=kind, root=data.root)
    shown = r"'e\u0301te\u0301' and '\xe9t\xe9'"
    with pytest.raises(OptionError, match=r"^data.train_split: .*: the classes '.*; rename or merge them$") as caught:
        open_split(data, "train_split")
    assert f"the classes {shown} are one name in two Unicode normalisations" in str(caught.value)


def test_a_file_of_class_names_may_have_either(tmp_path):
    data = write_split(tmp_path, "NFC", "folder")
    for form in ("NFC", "NFD"):
        (tmp_path / "classes.txt").write_text(unicodedata.normalize(form, "éléphant\nzèbre"))
        images = open_split(Data(root=data.root, classes=str(tmp_path / "classes.txt")), "train_split")
        assert classes_of(images) == ["éléphant", "zèbre"]


def test_names_in_a_checkpoint_are_read_in_nfc(tmp_path):
    make_checkpoint(tmp_path / "x.pt")
    written = [unicodedata.normalize("NFD", name) for name in NAMES]
    save_checkpoint(tmp_path / "nfd.pt", load_checkpoint(tmp_path / "x.pt") | {"classes": written})
    assert load_checkpoint(tmp_path / "nfd.pt")["classes"] == NAMES
