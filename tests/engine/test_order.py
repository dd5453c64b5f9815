"""Orders of an epoch: every index once, a function of seed and position, the same for any range of positions."""

import tracemalloc

import numpy as np
import pytest
import torch

from engine.data.order import BlockOrder, KeyedOrder, ListOrder
from engine.data.sampler import EpochSampler
from engine.runtime.distributed import World
from engine.training.differences import list_differences

FIRSTS = np.cumsum([0, 7, 3, 12, 5, 9, 1, 4, 11, 6])
ORDERS = {
    "list": lambda: ListOrder(int(FIRSTS[-1])),
    "keyed": lambda: KeyedOrder(int(FIRSTS[-1])),
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


@pytest.mark.parametrize("number", [1, 2, 3, 5, 16, 17, 64, 65, 1000])
def test_a_keyed_order_permutes_any_number(number):
    for seed in range(5):
        assert sorted(KeyedOrder(number)(seed, np.arange(number)).tolist()) == [*range(number)]


def test_a_keyed_order_looks_random():
    """Of 30 images any two come first equally often; of many, neighbours are as far apart as in a random order."""
    drawn = np.array([KeyedOrder(30)(seed, np.arange(2)) for seed in range(10_000)])
    for values, number in ((drawn[:, 0], 30), (drawn[:, 1], 30), (drawn @ [30, 1], 870)):
        counts = np.unique(values, return_counts=True)[1]
        assert len(counts) == number
        expected = len(drawn) / number  # chi-squared, within four standard deviations
        assert ((counts - expected) ** 2 / expected).sum() < number - 1 + 4 * np.sqrt(2 * (number - 1))
    number = 10**6
    order = KeyedOrder(number)(0, np.arange(number))
    distances = np.abs(np.diff(order)) / number  # of two random numbers: 1/3 on average, variance 1/18
    assert abs(distances.mean() - 1 / 3) < 4 * np.sqrt(1 / 18 / number)
    assert abs(np.corrcoef(order, np.arange(number))[0, 1]) < 4 / np.sqrt(number)
    assert abs(np.corrcoef(order, KeyedOrder(number)(1, np.arange(number)))[0, 1]) < 4 / np.sqrt(number)


def test_a_keyed_order_reaches_a_billion_images():
    positions = np.array([0, 1, 10**9 - 1])
    found = KeyedOrder(10**9)(7, positions)
    assert len({*found.tolist()}) == 3
    assert (found >= 0).all()
    assert (found < 10**9).all()


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


@pytest.mark.parametrize(("key", "values"), [("data.order", ("list", "keyed")), ("data.shuffle_shards", (16, 8))])
def test_a_run_does_not_go_on_in_another_order(key, values):
    there, here = ({key: value} for value in values)
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
