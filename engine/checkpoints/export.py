"""Exports a model to other programs, of any checkpoint that this project can read.

    python -m engine.checkpoints.export runs/eva eva/             # timm's `local-dir:` layout
    python -m engine.checkpoints.export runs/eva eva.safetensors  # weights with their configuration
    python -m engine.checkpoints.export runs/eva eva.onnx         # graph for ONNX Runtime, images of one size
    python -m engine.checkpoints.export released.pth eva.safetensors model.num_heads=3 attention.window_size=7
    python -m engine.checkpoints.export best.pth.tar eva.safetensors --config CONFIG.yaml attention=eva

A graph computes in fp32, is compared with the model before it is written, and holds config.json of the first form. If
an export cannot be written completely or computes something else, existing files stay unchanged.

An export has all options. Those that a checkpoint of the released code of EVA and LARA lacks are named, and given as
key.path=value. Weights of other programs (timm, DeiT, PVT-v2) come without options: a configuration describes their
model, and nothing is written unless all of them load unchanged. It must agree with what a file of timm's train.py
states: options of the model and its images, and the attention where it has trained a model of this project.
"""

import importlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from engine.runtime.signals import begin

if __name__ == "__main__":
    begin("engine.checkpoints.command_line:parse_arguments")

import safetensors.torch
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from engine.checkpoints.adapt import restore_model
from engine.checkpoints.bare_weights import read_with_config
from engine.checkpoints.command_line import parse_arguments
from engine.checkpoints.files import IDENTITY, METADATA, TRAINED, WEIGHTS, Weights, open_weights, trained_config
from engine.checkpoints.identify import CONFIG, WEIGHTS_FILES, list_checkpoints
from engine.checkpoints.local_dir import describe_model
from engine.checkpoints.origin import is_made_here
from engine.checkpoints.weights import check_predicts_classes
from engine.config.schema import Run, num_channels
from engine.run.described import parse_described
from engine.run.load import dump_run, load_run
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.files import write_file
from engine.runtime.ownership import check_claim, check_file, write_together
from engine.runtime.text import one_line
from models import is_host
from models.assignment import with_budget

PACKAGES = {"/": (), ".safetensors": (), ".onnx": ("onnx", "onnxscript", "onnxruntime")}
"""A directory, or a suffix of files -> the packages that its export needs besides the project's own."""

MAX_DIFFERENCE = 1e-3
"""Largest accepted difference of a graph's logits from the model's, relative to the largest logit. Rounding causes 1e-7
to 1e-6, and more if it moves a token to another cluster; a wrong option or operator causes 1e-2 and more."""

