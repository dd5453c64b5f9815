"""The command that checks the kernels; test_triton.py has the kernels themselves."""

import pytest

from bench import check_kernels


def test_the_command_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(check_kernels, "CASES", None)
    for arguments, status in (["--help"], 0), (["--foo"], 2):
        with pytest.raises(SystemExit, match=str(status)):
            check_kernels.main(arguments)
    assert "unrecognized arguments: --foo" in capsys.readouterr().err
