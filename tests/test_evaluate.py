"""Evaluation: exact counts and loss at any number of processes and any batch size."""

import json
import math
import os
import socket

import pytest
import torch
import torch.nn.functional as F
from torch import multiprocessing, nn

from engine.data import create_val_loader
from engine.distributed import World, join
from engine.evaluate import evaluate
from engine.schema import Data, Run

CPU = World(torch.device("cpu"))
RUN = Run(model={}, attention="softmax", data=Data(dataset="digits", workers=0, val_split="train"))  # 1,437: odd
BATCH_SIZES = (1, 7, 64)


class Linear(nn.Module):
    """Logits in float64, so that they do not depend on how images are batched."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(192, 10, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).double() @ self.weight


def evaluate_digits(world: World) -> list[dict[str, float]]:
    loaders = [create_val_loader(RUN, world, img_size=8, num_classes=10, batch_size=size) for size in BATCH_SIZES]
    return [evaluate(Linear(), loader, world, None) for loader in loaders]


def run_rank(rank: int, size: int, port: int, path: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = join("cpu")
    assert (world.rank, world.size, world.is_primary) == (rank, size, rank == 0)
    results = evaluate_digits(world)
    world.barrier()
    if rank == size - 1:
        with open(path, "w") as file:
            json.dump(results, file)
    world.leave()


@pytest.fixture(scope="module")
def expected():
    images, labels = next(iter(create_val_loader(RUN, CPU, img_size=8, num_classes=10, batch_size=2000)))
    assert len(images) == 1437
    logits = Linear()(images).detach()
    place = (logits > logits.gather(1, labels[:, None])).sum(1)  # how many classes stand before the right one
    log_prob = logits.log_softmax(1).gather(1, labels[:, None])
    return {
        "top1": 100 * (place == 0).sum().item() / 1437,
        "top5": 100 * (place < 5).sum().item() / 1437,
        "loss": -log_prob.sum().item() / 1437,
        "images": 1437,
    }


def assert_exact(results, expected):
    for result in results:
        assert result == expected | {"loss": pytest.approx(expected["loss"], rel=1e-6)}  # the loss is taken in fp32
    assert max(r["loss"] for r in results) - min(r["loss"] for r in results) < 1e-9


def test_one_process_counts_every_image_once(expected):
    assert_exact(evaluate_digits(CPU), expected)


def test_two_processes_count_every_image_once(expected, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (2, port, str(tmp_path / "results.json")), nprocs=2)
    assert_exact(json.loads((tmp_path / "results.json").read_text()), expected)


@pytest.mark.parametrize(("num_classes", "top5"), [(3, 100.0), (8, 75.0)])
def test_by_hand(num_classes, top5):
    """Classes 0, 1, 2 and the last, where logits fall with the class: one hit at the top, the last of 8 not in five."""
    logits = -torch.arange(float(num_classes)).repeat(4, 1)
    targets = torch.tensor([0, 1, 2, num_classes - 1])
    result = evaluate(nn.Identity(), [(logits[:3], targets[:3]), (logits[3:], targets[3:])], CPU, None)
    loss = F.cross_entropy(logits.double(), targets).item()
    assert result == {"top1": 25.0, "top5": top5, "loss": pytest.approx(loss, rel=1e-6), "images": 4}


def test_equal_logits_hit_no_more_than_once():
    result = evaluate(nn.Identity(), [(torch.zeros(10, 10), torch.arange(10))], CPU, None)
    assert result == {"top1": 10.0, "top5": 50.0, "loss": pytest.approx(math.log(10), rel=1e-6), "images": 10}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_evaluation_and_is_restored(training):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).train(training)
    logits, targets = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 6
    results = [evaluate(model, [(logits, targets)], CPU, None) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)  # BatchNorm's eps
    assert model.training == model[1].training == training


@pytest.mark.parametrize(("amp", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_is_that_of_the_run(amp, dtype):
    seen = []
    model = nn.Linear(4, 6)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    evaluate(model, [(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))], CPU, amp)
    assert seen == [dtype]
