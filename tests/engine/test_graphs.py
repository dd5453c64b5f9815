"""Passes in CUDA graphs: what is replayed, what stays as it was, what is refused. A stand-in captures on a CPU."""

import copy
import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attention.options import OptionError
from engine.objectives.classification import Classification
from engine.run.checks import check_cuda_graph, why_eager
from engine.run.load import parse_run
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.training import graphs
from engine.training.graphs import Capture, GraphedNetwork, Uncapturable, graph_passes
from models import create_model
from tests.engine.test_resume import Runs
from tests.engine.test_train import RUN, relative_rms, start
from tests.support.launcher import ForkServer


class FakeCapture:
    """Replays a pass by running it again, and writes its results where those of the first run are, as a graph does."""

    def __init__(self):
        self.warming_up = self.refusing_waits = nullcontext
        self.replays = []

    def record(self, run):
        results, number = run(), len(self.replays)
        self.replays.append(0)

        def replay():
            self.replays[number] += 1
            with torch.enable_grad():
                again = run()
            for old, new in zip(results, again, strict=True):
                if old is not None:
                    old.copy_(new)

        return replay, results


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    """The capture of runs on a CPU, as on a GPU."""
    capture = FakeCapture()
    monkeypatch.setattr(graphs, "Capture", lambda: capture)
    monkeypatch.setattr(graphs, "why_eager", lambda run, on_cuda: why_eager(run, True))
    return capture


class Noisy(nn.Module):
    """A network with weights, running statistics and random numbers; `act` is called in every pass."""

    def __init__(self, act=lambda module: None):
        super().__init__()
        self.norm, self.linear, self.unused = nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(1, 1)
        self.drop, self.act, self.count = DropPath(0.5), act, 0
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.act(self)
        y = self.drop(self.norm(x))
        return self.linear(y), y.sum(1)


def graphed(network: nn.Module, accumulates: bool = False) -> tuple[GraphedNetwork, FakeCapture]:
    capture = FakeCapture()
    return GraphedNetwork(network, [torch.zeros(4, 3)], None, accumulates, capture), capture


def test_a_capture_leaves_everything_as_it_was():
    network = Noisy().train()
    state, random_state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    network.linear.weight.grad = torch.ones(2, 3)
    graphed(network)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [weight.grad is None for weight in network.parameters()] == [True, True, False, True, True, True]
    assert network.linear.weight.grad.eq(1).all()


def test_the_first_pass_may_register_a_buffer():
    network = Noisy(lambda module: hasattr(module, "late") or module.register_buffer("late", torch.ones(1))).train()
    graphed(network)
    assert network.late == 1


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("ranks", ["one rank", "several ranks"])
def test_gradients_add_up_over_micro_batches(num_micro: int, ranks: str, process_group: None):
    """Without copies, the second replay would overwrite the first gradient."""
    eager = Noisy().train()
    network = copy.deepcopy(eager)
    wrapped, capture = graphed(network, num_micro > 1)
    if ranks == "several ranks":
        wrapped = DistributedDataParallel(wrapped)  # the group has one rank, but the hooks are those of several
    for _ in range(2):  # updates
        for micro in range(num_micro):
            x, is_last = torch.randn(4, 3), micro + 1 == num_micro
            for module in (eager, wrapped):
                torch.manual_seed(micro)
                with nullcontext() if is_last or not hasattr(module, "no_sync") else module.no_sync():
                    logits, sums = module(x)
                    (logits.square().mean() + sums.mean()).backward()
        for weight, expected in zip(network.parameters(), eager.parameters(), strict=True):
            gradient = torch.zeros_like(weight) if expected.grad is None else expected.grad
            assert weight.grad is expected.grad is None or torch.equal(weight.grad, gradient)
        network.zero_grad()
        eager.zero_grad()
    assert capture.replays == [2 * num_micro] * 2
    assert torch.equal(network.norm.running_var, eager.norm.running_var)


def test_other_batches_and_modes_are_not_replayed():
    network = Noisy().train()
    replayed, capture = graphed(network)
    replayed(torch.randn(3, 3))
    with torch.no_grad():
        replayed(torch.randn(4, 3))
    network.eval()
    assert torch.equal(replayed(torch.ones(4, 3))[0], network(torch.ones(4, 3))[0])
    assert capture.replays == [0, 0]
    network.train()
    replayed(torch.randn(4, 3))
    assert capture.replays == [1, 0]


def start_record(directory: Path) -> dict:
    """The first record of the run that `start` made there."""
    return json.loads((directory / "run" / "metrics.jsonl").read_text().splitlines()[0])


def redraw(module: nn.Module) -> None:
    module.mean = module.mean + 1


def count(module: nn.Module) -> None:
    module.count += 1


@pytest.mark.parametrize(
    ("act", "name"),
    [(redraw, "mean"), (count, "count"), (lambda module: random.random(), "Python's random state")],
    ids=["buffer", "count", "random"],
)
def test_a_state_of_the_host_is_refused(act, name: str):
    with pytest.raises(Uncapturable, match=rf"changes \.?{name} on the host"):
        graphed(Noisy(act).train())


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.grad_accum_steps=2", "model.drop_path_rate=0.2", "train.ema_decay=0.9", "train.amp=bf16"),
        pytest.param(("augment.mixup=0.8", "augment.smoothing=0.1", "model.stem=conv"), marks=pytest.mark.complete),
        pytest.param(
            ("model.mask_token=true", "model.num_classes=0", "augment.smoothing=0", "simmim.mask_size=4"),
            marks=pytest.mark.complete,
        ),
    ],
    ids=" ".join,
)
def test_a_graphed_run_ends_in_the_same_bits(overrides: tuple[str, ...], fake: FakeCapture, tmp_path: Path):
    (tmp_path / "eager").mkdir()
    expected = start(tmp_path / "eager", "train.cuda_graph=false", *overrides)
    again = start(tmp_path, *overrides)
    assert fake.replays == [10, 10] if "train.grad_accum_steps=2" in overrides else [5, 5]
    for name in ("model", "model_ema", "optimizer"):
        torch.testing.assert_close(again.get(name), expected.get(name), rtol=0, atol=0)
    assert start_record(tmp_path / "eager")["cuda_graph"] == "off: train.cuda_graph = false"
    assert start_record(tmp_path)["cuda_graph"].startswith("on, for micro-batches of ")


