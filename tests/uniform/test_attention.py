"""The uniform suite: what holds for every mechanism, over every case of `cases.py`."""

import dataclasses
import importlib
import sys

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention, OptionError, create_attention
from tests.support.cases import CASES, CAUSAL, HEAD_DIM, HEADS, B, Case
from tests.support.identities import assert_mean

FP64, FP64_GRADIENT, FP32_RMS, BF16_RMS = 1e-9, 1e-8, 1e-5, 1e-2

every_case = pytest.mark.parametrize("case", CASES, ids=str)
stochastic_case = pytest.mark.parametrize("case", [case for case in CASES if case.stochastic], ids=str)


def capture_op(case: Case, attn: Attention, x: Tensor, monkeypatch) -> tuple:
    """(op, positional arguments, keyword arguments) of the call that the mechanism makes for `x`."""
    module, name = importlib.import_module(f"attention.mechanisms.{case.name}"), case.op or case.name
    op, calls = getattr(module, name), []

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return op(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, spy)
        attn(x, case.grid)
    assert len(calls) == 1
    return op, *calls[0]


def leaves(args: tuple) -> list:
    """Arguments as fresh leaves that require gradients where they can."""
    return [a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def rms_ratio(a: Tensor, b: Tensor) -> float:
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_case
def test_op_equals_its_literal_twin_in_value_and_all_gradients(case, training, monkeypatch):
    op, args, options = capture_op(case, case.build().train(training), case.tokens(), monkeypatch)
    twin = getattr(sys.modules[op.__module__], f"{op.__name__}_reference")
    results = []
    for function in (op, twin):
        inputs = leaves(args)
        y = function(*inputs, **options)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
        (y * probe).sum().backward()
        results.append((y, [x.grad for x in inputs if isinstance(x, Tensor) and x.requires_grad]))
    (y, gradients), (y_twin, gradients_twin) = results
    torch.testing.assert_close(y, y_twin, rtol=FP64, atol=FP64)
    for gradient, expected in zip(gradients, gradients_twin, strict=True):
        gradient, expected = (torch.zeros(()) if g is None else g for g in (gradient, expected))
        torch.testing.assert_close(
            *torch.broadcast_tensors(gradient.double(), expected.double()), rtol=FP64_GRADIENT, atol=FP64_GRADIENT
        )


@pytest.mark.parametrize("case", [case for case in CASES if case.options.get("features") != "favorp"], ids=str)
def test_gradients_are_slopes(case):
    """By finite differences along random directions, the noise of training held fixed.

    Not so of favorp: what it adds to its features is relative to a maximum that has no gradient in the released code.
    """
    attn, x = case.build(), case.tokens(batch=1).requires_grad_()
    names, parameters = zip(*attn.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.func.functional_call(attn, dict(zip(names, parameters, strict=True)), (x, case.grid))

    torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@every_case
def test_shape_dtype_and_gradient_of_every_parameter(case):
    attn, x = case.build(torch.float32), case.tokens(torch.float32).requires_grad_()
    y = attn(x, case.grid)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in [("x", x), *attn.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@every_case
def test_other_grid_than_at_construction(case):
    attn, (H, W) = case.build().eval(), (case.grid[0] + 3, case.grid[1] - 1)
    x = torch.randn(B, case.num_tokens((H, W)), HEADS * HEAD_DIM, dtype=torch.float64)
    assert attn(x, (H, W)).isfinite().all()


@every_case
def test_batch_independence(case):
    attn, x = case.build().eval(), case.tokens()
    torch.testing.assert_close(attn(x, case.grid)[1:], attn(x[1:], case.grid), rtol=FP64, atol=FP64)


@every_case
def test_evaluation_is_deterministic_and_survives_a_state_dict(case):
    attn, x = case.build().eval(), case.tokens()
    y = attn(x, case.grid)
    assert torch.equal(y, attn(x, case.grid))
    other = case.build(seed=5).eval()
    assert not torch.equal(y, other(x, case.grid))
    other.load_state_dict(attn.state_dict(), strict=True)
    assert torch.equal(y, other(x, case.grid))


@stochastic_case
def test_training_draws_anew(case):
    x, runs = case.tokens(), []
    for _ in range(2):
        attn = case.build().train()
        torch.manual_seed(3)
        runs.append([attn(x, case.grid) for _ in range(3)])
    assert not torch.equal(runs[0][0], runs[0][2])
    assert all(torch.equal(y, same) for y, same in zip(*runs, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if not case.stochastic], ids=str)
def test_training_equals_evaluation_without_noise(case):
    attn, x = case.build(), case.tokens()
    assert torch.equal(attn.train()(x, case.grid), attn.eval()(x, case.grid))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_case
def test_every_precision_is_finite_on_large_inputs(case, dtype, training):
    x = 30 * case.tokens(torch.float32)
    attn = case.build(torch.float32).train(training)
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32):
        y = attn(x, case.grid)
    assert y.dtype == dtype
    assert y.isfinite().all()
    y.float().mean().backward()  # a sum's weight gradients leave fp16's range, which is a loss scaler's affair
    assert all(parameter.grad.isfinite().all() for parameter in attn.parameters())
    y = attn.to(dtype)(x.to(dtype), case.grid)
    assert y.dtype == dtype
    assert y.isfinite().all()


@every_case
def test_lower_precision_stays_close(case, monkeypatch):
    x = case.tokens()
    expected = case.build().eval()(x, case.grid)
    attn = case.build(torch.float64).float().eval()
    if case.well_conditioned:
        assert rms_ratio(attn(x.float(), case.grid).double(), expected) < FP32_RMS
        with torch.autocast("cpu", torch.bfloat16):
            y = attn(x.float(), case.grid)
        assert rms_ratio(y.double(), expected) < BF16_RMS
    else:  # no precision is lost beyond the rounding of what comes in
        op, args, options = capture_op(case, attn, x.float(), monkeypatch)
        rounded = [a.bfloat16() for a in args[:3]]
        with torch.autocast("cpu", torch.bfloat16):
            y = op(*rounded, *args[3:], **options)
        assert rms_ratio(y, op(*(a.float() for a in rounded), *args[3:], **options)) < FP32_RMS


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_case
def test_compiles_into_one_graph(case, training):
    torch.compiler.reset()
    attn, x = case.build(torch.float32).train(training), case.tokens(torch.float32)
    compiled = torch.compile(attn, fullgraph=True, dynamic=False, backend="eager")
    torch.manual_seed(4)
    expected = attn(x, case.grid)
    torch.manual_seed(4)
    torch.testing.assert_close(compiled(x, case.grid), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.mixes_values], ids=str)
def test_constant_values_stay_constant(case, monkeypatch):
    op, args, options = capture_op(case, case.build(), case.tokens(), monkeypatch)
    q, k, v, *rest = args
    constant = torch.randn_like(v[:, :, :1]).expand_as(v)
    y = op(q, k, constant, *rest, **options)
    torch.testing.assert_close(y, constant[:, :, :1].expand_as(y), rtol=FP64, atol=FP64)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, kind in ATTENTION.items() if hasattr(kind.Config, "attn_drop")])
