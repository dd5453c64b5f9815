"""Pre-training on masked images: masks by position, the loss and its twin, hidden pixels, and fine-tuning."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention import ATTENTION
from engine.checkpoints.adapt import fit_weights
from engine.checkpoints.weight_sources import read_weights
from engine.config.schema import Run
from engine.data.loaders import create_loaders
from engine.evaluation.evaluate import evaluate
from engine.evaluation.inference import load
from engine.objectives.masked_images import MaskedImages, masked_l1
from engine.run.load import load_run
from engine.runtime.distributed import World, seed_everything
from engine.runtime.errors import ConfigError, UserError
from engine.training.objective import create_objective, read_teacher
from models import create_model
from tests.engine.test_distill import build, leave
from tests.support.launcher import ROOT
from tests.support.refusals import refusal
from validate import main as validate

WORLD = World(torch.device("cpu"))
MASKED = ("model.mask_token=true", "model.num_classes=0", "model.stem=linear", "simmim.mask_size=8")
SMALL = ("model.embed_dim=12", "model.depth=2", "model.num_heads=2", "attention={name: softmax}", "data.workers=0")


def run_of(*overrides: str) -> Run:
    return load_run(ROOT / "configs/quickstart.yaml", [*SMALL, *MASKED, *overrides])


def masked_l1_reference(pixels: Tensor, images: Tensor, masks: Tensor) -> Tensor:
    """`masked_l1`, pixel by pixel."""
    p = images.shape[2] // masks.shape[1]
    losses = []
    for pixel, image, mask in zip(pixels, images, masks, strict=True):
        errors = [
            abs(pixel[c, y, x] - image[c, y, x])
            for c in range(image.shape[0])
            for y in range(image.shape[1])
            for x in range(image.shape[2])
            if mask[y // p, x // p]
        ]
        losses.append(sum(errors) / len(errors))
    return torch.stack(losses)


def draw(*shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < share


def test_the_loss_and_its_gradient_are_those_of_the_twin():
    torch.manual_seed(0)
    images, masks = torch.randn(2, 3, 6, 10, dtype=torch.float64), draw(2, 3, 5)
    pixels = torch.randn_like(images).requires_grad_()
    losses = [f(pixels, images, masks) for f in (masked_l1, masked_l1_reference)]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), pixels)[0] for x in losses), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("tokens", [(), ("model.class_token=true", "model.reg_tokens=2")], ids=str)
def test_masked_pixels_are_hidden_and_every_patch_is_reconstructed_in_its_place(tokens: tuple[str, ...]):
    run = run_of("model.img_size=[16, 24]", "model.in_chans=1", *tokens)
    model, images, mask = build(run).eval(), torch.randn(2, 1, 16, 24), draw(2, 4, 6)
    hidden = mask.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    pixels = model(images, mask)
    torch.testing.assert_close(model(torch.where(hidden, 7.0, images), mask), pixels)
    assert not torch.allclose(model(torch.where(hidden, images, 7.0), mask), pixels)
    assert not torch.allclose(model(images), pixels)
    tokens = model.decoder(model.forward_features(images, mask)[:, model.num_prefix_tokens :])
    for row, column in [(0, 0), (3, 5), (2, 1)]:
        patch = pixels[:, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        torch.testing.assert_close(patch.flatten(1), tokens[:, 6 * row + column])


def test_a_mask_is_a_key_mask_to_a_model_without_mask_token():
    """No model ignores its second argument."""
    torch.manual_seed(0)
    plain = create_model("deit", img_size=16, patch_size=4, embed_dim=12, depth=1, num_heads=3).eval()
    images, mask = torch.randn(1, 3, 16, 16), draw(1, 4, 4)
    for function in (plain, plain.forward_features):
        assert torch.equal(function(images, mask), function(images, key_mask=mask))
        assert not torch.equal(function(images, mask), function(images))


@pytest.mark.parametrize("name", sorted(set(ATTENTION)))
def test_every_mechanism_can_be_pre_trained(name: str):
    """Every parameter has a gradient, which training in several processes needs."""
    torch.manual_seed(0)
    sizes = {"img_size": 56, "patch_size": 4, "in_chans": 1, "embed_dim": 12, "depth": 1, "num_heads": 3}
    model = create_model("deit", attention=name, mask_token=True, num_classes=0, **sizes)
    images = torch.randn(1, 1, 56, 56)
    MaskedImages()(model, images, draw(1, 14, 14)).backward()
    of_backbone = create_model("deit", attention=name, num_classes=0, **sizes)
    of_backbone(images).square().sum().backward()
    idle = {weight for weight, x in of_backbone.named_parameters() if x.grad is None}
    assert {weight for weight, x in model.named_parameters() if x.grad is None} <= idle


def test_a_share_of_the_squares_is_masked_counted_up():
    masks = MaskedImages.create_targets(run_of("simmim.mask_ratio=0.6"), is_training=True)
    seed_everything(0)
    found = torch.stack([masks(0) for _ in range(400)])
    assert found.shape == (400, 14, 14)
    assert found.flatten(1).sum(1).unique().tolist() == [4 * 30]  # of 49 squares 29.4
    squares = found.unflatten(2, (7, 2)).unflatten(1, (7, 2))
    assert torch.equal(squares.any(4).any(2), squares.all(4).all(2))
    share = found.double().mean(0)  # of each patch, with a standard error of 0.024
    assert (share - 30 / 49).abs().max() < 4.5 * 0.0244


def masks_by_place(run: Run, epoch: int = 0, start: int = 0, world: World = WORLD) -> dict[int, Tensor]:
    """Position in the order of an epoch -> mask, of the images that a rank trains on."""
    loader, _, augment = create_loaders(run, world, img_size=56, num_classes=0)
    loader.sampler.set_epoch(epoch, start)
    torch.manual_seed(world.rank)  # the state of this process is of no consequence
    masks = [mask for images, targets in loader for mask in augment(images, targets)[1]]
    positions = range(start + world.rank, loader.sampler.stop, world.size)
    return dict(zip(positions, masks, strict=True))


def test_a_mask_is_a_function_of_seed_epoch_and_place():
    """Masks are the same at any number of processes and accumulation steps, and after resuming within the epoch."""
    run = run_of("data.subset=1", "train.total_batch_size=4")
    whole = masks_by_place(run)
    assert [*whole] == [*range(8)]
    ranks = [masks_by_place(run, world=World(WORLD.device, rank, 2)) for rank in range(2)]
    smaller = masks_by_place(run_of("data.subset=1", "train.total_batch_size=4", "train.grad_accum_steps=2"))
    for others in (ranks[0] | ranks[1], smaller, masks_by_place(run, start=4)):
        assert all(torch.equal(mask, whole[place]) for place, mask in others.items())
    assert len(ranks[0] | ranks[1]) == 8
    other_seed = run_of("data.subset=1", "train.total_batch_size=4", "train.seed=1")
    others = [whole, masks_by_place(run, epoch=1), masks_by_place(other_seed)]
    different = [mask for masks in others for mask in masks.values()]
    assert len({tuple(mask.flatten().tolist()) for mask in different}) == len(different)


def test_validation_masks_are_those_of_the_image_in_every_run():
    first, second = (MaskedImages.create_targets(run_of(f"train.seed={seed}"), is_training=False) for seed in (0, 1))
    masks = [first(index) for index in range(20)]
    seed_everything(5)
    assert all(torch.equal(second(index), mask) for index, mask in enumerate(masks))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 20


def test_an_evaluation_is_the_mean_over_images():
    run = run_of("model.img_size=16")
    model, images, masks = build(run).eval(), torch.randn(13, 3, 16, 16), draw(13, 4, 4)
    criterion = create_objective(run, model, None, WORLD)
    batches = [(images[:10], masks[:10]), (images[10:], masks[10:])]
    found = evaluate(model, batches, WORLD, None, measure=criterion.measure)
    pixels = model(images, masks).detach()
    assert found == {"loss": pytest.approx(masked_l1_reference(pixels, images, masks).mean().item()), "images": 13}


@pytest.mark.parametrize("token", ["false", "true"])
def test_fine_tuning_takes_all_but_what_reconstructs(token: str, tmp_path: Path):
    masked = run_of(f"model.class_token={token}", "attention={name: eva, window_size: 7}")
    state = leave(tmp_path, masked, classes=None).state_dict()
    options = ["model.stem=linear", f"model.class_token={token}", "attention={name: eva, window_size: 7}"]
    run = load_run(ROOT / "configs/quickstart.yaml", [*SMALL, *options])
    taken, fitted = fit_weights(build(run), read_weights(str(tmp_path)), "init.weights")
    outcome = {kind: [*entries] for kind, entries in fitted.items()}
    unused = ["mask_token", "decoder.weight", "decoder.bias"]
    assert sorted(outcome.pop("loaded")) == sorted({*state} - {*unused})
    assert sorted(outcome.pop("dropped")) == sorted(unused)
    assert outcome.pop("fresh") == ["head.weight", "head.bias"]
    assert not any(outcome.values())
    assert all(torch.equal(x, state[name]) for name, x in taken.items())


def test_who_asks_for_classes_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture):
    leave(tmp_path, run_of(), classes=None)
    problem = r"\.pt: pre-trained on masked images, it predicts no classes; train a classifier from it \(init.weights="
    with pytest.raises(UserError, match=problem):
        load(tmp_path)
    with pytest.raises(UserError, match=problem):
        read_teacher(str(tmp_path), run_of())
    assert "it predicts no classes" in refusal(validate, [tmp_path], capsys)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_classes=10"], "num_classes = 10: with mask_token there is no classifier; set it to 0"),
        (["model.stem=conv"], "stem = conv: with mask_token convolutions would see the masked pixels beside a patch;"),
        (["model.global_pool=avg"], "global_pool = avg: with mask_token nothing is pooled; leave it out"),
        (["model.class_token=true", "model.dist_token=true"], "with mask_token there is no second head; set it to"),
        (["simmim.mask_size=12"], "simmim.mask_size = 12: 12 x 12 pixels of a 56 x 56 image .* valid: 4, 8, 28, 56"),
        (["simmim.mask_size=2"], "simmim.mask_size = 2: .* no whole patches of 4"),
        (["simmim.mask_ratio=0.99"], "mask_ratio = 0.99 masks all 49 squares; lower it, or simmim.mask_size"),
        (["augment.cutmix=1.0"], "augment.cutmix = 1.0: masked images have no labels to mix or smooth; set it to 0"),
        (["augment.reprob=0.25"], "augment.reprob = 0.25: erased areas would be targets; set it to 0"),
        (["distill.teacher=runs/x"], "distill.teacher = runs/x: a model with mask_token predicts no classes"),
        (["model.mask_token=false", "model.num_classes=10"], "simmim: .* no mask token; set model.mask_token=true, or"),
        (["model={name: pvtv2_b0}"], "simmim: given, but the model has no mask token; choose a DeiT, not pvtv2_b0"),
        (["model={name: pvtv2_b0, mask_token: true}"], "mask_token: an option of Deit, which pvtv2_b0 is not; leave"),
    ],
)
def test_bad_input_is_refused_by_name_value_and_remedy(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        run_of(*overrides)