BATCH_SIZES = (1, 3)
"""Sizes of the batches that a graph is tried on; it is traced with two images."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    kind: Weights = "plain"
    with refuse_bad_input():
        check_target(args.output)
        if Path(args.output).resolve() == args.checkpoint.resolve():
            raise UserError(f"{args.output}: is the checkpoint itself; name another file")
        if args.config:
            run = load_run(args.config, args.overrides)
            checkpoint = read_with_config(run, args.checkpoint, args.weights)
        else:
            path, checkpoint, kind, why, _ = open_weights(args.checkpoint, weights=args.weights)
            is_own = is_made_here(args.checkpoint)
            if why:
                print(f"{path}: {why}", file=sys.stderr)
            run = parse_described(checkpoint["config"], str(path), args.overrides, is_own=is_own)
        note = export(args.output, run, checkpoint, kind)
        taken = "weights" if args.config else f"{kind} weights"
        print(f"{args.output}: the {taken} of {args.checkpoint}, of the model {run.model['name']}{note}")


def check_target(target: str) -> None:
    """Checks that `export` can write to `target`, before any work.

    Raises:
        UserError: another kind of file, no such directory to write to, or a package that is not installed.
    """
    kind, parent = _kind(target), Path(target).parent
    if not parent.is_dir():
        raise UserError(f"{target}: no directory {str(parent)!r}")
    if kind not in PACKAGES:
        raise UserError(f"{target}: no kind of export; choose a directory DIR/ or a file .safetensors or .onnx")
    if kind == "/":
        check_claim(Path(target), [WEIGHTS_FILES[0], CONFIG])
        if list_checkpoints(Path(target)):
            raise UserError(f"{target}: the directory of a run; name another one")
    else:
        check_file(Path(target), "the export", [kind])
    for package in PACKAGES[kind]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            remedy = "pip install 'efficient-attention-vision[export]' (in a checkout: pip install -e '.[export]')"
            raise UserError(f"{target}: needs the package {package} ({error}); {remedy}") from None


def export(target: str, run: Run, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """Writes the model that `run` describes, with one kind of weights of `checkpoint`.

    Args:
        target: see above; an existing directory may also be named without the slash.
    Returns:
        A note for the user, "" if there is none.
    Raises:
        UserError: it cannot be exported or written; existing files are unchanged.
    """
    path, kind, state = Path(target), _kind(target), WEIGHTS[weights]
    if kind == "/" and is_host(run.model["name"]):
        problem = f"timm's layout cannot describe {run.model['name']} with its attention"
        raise UserError(f"{target}: {problem}; choose a file .safetensors or .onnx")
    model, line = restore_model(run, checkpoint, weights)
    if line:
        print(line, file=sys.stderr)
    model.eval()
    if (
        run.train.budgets and with_budget(run.attention, run.train.budgets[-1]) != run.attention
    ):  # a part of the weights
        run = replace(run, train=replace(run.train, budgets=None, budget_distill=False))
    own = {TRAINED: trained_config(checkpoint), "config": dump_run(run), state: model.state_dict()}
    checkpoint = {**checkpoint, **own}
    if kind == ".safetensors":
        write_file(path, to_safetensors(checkpoint, weights))
        return ""
    check_predicts_classes(run, target)
    description = describe_model(model, run, checkpoint.get("classes"))
    if kind == "/":
        content = to_safetensors(checkpoint, weights)
        write_together(path, {WEIGHTS_FILES[0]: content, CONFIG: description.encode()})
        return ""
    images = torch.randn(sum(BATCH_SIZES), num_channels(run), *to_2tuple(run.model["img_size"]))
    content, compute = to_onnx(model, images[:2], description)
    difference = largest_difference(model, compute, images)
    if not difference <= MAX_DIFFERENCE:
        problem = f"its logits differ from the model's by {difference:.1e} of the largest, above {MAX_DIFFERENCE:.0e}"
        raise UserError(f"{target}: not written: {problem}; what was there is unchanged")
    write_file(path, content)
    return f"; on batches of {' and '.join(map(str, BATCH_SIZES))} differs by {difference:.1e} of the largest logit"


def to_safetensors(checkpoint: Mapping[str, Any], weights: Weights) -> bytes:
    """Returns the weights of one kind, and the metadata, in the format that `load_checkpoint` reads."""
    names = [name for name in (*METADATA, TRAINED, *IDENTITY) if name in checkpoint]
    metadata = {name: checkpoint[name] for name in names} | {"weights": weights}
    contiguous = {name: weight.contiguous() for name, weight in checkpoint[WEIGHTS[weights]].items()}
    return safetensors.torch.save(contiguous, metadata={"run": json.dumps(metadata)})


def to_onnx(model: nn.Module, images: Tensor, description: str) -> tuple[bytes, Callable[[Tensor], Tensor]]:
    """Returns the ONNX file for images (B, C, H, W) of any B, and the function that ONNX Runtime computes on the CPU.

    Raises:
        UserError: an operator that cannot be translated.
    """
    import onnxruntime

    from engine.checkpoints.onnx_operators import TRANSLATIONS

    with torch.no_grad():
        graph = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"):
            exported = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: "batch"},),
                custom_translation_table=TRANSLATIONS,
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(f"cannot be exported to ONNX: {one_line(' '.join(str(cause).split()), 200)}") from None
    program = cast(torch.onnx.ONNXProgram, exported)  # because of dynamo=True
    program.model.metadata_props[CONFIG] = description
    file = io.BytesIO()
    program.save(file)  # type: ignore[arg-type]  # a file object is accepted too
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return file.getvalue(), lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@torch.no_grad()
def largest_difference(model: nn.Module, compute: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Returns the largest difference of logits of `compute` and `model`, relative to the largest logit of an image."""
    found = []
    for batch in images.split(BATCH_SIZES):
        expected = model(batch).flatten(1)
        found.append((compute(batch).flatten(1) - expected).abs().amax(1) / expected.abs().amax(1))
    return torch.cat(found).max().item()


def _kind(target: str) -> str:
    """Returns the suffix of a file, or / for an existing directory or a name that ends with a slash."""
    path = Path(target)
    return "/" if target.endswith("/") or (path.is_dir() and path.suffix not in PACKAGES) else path.suffix


if __name__ == "__main__":
    main()