def test_dropout_of_weights_keeps_the_mean_and_ends_with_training(name):
    case = next(case for case in CASES if case.name == name)
    plain, dropping = (case.build(attn_drop=rate) for rate in (0.0, 0.5))
    x = case.tokens(batch=1)
    assert torch.equal(dropping.eval()(x, case.grid), plain.eval()(x, case.grid))
    plain.train(), dropping.train()
    torch.manual_seed(3)
    differences = torch.cat([dropping(x, case.grid) - plain(x, case.grid) for _ in range(200)])
    assert (differences.abs().amax((1, 2)) > 1e-3).all()
    assert_mean(differences, 0)


def test_every_mechanism_has_a_case():
    assert {case.name for case in CASES} == set(ATTENTION)


@pytest.mark.parametrize("name", ATTENTION)
def test_stock_projections(name):
    """timm's names for the projections, so that published softmax weights load wherever there are all three."""
    attn = create_attention(name, dim=192, num_heads=3, grid=(14, 14))
    state, rows = attn.state_dict(), 192 * attn.num_projections
    shapes = {"qkv.weight": (rows, 192), "qkv.bias": (rows,), "proj.weight": (192, 192), "proj.bias": (192,)}
    assert {key: tuple(state[key].shape) for key in shapes} == shapes
    assert "qkv.bias" not in create_attention(name, dim=192, num_heads=3, grid=(14, 14), qkv_bias=False).state_dict()


