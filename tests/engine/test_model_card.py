"""The model card of an exported directory: what the hub reads, and what a reader is told."""

import re
from dataclasses import asdict

import pytest
import timm
from huggingface_hub import ModelCard

from engine.checkpoints import export as export_module
from engine.checkpoints.adapt import restore_model
from engine.checkpoints.export import export
from engine.checkpoints.files import load_checkpoint, open_weights
from engine.checkpoints.progress import Progress
from engine.run.load import parse_run
from models import create_model

METRICS = {
    "top1": 87.654,
    "top5": 99.0,
    "loss": 0.4,
    "ema_top1": 89.123,
    "ema_top5": 99.5,
    "ema_loss": 0.3,
    "images": 360,
}
HYBRID = [{"blocks": 0, "name": "eva", "window_size": 2, "num_landmarks": 4}, {"blocks": 1, "name": "identity"}]


def trained(attention="softmax", **changes) -> dict:
    """A checkpoint of two of four epochs on the digits; `changes` are of its metadata."""
    model = {"name": "deit", "img_size": [24, 16], "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    data = {"dataset": "idx", "root": "/home/someone/secret/pictures", "subset": 50, "crop_mode": "squash"}
    config = {
        "model": model | {"num_classes": 6},
        "attention": attention,
        "data": data,
        "init": {"weights": "/home/someone/secret/before.pth"},
        "optim": {"opt": "sgd", "lr": 0.125, "lr_base_size": 70, "weight_decay": 0.0},
        "schedule": {"epochs": 4, "warmup_epochs": 0},
        "train": {"total_batch_size": 70, "amp": None},
    }
    run = parse_run(config, "x")
    state = create_model(attention=run.attention, **run.model).state_dict()
    progress = asdict(Progress(epoch=2, step=41, metrics=METRICS))
    checkpoint = {"config": config, "processes": 1, "images": 1437, "progress": progress, "train_content": "ab12"}
    return checkpoint | {"model": state, "model_ema": state} | changes


def card_of(tmp_path, checkpoint: dict, weights="plain", overrides=()) -> ModelCard:
    run = parse_run(checkpoint["config"], "x", overrides)
    assert export(f"{tmp_path}/export/", run, checkpoint, weights) == ""
    return ModelCard((tmp_path / "export/README.md").read_text())


def detail(card: ModelCard, title: str) -> str:
    """The text of an entry of the details, or its lines."""
    return re.search(rf"- \*\*{title}:\*\* ?(.*(\n  - .*)*)", card.content)[1].strip()


def test_the_hub_reads_its_front_matter(tmp_path):
    data = card_of(tmp_path, trained(HYBRID)).data
    assert (data.license, data.library_name, data.pipeline_tag) == ("unknown", "timm", "image-classification")
    assert data.tags == ["image-classification", "timm", "efficient-attention-vision", "deit", "eva", "identity"]


def test_it_says_what_the_checkpoint_holds(tmp_path):
    card = card_of(tmp_path, trained(HYBRID))
    assert "# Model card for deit with eva, identity\n" in card.text
    assert "a classifier of 6 classes" in card.text
    assert detail(card, "Training").splitlines() == [
        "- Data: 1,437 training images from `pictures`; `data.dataset=idx`, `data.subset=50`",
        "  - Initial weights: `before.pth`",
        "  - Optimiser: `sgd`, learning rate 0.125 at 70 images, weight decay 0",
        "  - Length: 2 of 4 epochs, 41 updates with 70 images each",
    ]
    found = "top-1 87.65 % of 360 validation images, after epoch 2, by the run's own evaluation in fp32."
    assert detail(card, "Accuracy") == found
    assert "  - input_size: `(3, 24, 16)`\n" in card.text
    assert "  - crop_mode: `squash`\n" in card.text
    assert detail(card, "Papers").split() == [
        "-",
        "https://arxiv.org/abs/2302.04542",
        "-",
        "https://arxiv.org/abs/2012.12877",
    ]
    assert "secret" not in card.content  # a path tells more than its owner wants


def test_averaged_weights_have_their_own_accuracy(tmp_path):
    card = card_of(tmp_path, trained(), "ema")
    assert detail(card, "Weights") == "averaged (EMA)"
    assert detail(card, "Accuracy").startswith("top-1 89.12 % of ")


def test_another_image_size_is_not_what_was_evaluated(tmp_path):
    card = card_of(tmp_path, trained(), overrides=["model.img_size=[32, 24]"])
    assert "It had other options of the model or of its images than this export." in card.text
    assert "  - input_size: `(3, 32, 24)`\n" in card.text


def test_an_export_of_an_export_tells_of_the_training(tmp_path, capsys):
    """Its configuration, the images that were held out and the image size, which the first export has changed."""
    checkpoint, first = trained(), tmp_path / "first.safetensors"
    checkpoint["config"]["data"] |= {"folds": 3, "fold": 0}
    again = ["model.img_size=[32, 24]", "data.fold=1", "optim.opt=adamw"]
    export(str(first), parse_run(checkpoint["config"], "x", again), checkpoint, "plain")
    export_module.main([str(first), f"{tmp_path}/second/"])
    card = ModelCard((tmp_path / "second/README.md").read_text())
    assert "It had other options of the model or of its images than this export." in card.text
    assert "`data.folds=3`" in detail(card, "Training")
    assert "data.fold=1" not in detail(card, "Training")
    assert "Optimiser: `sgd`" in detail(card, "Training")
    for export_again in (first, tmp_path / "second"):
        found = open_weights(export_again).checkpoint
        _, line = restore_model(parse_run(found["config"], "x", ["model.img_size=[40, 24]"]), found, "plain")
        assert line.startswith("model.img_size = [40, 24], trained at [24, 16]; resampled: ")
    assert load_checkpoint(first)["config"]["optim"]["opt"] == "adamw"


@pytest.mark.parametrize(
    ("progress", "options"),
    [
        ({"images": 140}, {}),  # saved within an epoch
        ({"metrics": {}}, {}),
        ({"metrics": {"top1": 9.0}}, {}),  # a stranger's
        ({"metrics": {"loss": 0.1, "images": 3}}, {}),
        ({"step": 0}, {}),
        ({"epoch": 3}, {"eval_every": 2}),
    ],
)
def test_an_accuracy_that_is_not_of_these_weights_is_unknown(progress, options, tmp_path):
    checkpoint = trained()
    checkpoint["progress"] |= progress
    checkpoint["config"]["train"] |= options
    says = "Unknown: the checkpoint holds no evaluation of these weights; `validate.py` measures it."
    assert detail(card_of(tmp_path, checkpoint), "Accuracy") == says


def test_a_training_without_a_record_is_unknown(tmp_path):
    """That of a directory which timm wrote, for one: the options of its run are defaults, and no facts."""
    model = timm.create_model("deit_tiny_p16", depth=1, num_classes=2, img_size=32)
    timm.models.save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    checkpoint = open_weights(tmp_path / "timm").checkpoint
    card = card_of(tmp_path, checkpoint)
    assert detail(card, "Training") == "- Unknown: these weights came without a record of their training."
    assert detail(card, "Accuracy").startswith("Unknown: ")
    assert detail(card, "Licence").startswith("Unknown: ")


def test_a_card_that_is_there_is_kept(tmp_path):
    card_of(tmp_path, trained())
    path, run = tmp_path / "export/README.md", parse_run(trained()["config"], "x")
    path.write_text("license: mit")
    assert "README.md stays as it was" in export(f"{tmp_path}/export/", run, trained(), "plain")
    assert path.read_text() == "license: mit"
