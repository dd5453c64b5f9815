"""Fast paths. The uniform suites compare those of the path "auto" with their literal twins, and the other paths with
"auto"; these tests cover the uses of a layer on all paths.
"""

import importlib

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, create_attention, kernels
from attention.ops import memory
from attention.ops.group_values import fused as groups
from attention.ops.joint_softmax import fused as joint
from attention.ops.random_features import fused as random_features
from attention.ops.randomized import fused as randomized
from attention.parts import transforms
from attention.parts.geometry import Windows
from engine.runtime.memory import peak_bytes
from tests.support.calls import value_and_gradients
from tests.support.cases import Case
from tests.support.comparisons import FP64_GRADIENT, rms_ratio
from tests.support.facts import CASES, light

CORES = {
    "joint": joint.JointSoftmax,
    "groups": groups.GroupValues,
    "means": groups.TileMean,
    "features": random_features.RandomFeatures,
    "samples": randomized.FirstOrder,
}
LAYERS = [
    Case("local", (4, 6), {"window_size": 2}),
    Case("eva", (4, 6), {"window_size": 2, "num_landmarks": 6}),
    Case("lara", (4, 6), {"num_landmarks": 6}),
    Case("performer", (4, 6), {"num_samples": 10}),
    Case("ra", (4, 6)),
]
every_layer = pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
and_nystrom = pytest.mark.parametrize(
    "case", [*LAYERS, Case("nystrom", (4, 6), {"num_landmarks": 4})], ids=lambda case: case.name
)


def taken(case: Case, monkeypatch) -> set[str]:
    """The fast paths that a layer calls."""
    called = set()
    with monkeypatch.context() as patch:
        for name, core in CORES.items():
            forward = core.forward
            patch.setattr(core, "forward", staticmethod(lambda *args, n=name, f=forward: (called.add(n), f(*args))[1]))
        case.build()(case.tokens(), case.grid)
    return called


@pytest.mark.parametrize(("room", "count"), [(1, 9), (10_000, 6), (14_000, 3), (30_000, 2)])
def test_chunks_that_fit_the_cache_make_no_difference(room, count, monkeypatch):
    """Heads one by one or in pairs, images one by one or in pairs."""
    case = Case("eva", (4, 5), {"window_size": 2, "num_landmarks": 6})
    attn, x, chunks = case.build(), case.tokens(batch=3), []
    expected = value_and_gradients(attn, x, case.grid)
    monkeypatch.setattr(memory, "CACHE", room)
    monkeypatch.setattr(
        joint, "cache_chunks", lambda *args: chunks.append(list(memory.cache_chunks(*args))) or chunks[-1]
    )
    results = value_and_gradients(attn, x, case.grid)
    assert [len(each) for each in chunks] == [count, count]  # forward and backward
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@pytest.mark.parametrize(
    ("grid", "window", "num_summaries", "kept"),
    [((4, 6), (2, 2), 0, True), ((14, 14), (7, 7), 4, True), ((4, 6), (2, 2), 4, False), ((5, 7), (3, 3), 0, False)],
)
def test_windows_are_kept_where_they_take_no_more_memory_than_tokens(grid, window, num_summaries, kept):
    tokens = [torch.randn(2, 3, grid[0] * grid[1], 4, requires_grad=True) for _ in "qkv"]
    summaries = [torch.randn(2, 3, 1, num_summaries, 4) for _ in "kv"]
    y = joint.joint_softmax(*tokens, None, *summaries, windows=Windows(grid, window))
    *windows, _, _ = y.grad_fn.saved_tensors
    assert len(windows) == (3 if kept else 5)
    if kept:
        assert sum(x.nbytes for x in windows) <= joint.MAX_KEPT * sum(x.nbytes for x in tokens)


