"""Counts the bytes that compiled layers read and write."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch._functorch import config as aot_config
from torch._inductor import config, metrics

from attention import Grid
from bench.workload import Subject, Workload

IMAGES = 4
"""Images of a call that is compiled. Bytes are proportional to them, but for the weights'."""


class Generated(NamedTuple):
    """Kernels of a call, products and fused attention of libraries included, and the bytes that they move."""

    nbytes: int
    kernels: int


def generated(subject: Subject, size: Grid, batch_tokens: int, mode: str, dtype: str) -> Generated:
    """Compiles a layer for this CPU, and takes Inductor's own count, in proportion to the tokens of a batch."""
    torch._dynamo.reset()
    metrics.reset()
    with _counting():
        Workload(subject, size, IMAGES, mode, dtype, "compiled", torch.device("cpu"))
    share = batch_tokens / (IMAGES * math.prod(size))
    return Generated(round(metrics.num_bytes_accessed * share), len(metrics.nodes_num_elem))


@contextmanager
def _counting() -> Iterator[None]:
    """Context in which Inductor compiles everything anew and counts, which it does for its log alone."""
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    level, log.disabled = log.level, False
    with config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.setLevel(level)
