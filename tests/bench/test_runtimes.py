"""Exported models in the benchmark, and the accuracy of 8 bits on the reference."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark
from analysis.laboratory import score
from analysis.trained import read_sample
from bench.runtimes import RUNTIMES, to_int8
from engine.checkpoints.export import to_onnx
from models import create_model
from tests.analysis.models import load_model

onnxruntime = pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[2]
REFERENCE, BENCHMARKS = ROOT / "reference", (ROOT / "docs/benchmarks.md").read_text()
IMAGES = "data.dataset=idx", f"data.root={REFERENCE}", "data.val_split=t10k"
EVA = {"name": "eva", "window_size": 2, "num_landmarks": 4}
OPTIONS = "--modes", "inference", "--device", "cpu", "--rounds", "2", "--batch-size", "1", "--image-sizes", "32"


def difference(runtime: str) -> float:
    """Largest difference of logits of the exported model from the model's, relative to the largest logit."""
    torch.manual_seed(0)
    model = create_model("deit_tiny_p8", attention=EVA, img_size=32, depth=1, num_classes=5).eval()
    images = torch.randn(1, 3, 32, 32)
    (result,) = RUNTIMES[runtime](model, images)()
    with torch.no_grad():
        (expected,) = model(images)
    return ((torch.as_tensor(result).view(-1) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.complete
def test_exported_models_compute_what_the_model_does():
    assert difference("onnx") < 1e-5
    assert 1e-5 < difference("onnx-int8") < 0.05


@pytest.mark.complete
def test_models_that_are_compiled_ahead_of_time_compute_what_the_model_does():
    """In a process of its own: the compiler imports distutils, which other tests would warn of."""
    code = "from tests.bench.test_runtimes import difference; print(difference('aot'))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert float(printed.split()[-1]) < 1e-5


@pytest.mark.complete
def test_exported_models_have_rows_beside_the_baseline_of_their_runtime(tmp_path, capsys):
    model = "model: {name: deit, img_size: 32, patch_size: 8, embed_dim: 24, depth: 1, num_heads: 3, num_classes: 5}\n"
    models, executions = [str(tmp_path / name) for name in ("softmax.yaml", "linear.yaml")], ["eager", "onnx"]
    for file in map(Path, models):
        file.write_text(f"{model}attention: {{name: {file.stem}}}\n")
    benchmark.main(["--models", *models, "--execution", *executions, *OPTIONS, "--output", str(tmp_path / "out")])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    title, _, *rows = lines
    found = [(row[0].removeprefix("| "), row[title.index("execution")]) for row in rows]
    assert found == [(model, execution) for execution in executions for model in models]
    peaks = [row[title.index("peak (MiB)")] for row in rows]
    assert all(peaks[:2])
    assert not any(peaks[2:])  # torch does not see what other programs allocate


@pytest.mark.complete
def test_eight_bits_hold_the_accuracy_of_the_reference():
    """On 500 test images, as stated; other CPUs round the products in 8 bits otherwise."""
    trained = load_model(REFERENCE / "fashion_mnist.safetensors", *IMAGES)
    sample = read_sample(trained, 500)
    content, _ = to_onnx(trained.model, torch.zeros(2, 1, 56, 56), "")
    session = onnxruntime.InferenceSession(to_int8(content), providers=["CPUExecutionProvider"])

    def eight_bits(images):
        return torch.as_tensor(session.run(["logits"], {"images": images.numpy()})[0])

    exact, rounded = (score(model, trained, sample).top1 for model in (trained.model, eight_bits))
    stated = re.search(r"on 500 of its test images it is ([\d.]+) %, and ([\d.]+) % in fp32", BENCHMARKS)
    assert [rounded, exact] == pytest.approx([*map(float, stated.groups())], abs=0.5)
    assert len(to_int8(content)) < 0.6 * len(content)