def test_without_gradients_only_one_chunk_is_held(monkeypatch):
    attn = create_attention("local", dim=12, num_heads=3, grid=(28, 28), window_size=14, position_bias="none")
    x = torch.randn(4, 784, 12)
    all_weights = 4 * 3 * 4 * 196**2 * x.element_size()
    monkeypatch.setattr(memory, "CACHE", all_weights // 12)
    with torch.no_grad():
        assert peak_bytes(lambda: attn(x, (28, 28)), x.device) < all_weights / 4


def test_chunks_cover_every_head_of_every_image_once():
    x = torch.zeros(5, 3, 2)
    for pairs, count in (1, 15), (2, 10), (3, 5), (7, 3), (15, 1), (100, 1):
        chunks = list(memory.cache_chunks(x, memory.CACHE // pairs))
        assert len(chunks) == count, pairs
        for chunk in chunks:
            x[chunk] += 1
    assert (x == 6).all()
    assert list(memory.cache_chunks(torch.zeros(5, 3, device="meta"), memory.CACHE)) == [(slice(0, 5), slice(0, 3))]


@pytest.mark.parametrize(
    ("case", "cores"),
    [
        (LAYERS[0], "joint"),
        (LAYERS[1], "means groups joint"),
        (LAYERS[2], "means features"),
        (LAYERS[3], "features"),
        (Case("combiner", (4, 6), {"window_size": 2}), "joint"),
        (Case("transformer_ls", (4, 6), {"window_size": 2, "num_landmarks": 6}), "joint"),
        (Case("eva", (5, 7), {"window_size": 3, "num_landmarks": 6, "num_prefix_tokens": 2}), "joint"),
        (Case("eva", (4, 6), {"window_size": 2, "num_landmarks": 6, "num_samples": 2}), "means groups"),
        (Case("eva", (4, 6), {"window_size": 2, "num_landmarks": 6, "attn_drop": 0.5}), "means groups"),
        (Case("local", (4, 6), {"window_size": 2, "overlap": 1}), ""),
        (Case("local", (4, 6), {"causal": True, "layout": "1d", "window_size": 7}), "joint"),
        (Case("lara", (4, 6), {"num_landmarks": 6, "weighting": "coupled"}), "means"),
        (Case("performer", (4, 6), {"features": "relu"}), ""),
        (LAYERS[4], "samples"),
        (Case("ra", (4, 6), {"proposal": "biased"}), "samples"),
        (Case("ra", (4, 6), {"features": "hyperbolic"}), ""),
    ],
    ids=str,
)
def test_what_fast_paths_cover(case, cores, monkeypatch):
    assert taken(case, monkeypatch) == set(cores.split())
    with kernels.use("plain"):
        assert taken(case, monkeypatch) == set()


@pytest.mark.parametrize(
    "case",
    [
        *LAYERS,
        Case("local", (6, 9), {"window_size": 3}),
        Case("local", (6, 9), {"window_size": 3, "position_bias": "none"}),
    ],
    ids=str,
)
def test_half_precision_is_as_close_as_the_plain_path(case):
    """Compares the total error of outputs and gradients over several seeds; 1.15 allows for equally good roundings."""
    errors = {"auto": 0.0, "plain": 0.0}
    for seed in range(8):
        attn, x = case.build(torch.float32, seed).eval(), case.tokens(torch.float32, seed)
        with kernels.use("plain"):
            exact = value_and_gradients(attn, x, case.grid)
        for path in errors:
            with kernels.use(path):
                rounded = value_and_gradients(attn, x, case.grid, amp=True)
            for result, expected in zip(rounded, exact, strict=True):
                errors[path] += min(rms_ratio(result.float(), expected), 1.0)
    assert errors["auto"] < 1.15 * errors["plain"]


@every_layer
def test_inputs_used_twice_frozen_or_strided(case):
    """Queries, keys and values that are used twice, have no gradients, or lie out of order in memory."""
    module, results = importlib.import_module(f"attention.mechanisms.{case.name}"), {}
    op = getattr(module, case.name)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, case.name, lambda *a, **k: (calls.append((a, k)), op(*a, **k))[1])
        case.build()(case.tokens(), case.grid)
    (q, k, v, *rest), options = calls[0]
    rest = [x.detach() if isinstance(x, Tensor) else x for x in rest]
    for path in ("auto", "plain"):
        with kernels.use(path):
            x, gradients = q.detach().clone().requires_grad_(), []
            y = op(x, x, x, *rest, **options) + x.square()
            gradients += torch.autograd.grad(y.square().sum(), x)
            for leaf in range(3):  # the summaries frozen
                inputs = [y.detach().mT.contiguous().mT.requires_grad_(i == leaf) for i, y in enumerate((q, k, v))]
                gradients += torch.autograd.grad(op(*inputs, *rest, **options).square().sum(), inputs[leaf])
            results[path] = gradients
    for gradient, expected in zip(results["auto"], results["plain"], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@pytest.mark.complete
@and_nystrom
def test_gradients_compile_under_autocast(case):
    """By the defaults of torch.compile; where eager mode's own rounding is large, the two differ by no more than it."""
    torch.compiler.reset()
    attn, x = case.build(torch.float32), case.tokens(torch.float32)
    graph = torch.compile(attn, fullgraph=True, dynamic=False, backend="aot_eager")
    results, expected = (value_and_gradients(layer, x, case.grid, amp=True) for layer in (graph, attn))
    exact = value_and_gradients(attn, x, case.grid)
    for result, gradient, unrounded in zip(results, expected, exact, strict=True):
        assert rms_ratio(result, gradient) < max(0.02, rms_ratio(gradient, unrounded))


@and_nystrom
def test_gradients_within_autocast(case):
    attn, x = case.build(torch.float32), case.tokens(torch.float32)
    expected = value_and_gradients(attn, x, case.grid, amp=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = value_and_gradients(attn, x, case.grid, amp=True)
    for result, gradient in zip(results, expected, strict=True):
        assert rms_ratio(result, gradient) < 0.02


def slope(case: Case) -> Tensor:
    """A second derivative of a layer."""
    x = case.tokens().requires_grad_()
    (gradient,) = torch.autograd.grad(case.build().eval()(x, case.grid).square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


def jacobian(case: Case) -> Tensor:
    """Derivatives of a layer in one batch."""
    attn, x = case.build().eval(), case.tokens()

    def totals(scale: Tensor) -> Tensor:
        return attn(scale * x, case.grid).sum((0, 2))

    return torch.autograd.functional.jacobian(totals, torch.ones((), dtype=x.dtype), vectorize=True)


@pytest.mark.parametrize(
    ("derivative", "problem"),
    [(slope, "no second derivatives; .*"), (jacobian, "no batched gradients .* torch.func.jacrev, or .*")],
)
@every_layer
def test_derivatives_that_fast_paths_have_not_are_refused_and_plain_ones_exist(case, derivative, problem):
    with pytest.raises(RuntimeError, match=rf"{problem} kernels.use\('plain'\)"):
        derivative(case)
    with kernels.use("plain"):
        assert derivative(case).isfinite().all()


@pytest.mark.parametrize("case", light(CASES), ids=str)
def test_the_definitions_have_second_order_gradients(case):
    """Softmax attention takes no fused kernel on this path, because the gradient of one has no gradient."""
    with kernels.use("plain"):
        assert slope(case).isfinite().all()
    assert not transforms.by_definition


@every_layer
def test_saved_bytes_fall_from_plain_to_auto(case):
    def saved(path) -> int:
        attn, storages = create_attention(case.name, dim=96, num_heads=3, grid=(14, 14)), {}
        parameters = {p.untyped_storage().data_ptr() for p in attn.parameters()}

        def keep(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x  # kept alive, so that no address is used again
            return x

        x = torch.randn(2, 196, 96, requires_grad=True)
        with kernels.use(path), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            attn(x, (14, 14))
        return sum(x.untyped_storage().nbytes() for address, x in storages.items() if address not in parameters)

    assert saved("auto") < saved("plain") or case.name == "local"  # equal up to small terms there


def test_paths_are_named_and_restored():
    assert kernels.path() == "auto"
    assert len([*ATTENTION.values()]) > 30, "imports all ops"
    assert kernels.resolved() == (
        "auto: fast approach_inverse, cluster_values, densities, elu_plus_one, focused, group_mean, group_values,"
        " joint_softmax, lara, linear_attention, log_features, merge_all_but_one, performer, powers_by_sign, ra, waves,"
        " within"
    )
    with kernels.use("plain"):
        assert kernels.resolved() == kernels.path() == "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_fast", {})  # as in a process that has imported softmax alone
        assert kernels.resolved() == "auto: fast none"
    assert kernels.path() == "auto"
    path = kernels.use("fast")
    with pytest.raises(ValueError, match=r"kernels.use\('fast'\): unknown path; one of auto, torch, triton, plain"):
        path.__enter__()
