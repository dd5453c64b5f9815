"""Every optimiser of timm trains, is saved and resumes to the same bits, or is refused before any work."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn

from attention.options import OptionError
from engine.checkpoints.progress import Progress
from engine.config.schema import Optim, Run, Schedule
from engine.run.load import load_run
from engine.runtime.distributed import World, seed_everything
from engine.runtime.errors import UserError
from engine.training.differences import list_differences
from engine.training.optim import check_optimizer, create_optimizer, create_schedule, keep_finite, restore_optimizer
from engine.training.resume import Checkpoints, Resumed
from models import create_model
from tests.engine.test_resume import digest
from tests.support.launcher import ROOT

CPU = torch.device("cpu")
NEED_CUDA = tuple(name for name in list_optimizers() if name.startswith(("bnb", "fused")))
REFUSED = ("adahessian", *NEED_CUDA)
ACCEPTED = [name for name in list_optimizers() if name not in REFUSED]

LIGHT = ("adamw", "sgd", "lamb", "lambc", "adafactorbv", "adopt", "lion", "madgrad", "muon", "nadam", "rmsproptf")
"""Optimisers of each kind: steps in tensors, in numbers and in groups; dtypes as state; no state."""

pytestmark = pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")  # by kron


@pytest.fixture(scope="module")
def run() -> Run:
    small = ["model.depth=1", "model.img_size=8", "attention={name: softmax}"]
    return load_run(ROOT / "configs/quickstart.yaml", [*small, "data.workers=0"])


class Weights(nn.Module):
    """A weight of every number of dimensions; some optimisers factorise or orthogonalise only some."""

    def __init__(self):
        super().__init__()
        shapes = (1,), (5,), (6, 4), (20, 33), (1, 9, 4), (4, 3, 2, 2)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)


@torch.compiler.set_stance("force_eager")
def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """Updates with random gradients that depend on their number only."""
    for step in range(begin, end):
        seed_everything(step)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape)
        optimizer.step()


def light_and_all(light: Collection[str]):
    marked = [name if name in light else pytest.param(name, marks=pytest.mark.stress) for name in ACCEPTED]
    return pytest.mark.parametrize("name", marked)


@light_and_all(LIGHT)
def test_every_optimizer_resumes_to_the_same_bits(name: str, run: Run, tmp_path: Path):
    run = replace(run, optim=Optim(opt=name))
    checkpoints = Checkpoints(tmp_path, run, World(CPU), 100)
    model, resumed = Weights(), Weights()
    optimizer, other = (create_optimizer(weights, run.optim, 512) for weights in (model, resumed))
    train(model, optimizer, 0, 2)
    checkpoints.save(Progress(step=2, images=8), {"model": model, "optimizer": optimizer})
    train(model, optimizer, 2, 5)
    assert Resumed(checkpoints).restore({"model": resumed, "optimizer": other}).step == 2
    train(resumed, other, 2, 5)
    assert digest(resumed.state_dict()) == digest(model.state_dict())
    assert digest(other.state_dict()) == digest(optimizer.state_dict())


@light_and_all([name for name in ACCEPTED if not name.startswith("kron")])  # which is slow at first
def test_the_trial_accepts_what_works(name: str):
    check_optimizer(Optim(opt=name), CPU)


CHANGES = {"betas": (0.5, 0.6, 0.7), "eps": 1e-3, "weight_decay": 0.5}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_option_that_was_changed_is_all_that_changes(name: str):
    """Timm's optimisers keep an option under one name or several, or not at all."""
    former = create_optimizer(Weights(), Optim(opt=name), 512)
    state = former.state_dict()
    for group in state["param_groups"]:
        group["step"] = 7
    info = get_optimizer_info(name)
    changes = CHANGES | {"betas": CHANGES["betas"][: info.num_betas]}
    for option, value in changes.items():
        optimizer = create_optimizer(Weights(), Optim(opt=name, **{option: value}), 512)
        new = optimizer.state_dict()["param_groups"]
        restore_optimizer(optimizer, state, former, "x")
        assert optimizer.state_dict()["param_groups"] == [group | {"step": 7} for group in new]


