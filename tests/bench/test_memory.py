"""Memory of a call for known cases, and a limit that refuses more memory than there is."""

import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from engine.runtime.memory import limit_memory, memory_permitting, peak_bytes, saved_bytes

CPU = torch.device("cpu")


def test_saved_bytes():
    linear, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    assert saved_bytes(lambda: linear(x), linear.parameters()) == 4 * 8 * 4
    assert saved_bytes(lambda: linear(x), []) == 4 * 8 * 4 + 16 * 8 * 4
    assert saved_bytes(lambda: linear(x).exp(), linear.parameters()) == 4 * 8 * 4 + 4 * 16 * 4
    assert saved_bytes(lambda: x[:1].square() + x[1:].square(), []) == 4 * 8 * 4  # one storage, as a whole
    with torch.no_grad():
        assert saved_bytes(lambda: linear(x).exp(), []) == 0


def test_saved_bytes_leaves_nothing_allocated():
    linear, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        saved_bytes(lambda: linear(x).exp(), [])  # exp saves its own result
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(changes) > 0
    assert sum(changes) == 0


def test_peak_bytes():
    def call():
        a, b = torch.ones(1000), torch.ones(500)
        del a
        return torch.ones(600), b

    assert peak_bytes(call, CPU) == 1500 * 4


@pytest.mark.gpu
def test_peak_bytes_on_a_gpu():
    x = torch.randn(2**20, device="cuda")
    torch.relu(x)
    assert peak_bytes(lambda: torch.relu(torch.relu(x)), x.device) == 2 * x.nbytes


def test_other_errors_are_not_taken_for_memory():
    with pytest.raises(RuntimeError, match="shapes"), memory_permitting():
        raise RuntimeError("shapes")


def test_memory_that_is_not_there_is_refused():
    """Without the limit, Linux would grant these unwritten blocks, and kill the process once they are used."""
    blocks, before = [], resource.getrlimit(resource.RLIMIT_DATA)
    count = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30 + 2
    with limit_memory(CPU), memory_permitting():
        blocks += (torch.empty(2**30, dtype=torch.uint8) for _ in range(count))
    assert (len(blocks) < count) == Path("/proc/meminfo").exists()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
