"""Processes, devices and seeds; test_evaluate.py and test_train.py have several processes."""

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from attention.options import OptionError
from engine.runtime.distributed import World, init_distributed, mix_seeds, seed_everything, set_arithmetic
from engine.runtime.errors import UserError
from engine.runtime.locks import lock_directory
from tests.support.refusals import refusal

LAUNCH = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Environment of a rank."""


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "two"), ("WORLD_SIZE", ""), ("RANK", None), ("LOCAL_RANK", "-1"), ("MASTER_ADDR", None)],
)
def test_a_wrong_environment_of_a_launcher_is_refused_in_a_line(monkeypatch, capsys, tmp_path, name, value):
    for key, text in (LAUNCH | {name: value}).items():
        monkeypatch.delenv(key, raising=False) if text is None else monkeypatch.setenv(key, text)
    error = refusal(train.main, ["configs/quickstart.yaml", "--output", tmp_path / "run"], capsys)
    assert f"{name} = {value!r}: no value of a launcher; start ranks with torchrun, which sets it" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.complete
def test_ranks_that_do_not_meet_end_in_time(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for key, text in (LAUNCH | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(key, text)
    problem = rf"^MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}: the 2 ranks have not met there in 0.02 minutes \(.*\)"
    with pytest.raises(UserError, match=rf"{problem}; start all ranks .*, or raise train.timeout_minutes$"):
        init_distributed("cpu", timeout_minutes=0.02)
    assert not dist.is_initialized()


@pytest.mark.parametrize("allocation", [{}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}], ids=["alone", "in SLURM"])
def test_without_torchrun_a_process_is_alone(monkeypatch, allocation):
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    world = init_distributed("cpu")
    assert world == World(torch.device("cpu"), rank=0, size=1)
    assert world.is_primary
    assert world.sum(torch.tensor(3)) == 3


def test_a_process_group_of_one_rank_ends_too():
    """Otherwise NCCL warns at the end of a run on one GPU, started by torchrun."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):  # the second time, there is none
        with World(torch.device("cpu")).ending():
            pass
        assert not dist.is_initialized()


def test_alone_there_is_nobody_to_wait_for():
    world = World(torch.device("cpu"))
    assert world.gather([torch.tensor(0.5), 2, True]) == [[0.5, 2.0, 1.0]]
    assert world.any(True)
    assert not world.any(False)
    world.barrier()
    world.copy_buffers(torch.nn.BatchNorm1d(2))


def test_auto_takes_what_is_there(monkeypatch):
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert init_distributed("auto").device.type == device


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"^train\.device: cuda is not available here; use auto or cpu$"):
        init_distributed("cuda")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (LAUNCH | {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^LOCAL_RANK = 2, .* GPUs of this machine are 2, .* --nproc_per_node=2$"):
        init_distributed("auto")


def test_every_rank_knows_why_a_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(World, "first", lambda self, text: text or f"{tmp_path}: in use")
    locked = lock_directory(tmp_path, World(torch.device("cpu"), rank=1, size=2))
    with pytest.raises(UserError, match=f"^{tmp_path}: in use$"), locked:
        pass


def test_neighbouring_keys_give_unrelated_seeds():
    seeds = {mix_seeds(seed, epoch, rank) for seed in range(5) for epoch in range(5) for rank in range(5)}
    assert len(seeds) == 125
    assert 0 <= min(seeds) < max(seeds) < 2**32
    assert len({seed % 2 for seed in seeds}) == 2
    assert len({mix_seeds(1), mix_seeds(1, 0), mix_seeds(1, 0, 0), mix_seeds(1, 0, 0, 0)}) == 4


def test_every_library_is_seeded():
    def draw(*key):
        seed_everything(*key)
        return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002 timm draws from the global one

    first, again, other = draw(1, 2), draw(1, 2), draw(1, 3)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_tf32_switch():
    assert not torch.backends.cuda.matmul.allow_tf32  # torch's own choice, which is the option's default
    try:
        set_arithmetic(deterministic=False, tf32=True)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        set_arithmetic(deterministic=False, tf32=False)


def test_the_deterministic_switch(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and put back what was
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_arithmetic(deterministic=False, tf32=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    try:
        set_arithmetic(deterministic=True, tf32=False)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # cuBLAS is deterministic only with it
    finally:
        torch.use_deterministic_algorithms(False)


def gloo_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread may end after it was listed
            names.append(task.read_text().strip())
    return [name for name in names if "gloo" in name]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_group_ends_when_it_is_destroyed(fails: bool):
    """An owner that goes later would join the group's threads, with Python's lock held."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, kept = World(torch.device("cpu"), rank=0, size=2), []
    try:
        with world.average_gradients(torch.nn.Linear(3, 2)) as network:
            network(torch.randn(4, 3)).sum().backward()
            kept.append(network)  # as the frame of a traceback does
            assert gloo_threads()
            if fails:
                raise KeyError
    except KeyError as error:
        kept.append(error)
    finally:
        dist.destroy_process_group()
    assert not gloo_threads()
