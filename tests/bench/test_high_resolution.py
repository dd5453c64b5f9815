"""The figure of ViTs at high resolution."""

from engine.reporting import result_tables, speed_tables

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