def test_random_state_is_resumed():
    """Kron keeps such state beside the state of the weights."""
    former, optimizer = (create_optimizer(Weights(), Optim(opt="kron"), 512) for _ in range(2))
    former.rng.random()
    restore_optimizer(optimizer, former.state_dict(), former, "x")
    assert optimizer.rng.random() == former.rng.random()


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_work_is_refused(name: str):
    if name in NEED_CUDA and torch.cuda.is_available():
        pytest.skip("it may work where there is CUDA")
    with pytest.raises(OptionError, match=rf"^optim\.opt = '{name}' cannot be used, a trial failed .*such as adamw$"):
        check_optimizer(Optim(opt=name), CPU)


def test_the_trial_sees_state_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    class Forgetful(torch.optim.SGD):
        count = 0

        def step(self) -> None:
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 0.1 / self.count
            super().step()

    def create(model: nn.Module, optim: Optim, total_batch_size: int) -> Forgetful:
        return Forgetful(model.parameters())

    monkeypatch.setattr("engine.training.optim.create_optimizer", create)
    with pytest.raises(OptionError, match="resumed, it makes other updates"):
        check_optimizer(Optim(), CPU)


def test_state_of_other_groups_is_refused():
    """timm makes one group without weight decay, and a weight's state is stored by its number in the groups."""
    former, optimizer = (create_optimizer(Weights(), Optim(weight_decay=value), 512) for value in (0.05, 0.0))
    with pytest.raises(UserError, match=r"^x: the checkpoint's state is for other groups of weights; optim\.weight_d"):
        restore_optimizer(optimizer, former.state_dict(), former, "x")


def test_layer_decay_scales_the_rates_of_timms_groups(caplog):
    """The head's rate is the schedule's, and each layer has half the rate of the next; the trial has no objection."""
    optim = Optim(layer_decay=0.5)
    check_optimizer(optim, CPU)
    assert not caplog.records
    tokens = {"class_token": True, "dist_token": True}
    model = create_model("deit", attention="eva", img_size=56, patch_size=4, embed_dim=12, depth=2, **tokens)
    optimizer = create_optimizer(model, optim, 512)
    create_schedule(optimizer, Schedule(sched="constant", warmup_epochs=0), 7).step_update(0)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    layers = {"patch_embed.": 3, "pos_embed": 3, "cls_token": 3, "dist_token": 3}
    layers |= {"blocks.0.": 2, "blocks.1.": 1, "norm.": 1, "head.": 0, "head_dist.": 0}
    for name, weight in model.named_parameters():
        (depth,) = (depth for prefix, depth in layers.items() if name.startswith(prefix))
        assert rates[id(weight)] == pytest.approx(5e-4 * 0.5**depth), name


@pytest.mark.parametrize(
    ("name", "timms"), [("deit_tiny_p16", "deit_tiny_distilled_patch16_224"), ("pvtv2_b2", "pvt_v2_b2")]
)
def test_layers_are_timms(name: str, timms: str):
    """A layer of a PVT-v2 is a stage. Timm's PVT-v2 has other names for queries, keys and values."""
    tokens = {"class_token": True, "dist_token": True} if name.startswith("deit") else {}
    with torch.device("meta"):
        models = create_model(name, attention="softmax", **tokens), timm.create_model(timms)
    here, there = (group_parameters(model, model.group_matcher(), reverse=True) for model in models)
    same = here.keys() & there.keys()
    assert {key: here[key] for key in same} == {key: there[key] for key in same}
    assert max(here.values()) == max(there.values())
    for key in here.keys() - same:
        stage, _, _ = key.partition(".attn.")
        assert here[key] == here[f"{stage}.norm1.weight"]


OWN = {"adamw": ((0.9, 0.999), 1e-8), "lion": ((0.9, 0.99), None), "lamb": ((0.9, 0.999), 1e-6), "sgd": (None, None)}
"""Published defaults of optimisers."""


