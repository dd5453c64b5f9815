"""Checks the Triton kernels: python -m bench.check_kernels

Without a GPU, TRITON_INTERPRET=1 in the environment runs the same check in Triton's interpreter. Exit status 1 means
that a kernel is wrong.
"""

import sys
from collections.abc import Sequence

import torch

from attention.ops.triton_tokens import INTERPRETED
from bench.kernel_cases import CASES, errors, excess
from engine.runtime.arguments import ArgumentParser


def main(arguments: Sequence[str] | None = None) -> None:
    ArgumentParser(prog="python -m bench.check_kernels", description=__doc__.partition(":")[0]).parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not INTERPRETED.value:
        sys.exit("no CUDA device; TRITON_INTERPRET=1 checks the kernels in Triton's interpreter")
    failed = False
    for case in CASES:
        found = errors(case, device)
        off = any(not excess(case, *pair) <= 1 for pair in found.values())
        failed |= off
        print("OFF" if off else "ok ", case, "|", ", ".join(f"{name} {pair[0]:.1e}" for name, pair in found.items()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
