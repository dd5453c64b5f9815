"""Released code of vision attention: with its weights, our layers reproduce its outputs and gradients, in float64.

tests/data/vision holds single modules, with weights that are exactly float32, outputs in float64, and gradients
computed in float64 and stored as float32; manifest.json states the repository, commit, class, arguments and token
layout. VISION in a facts file states the options, and the function from released weights to ours, under which our layer
equals that module; gradients reach the released weights through this function.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attention import create_attention
from tests.support.facts import FACTS, rows

RELEASED = Path(__file__).parents[1] / "data" / "vision"
CASES = json.loads((RELEASED / "manifest.json").read_text())


def as_tokens(x: Tensor, layout: str) -> Tensor:
    """Converts x from the module's layout, (B, N, C), (B, C, H, W) or (B, H, W, C), to (B, N, C)."""
    return {"BNC": lambda: x, "NCHW": lambda: x.flatten(2).mT, "NHWC": lambda: x.flatten(1, 2)}[layout]()


def test_every_stored_module_is_reproduced():
    stored = sorted(path.stem for path in RELEASED.glob("*.safetensors"))
    assert sorted(file for _, file in rows("VISION")) == stored == sorted(CASES)


@pytest.mark.parametrize(("name", "file"), rows("VISION"))
def test_numbers(name, file):
    case, tensors = CASES[file], load_file(RELEASED / f"{file}.safetensors")
    options, ours = FACTS[name].VISION[file]
    context = {key: case[key] for key in ("dim", "num_heads", "num_prefix_tokens")}
    attn = create_attention(name, **options, **context, grid=tuple(case["grid"])).double().eval()
    leaves = {key: x.double() for key, x in tensors.items() if key.startswith(("in.", "w.")) and x.is_floating_point()}
    leaves = {key: x.requires_grad_() for key, x in leaves.items()}

    state = ours({key.removeprefix("w."): x for key, x in leaves.items()})
    assert state.keys() == attn.state_dict().keys()
    x, expected = leaves["in.x"], tensors["out.y"]
    tokens = as_tokens(x, case["layout"])
    y = torch.func.functional_call(attn, state, (tokens, tuple(case["grid"])))
    y = y + tokens if case["adds_input"] else y
    cotangent = torch.arange(1, expected.numel() + 1, dtype=torch.float64).cos().view_as(expected)
    (y * as_tokens(cotangent, case["layout"])).sum().backward()

    torch.testing.assert_close(
        y, as_tokens(expected, case["layout"]), rtol=case["rtol"], atol=case["rtol"] * expected.abs().max()
    )
    stored = {key.removeprefix("grad."): x.double() for key, x in tensors.items() if key.startswith("grad.")}
    assert "x" in stored
    for key, gradient in stored.items():
        found = leaves["in.x" if key == "x" else key].grad
        tolerance = max(1e-6, case["rtol"])  # gradients are stored in float32
        torch.testing.assert_close(found, gradient, rtol=0, atol=tolerance * gradient.abs().max())