@pytest.mark.parametrize("name", [name for name in list_optimizers() if name not in NEED_CUDA])
def test_null_is_the_optimisers_own(name: str):
    """Every group has timm's values without a word of ours."""
    model, given = Weights(), {"lr": Optim().lr, "weight_decay": Optim().weight_decay}
    optimizers = create_optimizer(model, Optim(opt=name), 512), create_optimizer_v2(model, name, **given)
    (here, *_), (there, *_) = (optimizer.param_groups for optimizer in optimizers)
    assert here.keys() == there.keys()
    assert all(here[key] == there[key] for key in here.keys() - {"params"})
    assert (here.get("betas"), here.get("eps")) == OWN.get(name, (here.get("betas"), here.get("eps")))


def test_options_that_an_optimizer_does_not_take_are_refused():
    for optim, problem in [
        (Optim(opt="sgd", betas=(0.9, 0.999)), r"optim\.betas = \(0\.9, 0\.999\), but sgd takes none; set it to null"),
        (Optim(opt="lion", eps=1e-8), r"optim\.eps = 1e-08, but lion takes none"),
        (Optim(opt="adanw", betas=(0.9, 0.999)), r"optim\.betas = \[0\.9, 0\.999\], but adanw takes 3"),
        (Optim(betas=(0.9, 0.99, 0.999)), r"optim\.betas = \[0\.9, 0\.99, 0\.999\], but adamw takes 2"),
    ]:
        with pytest.raises(OptionError, match=f"^{problem}"):
            check_optimizer(optim, CPU)


def test_compilation_may_differ_unless_both_runs_choose_it():
    """Auto depends on the GPU, and a run from before has false."""
    assert not list_differences({"train.compile": False}, {"train.compile": "auto"})
    assert list_differences({"train.compile": True}, {"train.compile": False})


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd", "adam", "lamb"])
def test_weight_decay_is_decoupled_from_the_gradient_or_not(name: str):
    """Decoupled, it takes lr * weight_decay of the weights, and the next step's moments know nothing of it."""
    ends, states = [], []
    for decay in (0.0, 0.1):
        torch.manual_seed(0)
        model = nn.Linear(7, 5, bias=False)
        start = model.weight.detach().clone()
        optimizer = create_optimizer(model, Optim(opt=name, lr=0.01, weight_decay=decay), 512)
        train(model, optimizer, 0, 1)
        ends.append(model.weight.detach())
        states.append([x for x in optimizer.state[model.weight].values() if torch.is_tensor(x)])
    takes_its_share = torch.allclose(ends[0] - ends[1], 0.01 * 0.1 * start, rtol=1e-3, atol=1e-6)
    assert (takes_its_share and all(map(torch.equal, *states))) is (name in ("adamw", "lion", "muon"))


def fuse(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Fused, as `create_optimizer` makes it on CUDA; a CPU can do it too."""
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, value: float = 0.1) -> torch.optim.Optimizer:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, value)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("fused_before", [False, True])
def test_a_run_may_go_on_with_a_fused_optimizer_or_without(fused_before: bool):
    """The weights are equal up to rounding: the two sum in different orders."""
    options, (start, here, there) = Optim(), (nn.Linear(3, 5) for _ in range(3))
    before, after = (fuse, lambda x: x)[:: 1 if fused_before else -1]
    former = trained(before(create_optimizer(start, options, 8)), start)
    here.load_state_dict(start.state_dict())
    optimizer = after(create_optimizer(here, options, 8))
    restore_optimizer(optimizer, former.state_dict(), after(create_optimizer(there, options, 8)), "x")
    assert {bool(group["fused"]) for group in optimizer.param_groups} == {not fused_before}
    trained(former, start)
    trained(optimizer, here)
    torch.testing.assert_close(here.weight, start.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_fused_optimizer_keeps_its_weights_finite(value: float):
    model = nn.Linear(3, 5)
    optimizer, before = fuse(create_optimizer(model, Optim(), 8)), model.weight.detach().clone()
    keep_finite(optimizer, torch.tensor(value))
    trained(optimizer, model, value)
    assert torch.equal(model.weight, before)
    keep_finite(optimizer, torch.tensor(1.0))
    trained(optimizer, model)
    assert not torch.equal(model.weight, before)
    assert model.weight.isfinite().all()