@pytest.mark.parametrize("name", ATTENTION)
def test_defaults_suit_the_grids_of_deit_and_pvt(name):
    for side in (14, 28, 56):
        attn = create_attention(name, dim=8, num_heads=2, grid=(side, side))
        assert attn(torch.randn(1, side * side, 8), (side, side)).shape == (1, side * side, 8)


@pytest.mark.parametrize("name", ATTENTION)
def test_options_are_documented_frozen_dataclasses(name):
    config = ATTENTION[name].Config()
    for field in dataclasses.fields(config):
        assert field.metadata["meaning"], field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sofmax", {}, r"attention.name: unknown mechanism 'sofmax'; did you mean 'softmax'\?"),
        ("eva", {"windw_size": 7}, r"attention\(eva\).windw_size: unknown option; did you mean 'window_size'\?"),
        ("eva", {"window_size": "7"}, r"attention\(eva\).window_size: expected int, got '7'"),
        ("eva", {"num_landmarks": 47}, r"attention\(eva\).num_landmarks = 47 .* 14x14 .* nearest valid: 48"),
        ("eva", {"num_landmarks": 197}, r"attention\(eva\).num_landmarks = 197 .* 14x14 .* nearest valid: 196"),
        ("eva", {"window_size": 15}, r"attention\(eva\).window_size = 15: larger than the 14x14 grid; at most 14"),
        ("eva", {"num_landmarks": 148, "partition": "complement"}, r"num_landmarks = 148: .* at most 147"),
        ("eva", {"window_size": 0, "num_landmarks": 0}, r"attention\(eva\).window_size = 0: .* give one of them"),
        ("eva", {"window_size": 0, "partition": "mask"}, r"attention\(eva\).partition = mask: needs window_size"),
        ("eva", {"released_overlap_groups": True}, r"released_overlap_groups = True: needs overlap above 0"),
        ("local", {"overlap": 10**12}, r"attention\(local\).overlap = 1000000000000: larger than .*; at most 14"),
        ("local", {"window_size": 15}, r"attention\(local\).window_size = 15: larger than the 14x14 grid; at most 14"),
        ("local", {"window_size": -1}, r"attention\(local\).window_size = -1 is below the least valid value 1"),
        ("sra", {"reduction": 15}, r"attention\(sra\).reduction = 15: larger than the 14x14 grid; at most 14"),
        ("combiner", {"window_size": 15}, r"attention\(combiner\).window_size = 15: .* at most 14"),
        ("transformer_ls", {"window_size": 0, "num_landmarks": 0}, r"window_size = 0: .* give one of them"),
        ("smyrf", {"cluster_size": 197}, r"attention\(smyrf\).cluster_size = 197: .* at most 196"),
        ("scatterbrain", {"overlap": 1}, r"scatterbrain\).overlap = 1: .* set complement: subtract"),
        ("scatterbrain", {"num_rounds": 3}, r"scatterbrain\).num_rounds = 3: .* leave it out"),
        ("scatterbrain", {"support": "lsh"}, r"position_bias = table: .* set position_bias: none"),
        ("nystrom", {"num_landmarks": 47}, r"attention\(nystrom\).num_landmarks = 47 .* nearest valid: 48"),
        ("nystrom", {"conv_size": 4}, r"attention\(nystrom\).conv_size = 4: must be odd; nearest valid: 3"),
        ("nystrom", {"conv": "none", "conv_size": 3}, r"attention\(nystrom\).conv_size = 3: does not act with"),
        ("orthoformer", {"num_landmarks": 197}, r"attention\(orthoformer\).num_landmarks = 197: .* at most 196"),
        ("softmax", {"num_heads": 3}, r"num_heads = 3 does not divide dim = 16"),
        ("local", {"causal": True}, r"attention\(local\).layout = 2d: causal .* set layout: 1d"),
        ("eva", {**CAUSAL, "position_bias": "t5_released"}, r"position_bias = t5_released: .* one of none, table, t5"),
        ("eva", {**CAUSAL, "partition": "mask"}, r"attention\(eva\).causal = True: needs .* partition all"),
        ("eva", {"visibility": "released"}, r"attention\(eva\).visibility = released: acts with causal; leave it out"),
        ("softmax", {"causal": True, "num_prefix_tokens": 1}, r"causal = True: prefix tokens see every token"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        create_attention(name, **({"dim": 16, "num_heads": 2, "grid": (14, 14)} | options))
