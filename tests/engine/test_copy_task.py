"""The copy task: its sequences, training, evaluation, and the options that it refuses."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import OptionError
from engine.checkpoints.export import main as export
from engine.checkpoints.progress import Progress
from engine.config.schema import Run
from engine.data.identity import identify_data
from engine.data.loaders import create_loaders, create_val_loader
from engine.data.splits import open_images
from engine.evaluation.evaluate import evaluate
from engine.evaluation.inference import load
from engine.objectives.copying import COPIES, Copying
from engine.run.load import load_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError, UserError
from engine.training.objective import create_objective
from engine.training.resume import Checkpoints
from models import create_model
from tests.support.launcher import ROOT
from tests.support.refusals import refusal
from validate import main as validate

WORLD = World(torch.device("cpu"))
SMALL = (
    *("model.img_size=[1, 8]", "model.vocab_size=5", "model.num_classes=5", "model.embed_dim=12", "model.depth=1"),
    *("data.num_sequences=[20, 6]", "train.total_batch_size=4"),
)
CAUSAL, LARA = "{blocks: 0, name: softmax, causal: true}", "name: lara, num_landmarks: 4"


def run_of(*overrides: str) -> Run:
    return load_run(ROOT / "configs/copy_task/softmax.yaml", [*SMALL, *overrides])


def test_a_sequence_says_twice_what_is_drawn_and_is_the_same_in_every_run():
    splits = {option: open_images(run_of(), option, (1, 8), False) for option in ("train_split", "val_split")}
    assert [len(images) for images in splits.values()] == [20, 6]
    sequences = {option: torch.tensor(images.reader.images) for option, images in splits.items()}
    for found in sequences.values():
        assert torch.equal(found[..., :4], found[..., 4:])
        assert (found[..., 0] == 0).all()
    assert sequences["train_split"][..., 1:4].unique().tolist() == [1, 2, 3, 4]
    more = open_images(run_of("data.num_sequences=[30, 6]", "train.seed=1"), "train_split", (1, 8), False)
    assert torch.equal(torch.tensor(more.reader.images)[:20], sequences["train_split"])
    assert not torch.equal(sequences["train_split"][:6], sequences["val_split"])


def test_loaders_give_the_numbers_of_tokens():
    train, val, augment = create_loaders(run_of(), WORLD, img_size=(1, 8), num_classes=5)
    batches = [augment(*batch)[0] for batch in train] + [sequences for sequences, _ in val]
    assert {(batch.dtype, *batch.shape[1:]) for batch in batches} == {(torch.uint8, 1, 1, 8)}
    drawn = [open_images(run_of(), option, (1, 8), False).reader.images for option in ("train_split", "val_split")]
    for loaded, images in zip((batches[:5], batches[5:]), drawn, strict=True):
        assert sorted(torch.cat(loaded).flatten(1).tolist()) == sorted(torch.tensor(images).flatten(1).tolist())
    assert identify_data(train.dataset.dataset, val.dataset)["classes"] == list("01234")


class Knowing(nn.Module):
    """Predicts the next token with logit `certainty`, but another one in the `wrong` places of the sequence."""

    def __init__(self, certainty: float, wrong: tuple[int, ...] = ()):
        super().__init__()
        self.certainty, self.wrong = certainty, wrong

    def forward(self, sequences: Tensor) -> Tensor:
        following = sequences.flatten(1).long().roll(-1, 1)
        for place in self.wrong:
            following[:, place - 1] = 6
        return self.certainty * F.one_hot(following, 7).float()


def test_the_tokens_of_the_second_half_count_alone():
    """0 1 2 3 0 1 2 3: the last three count, each predicted in the place before it."""
    sequences = torch.tensor([[0, 1, 2, 3] * 2, [0, 5, 5, 4] * 2], dtype=torch.uint8)[:, None, None]
    batches = [(sequences, torch.zeros(2))]
    right = torch.tensor(3.0).exp() / (torch.tensor(3.0).exp() + 6)
    for wrong, hits in [((1, 2, 3, 4), 3), ((5,), 2), ((6, 7), 1)]:
        found = evaluate(Knowing(3.0, wrong), batches, WORLD, None, measure=COPIES)
        loss = -(right.log() * hits + ((1 - right) / 6).log() * (3 - hits)).item() / 3
        assert found["top1"] == pytest.approx(100 * hits / 3)
        assert (found["loss"], found["images"]) == (pytest.approx(loss, rel=1e-6), 2)
        assert Copying()(Knowing(3.0, wrong), *batches[0]).item() == pytest.approx(loss, rel=1e-6)
    assert evaluate(Knowing(0.0), batches, WORLD, None, measure=COPIES)["loss"] == pytest.approx(1.945910149)  # log 7


def test_a_model_of_tokens_predicts_each_from_those_before_it():
    run = run_of("model.embed_dim=24", "attention={name: eva, causal: true, window_size: 2, num_landmarks: 4}")
    torch.manual_seed(0)
    model = create_model(attention=run.attention, **run.model).double().eval()
    tokens = torch.randint(5, (3, 1, 1, 8), dtype=torch.uint8)
    logits = model(tokens)
    assert logits.shape == (3, 8, 5)
    edited = tokens.clone()
    edited[..., 5] = (edited[..., 5] + 1) % 5
    changed = (model(edited) - logits).abs().amax((0, 2)) > 1e-9
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_a_model_of_tokens_refuses_what_acts_on_pixels():
    options = {"img_size": (1, 8), "patch_size": 1, "in_chans": 1, "vocab_size": 5, "embed_dim": 12, "num_heads": 3}
    assert create_model("deit", depth=1, **options)(torch.zeros(2, 1, 1, 8)).shape == (2, 1000)
    for more, problem in (
        ({"in_chans": 3}, "model.in_chans = 3: with vocab_size set it to 1"),
        ({"stem": "conv"}, "model.stem = conv: with vocab_size set it to linear"),
        ({"img_size": 8, "patch_size": 2}, "model.patch_size = 2: with vocab_size set it to 1"),
        ({"mask_token": True, "num_classes": 0}, "model.mask_token = True: with vocab_size set it to false"),
    ):
        with pytest.raises(OptionError, match=problem):
            create_model("deit", **options | more)


def save(directory: Path) -> Run:
    """Leaves a checkpoint of an untrained run in `directory`."""
    run = run_of()
    state = {"model": create_model(attention=run.attention, **run.model)}
    Checkpoints(directory, run, WORLD, 20, {"classes": list("01234")}).save(Progress(step=1, images=8), state)
    return run


def test_a_run_is_validated_by_its_copies_and_does_not_take_images(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = save(tmp_path)
    validate([str(tmp_path), "data.workers=0", "--json"])
    assert '"images": 6' in (printed := capsys.readouterr().out)
    loader = create_val_loader(run, WORLD, img_size=(1, 8))
    model = create_model(attention=run.attention, **run.model)
    assert create_objective(run, model, None, WORLD).measure is COPIES
    assert all(f'"{name}"' in printed for name in evaluate(model, loader, WORLD, None, measure=COPIES))
    with pytest.raises(UserError, match=r"\.pt: trained to copy sequences, it does not take images; name a run"):
        load(tmp_path)
    for main, arguments in ((validate, ["--flip"]), (export, [tmp_path / "x.onnx"])):
        error = refusal(main, [tmp_path, *arguments], capsys)
        assert "it does not take images" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.vocab_size=0"], r"model.vocab_size = 0: .* set it to their number, of a DeiT, at least 2"),
        (["model={name: pvtv2_b0}"], r"model.vocab_size = None: the copy task has sequences of tokens;"),
        (["model.img_size=[1, 9]"], r"model.img_size = \[1, 9\]: .* set it to \[1, N\] with N even, at least 4"),
        (["model.num_classes=10"], r"model.num_classes = 10: .* set it to 5, to predict one at every place"),
        (["model.global_pool=avg"], r"model.global_pool = avg: .* set it to '', to predict one at every place"),
        (["attention={name: softmax}"], r"attention\(softmax\).causal = False: .* set it to true, or choose"),
        ([f"attention={{{LARA}}}"], r"attention\(lara\).causal = False: "),
        (["model.depth=2", f"attention=[{CAUSAL}, {{blocks: 1, {LARA}}}]"], r"attention\(lara\).causal = False: "),
        (["augment.mixup=0.8"], r"augment.mixup = 0.8: the copy task has sequences of tokens; set it to 0.0"),
        (["augment.auto_augment=rand-m9"], r"augment.auto_augment = rand-m9: .* set it to null"),
        (["data.root=."], r"data.root = \.: .* set it to null"),
        (["distill.teacher=runs/x"], r"distill.teacher = runs/x: .* set it to null"),
        (["data.dataset=digits", "model.vocab_size=0"], r"data.num_sequences: acts on data.dataset=copy, not digits;"),
        (["data.num_sequences=[1000000, 5]", "model.img_size=[1, 256]"], r"lower it: 256,000,000 tokens are above 134"),
    ],
)
def test_what_makes_no_sense_of_sequences_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        run_of(*overrides)
