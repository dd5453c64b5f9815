"""Causal attention: no output depends on later tokens; decoding token by token equals one pass over the sequence;
prefix tokens are refused, because they attend to every token.
"""

import pytest
import torch

from attention import OptionError
from attention.decoding import DECODERS, create_decoder
from attention.parts import chunks
from models import create_model
from tests.support.cases import Case
from tests.support.comparisons import BF16_RMS, rms_ratio
from tests.support.facts import CASES

CAUSAL_CASES = [case for case in CASES if case.options.get("causal")]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_outputs_ignore_later_tokens(case, training):
    attn, x, N = case.build().train(training), case.tokens(), case.num_tokens(case.grid)
    torch.manual_seed(0)
    y = attn(x, case.grid)
    for n in (0, 7, 8, 20, N - 2):
        edited = torch.cat([x[:, : n + 1], torch.randn_like(x[:, n + 1 :])], 1)
        torch.manual_seed(0)
        z = attn(edited, case.grid)
        torch.testing.assert_close(z[:, : n + 1], y[:, : n + 1], rtol=1e-10, atol=1e-10)
        assert (z[:, n + 1 :] - y[:, n + 1 :]).abs().amax((0, 2)).min() > 1e-6


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_causal_attention_refuses_prefix_tokens(case):
    options = {name: value for name, value in case.options.items() if name != "depth"}  # depth belongs to the network
    message = rf"attention\({case.name}\).causal = True: prefix tokens attend to every token"
    with pytest.raises(OptionError, match=message):
        create_model("deit", attention={"name": case.name, **options}, class_token=True)


DECODED = [  # and EVA's in tests/mechanisms/test_eva.py
    *(case for case in CAUSAL_CASES if case.name in DECODERS and case.name != "eva"),
    *(Case("performer", (5, 7), {"causal": True, "features": x}) for x in ("hyperbolic", "relu")),
    Case("transnormer", (5, 7), {"causal": True, "depth": 2, "window_size": 8, "variant": "t1"}),
]


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_decoding_token_by_token_equals_the_parallel_form(case, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 8)
    attn, x, N = case.build().eval(), case.tokens(), case.num_tokens(case.grid)
    decoder, y, kept = create_decoder(attn, case.grid), [], []
    for token in x.split(1, dim=1):
        y.append(decoder(token))
        kept.append(sum(tensor.numel() for tensor in decoder.past.kept.values()))
    torch.testing.assert_close(torch.cat(y, 1), attn(x, case.grid), rtol=1e-10, atol=1e-10)
    assert case.name == "softmax" or max(kept[8:]) <= max(kept[:8])  # a window's tokens, or running sums
    with pytest.raises(ValueError, match=rf"attention\({case.name}\): all {N} tokens of the grid are decoded"):
        decoder(x[:, :1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CAUSAL_CASES if case.name in DECODERS], ids=str)
def test_half_types_are_decoded(case, dtype):
    attn, x = case.build(dtype).eval(), case.tokens(dtype)
    decoder = create_decoder(attn, case.grid)
    y = torch.cat([decoder(token) for token in x.split(1, dim=1)], 1)
    assert y.dtype == dtype
    expected = attn.double()(x.double(), case.grid)
    assert not case.well_conditioned or rms_ratio(y.double(), expected) < 2 * BF16_RMS  # projections are halves too


def test_decoding_refuses_what_it_cannot_do():
    attn, combiner = (CAUSAL_CASES[0].build(), next(case for case in CAUSAL_CASES if case.name == "combiner").build())
    with pytest.raises(ValueError, match=r"attention\(combiner\): is not decoded token by token; use one of softmax, "):
        create_decoder(combiner.eval(), (5, 7))
    with pytest.raises(ValueError, match=r"attention\(softmax\): decoding needs causal: true, .* call eval\(\)"):
        create_decoder(attn, (5, 7))
    with pytest.raises(ValueError, match=r"attention\(softmax\): got 35 tokens; decode them one by one"):
        create_decoder(attn.eval(), (5, 7))(CAUSAL_CASES[0].tokens())
