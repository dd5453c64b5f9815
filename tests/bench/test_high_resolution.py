"""ViTs at high resolution, in small: rows of the file, its continuation, and the tables and the figure made of it."""

import pytest

from attention import Attention
from bench import high_resolution
from bench.high_resolution import KEPT, MECHANISMS, Case, main, with_attention
from engine.reporting import result_tables, speed_tables
from engine.runtime.reading import read_csv

HOST, TWO = "vit_tiny_patch16_224", (MECHANISMS[0], "linear")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of one tiny case."""
    path = tmp_path_factory.mktemp("high") / "high_resolution.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(high_resolution, "CASES", [Case(HOST, (128, 144), "forward+backward")])
        patch.setattr(high_resolution, "MECHANISMS", TWO)
        main(["--output", str(path)])
    return path


def test_rows_have_times_memory_and_ratios_of_products(file):
    rows = read_csv(file)
    names = [*TWO, TWO[1] + KEPT]
    assert [row["name"] for row in rows] == [f"{HOST}:{name}" for name in names]
    assert all(float(row["seconds"]) > 0 and int(row["peak_bytes"]) > 0 and row["torch"] for row in rows)
    softmax, *others = [int(row["macs"]) for row in rows]
    assert [float(row["macs_ratio"]) for row in rows[1:]] == pytest.approx([softmax / macs for macs in others])
    assert {row["size"] for row in rows} == {"128x144"}


def test_a_file_is_continued(file, monkeypatch):
    monkeypatch.setattr(high_resolution, "CASES", [Case(HOST, (128, 144), "forward+backward")])
    before = file.read_bytes()
    main(["--output", str(file)])
    assert file.read_bytes() == before


def test_every_fourth_block_keeps_the_attention_of_the_host():
    def mechanisms(text: str) -> list[str]:
        return [
            type(m).__name__ for m in with_attention(HOST, text).build((32, 32)).modules() if isinstance(m, Attention)
        ]

    assert mechanisms("softmax") == []  # the host as it is
    assert mechanisms("linear" + KEPT) == 3 * (3 * ["Linear"] + ["Softmax"])


def test_tables_are_of_the_file(file, monkeypatch):
    monkeypatch.setattr(result_tables, "DATA", file.parent)
    monkeypatch.setitem(speed_tables.HOSTS, HOST, "ViT-Ti/16")
    for table in (part().splitlines() for part in speed_tables.OF_HOSTS.values()):
        assert table[0] == "| mechanism | ViT-Ti/16, 128x144, training |"
        assert [line.split("`")[1] for line in table[2:-2]] == [*TWO, TWO[1] + KEPT]
    rows = read_csv(file)
    assert speed_tables.speed(rows[0]).strip("~") == f"{float(rows[0]['images_per_second']):.3g} images/s"
    expected = f"{float(rows[2]['speedup']):.2f} ({float(rows[2]['macs_ratio']):.2f})"
    assert speed_tables.speed(rows[2]).strip("~") == expected


FIGURE = """name,size,mode,images_per_second
vit_small_patch16_dinov3:softmax,512,inference,1
vit_small_patch16_dinov3:eva:window_size=8,512,inference,1.5
vit_small_patch16_dinov3:eva:window_size=8 + softmax,512,inference,9
vit_small_patch16_dinov3:softmax,512x1024,inference,0.25
vit_small_patch16_dinov3:eva:window_size=8,512x1024,inference,0.75
vit_base_patch14_dinov2:softmax,518,inference,9
"""


def test_figure_is_of_one_host_with_one_kind_of_attention(tmp_path, monkeypatch):
    (tmp_path / "high_resolution.csv").write_text(FIGURE)
    monkeypatch.setattr(result_tables, "DATA", tmp_path)
    (axes,) = speed_tables.speed_at_high_resolution().axes
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert lines == [[[1024, 1], [2048, 0.25]], [[1024, 1.5], [2048, 0.75]]]
