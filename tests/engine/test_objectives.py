"""A further objective is one file and one line of `OBJECTIVES`: scripts and loaders need no other change.

The loss of every objective means the same at any number of micro-batches and ranks.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from timm.data.mixup import mixup_target
from torch import Tensor, nn

import train
import validate
from engine.data.splits import open_split
from engine.objectives import OBJECTIVES, choose_objective
from engine.objectives.masked_images import MaskedImages
from engine.objectives.objective import Measure, Objective, Run
from engine.run.load import load_run
from engine.runtime.distributed import World, init_distributed
from engine.training.objective import create_objective
from models import create_model
from tests.engine.test_alignment import leave_teacher
from tests.support.launcher import ROOT
from tests.support.refusals import refusal

SEED = 41
"""Seed of the runs that have the objective of this file."""


def squared_error(network: Callable[[Tensor], Tensor], images: Tensor, positions: Tensor) -> Tensor:
    return (network(images)[:, 0] - positions).square()


class Position(Objective):
    """Regression of an image's position in its split, over 1,000."""

    measure, predicts_classes = Measure(("loss",), lambda model, x, y, rows: [squared_error(model, x, y).sum()]), False
    identity = MappingProxyType({"scale": "1000"})

    @staticmethod
    def applies(run: Run) -> bool:
        return run.train.seed == SEED

    @staticmethod
    def prediction_refusal(source: str, of_metrics: bool) -> str:
        return "it predicts positions; name another run"

    @staticmethod
    def create_targets(run: Run, is_training: bool) -> Callable[[int], Tensor]:
        return lambda index: torch.tensor(index / 1000)

    def __call__(self, network: Callable[[Tensor], Tensor], images: Tensor, positions: Tensor, /) -> Tensor:
        return squared_error(network, images, positions).mean()


@pytest.mark.complete
def test_a_fifth_objective_trains_evaluates_and_is_known_to_the_other_scripts(tmp_path, monkeypatch, capsys):
    last = OBJECTIVES["classification"]
    monkeypatch.delitem(OBJECTIVES, "classification")
    monkeypatch.setitem(OBJECTIVES, "position", Position)
    monkeypatch.setitem(OBJECTIVES, "classification", last)
    small = ["model.embed_dim=12", "model.depth=1", "model.num_classes=1", "schedule.epochs=2", "data.workers=0"]
    options = [*small, f"train.seed={SEED}", "train.total_batch_size=256", "schedule.warmup_epochs=0"]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(tmp_path)])
    records = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    losses = {kind: [record["loss"] for record in records if record["kind"] == kind] for kind in ("train", "eval")}
    assert losses["train"][1] < losses["train"][0]  # held-out images have positions of another mean
    assert len(losses["eval"]) == 2
    assert "top1" not in records[-1]
    assert "it predicts positions; name another run" in refusal(validate.main, [tmp_path], capsys)


SMALL = ("model.embed_dim=12", "model.depth=2", "model.num_heads=2")
IMAGES = (*SMALL, "model.img_size=24", "model.stem=linear", "attention={name: softmax}")
MIXED = ("augment.mixup=0.8", "augment.smoothing=0.1")
WEIGHTS = "train.class_weights=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
TEACHER = ("init.weights=TEACHER", "distill.teacher=init.weights")
LARA = ("model.depth=3", "attention={name: lara, num_landmarks: 4}", *TEACHER, "distill.type=attention")
BLANK = ("augment.mixup=0", "augment.cutmix=0", "augment.smoothing=0", "augment.reprob=0")
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "classification": ("quickstart", [*IMAGES, "augment.smoothing=0.1"]),
    "sandwich": ("quickstart", [*IMAGES[:-1], LARA[1], "train.budgets=[1, 2, 4]", "train.budget_distill=true"]),
    "classification of mixed images": ("quickstart", [*IMAGES, *MIXED]),
    "classification, weights": ("quickstart", [*IMAGES, WEIGHTS, "augment.smoothing=0.1"]),
    "classification of mixed images, weights": ("quickstart", [*IMAGES, *MIXED, WEIGHTS]),
    **{
        f"distillation, {kind}": ("quickstart", [*IMAGES, "model.depth=3", *TEACHER, f"distill.type={kind}"])
        for kind in ("hard", "soft", "soft_released")
    },
    "alignment": ("quickstart", [*IMAGES, *LARA]),
    "alignment, labels": ("quickstart", [*IMAGES, *LARA, "distill.alpha=0.5", WEIGHTS]),
    "masked_images": (
        "quickstart",
        [*IMAGES, "model.mask_token=true", "model.num_classes=0", "simmim.mask_size=8", *BLANK],
    ),
    "sequences": ("lra_listops/softmax", [*SMALL, "model.img_size=[1, 40]"]),
    "copying": ("copy_task/softmax", [*SMALL, "model.img_size=[1, 12]"]),
}
"""Name of an objective, and of a variant of it -> configuration, and overrides."""


