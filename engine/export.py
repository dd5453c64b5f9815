"""A trained model for other programs: the name of what is written says for which.

DIR/               timm's `local-dir:` layout, for timm.create_model("local-dir:DIR", pretrained=True)
FILE.safetensors   the weights with the run's configuration, for the scripts here and timm's `checkpoint_path`
FILE.onnx          the graph for ONNX Runtime, images of one size, any number of them
FILE.pt2           the graph for torch.export.load, likewise

Graphs compute in fp32, as evaluation without `train.amp` does. They are compared with the model before they are
written, and hold config.json of the first form, with preprocessing and labels. What cannot be written completely, or
computes something else, leaves what was there unchanged.
"""

import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import safetensors.torch
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from engine.augment import num_channels
from engine.checkpoint import IDENTITY, METADATA, WEIGHTS, Weights
from engine.config import dump_run
from engine.errors import UserError, one_line
from engine.files import digest_path, write_atomically, write_verified
from engine.fit import build_models
from engine.local_dir import CONFIG, WEIGHTS_FILES, describe_model
from engine.schema import Run

PACKAGES = {"/": (), ".safetensors": (), ".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": ()}
"""A directory, or a file of this suffix -> the packages that it needs besides those of the project."""

MAX_DIFFERENCE = 1e-3
"""Of a graph's logits from the model's, relative to the largest. Rounding makes 1e-7 to 1e-6, and more should it move a
token to another cluster; a wrong option or operator makes 1e-2 and more."""

BATCH_SIZES = (1, 3)
"""Of the images that a graph is tried on, other than the two that it is made with."""


def check_target(target: str) -> None:
    """Whether `export` can write to `target`, before any work.

    Raises:
        UserError: another kind of file, no such directory to write to, or a package that is not installed.
    """
    kind, parent = _kind(target), Path(target).parent
    if not parent.is_dir():
        raise UserError(f"{target}: no directory {str(parent)!r}")
    if kind not in PACKAGES:
        raise UserError(f"{target}: no kind of export; choose a directory DIR/ or a file .safetensors, .onnx or .pt2")
    for package in PACKAGES[kind]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            remedy = "pip install 'efficient-attention-vision[export]' (in a checkout: pip install -e '.[export]')"
            raise UserError(f"{target}: needs the package {package} ({error}); {remedy}") from None


def export(target: str, run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Writes the model that `run` describes, with one kind of weights of `checkpoint`.

    Args:
        target: see above; also the name of a directory that exists.
    Returns:
        What was found out about it on the way, "" if nothing.
    Raises:
        UserError: it cannot be exported, or written; what is there is unchanged.
    """
    path, kind, state = Path(target), _kind(target), WEIGHTS[weights]
    model = build_models(run, checkpoint, [weights])[0][weights].eval()
    checkpoint = {**checkpoint, "config": dump_run(run), state: model.state_dict()}
    if kind == ".safetensors":
        export_checkpoint(path, checkpoint, weights)
        return ""
    description = describe_model(model, run, checkpoint.get("classes"))
    if kind == "/":
        content = to_safetensors(checkpoint, weights)
        _write(path, lambda: _write_together(path, {WEIGHTS_FILES[0]: content, CONFIG: description.encode()}))
        return ""
    images = torch.randn(sum(BATCH_SIZES), num_channels(run), *to_2tuple(run.model["img_size"]))
    content, compute = (to_onnx if kind == ".onnx" else to_pt2)(model, images[:2], description)
    difference = largest_difference(model, compute, images)
    if not difference <= MAX_DIFFERENCE:
        problem = f"its logits differ from the model's by {difference:.1e} of the largest, above {MAX_DIFFERENCE:.0e}"
        raise UserError(f"{target}: not written: {problem}; what was there is unchanged")
    _write(path, lambda: write_atomically(path, content))
    return f"; on batches of {' and '.join(map(str, BATCH_SIZES))} differs by {difference:.1e} of the largest logit"


def export_checkpoint(path: Path, checkpoint: Mapping[str, Any], weights: Weights) -> None:
    """Writes the weights of one kind alone to `path` in the safetensors format, see `to_safetensors`.

    Raises:
        UserError: it cannot be written; what is there is unchanged.
    """
    content = to_safetensors(checkpoint, weights)
    _write(path, lambda: write_verified(path, content))


def to_safetensors(checkpoint: Mapping[str, Any], weights: Weights) -> bytes:
    """The weights of one kind in the safetensors format.

    The metadata and the kind (`weights`) go with them, so that `load_checkpoint` reads the file as a checkpoint.
    """
    metadata = {name: checkpoint[name] for name in (*METADATA, *IDENTITY) if name in checkpoint} | {"weights": weights}
    contiguous = {name: weight.contiguous() for name, weight in checkpoint[WEIGHTS[weights]].items()}
    return safetensors.torch.save(contiguous, metadata={"run": json.dumps(metadata)})


def to_pt2(model: nn.Module, images: Tensor, description: str) -> tuple[bytes, Callable[[Tensor], Tensor]]:
    """The file of torch.export.save for images (B, C, H, W) of any B, and what is computed by the graph in it."""
    file = io.BytesIO()
    torch.export.save(_trace(model, images), file, extra_files={CONFIG: description})
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns of the bytes that it reads itself
        program = torch.export.load(io.BytesIO(file.getvalue()))
    return file.getvalue(), program.module()


def to_onnx(model: nn.Module, images: Tensor, description: str) -> tuple[bytes, Callable[[Tensor], Tensor]]:
    """The ONNX file for images (B, C, H, W) of any B, and what ONNX Runtime computes by it on the CPU.

    Raises:
        UserError: an operator that cannot be translated.
    """
    import onnxruntime

    from engine.onnx_operators import TRANSLATIONS

    graph = _trace(model, images)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"):
            exported = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                custom_translation_table=TRANSLATIONS,
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(f"cannot be exported to ONNX: {one_line(' '.join(str(cause).split()), 200)}") from None
    program = cast(torch.onnx.ONNXProgram, exported)  # of dynamo=True
    program.model.metadata_props[CONFIG] = description
    file = io.BytesIO()
    program.save(file)  # type: ignore[arg-type]  # it writes to files too
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return file.getvalue(), lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@torch.no_grad()
def _trace(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The graph of `model` for any number of such images."""
    return torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@torch.no_grad()
def largest_difference(model: nn.Module, compute: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Of the logits of `compute` from those of `model`, relative to the largest of an image: over `BATCH_SIZES`."""
    found = []
    for batch in images.split(BATCH_SIZES):
        expected = model(batch).flatten(1)
        found.append((compute(batch).flatten(1) - expected).abs().amax(1) / expected.abs().amax(1))
    return torch.cat(found).max().item()


def _kind(target: str) -> str:
    """The suffix of a file, or / for a directory: a name that ends so, or a directory that is there."""
    path = Path(target)
    return "/" if target.endswith("/") or (path.is_dir() and path.suffix not in PACKAGES) else path.suffix


def _write_together(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes all of `files`, or if one cannot be written none of them."""
    with TemporaryDirectory(dir=directory.parent) as unfinished:
        for name, content in files.items():
            write_atomically(Path(unfinished, name), content)
        directory.mkdir(exist_ok=True)
        for name in files:
            digest_path(directory / name).unlink(missing_ok=True)  # of what was there
            os.replace(Path(unfinished, name), directory / name)


def _write(path: Path, write: Callable[[], None]) -> None:
    """Calls `write`, whose errors become those of the user."""
    try:
        write()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; what was there is unchanged") from error
