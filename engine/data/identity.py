"""Identity of the data of a run: names of its classes, and digests of the names and the content of its images."""

import hashlib
import sys
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np

from engine.config.schema import Data, Run
from engine.data.splits import Images, classes_of
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import to_nfc


def identify_data(train: Images, val: Images) -> dict[str, Any]:
    """Returns the identity of the data of a run: class names, and digests of each split; see `identify_split`."""
    return {"classes": classes_of(train), **identify_split("train", train), **identify_split("val", val)}


def is_one_split(identity: Mapping[str, Any]) -> bool:
    """Returns whether the training images of `identify_data` are those of the validation, by whatever name."""
    return all(identity[f"train_{what}"] == identity[f"val_{what}"] for what in ("files", "content"))


def warn_of_one_split(identity: Mapping[str, Any], run: Run, world: World) -> None:
    """Prints a warning on the primary rank if the training images are those of the validation."""
    if world.is_primary and is_one_split(identity):
        splits = f"data.val_split = {run.data.val_split} has the images of data.train_split"
        print(f"warning: {splits}; top-1 is not that of new images", file=sys.stderr, flush=True)


def identify_split(name: Literal["train", "val"], images: Images) -> dict[str, str]:
    """Returns the digest of the files of a split, see `digest_files`, and that of their content.

    The content is the SHA-256 of `SplitReader.fingerprints`: images of one name and one size in bytes are the same.
    """
    content = hashlib.sha256(np.ascontiguousarray(images.reader.fingerprints(), "<i8").data).hexdigest()
    return {f"{name}_files": digest_files(images), f"{name}_content": content}


def check_held_out(data: Data, checkpoint: Mapping[str, Any], identity: Mapping[str, str]) -> str:
    """Checks that images held out of the training split are those that validated in the training of `checkpoint`.

    Their names decide, as a prepared copy of them may have other content; `identity` is theirs, see `identify_split`.

    Returns:
        A warning, where the checkpoint does not know its images; else "".
    Raises:
        UserError: they differ; the model may have been trained on some of them.
    """
    there, held_out_by = checkpoint.get("val_files"), data.held_out_by
    if not held_out_by or there == identity["val_files"]:
        return ""
    if there is None:
        problem = "the checkpoint does not say which images its training held out, and may have been trained on these"
        return f"warning: {held_out_by}: {problem}"
    problem = f"holds out other images of data.train_split = {data.train_split!r} than those that validated in training"
    whole = f"{held_out_by.partition(' ')[0]}=null data.val_split=NAME"
    remedy = f"give the data and options of the training, or a whole split with {whole}"
    raise UserError(f"{held_out_by}: {problem}, and the model may have been trained on them; {remedy}")


def digest_files(images: Images) -> str:
    """SHA-256 of the class index and the name (relative to the split, in NFC) of every image in order."""
    digest, names, labels = hashlib.sha256(), iter(images.reader.filenames()), images.reader.labels
    changes = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    for begin, end in pairwise(changes):  # by class: there may be a million images
        label = f"{labels[begin]} "
        text = label + f"\0{label}".join(islice(names, end - begin)) + "\0"
        digest.update(to_nfc(text).encode(errors="surrogateescape"))
    return digest.hexdigest()