def load_case(case: str, teacher: Path) -> Run:
    config, overrides = CASES[case]
    return load_run(ROOT / f"configs/{config}.yaml", [text.replace("TEACHER", str(teacher)) for text in overrides])


def create_case(case: str, teacher: Path) -> tuple[Objective, nn.Module, Tensor, Tensor]:
    """The objective, a model, and the images and targets of a batch; images differ much in their scale. In float64."""
    run, generator = load_case(case, teacher), torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    model = create_model(attention=run.attention, **run.model).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.2)
    images = None if run.distill.teacher is None else open_split(run.data, "train_split")
    objective = create_objective(run, model, images, World(torch.device("cpu")))
    for part in (model, *vars(objective).values()):
        if isinstance(part, nn.Module):
            part.double()
    if objective.inputs == "tokens":
        size = run.model["img_size"]
        tokens = torch.randint(1, run.model["vocab_size"], (8, 1, *size), generator=generator)
        return objective, model, tokens, torch.arange(8)
    inputs = (
        torch.randn(8, 3, 24, 24, generator=generator, dtype=torch.float64) * torch.arange(1, 9)[:, None, None, None]
    )
    if isinstance(objective, MaskedImages):
        masks = MaskedImages.create_targets(run, False)
        return objective, model, inputs, torch.stack([masks(index) for index in range(8)])
    labels = torch.tensor([0, 5, 9, 2, 2, 7, 1, 3])
    return objective, model, inputs, mixup_target(labels, 10, 0.7, 0.1).double() if "mixed" in case else labels


def backward(parts: Sequence[tuple[Tensor, Tensor]], network: Callable, case: SimpleNamespace) -> tuple[Tensor, list]:
    """The loss of an update of these micro-batches, and its gradients."""
    case.model.zero_grad()
    total = sum((case.objective(network, *part) / len(parts) for part in parts), torch.zeros((), dtype=torch.float64))
    total.backward()
    return total.detach(), [weight.grad.clone() for weight in case.model.parameters() if weight.grad is not None]


def compare(name: str, teacher: Path, world: World) -> None:
    """Asserts that the ranks, and micro-batches of each, have the loss and the gradients of the whole batch."""
    objective, model, images, targets = create_case(name, teacher)
    case = SimpleNamespace(objective=objective, model=model)
    wrapped = objective.wrap(model)
    expected = backward([(images, targets)], wrapped, case)
    parts = [*zip(images.split(2), targets.split(2), strict=True)][world.rank :: world.size]
    if world.size == 1:
        found = backward(parts, wrapped, case)
    else:
        with world.average_gradients(wrapped) as network:
            found = backward([tuple(map(torch.cat, zip(*parts, strict=True)))], network, case)
        world.sum(found[0]).div_(world.size)
    assert expected[1], name
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12, msg=lambda text: f"{name}: {text}")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    leave_teacher(directory)
    return directory


def test_every_objective_has_a_case(teacher):
    chosen = {name: choose_objective(load_case(name, teacher)) for name in CASES}
    assert {name: OBJECTIVES[name.split(",")[0].split(" ")[0]] for name in CASES} == chosen
    assert {*chosen.values()} == {*OBJECTIVES.values()}


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_have_the_loss_and_the_gradients_of_their_batch(name, teacher):
    compare(name, teacher, World(torch.device("cpu")))


def main(arguments: Sequence[str]) -> None:
    world = init_distributed("cpu")
    with world.ending():
        for name in CASES:
            compare(name, Path(arguments[0]), world)


def test_two_ranks_have_the_loss_and_the_gradients_of_their_batch(teacher, fork_server, tmp_path):
    statuses, job = fork_server.run([str(teacher)], tmp_path / "log", ranks=2, script=__name__)
    assert statuses == [0, 0], job.text
