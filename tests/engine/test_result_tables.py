"""The functions that make the tables of result pages; tests/test_readme.py compares the pages with what they make."""

import pytest

from engine.reporting import result_tables, speed_tables
from engine.reporting.result_tables import (
    averages,
    best_first,
    difference,
    less_one,
    means,
    over_seeds,
    read,
    series,
    table,
    texts,
    without_and_with,
)

FILE = """attention,start,train.seed,top1,loss
softmax,a,0,80,0.5
softmax,a,1,82,0.7
eva,a,0,81,0.1
eva,a,1,83,0.3
lara,a,1,70,
softmax,b,0,80,
softmax,b,1,90,
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "results.csv").write_text(FILE)
    monkeypatch.setattr(result_tables, "DATA", tmp_path)
    return "results.csv"


def test_values_by_seed(file):
    assert series(file, start="a") == {"softmax": {"0": 80, "1": 82}, "eva": {"0": 81, "1": 83}, "lara": {"1": 70}}
    assert series(file, "loss", start="a")["eva"] == {"0": 0.1, "1": 0.3}
    assert "lara" not in series(file, "loss")
    assert best_first(series(file, start="a")) == ["eva", "softmax", "lara"]
    assert texts(file, "loss", ".2f", start="a", attention="softmax") == {"softmax": "0.70"}


def test_cells(file):
    found = series(file, start="a")
    assert means(found) == {"softmax": "81.00 ± 1.41", "eva": "82.00 ± 1.41", "lara": "70.00"}
    assert averages(found, ".0f") == {"softmax": "81", "eva": "82", "lara": "70"}
    assert less_one(found, "softmax") == {"eva": "+1.00 ± 0.00", "lara": "-12.00 (one run)"}
    assert difference({"0": 1, "1": 5, "2": 9}, {"0": 2, "1": 3}) == (0.5, pytest.approx(4.5**0.5), 2, 0, 1)
    assert table({"a": {"x": "1"}, "b": {"y": "2"}}, ["y", "x"]) == (
        "| mechanism | a | b |\n| --- | --- | --- |\n| `y` |  | 2 |\n| `x` | 1 |  |"
    )


def test_tables(file):
    lines = without_and_with(file, "start", ("a", "b"), ("a (%)", "b (%)")).splitlines()
    assert lines[0] == "| mechanism | a (%) | b (%) | difference |"
    assert lines[2] == "| `softmax` | 81.00 ± 1.41 | 85.00 ± 7.07 | +4.00 ± 5.66 (noise) |"
    assert lines[3] == "| `eva` | 82.00 ± 1.41 |  |  |"
    assert over_seeds(file).splitlines()[3] == "| `eva` | 82.00 ± 1.41 | -3.00 ± 5.66 (noise) |"


def test_ratios_of_speed(tmp_path, monkeypatch):
    rows = (
        "name,size,speedup,speedup_noisy\nsoftmax,9,1,False\neva,9,0.4,True\nlara,9,2,False\nlara,8,7,False\nra,9,,\n"
    )
    (tmp_path / "speed.csv").write_text(rows)
    monkeypatch.setattr(result_tables, "DATA", tmp_path)
    assert speed_tables.ratios("speed.csv", size="9") == {"softmax": "1.00", "eva": "~0.40", "lara": "2.00"}
    assert speed_tables.ratios("speed.csv", power=-1, size="9") == {"softmax": "1.00", "eva": "~2.50", "lara": "0.50"}


TRAINING = """model,tokens,name,execution,seconds,seconds_noisy,images_per_second
tiny8,784,timm,eager,0.06,False,2000
tiny8,784,timm,compiled,0.04,False,3200
tiny8,784,timm,compiled-cuda-graph,0.03,False,4000
tiny8,784,softmax,compiled-cuda-graph,0.03,False,4400
tiny8,784,eva,compiled-cuda-graph,0.02,True,5280
tiny8,784,lara,compiled-cuda-graph,,,
tiny8,784,timm,eager,0.07,False,1900
tiny8,784,timm,compiled-cuda-graph,0.04,False,3900
"""


def test_training_is_compared_with_the_fastest_execution(tmp_path, monkeypatch):
    (tmp_path / "gpu_training.csv").write_text(TRAINING)
    monkeypatch.setattr(speed_tables, "TRAINING", "gpu_training.csv")
    monkeypatch.setattr(result_tables, "DATA", tmp_path)
    [line] = speed_tables.training_on_gpu().splitlines()[2:]
    assert line.startswith("| DeiT-Tiny/8 | 784 | 2,000 (0.50) | 4,000 (1.00) | 4,400 (1.10) | ~5,280 (~1.32) |  |")


def test_figure_of_speed_has_the_measured_values():
    gpu, core = speed_tables.speed_against_tokens().axes
    speedups = {row["name"]: float(row["speedup"]) for row in read("efficiency.csv", size="784", **speed_tables.ON_CPU)}
    for line, name in zip(core.lines[1:], speed_tables.LINES.values(), strict=True):
        assert line.get_ydata()[1] == speedups[name]
    for line, name in zip(gpu.lines[1:], ("softmax", "eva"), strict=True):
        rows = [row for row in read(speed_tables.TRAINING, name=name) if row["model"] in ("tiny8", "tiny4")]
        assert [*line.get_ydata()] == [float(row["images_per_second"]) for row in rows]
