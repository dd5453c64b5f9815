"""Orders of an epoch: every index once, a function of seed and position, the same for any range of positions."""

import tracemalloc

import numpy as np
import pytest
import torch

from engine.data.order import BlockOrder, ListOrder
from engine.data.sampler import EpochSampler
from engine.runtime.distributed import World
from engine.training.differences import list_differences

FIRSTS = np.cumsum([0, 7, 3, 12, 5, 9, 1, 4, 11, 6])
ORDERS = {
    "list": lambda: ListOrder(int(FIRSTS[-1])),
    "blocks": lambda: BlockOrder(FIRSTS, 2),
    "a block of all": lambda: BlockOrder(FIRSTS, 20),
    "blocks that fit": lambda: BlockOrder(FIRSTS, 3),
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_image_comes_once_and_any_position_alone(name):
    number = int(FIRSTS[-1])
    whole = ORDERS[name]()(3, np.arange(number))
    assert sorted(whole.tolist()) == [*range(number)]
    assert whole.tolist() != [*range(number)]
    order = ORDERS[name]()
    assert order(4, np.arange(number)).tolist() != whole.tolist()
    for part in (np.arange(50, 57), np.array([31]), np.arange(2, number, 3), np.arange(0)):
        assert order(3, part).tolist() == whole[part].tolist()


def test_blocks_need_few_shards_at_a_time():
    order = BlockOrder(FIRSTS, 2)
    shards = np.searchsorted(FIRSTS, order(0, np.arange(FIRSTS[-1])), "right") - 1
    assert order.block[1].dtype == np.int64
    seen: list[set[int]] = []
    for shard in shards.tolist():
        if not seen or (shard not in seen[-1] and len(seen[-1]) == 2):
            seen.append(set())
        seen[-1].add(shard)
    assert sorted(shard for block in seen for shard in block) == [*range(9)]


def test_a_run_does_not_go_on_in_another_order():
    key = "data.shuffle_shards"
    there, here = {key: 16}, {key: 8}
    (line,) = list_differences(there, here, ())
    assert key in line
    assert not list_differences(there, here, (key,))


def test_an_epoch_of_a_list_is_not_a_list_of_python_numbers():
    """It takes three arrays of 8 bytes an image while it is drawn; numbers and their list would take 40 more."""
    sampler = EpochSampler(10**6, 64, World(torch.device("cpu")), 0)
    tracemalloc.start()
    places = [place for place, _ in zip(sampler, range(100), strict=False)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({index for index, _, _ in places}) == 100
    assert peak < 36e6
