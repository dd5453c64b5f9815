"""Distillation: the loss against its formulas, and the teachers that are taken and refused."""

import math
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from engine.checkpoints.export import to_safetensors
from engine.checkpoints.progress import Progress
from engine.config.schema import Augment, Distill, Run
from engine.data.splits import open_split
from engine.objectives.classification import create_loss
from engine.objectives.distillation import Distillation, digest_weights, distillation_loss
from engine.objectives.objective import Objective
from engine.run.load import load_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError, UserError
from engine.training.objective import create_objective
from engine.training.resume import Checkpoints
from models import create_model
from tests.support.cases import perturbed
from tests.support.launcher import ROOT

WORLD = World(torch.device("cpu"))
MODEL = ("img_size=16", "patch_size=8", "embed_dim=12", "depth=1", "num_heads=2", "stem=linear")
DISTILLED = ("model.class_token=true", "model.dist_token=true")
DIGITS = [str(digit) for digit in range(10)]


def run_of(*overrides: str) -> Run:
    small = [f"model.{option}" for option in MODEL]
    return load_run(ROOT / "configs/quickstart.yaml", [*small, "attention={name: softmax}", *overrides])


def build(run: Run, seed: int = 0) -> nn.Module:
    """The model of `run`, with weights that are not small."""
    torch.manual_seed(seed)
    return perturbed(create_model(attention=run.attention, **run.model), 0.2)


def leave(directory: Path, run: Run, classes: list[str] | None = DIGITS, **more: nn.Module) -> nn.Module:
    """Leaves a checkpoint of `run` in `directory`, and returns its model."""
    model = build(run)
    directory.mkdir(exist_ok=True)
    identity = {} if classes is None else {"classes": classes}
    Checkpoints(directory, run, WORLD, 100, identity).save(Progress(step=1, images=8), {"model": model} | more)
    return model.eval()


def criterion_of(run: Run, model: nn.Module | None = None) -> Objective:
    return create_objective(run, model or build(run), open_split(run.data, "train_split"), WORLD)


def softmax(z: list[float]) -> list[float]:
    total = sum(map(math.exp, z))
    return [math.exp(value) / total for value in z]


def on_paper(outputs, teacher: Tensor, targets: Tensor, distill: Distill) -> float:
    """Equations 2 and 3 of the paper, image by image and class by class; `targets` are probabilities."""
    z_cls, z_dist = (z.tolist() for z in (outputs if isinstance(outputs, tuple) else (outputs, outputs)))
    tau, loss = distill.tau, 0.0
    for cls, dist, taught, y in zip(z_cls, z_dist, teacher.tolist(), targets.tolist(), strict=True):
        loss -= (1 - distill.weight) * sum(p * math.log(q) for p, q in zip(y, softmax(cls), strict=True))
        if distill.type == "hard":
            loss -= distill.weight * math.log(softmax(dist)[taught.index(max(taught))])
            continue
        p, q = softmax([z / tau for z in taught]), softmax([z / tau for z in dist])
        divergence = tau**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        loss += distill.weight * divergence / (len(cls) if distill.type == "soft_released" else 1)
    return loss / len(z_cls)


