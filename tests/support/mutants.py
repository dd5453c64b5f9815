"""Mutation run (`make mutants`): small faults are put into the code one by one, and the tests should see each of them.

Every mutant is one fault in a copy of the project: a comparison, an operator, a number, a condition or a deleted call.
The tests that concern its file run until the first failure; a mutant that passes them all has survived. A seed chooses
the mutants.

mutmut 3 puts all mutants of a function into one module, which torch.compile does not take. cosmic-ray changes the
working tree, and has one test command. Neither draws a sample.
"""

import argparse
import ast
import itertools
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
MUTATED = ("attention/**/*.py", "engine/training/*.py", "train.py")
NAMES = (
    *("twins", "contract", "determinism", "paths", "options", "costs"),
    *("fit", "key_mask", "causal", "prefix", "symmetry"),
)
UNIFORM = [f"tests/uniform/test_{name}.py" for name in NAMES]
TRAINING = [f"tests/engine/test_{name}.py" for name in ("train", "faults", "resume", "recorder")]
TESTS = [
    (r"attention/mechanisms/(\w+)\.py", [r"tests/mechanisms/test_\1.py", *UNIFORM, "-k", r"\1"]),
    (
        r"attention/(ops|parts)/(\w+).*",
        [r"tests/\1", "tests/parts", *UNIFORM, "tests/mechanisms", "tests/engine/test_device.py"],
    ),
    (r"attention/(\w+)\.py", ["tests/test_options.py", "tests/test_front_door.py", "tests/parts", "tests/uniform"]),
    (r"engine/training/(\w+)\.py", [r"tests/engine/test_\1.py", *TRAINING, "tests/engine"]),
    (r"train\.py", [*TRAINING, "tests/engine"]),
]
"""File that is mutated -> arguments of pytest; the files that exist are run in this order."""

FLIPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}
UNSEEN = ast.Raise | ast.Assert | ast.JoinedStr
"""Nodes without mutants: messages, and assertions."""


class Mutant(NamedTuple):
    """A part of a file, given by offsets in its bytes, and what takes its place."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        old = (ROOT / self.file).read_bytes()[self.start : self.end].decode()
        return f"{self.file}:{self.line}: {self.kind}: {' '.join(old.split())}  ->  {self.new}"


def faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Kind and text of what may take a node's place."""
    match node:
        case ast.Compare(left, [op], others) if type(op) in FLIPPED:
            yield "comparison", ast.unparse(ast.Compare(left, [FLIPPED[type(op)]()], others))
        case ast.BinOp(left, op, right) if type(op) in FLIPPED:
            yield "arithmetic", ast.unparse(ast.BinOp(left, FLIPPED[type(op)](), right))
        case ast.BoolOp(op, values):
            yield "condition", ast.unparse(ast.BoolOp(FLIPPED[type(op)](), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", ast.unparse(operand)
        case ast.Constant(bool(value)):
            yield "constant", str(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", str(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "deleted statement", "pass"


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, outside of reference implementations."""
    starts, found = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))], []

    def visit(node: Any) -> None:
        if (
            not isinstance(node, ast.AST)
            or isinstance(node, UNSEEN)
            or str(getattr(node, "name", "")).endswith("_reference")
        ):
            return
        for kind, new in faults(node):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            found.append(Mutant(file, node.lineno, kind, start, end, new if kind[:3] == "del" else f"({new})"))
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    visit(child)

    visit(ast.parse(source))
    return found


def suite_of(file: str, tree: Path) -> list[str]:
    """Arguments of pytest for the tests that concern a file."""
    for pattern, tests in TESTS:
        if match := re.fullmatch(pattern, file):
            words = [match.expand(word) for word in tests]
            return [word for word in dict.fromkeys(words) if not word.startswith("tests/") or (tree / word).exists()]
    raise LookupError(f"{file}: has no row in TESTS of {__file__}")


def run_tests(tree: Path, arguments: Sequence[str], seconds: float) -> str | None:
    """Runs tests until one fails: returns its name, "" where no test began, and None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 5:
        raise LookupError(f"pytest {' '.join(arguments)}: runs no test")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
    return None if process.returncode == 0 else failed[1] if failed else ""


def killer(tree: Path, mutant: Mutant, seconds: float, arguments: Sequence[str] | None = None) -> str | None:
    """The test that sees the mutant, as `run_tests` returns it; the file in `tree` is then as before."""
    path = tree / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    try:
        return run_tests(tree, arguments or suite_of(mutant.file, tree), seconds)
    finally:
        path.write_bytes(source)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=MUTATED, help="patterns of files; default: attention/ and training")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="limit of a mutant's tests; overdue ones are killed")
    args = parser.parse_args(arguments)
    files = sorted({path for pattern in args.files for path in ROOT.glob(pattern) if "triton" not in path.name})
    every = [mutant for path in files for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs", "site", ".*_cache")
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        for number in range(args.jobs):
            trees.put(Path(shutil.copytree(ROOT, Path(directory) / str(number), ignore=left_out, symlinks=True)))

        def attempt(mutant: Mutant) -> str | None:
            tree = trees.get()
            found = killer(tree, mutant, args.seconds)
            print("survived" if found is None else "killed  ", mutant, found or "", flush=True)
            trees.put(tree)
            return found

        found = list(pool.map(attempt, chosen))
        killers = sorted({test for test in found if test})
        if killers and (broken := run_tests(trees.get(), killers, args.seconds)) is not None:
            sys.exit(f"{broken} fails without a mutant too")
    survivors = [mutant for mutant, test in zip(chosen, found, strict=True) if test is None]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(mutant.kind for mutant in survivors).items())
    num_killed = len(chosen) - len(survivors)
    print(f"{num_killed} of {len(chosen)} mutants killed, seed {args.seed}; survivors: {kinds or 'none'}")
    return len(survivors)


if __name__ == "__main__":
    main()
