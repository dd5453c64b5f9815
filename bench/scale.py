"""Start of a run with very many images, which are invented: time and memory that grow with their number.

    python -m bench.scale                             # a thousand, ten million, a hundred million and a billion images
    python -m bench.scale --images 1e6 --order list

A new process for each number plays one of a single rank: it makes the order of an epoch and takes the first batch from
two loader workers. Names and classes are computed from an image's number, in place of a file that the processes of a
node map; they take no memory here. Memory is what a process has alone: private pages, without those that it shares.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data.loader import fast_collate

from engine.config.schema import Data, Run
from engine.data.augment import create_transform
from engine.data.identity import identify_split
from engine.data.layout import SplitReader
from engine.data.loaders import ImageLoader, create_order
from engine.data.sampler import EpochSampler, SeededDataset
from engine.data.splits import Images
from engine.reporting.tables import align
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import World

ORDERS = ("list", "keyed")
"""Values of data.order."""

LARGEST_LIST = 10**8
"""Largest number of images for which a list is drawn: it takes 16 bytes an image."""

LARGEST_NAMED = 10**7
"""Largest number of images that are identified by their names; the time is in proportion."""

ROLLUP = "/proc/{}/smaps_rollup"
"""File of a process that has sums of its memory by kind."""

NUM_CLASSES, BATCH_SIZE, IMG_SIZE, NUM_WORKERS = 1000, 64, 64, 2


class InventedReader(SplitReader):
    """Images of one content, with names and classes from their numbers."""

    def __init__(self, number: int):
        super().__init__()
        self.labels = np.broadcast_to(np.zeros(1, np.int32), number)
        self.class_to_idx = {f"{label:03d}": label for label in range(NUM_CLASSES)}
        file = io.BytesIO()
        Image.fromarray(np.zeros((IMG_SIZE, IMG_SIZE, 3), np.uint8)).save(file, "PNG")
        self.content = file.getvalue()

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return io.BytesIO(self.content), index % NUM_CLASSES

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f"{index % NUM_CLASSES:03d}/{index:010d}.png"

    def filenames(self, basename: bool = False, absolute: bool = False) -> Iterator[str]:
        return map(self._filename, range(len(self)))

    def fingerprints(self) -> np.ndarray:
        return np.broadcast_to(np.full(1, len(self.content)), len(self))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Time and memory of a run's start, by number of images.")
    default = [1e3, 1e7, 1e8, 1e9]
    parser.add_argument("--images", type=float, nargs="+", default=default, help="numbers of images (1e3 1e7 1e8 1e9)")
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=ORDERS, help="values of data.order (list keyed)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not all(BATCH_SIZE <= number <= 10**10 for number in args.images):
        parser.error(f"--images must be {BATCH_SIZE} to 1e10, got {' '.join(f'{number:g}' for number in args.images)}")
    if not Path(ROLLUP.format("self")).exists():
        parser.error(f"needs Linux: memory is read from {ROLLUP.format('PID')}")
    numbers = [*map(int, args.images)]
    if args.one:
        return print(json.dumps(start(numbers[0], args.order[0])))
    header = "images", "data.order", "first batch (s)", "a rank (MB)", "a worker (MB)", "identity by names (s)"
    rows = [header]
    for number in numbers:
        for order in args.order:
            if order == "list" and number > LARGEST_LIST:
                continue
            command = [sys.executable, "-m", "bench.scale", "--one", "--images", str(number), "--order", order]
            done = subprocess.run(command, stdout=subprocess.PIPE)
            if done.returncode:
                sys.exit(f"{number:,} images, data.order={order}: the process ended with status {done.returncode}")
            rows.append((f"{number:,}", order, *row_of(json.loads(done.stdout))))
            print(align([header, rows[-1]]).splitlines()[-1], file=sys.stderr, flush=True)
    print(align(rows))


def row_of(found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    seconds = "" if found["identity"] is None else f"{found['identity']:.1f}"
    return f"{found['first']:.1f}", f"{found['rank']:.0f}", f"{found['worker']:.0f}", seconds


def private_memory(process: int | str) -> int:
    """Bytes of the pages that only this process has, on Linux."""
    text = Path(ROLLUP.format(process)).read_text()
    return 1024 * sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)))


def start(number: int, order: str) -> dict[str, float | None]:
    """Takes the first batch of so many images, and identifies them.

    Returns:
        Seconds to the first batch, MB of this process and of a loader worker, and seconds of processor time of the
        identity by names (None: not measured).
    """
    run = Run(model={}, attention="softmax", data=Data(order=order))
    images = Images(InventedReader(number), create_transform(run, IMG_SIZE, is_training=True, as_bytes=True))
    began = time.perf_counter()
    sampler = EpochSampler(number, BATCH_SIZE, World(torch.device("cpu")), 0, base=create_order(images, run))
    data = SeededDataset(images, 0)
    loader = ImageLoader(
        data, BATCH_SIZE, stack=fast_collate, limit=0, remedy="", sampler=sampler, num_workers=NUM_WORKERS
    )
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    rank, worker = private_memory("self") / 1e6, max(private_memory(child.pid) for child in active_children()) / 1e6
    began = time.process_time()
    if number <= LARGEST_NAMED:
        identify_split("train", images)
    identity = time.process_time() - began if number <= LARGEST_NAMED else None
    return {"first": first, "rank": rank, "worker": worker, "identity": identity}


if __name__ == "__main__":
    main()
