"""Ownership of files: a program replaces and removes only what it made, as a marker file in the directory proves."""

import errno
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from engine.runtime.errors import UserError
from engine.runtime.files import (
    FailedAfterReplacing,
    append_whole,
    check_output,
    explain_unwritten,
    make_directory,
    sync_directory,
    write_atomically,
)
from engine.runtime.reading import parsing, read_bounded

MARKER = "made_by_eav.json"
"""Name of the marker file of a directory: a line of JSON for every claim."""


def claim(directory: Path, names: Iterable[str]) -> None:
    """Makes the directory, whose files of these names may be replaced or removed later.

    The names of earlier claims stay valid. The directory may hold files of others, too.

    Raises:
        UserError: a file of such a name is there already, and no earlier claim has it. OSError: it cannot be made or
            written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = {*names}
    check_claim(directory, names)
    if new := names - _names(directory):
        content = json.dumps({"kind": "results", "names": sorted(new)})
        append_whole(directory / MARKER, f"\n{content}\n".encode(), sync=True)  # a cut line does not spoil the next


def check_claim(directory: Path, names: Iterable[str]) -> None:
    """Refuses files of these names in `directory` that no claim names."""
    there = [name for name in names if os.path.lexists(directory / name)]  # before another process claims and makes it
    if strange := sorted({*there} - _names(directory)):
        problem = "is there already, and this program has no record of having made it"
        others = f" (nor {', '.join(strange[1:])})" if strange[1:] else ""
        them = "them" if others else "it"
        raise UserError(f"{directory / strange[0]}: {problem}{others}; move {them} away, or name another directory")


def owned_files(directory: Path) -> list[Path]:
    """Returns the regular files in `directory` that claims name."""
    if not (names := _names(directory)):
        return []
    with os.scandir(directory) as entries:  # the claim may name far more files than there are
        return sorted(directory / x.name for x in entries if x.name in names and x.is_file(follow_symlinks=False))


def remove_owned(directory: Path, names: Iterable[str]) -> None:
    """Removes those of the files that are in `directory` and that a claim names."""
    names = {*names}
    for path in owned_files(directory):
        if path.name in names:
            path.unlink(missing_ok=True)


def write_together(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes all of `files`, or none if one cannot be written, into a directory that is made if need be.

    Raises:
        UserError: one cannot be written, or is there and was not made by this program.
    """
    with (
        explain_unwritten(directory),
        tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as unfinished,
    ):
        for name, content in files.items():
            write_atomically(Path(unfinished, name), content)
        claim(directory, files)
        if folders := [name for name in files if (directory / name).is_dir()]:
            raise IsADirectoryError(errno.EISDIR, f"{folders[0]} is a directory")
        for number, name in enumerate(files):
            try:
                os.replace(Path(unfinished, name), directory / name)
            except OSError as error:
                if number == 0:
                    raise
                raise FailedAfterReplacing(error.errno, f"{name}: {error.strerror}") from error
        sync_directory(directory)


def make_output(directory: Path, files: Collection[str]) -> None:
    """Makes the directory that --output names, and claims these files in it.

    Raises:
        UserError: it cannot be made, or a file cannot be written, or is there and was not made by this program.
    """
    make_directory(directory, files, "--output")
    claim_results(directory, files)


def claim_results(directory: Path, files: Iterable[str]) -> None:
    """Claims files of results. UserError: they cannot be claimed, see `claim`, or the marker cannot be written."""
    with explain_unwritten(directory):
        claim(directory, files)


def check_file(path: Path, option: str, suffixes: Collection[str]) -> None:
    """`check_output` of a file that the user names by itself.

    Raises:
        UserError: as there; or it is a result that a command keeps in a directory, as epochs.csv of a run.
    """
    if path.name in _names(path.parent):
        raise UserError(f"{path}: {option} would replace a result that {path.parent / MARKER} lists; name another file")
    check_output(path, option, suffixes)


def _names(directory: Path) -> set[str]:
    """Returns the names that the claims on `directory` hold."""
    try:
        lines = read_bounded(directory / MARKER, 2**26).splitlines()
    except (UserError, FileNotFoundError):
        return set()
    found: set[str] = set()
    for line in filter(None, lines):
        with suppress(UserError), parsing(MARKER):  # a killed process may have begun a line
            names = json.loads(line)["names"]
            found |= {*names} if all(isinstance(name, str) for name in names) else set()
    return found
