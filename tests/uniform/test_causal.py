"""Causal attention: no output depends on later tokens, and decoding token by token gives the same as the whole grid."""

import pytest
import torch

from attention import create_attention
from attention.decoding import EvaDecoder
from attention.ops.group_values.op import visible_groups
from attention.ops.joint_softmax.op import exact_set
from attention.parts.groups import bins
from tests.support.cases import CASES, CAUSAL, HEAD_DIM, HEADS, Case

GRID = (5, 7)
N = GRID[0] * GRID[1]
CAUSAL_CASES = [case for case in CASES if case.options.get("causal")]
EVA_CASES = [case for case in CAUSAL_CASES if case.name == "eva"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_outputs_ignore_later_tokens(case, training):
    attn, x = case.build().train(training), case.tokens()
    torch.manual_seed(0)
    y = attn(x, GRID)
    for n in (0, 7, 8, 20, N - 2):
        edited = torch.cat([x[:, : n + 1], torch.randn_like(x[:, n + 1 :])], 1)
        torch.manual_seed(0)
        z = attn(edited, GRID)
        torch.testing.assert_close(z[:, : n + 1], y[:, : n + 1], rtol=1e-10, atol=1e-10)
        assert (z[:, n + 1 :] - y[:, n + 1 :]).abs().amax((0, 2)).min() > 1e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [("local", {}), ("combiner", {}), ("eva", {"num_landmarks": 1}), ("eva", {"num_landmarks": 5, "num_samples": 2})],
)
def test_one_block_is_causal_softmax(name, options):
    """No group lies before the only block."""
    options = {"causal": True, "layout": "1d", "window_size": N, "position_bias": "none", **options}
    case = Case(name, GRID, options)
    attn, expected = case.build(), Case("softmax", GRID, {"causal": True}).build()
    expected.load_state_dict(attn.state_dict(), strict=False)
    x = case.tokens()
    torch.testing.assert_close(attn(x, GRID), expected(x, GRID), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("overlap", [0, 3])
def test_groups_seen_by_the_paper_and_by_the_released_code(overlap):
    groups, windows = bins((1, N), (1, 9), torch.device("cpu")), {"window": (1, 8), "overlap": (0, overlap)}
    members = [set(index[valid].tolist()) for index, valid in zip(groups.index[0], groups.valid[0], strict=True)]
    paper, released = (visible_groups(groups, rule, N, windows)[0] for rule in ("paper", "released"))
    for n in range(N):
        exact = set(exact_set(n, (1, N), (1, 8), (0, overlap), causal=True)[0])
        assert paper[n].tolist() == [max(group) < min(exact) for group in members]  # disjoint from E, and before it
        assert released[n].tolist() == [max(group) < n for group in members]  # E's own tokens count twice
    assert (released & ~paper).any()


@pytest.mark.parametrize(
    "case",
    [
        *EVA_CASES,
        Case("eva", GRID, {**CAUSAL, "num_landmarks": 0}),
        Case("eva", GRID, {**CAUSAL, "num_landmarks": 9, "mu": "trainable", "position_bias": "none"}),
        Case("eva", GRID, {**CAUSAL, "num_landmarks": 9, "overlap": 2, "released_overlap_groups": True}),
    ],
    ids=str,
)
def test_decoding_token_by_token_equals_the_parallel_form(case):
    attn, x = case.build().eval(), case.tokens()
    decoder = EvaDecoder(attn, GRID)
    y, most = [], 0
    for token in x.split(1, dim=1):
        y.append(decoder(token))
        most = max(most, len(decoder.tokens))
    torch.testing.assert_close(torch.cat(y, 1), attn(x, GRID), rtol=1e-10, atol=1e-10)
    longest = max((len(group) for group in decoder.groups), default=0)
    assert most <= 8 + case.options.get("overlap", 0) + longest < N  # keeps the exact set and the present group alone
    with pytest.raises(ValueError, match=f"all {N} tokens .* are decoded"):
        decoder(x[:, :1])


def test_decoding_refuses_what_is_not_causal_or_in_training():
    options = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "grid": GRID, "window_size": 3, "num_landmarks": 6}
    with pytest.raises(ValueError, match="causal: true"):
        EvaDecoder(create_attention("eva", **options).eval(), GRID)
    with pytest.raises(ValueError, match="call eval"):
        EvaDecoder(create_attention("eva", **options, causal=True, layout="1d"), GRID)