class Fixed(nn.Module):
    """A teacher with the same logits for all images."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.model, self.logits = nn.Identity(), logits

    def forward(self, images: None) -> Tensor:
        return self.logits


@pytest.mark.parametrize("two_heads", [False, True])
@pytest.mark.parametrize(
    "distill",
    [
        Distill(teacher="x"),
        Distill(teacher="x", alpha=0.9),
        Distill(teacher="x", type="soft", alpha=0.1, tau=3.0),
        Distill(teacher="x", type="soft_released", tau=2.0),
    ],
)
def test_the_loss_is_that_of_the_paper(distill: Distill, two_heads: bool):
    torch.manual_seed(0)
    logits, other, teacher = (2 * torch.randn(4, 5, dtype=torch.float64) for _ in range(3))
    outputs = (logits, other) if two_heads else logits
    soft, indices = torch.rand(4, 5, dtype=torch.float64).softmax(1), torch.tensor([3, 0, 4, 3])
    for targets, smooth in ((soft, 0.0), (indices, 0.1)):
        loss = Distillation(create_loss(Augment(mixup=0, cutmix=0, smoothing=smooth)), distill, Fixed(teacher))
        expected = soft if targets is soft else 0.9 * nn.functional.one_hot(indices, 5) + 0.1 / 5
        found = loss(lambda _: outputs, None, targets).item()
        assert found == pytest.approx(on_paper(outputs, teacher, expected, distill))


@pytest.mark.parametrize("kind", ["hard", "soft", "soft_released"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_teacher_whose_logits_are_not_finite_teaches_no_class(kind, value):
    logits, teacher = torch.randn(2, 3, 7)
    teacher[1] = value
    assert not distillation_loss(logits, teacher, kind, 1.0).isfinite()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_half_precision_logits_make_a_loss_in_fp32(kind):
    logits, teacher = torch.randn(2, 3, 50).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(logits, teacher, kind, 3.0)
    torch.testing.assert_close(loss, distillation_loss(logits.float(), teacher.float(), kind, 3.0))


@pytest.mark.parametrize("options", [(), ("distill.type=soft", "distill.tau=2.0")], ids=str)
def test_gradients_of_a_step(options: tuple[str, ...], tmp_path: Path):
    """Gradients of both heads' logits equal the formulas, in float64."""
    teacher = leave(tmp_path, run_of("model.embed_dim=16")).double()
    run = run_of(*DISTILLED, f"distill.teacher={tmp_path}", *options)
    model = build(run).double()
    criterion = criterion_of(run, model)
    criterion.teacher.double()
    images, targets = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.tensor([1, 0, 7])
    criterion(model, images, targets).backward()
    twin = build(run).double()
    twin.set_distilled_training()
    logits, distilled = twin(images)
    taught, tau = teacher(images), run.distill.tau
    p = (taught / tau).softmax(1) if options else nn.functional.one_hot(taught.argmax(1), 10)
    by_logits = logits.softmax(1) - nn.functional.one_hot(targets, 10), tau * ((distilled / tau).softmax(1) - p)
    torch.autograd.backward((logits, distilled), [0.5 / 3 * gradient.detach() for gradient in by_logits])
    for name, weight in model.named_parameters():
        expected = twin.get_parameter(name).grad
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-8 * expected.abs().max().item(), msg=name)
    assert all(weight.grad is None for weight in criterion.teacher.parameters())


def test_a_teacher_sees_images_as_it_was_trained_with(tmp_path: Path):
    """It gets its own normalisation, and grey images as three equal channels; averaged weights are preferred."""
    own = "data.mean=[0.4, 0.5, 0.6]", "data.std=[0.2, 0.3, 0.25]"
    average = build(run_of(*own), seed=1).eval()
    leave(tmp_path, run_of(*own), model_ema=average)
    pixels = torch.rand(2, 3, 16, 16)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    colour = criterion_of(run_of(f"distill.teacher={tmp_path}"))
    torch.testing.assert_close(colour.teacher((pixels - 0.5) / 0.5), average((pixels - mean) / std))
    grey = criterion_of(run_of(f"distill.teacher={tmp_path}", "model.in_chans=1"))
    levels = pixels[:, :1]
    torch.testing.assert_close(grey.teacher((levels - 0.5) / 0.5), average((levels - mean) / std))


def test_without_a_teacher_the_loss_is_of_the_targets_alone():
    run = run_of(*DISTILLED)
    model = build(run)
    criterion, logits = criterion_of(run, model), torch.randn(3, 10)
    assert not model.distilled_training
    assert criterion.identity == {"teacher_weights": "none"}
    targets = torch.tensor([1, 2, 3])
    assert torch.equal(criterion(lambda _: logits, None, targets), criterion.loss(logits, targets))


