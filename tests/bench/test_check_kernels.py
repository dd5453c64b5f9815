"""The check of the kernels on a GPU; test_triton.py has the kernels themselves."""

from inspect import currentframe

import pytest
from torch._inductor.exc import InductorError

from bench.check_kernels import implemented


def test_peers_that_do_not_compile_are_columns_without_times():
    def too_large() -> None:
        raise InductorError(RuntimeError("No valid triton configs. out of resource"), currentframe())

    def missing() -> None:
        raise NotImplementedError("no gradients on a CPU. Use a GPU")

    def broken() -> None:
        raise RuntimeError("wrong")

    calls, reasons = implemented({"fine": int, "large": too_large, "missing": missing})
    assert calls == {"fine": int}
    assert reasons == {"large": "RuntimeError: No valid triton configs", "missing": "no gradients on a CPU"}
    with pytest.raises(RuntimeError, match="wrong"):
        implemented({"broken": broken})
