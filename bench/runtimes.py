"""Inference of exported models by the programs that serve them, on a CPU and in fp32.

onnx: ONNX Runtime. onnx-int8: the same with the weights of linear layers in 8 bits, and their inputs quantised at every
call (its dynamic quantisation). aot: AOTInductor, compiled by torch ahead of time. All run the definitions of
attention, with as many threads as torch.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from bench.timing import Call
from engine.checkpoints.export import to_onnx


def onnx(model: nn.Module, images: Tensor) -> Call:
    """Exports `model`, and returns a call of the exported model with these images. All functions here do the same."""
    return _session(_export(model, images), images)


def onnx_int8(model: nn.Module, images: Tensor) -> Call:
    return _session(to_int8(_export(model, images)), images)


@torch.no_grad()
def aot(model: nn.Module, images: Tensor) -> Call:
    with TemporaryDirectory() as folder:
        graph = torch.export.export(model, (images,))
        package = torch._inductor.aoti_compile_and_package(graph, package_path=f"{folder}/model.pt2")
        compiled = torch._inductor.aoti_load_package(package)
    return lambda: compiled(images)


RUNTIMES: dict[str, Callable[[nn.Module, Tensor], Call]] = {"onnx": onnx, "onnx-int8": onnx_int8, "aot": aot}


def to_int8(content: bytes) -> bytes:
    """Quantises the constant matrices of an ONNX model to 8 bits, one scale for each."""
    from onnxruntime.quantization import quantize_dynamic

    with TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "int8.onnx")
        source.write_bytes(content)
        quantize_dynamic(source, target, op_types_to_quantize=["MatMul", "Gemm"])
        return target.read_bytes()


def _export(model: nn.Module, images: Tensor) -> bytes:
    return to_onnx(model, images.new_zeros(2, *images.shape[1:]), "")[0]  # one image would give a graph for one


def _session(content: bytes, images: Tensor) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    inputs = {"images": images.numpy()}
    return lambda: session.run(["logits"], inputs)
