"""Any content of a file that is read ends in one line, or is passed over, within seconds; never in a traceback."""

import gzip
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from ablation.report import lost_runs
from ablation.sweep import read_ablation
from analysis.draws import to_draw
from analysis.measurements import Measurements
from analysis.tune import read_results
from attention.options import OptionError
from bench.choice import read_quality
from engine.checkpoints.files import load_checkpoint
from engine.checkpoints.weight_sources import read_weights
from engine.config.schema import Data
from engine.data.folders import list_files, measure_files
from engine.data.splits import open_split
from engine.data.subset import read_names
from engine.reporting.metrics import EpochTable, find_records
from engine.reporting.runs import summarise
from engine.run.load import load_run
from engine.runtime.errors import UserError
from engine.runtime.locks import is_locked, lock_holder
from engine.runtime.ownership import MARKER, owned_files
from engine.runtime.reading import open_regular, parsing

SECONDS = 20


class TooLongError(BaseException):
    """Raised by the alarm; no reader catches it."""


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Ends a reader that waits for a pipe, or never ends, at the alarm."""

    def end(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    yield
    signal.signal(signal.SIGALRM, before)


def read_split(path: Path, dataset: str) -> None:
    images = open_split(Data(dataset=dataset, root=str(path.parent)), "train_split")
    list(images)
    images.reader.fingerprints()


def read_measurement(path: Path) -> None:
    values = Measurements(path, {}).find("k")
    if values is not None:
        with parsing(path):
            to_draw(values, path)


def read_run(path: Path) -> None:
    EpochTable(find_records(path.parent))
    summarise(path.parent)


def read_lock(path: Path) -> None:
    is_locked(path.parent)
    lock_holder(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": read_run,
    "measurements.jsonl": read_measurement,
    "runs.csv": lambda path: (lost_runs([], path.parent), read_results(path, 1)),
    "quality.csv": read_quality,
    "run.yaml": load_run,
    "sweep.yaml": lambda path: read_ablation(path, [], path.parent, []),
    "classes.txt": lambda path: read_names(str(path)),
    "lock": read_lock,
    MARKER: lambda path: owned_files(path.parent),
    "train.csv": lambda path: read_split(path, "csv"),
    "train.npz": lambda path: read_split(path, "cache"),
    "train-images-idx3-ubyte": lambda path: read_split(path, "idx"),
    "train-images-idx3-ubyte.gz": lambda path: read_split(path, "idx"),
    "train-0.tar": lambda path: read_split(path, "wds"),
    "x.pt": load_checkpoint,
    "x.safetensors": lambda path: read_weights(str(path)),
    "model/config.json": lambda path: read_weights(f"timm:local-dir:{path.parent}"),
}

DEEP = 200_000
METADATA = dict.fromkeys(("ignored", "classes", "shards", "run"), "[" * DEEP)
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "number": b"7",
    "text": b'"text"',
    "list": b"[1]",
    "mapping": b"{}",
    "mapping of null": b'{"rows": null, "kind": null, "key": "k", "values": null, "names": null, "shards": null}',
    "mapping of lists": b'{"rows": [[]], "kind": [], "key": "k", "values": [[]], "names": [[]], "shards": [[]]}',
    "nested lists": b"[" * DEEP,
    "nested mappings": b'{"key": ' * DEEP,
    "nested values": b'{"key": "k", "values": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "huge integer": b'{"key": "k", "values": ' + b"9" * DEEP + b"}",
    "huge number": b"[1e999, -1e999, NaN, Infinity, 1" + b"0" * 400 + b"]",
    "no UTF-8": b"\xff\xfe\x00{",
    "null character": b"file,label\n\0,\0\n",
    "byte order mark": b"\xef\xbb\xbf{}",
    "half of a pair": b'{"key": "\\ud800", "values": "\\udfff"}',
    "half of a pair in UTF-8": b"\xed\xa0\x80,label\n",
    "quote without end": b'file,label\n"a,b\n',
    "large field": b"file,label\n" + b"x" * 200_000 + b",b\n",
    "many fields": b"file,label\na,b,c,d,e,f\n",
    "one field": b"epoch,eval_top1\n1\n",
    "packed": gzip.compress(b"\0" * 10**6),
    "metadata nested deeply": save({"names": np.zeros(1, np.uint8)}, METADATA),
    "header nested deeply": (8 + DEEP).to_bytes(8, "little") + b"[" * (8 + DEEP),
    "header of a huge size": (2**62).to_bytes(8, "little") + b"{}",
    "zip": b"PK\x03\x04" + bytes(100),
    "tar": b"a" * 512 + bytes(1024),
    "line of a megabyte": b"x" * 2**21,
}
SPECIAL: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "sparse file of a terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
}
KINDS = [*HOSTILE, *SPECIAL, "missing"]


def put(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in HOSTILE:
        path.write_bytes(HOSTILE[kind])
    elif kind in SPECIAL:
        SPECIAL[kind](path)


def fault_of(read: Callable[[Path], object], path: Path) -> str:
    """Returns what the reader raises but for a refusal of one line, or of a line for each wrong option as ConfigError
    separates them, or that the file is not there; "" for nothing."""
    signal.alarm(SECONDS)
    try:
        read(path)
    except (UserError, OptionError) as error:
        return "" if str(error) and "\n" not in str(error).replace("\n       ", "") else f"lines: {error}"
    except TooLongError:
        return f"not finished after {SECONDS} s"
    except FileNotFoundError as error:
        return repr(error) if path.exists() else ""
    except Exception as error:
        return repr(error)[:200]
    finally:
        signal.alarm(0)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_any_content_ends_in_one_line(name: str, tmp_path: Path):
    faults = {}
    for number, kind in enumerate(KINDS):
        put(path := tmp_path / str(number) / name, kind)
        faults[kind] = fault_of(READERS[name], path)
    assert not {kind: fault for kind, fault in faults.items() if fault}


STAGE = [50.0, 1.5, 0.1, 0.2, 3]
VALID: dict[str, Any] = {
    "measurements.jsonl": {
        "key": "k",
        "values": {"replaced": STAGE, "aligned": STAGE, "seconds": 1.5, "untrained": 3, "peak": 4096},
    },
    MARKER: {"kind": "cache", "names": ["a"]},
    "metrics.jsonl": {"kind": "train", "epoch": 1, "step": 3, "loss": 0.5, "time": "2026-01-01 00:00:00"},
}
OTHERS = (None, True, -1, 1e308, 10**400, "", "text", "\ud800", [], [1], {}, {"a": 1})


def changed(value: Any) -> Iterator[Any]:
    """Yields `value` with any part of it replaced by another value, or left out."""
    yield from OTHERS
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        rest = {k: v for k, v in items if k != key} if isinstance(value, dict) else value[:key] + value[key + 1 :]
        yield rest
        for other in changed(part):
            yield rest | {key: other} if isinstance(rest, dict) else [*value[:key], other, *value[key + 1 :]]


@pytest.mark.parametrize("name", VALID)
def test_a_changed_value_ends_in_one_line(name: str, tmp_path: Path):
    path, faults, number = tmp_path / name, {}, 0
    path.write_text(json.dumps(VALID[name]))
    assert not fault_of(READERS[name], path)
    for content in changed(VALID[name]):
        path.write_text(json.dumps(content))
        faults[json.dumps(content)[:200]] = fault_of(READERS[name], path)
        number += 1
    assert not {content: fault for content, fault in faults.items() if fault}
    assert number > 30


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_has_ends_in_one_line(name: str):
    with pytest.raises(OSError, match="a name that no file has"):
        open_regular(name)
    for read in (load_run, read_names, list_files_of, load_checkpoint, read_weights):
        assert not fault_of(read, Path(name))
    assert measure_files([name]).tolist() == [-1]


def list_files_of(path: Path) -> None:
    list_files([str(path)])
