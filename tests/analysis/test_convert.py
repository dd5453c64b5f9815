"""analyze.py convert: its parts in turn, what it goes on from, what it refuses, and images without labels."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import analyze
import train
from analysis import convert, search
from engine.checkpoints.files import load_checkpoint, save_checkpoint
from engine.evaluation.inference import load
from tests.analysis.models import SMALL, load_model, read_rows, refusal, save_model

OPTIONS = "--attention linear --align 2 --images 20 --batch-size 2 --finetune 1 data.subset=0.1 data.workers=0"
PARTS = [(search, "main"), (train, "main"), (convert, "compare")]
"""Functions of the parts, which are patched."""


def arguments_of(checkpoint: Path, output: Path, *arguments: str, budget: str = "macs=0.97") -> list[str]:
    budgets = [] if "--budget" in arguments else ["--budget", budget]
    return ["convert", str(checkpoint), "--output", str(output), *budgets, *OPTIONS.split(), *arguments]


def never(*given: object) -> None:
    raise AssertionError("a finished part is repeated")


def stop_before(part: int, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is killed before one of `PARTS`; the one before may run, and those before that are finished."""

    def stop(*given: object) -> None:
        raise SystemExit(75)

    with monkeypatch.context() as patch:
        for finished in PARTS[: max(0, part - 1)]:
            patch.setattr(*finished, never)
        patch.setattr(*PARTS[part], stop)
        with pytest.raises(SystemExit, match="75"):
            analyze.main(given)


@pytest.mark.parametrize("kills", [(), (1, 2)], ids=["at once", "in three commands"])
def test_a_model_becomes_another_and_no_finished_part_is_repeated(checkpoint, tmp_path, monkeypatch, capsys, kills):
    monkeypatch.chdir(tmp_path)
    given = arguments_of(checkpoint, Path("out"))
    for part in kills:
        stop_before(part, given, monkeypatch)
    with monkeypatch.context() as patch:
        for finished in PARTS[:2] if kills else []:
            patch.setattr(*finished, never)
        analyze.main(given)
    for lost in "report.md", "model.safetensors":  # are made again
        Path("out", lost).unlink()
        analyze.main(given)
    shown = capsys.readouterr().out
    for finished in PARTS:
        monkeypatch.setattr(*finished, never)
    analyze.main(given)
    text = Path("out/report.md").read_text()
    assert shown.endswith(f"{text}\n")
    assert capsys.readouterr().out == f"{text}\n"
    original, aligned, tuned = rows = read_rows(Path("out/report.csv"))
    assert [row["model"] for row in rows] == ["original", "aligned", "fine-tuned"]
    assert int(aligned["macs"]) == int(tuned["macs"]) <= 0.97 * int(original["macs"])
    assert original["layers"] == "0-1 softmax"
    assert "linear" in aligned["layers"] == tuned["layers"]
    for row in rows:
        assert float(row["top1"]) - float(original["top1"]) == pytest.approx(float(row["difference"]))
        assert float(row["images_per_second"]) == pytest.approx(2000 / float(row["ms"]))
        assert float(row["peak_mib"]) > 0
    names: dict = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    x = torch.randn(2, 3, 16, 16)
    chosen = max((aligned, tuned), key=lambda row: float(row["top1"]))["model"]
    source = Path("out/tuned") if chosen == "fine-tuned" else next(Path("out/search/front").glob("*.safetensors"))
    if chosen == "fine-tuned":
        torch.testing.assert_close(names["model"](x), load_model(source).model(x))
    assert Path("out/search/front.png").exists()


def test_classes_keep_their_names_where_the_data_number_them(checkpoint, tmp_path, monkeypatch):
    names = list("abcdefghij")
    save_checkpoint(tmp_path / "step_1.pt", load_checkpoint(checkpoint) | {"classes": names})
    compare = convert.compare

    def prefer_the_tuned(*given):
        return [row | {"top1": float(row["model"] == "fine-tuned")} for row in compare(*given)]

    monkeypatch.setattr(convert, "compare", prefer_the_tuned)
    analyze.main(arguments_of(tmp_path / "step_1.pt", tmp_path / "out"))
    assert load(tmp_path / "out/model.safetensors")[2] == names


def test_other_options_in_a_directory_are_refused(checkpoint, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    stop_before(1, arguments_of(checkpoint, output), monkeypatch)
    capsys.readouterr()
    monkeypatch.setattr(search, "main", never)
    of = f"of the conversion in {output}; give that again, or name another --output"
    changed = {
        f"--budget: ['macs=1'] differs from ['macs=0.97'], {of}": {"budget": "macs=1"},
        "--finetune: 2 differs from 1, of": {"options": ["--finetune", "2"]},
        "'data.workers=0', 'optim.lr=1.0'] differs from [": {"options": ["optim.lr=1.0"]},
    }
    for text, others in changed.items():
        budget = others.get("budget", "macs=0.97")
        assert text in refusal(capsys, *arguments_of(checkpoint, output, *others.get("options", ()), budget=budget))
    (tmp_path / "again").mkdir()
    other = save_model(tmp_path / "again", SMALL, scale=5)
    assert f"RUN: {other}, " in refusal(capsys, *arguments_of(other, output))
    (output / "convert.json").write_text("{")
    assert "delete it, and give the command again" in refusal(capsys, *arguments_of(checkpoint, output))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget", "macs=0.9", "macs=1"], "--budget macs=0.9 macs=1: a model is converted for one; give one"),
        (
            ["--budget", "macs=half", "data.root=/none"],
            "--budget: 'macs=half': 'half' is not a number above 0; macs is",
        ),
        (["data.train_split=val"], "would be fitted to the images that they are measured on; name another split"),
        (["data.train_split=val", "--finetune", "0"], "would be fitted to the images that they are measured on; name"),
        (["--budget", "ms=1e6"], "--budget ms=1e6: the model's own attention takes ms="),
        (["--budget", "macs=0.1"], "--budget macs=0.1: the cheapest assignment of these mechanisms takes macs=0.9"),
    ],
)
def test_refusals_come_before_any_part(checkpoint, tmp_path, capsys, arguments, expected):
    assert expected in refusal(capsys, *arguments_of(checkpoint, tmp_path / "out", *arguments))
    assert not (tmp_path / "out/tuned").exists()


def test_without_labels_the_share_of_changed_predictions_is_bounded(checkpoint, tmp_path, monkeypatch, capsys):
    """Nothing is trained with labels, and top-1 is agreement with the model."""
    photos = tmp_path / "photos/all"
    photos.mkdir(parents=True)
    for number, pixels in enumerate(torch.randint(256, (80, 8, 8), dtype=torch.uint8)):
        Image.fromarray(pixels.numpy()).save(photos / f"{number}.png")
    monkeypatch.setattr(train, "main", never)
    data = f"data.dataset=folder data.root={photos.parent} data.train_split=. data.val_fraction=0.5 data.subset=null"
    given = arguments_of(checkpoint, tmp_path / "out", *data.split())
    assert "--finetune 1: no labels: the images are" in refusal(capsys, *given)
    place = given.index("--finetune")
    analyze.main(given[:place] + given[place + 2 :])
    original, aligned = read_rows(tmp_path / "out/report.csv")
    changed = int(aligned["changed"])
    assert float(original["top1"]) == 100
    assert float(aligned["top1"]) == pytest.approx(100 * (1 - changed / 40))
    shown = capsys.readouterr()
    assert f"{changed} of 40 predictions changed" in shown.out
    assert "| unchanged (%) |" in shown.out
    assert "no labels: the images are all of one class" in shown.err
    assert "to train it" not in shown.out
