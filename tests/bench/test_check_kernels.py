"""The check of the kernels on a GPU; test_triton.py has the kernels themselves."""

from inspect import currentframe

import pytest
from torch._inductor.exc import InductorError

from bench import check_kernels
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


def test_the_command_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(check_kernels, "CASES", None)
    for arguments, status in (["--help"], 0), (["--foo"], 2):
        with pytest.raises(SystemExit, match=str(status)):
            check_kernels.main(arguments)
    assert "unrecognized arguments: --foo" in capsys.readouterr().err
