"""Causal attention: no output depends on later tokens; prefix tokens are refused, as they attend to all."""

import pytest
import torch

from attention import OptionError
from models import create_model
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
