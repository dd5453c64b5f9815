"""Provenance of a result: command, version and git revision of the code, device and packages."""

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from attention import __version__
from attention.plugins import versions

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")

CODE = "analysis", "attention", "bench", "engine", "models"
"""Packages on which a measurement of a trained model may depend."""


def provenance(device: torch.device) -> dict[str, Any]:
    """Returns command, version and git revision of this code (None if it is installed), device and package versions."""
    code, run = Path(__file__), partial(subprocess.run, capture_output=True, text=True, check=True)
    try:
        # An installed package may lie in the repository of another project, which does not track it.
        run(["git", "-C", code.parent, "ls-files", "--error-unmatch", code.name])
        describe = ["git", "-C", code.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        revision = run(describe).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = None
    return {
        "command": shlex.join(sys.argv),
        "version": __version__,
        "git": revision,
        "device": device_name(device),
        **({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        **({"plugins": found} if (found := versions()) else {}),
    }


def digest_code() -> str:
    """Returns the SHA-256 of the names and the content of all modules of `CODE`, in a checkout or as installed."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(path for package in CODE for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """Returns the model name of the GPU or the processor; "cpu" if the system does not name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1]
    return platform.processor() or "cpu"