def test_the_identity_is_of_the_weights(tmp_path: Path):
    """The digest is the same in a checkpoint and an export, and one bit changes it."""
    model = leave(tmp_path, run_of())
    (tmp_path / "teacher.safetensors").write_bytes(to_safetensors(torch.load(tmp_path / "step_1.pt"), "plain"))
    sources = tmp_path, tmp_path / "step_1.pt", tmp_path / "teacher.safetensors"
    digests = {criterion_of(run_of(f"distill.teacher={source}")).identity["teacher_weights"] for source in sources}
    assert digests == {digest_weights(model.state_dict())}
    with torch.no_grad():
        model.head.bias[3] = model.head.bias[3].nextafter(torch.tensor(9.0))
    assert digest_weights(model.state_dict()) not in digests


def test_a_name_of_timms_hub(monkeypatch, capsys):
    """A convolutional network takes images of any size, and says so; its own normalisation is timm's."""
    stock = timm.create_model("resnet10t", num_classes=10)

    def create(name: str, pretrained: bool) -> nn.Module:
        assert (name, pretrained) == ("resnet10t.c3_in1k", True)
        return stock

    monkeypatch.setattr(timm, "create_model", create)
    criterion = criterion_of(run_of("distill.teacher=timm:resnet10t.c3_in1k"))
    images = torch.randn(2, 3, 16, 16)
    assert not stock.training
    mean, std = (torch.tensor(stock.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close(criterion.teacher(images), stock((images * 0.5 + 0.5 - mean) / std))
    about = "trained with images of 3 x 176 x 176, asked about 3 x 16 x 16"
    about += "; its classes are not known from this file; the 10 of its classifier are taken for the data's, in order"
    assert capsys.readouterr().out == f"distill.teacher=timm:resnet10t.c3_in1k: hard, alpha 0.5; {about}\n"


@pytest.mark.parametrize("names", [DIGITS, [*"abcdefghij"], DIGITS[::-1]], ids=["same", "positions", "reversed"])
def test_a_teacher_of_timm_with_names_has_the_same_classes_in_the_same_order(names, tmp_path, capsys):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2}
    stock = timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=10)
    save_for_hf(stock, tmp_path, {"label_names": dict(enumerate(names))}, model_args=sizes)
    run = run_of(f"distill.teacher=timm:local-dir:{tmp_path}")
    if names != DIGITS[::-1]:
        criterion_of(run)
        assert "its classes are not known" not in capsys.readouterr().out
        return
    with pytest.raises(UserError, match="other classes: the same names in another order; choose a teacher of the same"):
        criterion_of(run)


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        (("model.num_classes=7", None), "it has 7 classes, the images have 10; choose a teacher of the same classes"),
        (
            ("model.num_classes=10", [*DIGITS[:9], "nine"]),
            "other classes: only in the teacher: nine (1); only in the data: 9 (1); choose a teacher of the same",
        ),
        (("model.img_size=24", DIGITS), "trained with images of 3 x 24 x 24, it does not take 3 x 16 x 16 ("),
        (("model.in_chans=1", DIGITS), "trained with images of 1 x 16 x 16, it does not take 3 x 16 x 16 ("),
        ("weights.pth", "weights alone, which do not say of what model they are; name timm:NAME of timm's hub, or"),
        ("none", "no such run directory or checkpoint"),
        (".", "no checkpoint there"),
    ],
)
def test_a_teacher_of_other_images_or_classes_or_no_model_is_refused(teacher, says, tmp_path):
    """A teacher is an option of its run and the names of its classes, or a file."""
    source = tmp_path / (teacher if isinstance(teacher, str) else "run")
    if isinstance(teacher, tuple):
        leave(source, run_of(teacher[0]), classes=teacher[1])
    torch.save(build(run_of()).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(UserError) as caught:
        criterion_of(run_of(f"distill.teacher={source}"))
    assert str(caught.value).startswith(f"distill.teacher={source}: ")
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["distill.type=soft"], "distill.teacher = null, but other options of distill are given: name a teacher"),
        (["distill.tau=2.0", "distill.teacher=x"], "distill.tau = 2 acts on soft predictions: set distill.type=soft"),
    ],
)
def test_options_that_contradict_are_refused(overrides: list[str], says: str):
    with pytest.raises(ConfigError) as caught:
        run_of(*overrides)
    assert says in str(caught.value)
