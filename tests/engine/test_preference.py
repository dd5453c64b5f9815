"""Averaged weights are taken where no kind is named, unless the plain ones were measured as better."""

import math
from pathlib import Path

import pytest

import predict
from engine.checkpoints import export
from engine.checkpoints.files import load_checkpoint, prefer, save_checkpoint
from engine.checkpoints.weight_sources import read_weights
from engine.run.load import parse_run
from engine.training.objective import read_teacher
from tests.engine.test_predict import make_checkpoint

ROOT = Path(__file__).parents[2]
BETTER = "the plain weights, which were measured as better: top-1 100.00 %, that of the averaged ones 57.14 %"


@pytest.mark.parametrize(
    ("plain", "averaged", "images", "chosen"),
    [
        (100, 57.14, 14, "plain"),  # sqrt(.5714 x .4286 / 14) = 13.2 %
        (100, 57.14, 2, "ema"),  # 35 %, within twice of which is 42.86
        (80.1, 80, 10_000, "ema"),  # sqrt(.8 x .2 x 2 / 10,000) = .57 %
        (82, 80, 10_000, "plain"),
        (80, 82, 10_000, "ema"),
        (100, 0, 3, "plain"),
        (0, 0, 3, "ema"),
        (math.nan, 50, 100, "ema"),
        (50, math.nan, 100, "ema"),
        (1e9, -1e9, 100, "ema"),  # of a stranger
    ],
)
def test_noise_is_twice_the_standard_error(plain, averaged, images, chosen):
    metrics = {"plain": {"top1": plain, "images": images}, "ema": {"top1": averaged, "images": images}}
    assert prefer(metrics)[0] == chosen
    assert [prefer({kind: metrics[kind]}) for kind in metrics] == [("plain", ""), ("ema", "")]


@pytest.mark.parametrize(
    ("plain", "averaged", "chosen"), [(1, math.nan, "plain"), (1, 2, "ema"), (math.nan,) * 2 + ("ema",)]
)
def test_a_loss_that_is_not_finite_is_not_better(plain, averaged, chosen):
    assert prefer({"plain": {"loss": plain}, "ema": {"loss": averaged}})[0] == chosen


@pytest.fixture
def young(tmp_path: Path) -> Path:
    """A checkpoint whose averaged weights have seen few updates."""
    make_checkpoint(tmp_path / "x.pt")
    checkpoint = load_checkpoint(tmp_path / "x.pt")
    checkpoint["progress"]["metrics"] = {"top1": 100.0, "ema_top1": 57.14, "images": 14}
    save_checkpoint(tmp_path / "x.pt", checkpoint)
    return tmp_path / "x.pt"


def test_all_take_the_weights_that_were_measured_as_better(young: Path, capsys: pytest.CaptureFixture):
    """Prediction, exports, initial weights and a teacher; each says both numbers. A named kind is taken."""
    trained = load_checkpoint(young)
    run = parse_run(trained["config"] | {"distill": {"teacher": str(young)}}, "x")
    source, teacher = read_weights(str(young)), read_teacher(str(young), run)
    assert BETTER in source.origin
    assert teacher.note == BETTER
    image, output = str(ROOT / "reference/bag.png"), young.with_name("x.safetensors")
    predict.main([str(young), image, "--device", "cpu"])
    export.main([str(young), str(output)])
    assert capsys.readouterr().err == f"{young}: {BETTER}\n" * 2
    for state in (source.state, teacher.model.state_dict(), load_checkpoint(output)["model"]):
        assert all(x.equal(trained["model"][name]) for name, x in state.items())
    export.main([str(young), str(output), "--weights", "ema"])
    assert load_checkpoint(output)["model_ema"]["head.weight"].equal(trained["model_ema"]["head.weight"])
    assert capsys.readouterr().err == ""
