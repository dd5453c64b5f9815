"""data.crop_mode: timm's crops in validation and prediction."""

import numpy as np
import pytest
from PIL import Image

from engine.data.augment import create_transform
from engine.run.load import parse_run
from engine.runtime.errors import ConfigError

DEIT = {"name": "deit", "img_size": 48, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize("channels", [1, 3])
def test_what_crops_show_by_hand(channels):
    """squash shows all stripes of an image, border adds borders above and below, center shows the middle."""
    stripes = np.repeat(np.array([0, 100, 200], np.uint8), 32)[None].repeat(48, 0)  # 48 x 96
    image = Image.fromarray(stripes).convert("L" if channels == 1 else "RGB")
    shown = {}
    for mode in ("center", "squash", "border"):
        data = {"root": "x", "crop_mode": mode, "crop_pct": 1.0, "interpolation": "nearest", "mean": [0.4]}
        run = parse_run({"model": DEIT | {"in_chans": channels}, "attention": "softmax", "data": data}, "test")
        shown[mode] = create_transform(run, 48, is_training=False, as_bytes=True)(image)
    for x in shown.values():
        assert x.shape == (channels, 48, 48)
        assert (x == x[:1]).all()
    assert shown["center"].unique().tolist() == [0, 100, 200]
    assert shown["center"][0, 0].bincount()[[0, 100, 200]].tolist() == [8, 32, 8]
    assert shown["squash"][0, 0].bincount()[[0, 100, 200]].tolist() == [16, 16, 16]
    assert (shown["border"][:, :12] == 102).all()
    assert (shown["border"][:, -12:] == 102).all()
    assert shown["border"][0, 24].bincount()[[0, 100, 200]].tolist() == [16, 16, 16]


@pytest.mark.parametrize("dataset", ["copy", "idx"])
def test_sequences_of_tokens_have_no_crop(dataset):
    tokens = {"vocab_size": 5, "patch_size": 1, "in_chans": 1, "img_size": [1, 8], "num_classes": 5}
    copy = {"global_pool": ""} if dataset == "copy" else {}
    neutral = {"scale": [1, 1], "ratio": [1, 1], "hflip": 0, "color_jitter": 0, "reprob": 0, "mixup": 0, "cutmix": 0}
    tree = {
        "model": {**DEIT, **tokens, **copy},
        "attention": {"name": "linear", "causal": True} if dataset == "copy" else "softmax",
        "data": {"dataset": dataset, "root": None if dataset == "copy" else ".", "crop_mode": "squash"},
        "augment": {**neutral, "smoothing": 0, "auto_augment": None},
    }
    with pytest.raises(ConfigError, match=r"data.crop_mode = squash: .*tokens; set it to center"):
        parse_run(tree, "test")
