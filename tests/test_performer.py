"""Performer: which samples are used when, what each feature map is, and its symmetries."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import OptionError, create_attention
from attention.mechanisms.performer import performer
from attention.ops.random_features.op import random_feature_attention
from attention.parts.features import FEATURE_MAPS, scale
from tests.support.identities import assert_equal, draw

GRID = (3, 5)
FEATURES = ["positive", "hyperbolic", *FEATURE_MAPS]
every_feature = pytest.mark.parametrize("features", FEATURES)


def layer(**options):
    torch.manual_seed(0)
    return create_attention("performer", dim=8, num_heads=2, grid=GRID, num_samples=6, **options)


def samples(attn, monkeypatch) -> Tensor:
    """The omega of one forward pass."""
    used = []
    monkeypatch.setattr(
        "attention.mechanisms.performer.performer", lambda q, k, v, omega, *_, **__: used.append(omega) or q
    )
    attn(torch.zeros(1, 15, 8), GRID)
    monkeypatch.undo()
    return used[0]


def test_hyperbolic_features_are_positive_ones_at_mirrored_samples():
    q, k, v, omega = draw(2, 2, 9, 4), draw(2, 2, 9, 4, seed=1), draw(2, 2, 9, 4, seed=2), draw(2, 5, 4, seed=3)
    mirrored = random_feature_attention(scale(q), scale(k), v, torch.cat([omega, -omega], 1))
    assert_equal(performer(q, k, v, omega, features="hyperbolic"), mirrored)


def test_negative_normalisers_are_counted_and_keep_their_sign():
    q, k, v, omega = draw(1, 2, 40, 4), draw(1, 2, 40, 4, seed=1), draw(1, 2, 40, 4, seed=2), draw(2, 1, 4, seed=3)
    count = torch.zeros((), dtype=torch.int64)
    y = performer(3 * q, 3 * k, v, omega, count, features="trigonometric")
    angle = (scale(3 * q) @ omega.mT)[..., :, None, :] - (scale(3 * k) @ omega.mT)[..., None, :, :]
    kernel = angle.cos().mean(-1) * (scale(3 * k).square().sum(-1) / 2).exp()[..., None, :]
    normaliser = kernel.sum(-1, keepdim=True)
    assert count == (normaliser < 0).sum()
    assert 0 < count < normaliser.numel()
    assert_equal(y, kernel @ v / normaliser)


def test_a_vanishing_normaliser_is_raised_to_its_floor():
    q, omega = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-torch.pi / 2, torch.pi / 2], dtype=torch.float64).view(1, 1, 2, 1)  # cosines of 6e-17
    v = torch.tensor([2.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    count = torch.zeros((), dtype=torch.int64)
    y = performer(q, k, v, omega, count, features="trigonometric")
    assert count == 1
    assert y.abs() < 1e-9  # 1e-16 / 1e-6; the ratio itself is 1


@pytest.mark.parametrize("features", ["trigonometric", "favorp"])
def test_the_count_is_kept_out_of_checkpoints(features):
    attn = layer(features=features)
    attn(50 * torch.randn(2, 15, 8), GRID)
    assert attn.num_clamped > 0
    assert set(attn.state_dict()) == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "omega"}
    assert layer().num_clamped is None


def test_training_redraws_and_evaluation_keeps_the_stored_samples(monkeypatch):
    attn = layer()
    first, second = samples(attn, monkeypatch), samples(attn, monkeypatch)
    assert first.shape == (2, 6, 4)
    assert not torch.equal(first, second)
    assert samples(attn.eval(), monkeypatch) is attn.omega
    assert "omega" in attn.state_dict()


def test_fixed_and_learnable_samples(monkeypatch):
    attn = layer(sampling="fixed")
    assert samples(attn, monkeypatch) is samples(attn.eval(), monkeypatch) is attn.omega
    assert isinstance(layer(sampling="learnable").omega, torch.nn.Parameter)


def test_orthogonal_evaluation_after_independent_training(monkeypatch):
    """The released code's choice."""

    def are_orthogonal(omega):
        return [torch.allclose(b @ b.mT, torch.diag_embed((b @ b.mT).diagonal()), atol=1e-5) for b in omega[:, :4]]

    attn = layer(eval_draws="orthogonal")
    assert are_orthogonal(samples(attn.eval(), monkeypatch)) == [True, True]
    assert are_orthogonal(samples(attn.train(), monkeypatch)) == [False, False]
    assert are_orthogonal(samples(layer(draws="orthogonal"), monkeypatch)) == [True, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_samples_are_shared_by_as_many_passes_as_asked(compiled):
    torch.compiler.reset()
    attn = layer(redraw_every=3)
    forward = torch.compile(attn, fullgraph=True, backend="eager") if compiled else attn
    used = []
    for _ in range(7):
        forward(torch.zeros(1, 15, 8), GRID)
        used.append(attn.train_omega.clone())
    assert [torch.equal(a, b) for a, b in itertools.pairwise(used)] == [True, True, False, True, True, False]
    again = layer(redraw_every=3)
    again.load_state_dict(attn.state_dict())
    torch.manual_seed(1)
    again(torch.zeros(1, 15, 8), GRID)  # the eighth pass, after a resumption
    assert torch.equal(again.train_omega, used[-1])


@pytest.mark.parametrize("redraw_every", [1, 2])
def test_recomputation_uses_the_samples_of_its_own_pass(redraw_every):
    """Activation checkpointing runs a pass twice: neither samples nor their count may tell."""
    gradients = []
    for recompute in (False, True):
        attn = layer(redraw_every=redraw_every).double()
        torch.manual_seed(2)
        for _ in range(5):
            x = draw(2, 15, 8)
            y = checkpoint(attn, x, GRID, use_reentrant=False) if recompute else attn(x, GRID)
            y.square().sum().backward()
        gradients.append(attn.qkv.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "fixed", "redraw_every": 2}, r"attention\(performer\).redraw_every = 2: .*; leave it out"),
        ({"sampling": "learnable", "eval_draws": "iid"}, r"attention\(performer\).eval_draws = iid: .*; leave it out"),
        ({"features": "fourier"}, r"attention\(performer\).features: 'fourier' is not a choice"),
    ],
)
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        layer(**options)
