"""Files of strangers are opened by engine/runtime/reading.py alone, and parsed there or in its context `parsing`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ablation", "analysis", "attention", "bench", "engine", "models")
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
PARSERS = {
    *("json.load", "json.loads", "csv.reader", "csv.DictReader", "yaml.load", "yaml.safe_load", "yaml.safe_load_all"),
    *("np.load", "np.loadtxt", "np.genfromtxt", "np.fromfile", "np.memmap", "pickle.load", "pickle.loads"),
    *("torch.load", "safe_open", "load_file", "safetensors.torch.load", "safetensors.torch.load_file"),
    *("tarfile.open", "zipfile.ZipFile", "gzip.open", "gzip.decompress", "zlib.decompress", "tomllib.loads"),
    *("Image.open", "ast.literal_eval", "struct.unpack", "struct.unpack_from"),
}

OF_READER = "engine.data.splits.refusing, in which every split is opened, refuses whatever a reader raises"
OF_CHECKPOINT = "engine.checkpoints.files.load_checkpoint refuses whatever a file raises"
MAY_PARSE = {
    "ablation/names.py": "texts of options that the sweep has formatted itself",
    "engine/checkpoints/files.py": OF_CHECKPOINT,
    "engine/checkpoints/format.py": OF_CHECKPOINT,
    "engine/checkpoints/local_dir.py": OF_CHECKPOINT,
    "engine/data/arrays.py": "the digits that scikit-learn installs",
    "engine/data/cache.py": OF_READER,
    "engine/data/csv_file.py": OF_READER,
    "engine/data/images.py": "decode refuses whatever an image raises",
    "engine/data/tar.py": OF_READER,
    "engine/data/webdataset.py": OF_READER,
}
"""Module that parses outside of `parsing` -> the reason."""

MAY_OPEN = {
    "attention/plugins.py": "code of the user, which is run",
    "engine/checkpoints/local_dir.py": "a license, which is shown",
    "engine/data/cache.py": "the pixels that the index beside them describes",
    "engine/reporting/generate.py": "pages of this repository",
    "engine/runtime/memory.py": "the kernel's files on a process",
    "engine/runtime/provenance.py": "code of this project, and the kernel's files on the machine",
    "engine/runtime/reading.py": "the place for it",
}
"""Module that opens files for reading without `engine.runtime.reading` -> the reason."""


def direct_calls(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Returns calls of parsers outside of `with parsing(...)`, and those that open a file for reading."""
    parsed: set[str] = set()
    opened: set[str] = set()

    def visit(node: ast.AST, is_guarded: bool) -> None:
        if isinstance(node, ast.With):
            is_guarded |= any(ast.unparse(item.context_expr).startswith("parsing(") for item in node.items)
        if isinstance(node, ast.Call):
            name, texts = ast.unparse(node.func), [x.value for x in node.args if isinstance(x, ast.Constant)]
            mode = next((text for text in texts if isinstance(text, str)), "r")
            is_opener = name == "open" or (name.endswith((".open", ".read_text", ".read_bytes")) and name != "os.open")
            if name in PARSERS:
                parsed.update(() if is_guarded else [name])
            elif is_opener and not {*mode} & {*"wax"}:
                opened.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child, is_guarded)

    visit(tree, False)
    return parsed, opened


def test_files_are_read_in_one_way():
    """By open_regular or read_bounded of engine.runtime.reading, and within `with parsing(...)`."""
    found = {str(path.relative_to(ROOT)): direct_calls(ast.parse(path.read_text())) for path in FILES}
    assert {place: parsed for place, (parsed, _) in found.items() if parsed}.keys() <= MAY_PARSE.keys()
    assert {place: opened for place, (_, opened) in found.items() if opened}.keys() <= MAY_OPEN.keys()


@pytest.mark.parametrize(
    ("line", "parsed", "opened"),
    [
        ("json.loads(text)", {"json.loads"}, set()),
        ("with parsing(path):\n    json.loads(text)", set(), set()),
        ("with other(path):\n    yaml.safe_load(text)", {"yaml.safe_load"}, set()),
        ("path.read_text()", set(), {"path.read_text"}),
        ("open(path)", set(), {"open"}),
        ("with path.open('rb') as file: pass", set(), {"path.open"}),
        ("path.open('wb'); open(path, 'a'); read_text(path)", set(), set()),
    ],
)
def test_what_counts_as_direct(line: str, parsed: set[str], opened: set[str]):
    assert direct_calls(ast.parse(line)) == (parsed, opened)
