"""Reads every image of a run once, before it is trained: whether broken ones would stop it, and copies of images."""

from typing import cast

import torch

from engine.config.schema import Run
from engine.data.loaders import create_loaders, images_of
from engine.data.sampler import EpochSampler
from engine.data.splits import classes_of
from engine.data.verify import list_copies, read_checked
from engine.runtime.distributed import World


def check_images(run: Run) -> bool:
    """Reads both splits of `run`, prints broken images and copies; returns whether the run could read what it needs.

    The order of every epoch is known, and so is the number of broken images that it would leave out.

    Raises:
        OptionError: data that cannot be used, see `create_loaders`.
    """
    world, model = World(torch.device("cpu")), run.model
    train, val, _ = create_loaders(run, world, img_size=model["img_size"], num_classes=model["num_classes"])
    broken, digests = {}, {}
    for name, loader in {"train": train, "val": val}.items():
        images = images_of(loader)
        broken[name], digests[name] = read_checked(images, run.data.workers, name)
        number = f"{len(broken[name]):,} broken"
        print(f"{name}: {len(images):,} images of {len(classes_of(images)):,} classes, {number}")
        print("".join(f"  {sample}\n" for sample in broken[name].values()), end="")
    print("".join(f"{line}\n" for line in list_copies(digests)), end="")
    problems = []
    counts = count_skipped(cast(EpochSampler, train.sampler), [*broken["train"]], run.schedule.epochs)
    if stops := [epoch for epoch, count in enumerate(counts, start=1) if count > run.data.max_broken]:
        found = f"{counts[stops[0] - 1]:,} broken training images, more than data.max_broken = {run.data.max_broken}"
        problems.append(f"epoch {stops[0]} would stop the run: {found}; repair or remove them, or raise it")
    if broken["val"] and run.data.broken_val == "refuse":
        remedy = "repair or remove them, or leave them out by data.broken_val=skip"
        problems.append(f"the first evaluation would end the run: {len(broken['val']):,} broken images; {remedy}")
    print("\n".join(problems or [f"no image stops this run; an epoch leaves out {max(counts):,} at most"]))
    return not problems


def count_skipped(sampler: EpochSampler, broken: list[int], epochs: int) -> list[int]:
    """The number of images that every epoch of a run would leave out, of those with the indices `broken`.

    A broken image counts as often as it occurs: more than once with repeated augmentation or balanced sampling, and not
    at all where it is among the images that fill no batch.
    """
    if not broken:
        return [0] * epochs
    is_broken, counts = torch.zeros(sampler.num_images, dtype=torch.bool), []
    is_broken[broken] = True
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        counts.append(int(is_broken[sampler.order(range(sampler.stop))].sum()))
    return counts
