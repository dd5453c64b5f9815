"""A short alignment: replaced attention layers, fitted to those of a trained model in a few steps without labels."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from analysis.command_line import BATCH_SIZE
from analysis.trained import Sample, Trained, read_images
from attention.options import OptionError
from engine.config.objective_options import TEACHER_OF_INIT, Distill
from engine.config.schema import Optim, Schedule
from engine.data.identity import identify_data, is_one_split
from engine.data.splits import Images, open_split
from engine.objectives.alignment import Alignment
from engine.objectives.distillation import Teacher
from engine.training.optim import create_optimizer, create_schedule
from models.base import attention_layers, is_same_attention

OPTIM = Optim(lr=1e-2, lr_base_size=BATCH_SIZE, weight_decay=0.0, clip_grad=1.0)
SCHEDULE = Schedule(epochs=1, warmup_epochs=0)
"""Optimiser, and cosine schedule over the steps, as in configs/fashion_mnist/align_lara.yaml."""

RECIPE: dict[str, Any] = {"batch_size": BATCH_SIZE, "optim": asdict(OPTIM), "schedule": asdict(SCHEDULE)}


def open_training_images(trained: Trained, sample: Sample) -> tuple[Images, Tensor]:
    """Opens the training images of the run, for which labels are not used.

    Returns:
        The images, and the indices of those that may be used: all, or where the training images are those of the
        validation too, those that `sample` leaves out.
    Raises:
        OptionError: they cannot be read, or are too few.
    """
    data = trained.run.data
    try:
        images = open_split(data, "train_split")
    except OptionError as error:
        remedy = f"--align needs images; data.train_split={data.val_split} takes those that are not classified"
        raise OptionError(error.key, f"{str(error).removeprefix(error.key).removeprefix(': ')}; {remedy}") from None
    indices = torch.arange(len(images))
    remedy = "name a larger split" if data.subset is None else f"raise data.subset = {data.subset}"
    if validates_on_training_images(trained):
        numbers = images.reader.indices if data.subset is not None else indices  # in the split
        indices = indices[~torch.isin(torch.as_tensor(numbers), torch.tensor(sample.indices))]
        remedy = "lower --images, or name another split"
    if len(indices) < BATCH_SIZE:
        problem = f"leaves {len(indices)} images for --align, below {BATCH_SIZE}, those of a step; {remedy}"
        raise OptionError("data.train_split", f" = {data.train_split!r} {problem}")
    return images, indices


def validates_on_training_images(trained: Trained) -> bool:
    """Returns whether training and validation images are the same split, and none are held out."""
    data = replace(trained.run.data, subset=None)
    if data.held_out_by:
        return False
    return is_one_split(identify_data(open_split(data, "train_split"), open_split(data, "val_split")))


def draw_batches(trained: Trained, images: Images, indices: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """Yields `steps` batches (B, C, H, W), prepared as for validation, in an order of `seed`; none twice before all.

    Raises:
        BrokenImage: an image cannot be read.
    """
    generator = torch.Generator().manual_seed(seed)
    rest = indices[:0]
    for _ in range(steps):
        if len(rest) < BATCH_SIZE:
            rest = torch.cat([rest, indices[torch.randperm(len(indices), generator=generator)]])
        chosen, rest = rest[:BATCH_SIZE], rest[BATCH_SIZE:]
        yield read_images(images, chosen.tolist(), trained.run)[0]


def align_by_seed(trained: Trained, model: nn.Module, training: tuple[Images, Tensor], steps: int, seed: int) -> None:
    """Aligns `model` on training images, see `open_training_images`; order and random numbers follow from `seed`.

    Raises:
        FloatingPointError: a gradient is not finite. BrokenImage: an image cannot be read.
    """
    torch.manual_seed(seed)
    align(trained, model, draw_batches(trained, *training, steps, seed), steps)


def align(trained: Trained, model: nn.Module, batches: Iterable[Tensor], steps: int) -> None:
    """Fits the attention layers of `model` that differ from the trained model's; see `Alignment`. Each batch is a step.

    If all layers are the trained model's, nothing is changed. Random numbers follow from torch's generator.

    Raises:
        FloatingPointError: a gradient is not finite.
    """
    layers = zip(attention_layers(model), attention_layers(trained.model), strict=True)
    if all(is_same_attention(*pair) for pair in layers):
        return
    teacher = Teacher(copy.deepcopy(trained.model), (), None, *[((0.0,), (1.0,))] * 2).to(trained.device)
    distill = Distill(teacher=TEACHER_OF_INIT, type="attention")
    objective = Alignment(nn.Identity(), distill, model.train(), teacher)
    optimizer = create_optimizer(model, OPTIM, BATCH_SIZE)
    schedule = create_schedule(optimizer, SCHEDULE, steps)
    for step, images in enumerate(batches):
        schedule.step_update(step)
        objective(objective.fitted, images.to(trained.device), torch.empty(0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        if not norm.isfinite():
            raise FloatingPointError(f"a gradient is not finite in step {step + 1} of --align")
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