def test_a_network_that_cannot_be_captured_trains_without_graphs(fake: FakeCapture):
    model = create_model(attention="softmax", **RUN["model"])
    model.register_forward_hook(lambda *_: random.random() and None)
    run, world = parse_run(RUN, "run.yaml"), World(torch.device("cpu"))
    given = Classification(nn.CrossEntropyLoss()), model, run, world, torch.contiguous_format
    network, text = graph_passes(*given)
    assert network is model
    assert text == "off: a pass of the network changes Python's random state on the host"
    demanding = replace(run, train=replace(run.train, cuda_graph=True))
    with pytest.raises(UserError, match=r"train\.cuda_graph = true: .* set it to auto or false"):
        graph_passes(*given[:2], demanding, *given[3:])


@pytest.mark.parametrize(
    ("overrides", "on_cuda", "reason"),
    [
        ((), True, ""),
        ((), False, "the device is not cuda"),
        (("train.grad_checkpointing=true",), True, "train.grad_checkpointing=false"),
        (("distill.teacher=x", "distill.type=attention", "init.weights=x"), True, "distill.type = attention"),
    ],
)
def test_options_that_rule_graphs_out(overrides: tuple[str, ...], on_cuda: bool, reason: str):
    run = parse_run(RUN, "run.yaml", ("train.device=cuda", *overrides))
    assert reason in why_eager(run, on_cuda)
    assert bool(reason) == bool(why_eager(run, on_cuda))
    check_cuda_graph(run, on_cuda)
    demanding = replace(run, train=replace(run.train, cuda_graph=True))
    with pytest.raises(OptionError, match=r"train\.cuda_graph = true: ") if reason else nullcontext():
        check_cuda_graph(demanding, on_cuda)


def test_graphs_on_a_cpu_are_refused_before_data_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        start(tmp_path, "train.cuda_graph=true", "data.dataset=folder", "data.root=/nowhere")
    assert "train.cuda_graph = true: the device is not cuda; set train.device=cuda" in capsys.readouterr().err


GPU_RUN = (
    *("train.device=cuda", "train.compile=false", "optim.opt=sgd", "optim.lr=0.1", "model.drop_path_rate=0.2"),
    "schedule.epochs=2",
)
"""Ten updates, which change the weights by 3 % of their RMS."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
@pytest.mark.parametrize("name", ["softmax", "eva", "lara", "performer", "local"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.amp=null",),
        ("train.amp=bf16", "train.grad_accum_steps=2", "train.ema_decay=0.9", "augment.mixup=0.8"),
        ("train.amp=fp16", "train.channels_last=true"),
        ("train.amp=bf16", "train.compile=true"),
    ],
    ids=" ".join,
)
def test_graphs_on_a_gpu_train_as_without(name: str, overrides: tuple[str, ...], tmp_path: Path):
    """Draws of random numbers are equal, too: stochastic depth, and the samples of the mechanism."""
    (tmp_path / "eager").mkdir()
    given = (*GPU_RUN, f"attention={name}", *overrides)
    expected = start(tmp_path / "eager", "train.cuda_graph=false", *given)
    again = start(tmp_path, "train.cuda_graph=true", *given)
    assert start_record(tmp_path)["cuda_graph"].startswith("on")
    assert relative_rms(again["model"], expected["model"]) < 2e-3


@pytest.mark.gpu
def test_replays_on_a_gpu_draw_anew(tmp_path: Path):
    network = Noisy().train().cuda()
    inputs = torch.randn(64, 3, device="cuda")
    eager = copy.deepcopy(network)
    replayed = GraphedNetwork(network, [torch.zeros_like(inputs)], None, False, Capture())
    draws = []
    for seed in (1, 1, 2, None):
        for module in (replayed, eager):
            if seed is not None:
                torch.cuda.manual_seed(seed)
            draws.append(module(inputs)[1].eq(0).tolist())
    assert draws[0:6:2] == draws[1:6:2]  # as without graphs
    assert draws[0] == draws[2] != draws[4] != draws[6]
    assert sum(draws[6]) not in (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "act", [lambda module: module.norm.running_var.sum().item(), lambda module: torch.ones(9).cuda()]
)
def test_what_waits_on_a_gpu_is_refused(act):
    with pytest.raises(Uncapturable, match="waits for the device"):
        GraphedNetwork(Noisy(act).train().cuda(), [torch.zeros(4, 3, device="cuda")], None, False, Capture())
    assert Noisy().cuda()(torch.randn(4, 3, device="cuda"))[0].sum().item() < 1e6  # the device is as before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eva", "performer"])
def test_a_graphed_run_on_a_gpu_resumes_to_the_same_bits(name: str, fork_server: ForkServer, tmp_path: Path):
    overrides = f"attention={name}", *GPU_RUN[:2], "train.cuda_graph=true", "train.deterministic=true"
    runs = Runs(fork_server, tmp_path, (*overrides, "train.amp=bf16", "train.grad_accum_steps=2"))
    assert runs.survives(("train.nn.utils.clip_grad_norm_", 9, "SIGKILL")) != [0]
