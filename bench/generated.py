"""Counts the bytes that compiled layers read and write."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch._functorch import config as aot_config
from torch._inductor import config, metrics

from attention import Grid
from bench.workload import Subject, Workload

IMAGES = 4, 8
"""Images of the two calls that are compiled: bytes grow linearly with images, and those of weights are constant."""


class Generated(NamedTuple):
    """Kernels of a call, products and fused attention of libraries included, and the bytes that they move."""

    nbytes: int
    kernels: int


def generated(subject: Subject, size: Grid, batch: int, mode: str, dtype: str) -> Generated:
    """Compiles a layer for this CPU, and extrapolates Inductor's own count to a batch of images."""
    few, many = (_compiled(subject, size, images, mode, dtype) for images in IMAGES)
    of_image = (many.nbytes - few.nbytes) / (IMAGES[1] - IMAGES[0])
    return Generated(round(few.nbytes + of_image * (batch - IMAGES[0])), many.kernels)


def _compiled(subject: Subject, size: Grid, images: int, mode: str, dtype: str) -> Generated:
    torch._dynamo.reset()
    metrics.reset()
    with _counting():
        Workload(subject, size, images, mode, dtype, "compiled", torch.device("cpu"))
    kernels = sum(elements > 0 for _, elements in metrics.nodes_num_elem)  # others name a result, and launch nothing
    return Generated(metrics.num_bytes_accessed, kernels)


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
