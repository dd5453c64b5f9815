"""Runs whose number of ranks changes: the images of an epoch."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from engine.data.sampler import EpochSampler
from engine.runtime.distributed import World
from tests.engine.test_resume import RUN, records
from tests.support.launcher import ForkServer


def test_any_sequence_of_ranks_reads_every_image_once():
    """The ranks change at random updates of an epoch of 100 images and total batches of 12."""
    rng = np.random.default_rng(0)
    for epoch in range(20):
        start, seen, undisturbed = 0, [], EpochSampler(100, 12, World(torch.device("cpu")), seed=1)
        undisturbed.set_epoch(epoch)
        while start < 96:
            ranks, updates = int(rng.choice([1, 2, 3, 4, 6, 12])), int(rng.integers(1, 4))
            batches = []
            for rank in range(ranks):
                sampler = EpochSampler(100, 12, World(torch.device("cpu"), rank, ranks), seed=1)
                sampler.set_epoch(epoch, start)
                batches.append(list(sampler)[: updates * 12 // ranks])
            seen += sorted((place for batch in batches for place in batch), key=lambda place: place[2])
            start = min(96, start + 12 * updates)
        assert seen == list(undisturbed)
        assert len({index for index, _, _ in seen}) == 96


def images_of_epochs(log: Path, num_ranks: int) -> tuple[dict[int, Counter], dict[int, int]]:
    """Returns, for every epoch, how often the updates that stand have read each image, and the ranks of each update.

    An update that was made again, after a kill, stands as it was made last: by as many ranks as there then were.
    """
    updates: list[dict[int, tuple[int, list[tuple[int, int]]]]] = []
    for rank in range(num_ranks):
        made, places = {}, []
        for line in Path(f"{log}.{rank}").read_text().splitlines():
            kind, *words = line.split()
            if kind == "start":
                places = []
            elif kind == "place":
                places.append((int(words[1]), int(words[0])))
            elif kind == "ranks":
                made[int(words[0])], places = (int(words[1]), places), []
        updates.append(made)
    epochs: dict[int, Counter] = {}
    ranks = {step: size for step, (size, _) in updates[0].items()}
    for step, size in ranks.items():
        for made in updates[:size]:
            assert made[step][0] == size
            for epoch, index in made[step][1]:
                epochs.setdefault(epoch, Counter())[index] += 1
    return epochs, ranks


@pytest.mark.quick
def test_fewer_and_more_ranks_go_on_by_themselves(fork_server: ForkServer, tmp_path: Path):
    """Two ranks are killed in their sixth update, one goes on for two updates, and three train to the end."""
    config, output, log = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "log"
    config.write_text(yaml.safe_dump(RUN))
    options = ["train.total_batch_size=12", "augment.mixup=0", "augment.cutmix=0"]  # four updates of the 50 digits left
    command = [str(config), "--allow-change", "processes", *options, "--output", str(output)]
    kill = ("engine.training.exchange.UpdateExchange.send", 6, "SIGKILL")
    launches = [(2, [kill], None), (1, [("train.nn.utils.clip_grad_norm_", 1, "SIGTERM")], [75]), (3, [], [0] * 3)]
    for number, (ranks, faults, expected) in enumerate(launches):
        own = tmp_path / f"log{number}"
        statuses, job = fork_server.run(command, own, dict.fromkeys(range(ranks), faults), ranks)
        assert expected in (statuses, None), job.text
        for rank in range(3):
            text = Path(f"{own}.{rank}").read_text() if rank < ranks else ""
            with Path(f"{log}.{rank}").open("a") as file:
                file.write(text)
    epochs, ranks = images_of_epochs(log, 3)
    assert [ranks[step] for step in range(1, 9)] == [2, 2, 2, 2, 1, 1, 3, 3]
    assert [sorted(counts.values()) for counts in epochs.values()] == [[1] * 48] * 2
    changes = [line for line in records(output)[:99] if line["kind"] == "change"]
    changed = [(line["option"], line["before"], line["now"], line["step"]) for line in changes]
    assert changed == [("processes", 2, 1, 4), ("processes", 1, 3, 6)]
    statuses, job = fork_server.run([*command, "optim.lr=1.0"], tmp_path / "refused")  # alone, after three
    assert statuses == [2]
    assert "\n  optim.lr: " in job.text
