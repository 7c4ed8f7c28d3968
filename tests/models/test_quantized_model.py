"""A quantized checkpoint runs as the numbers that its bits stand for, whichever kernel multiplies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy, write_tiny_model
from dequantized_model import write_dequantized
from in_process import succeed

from crelle import LLM, Sampling, quantize
from crelle.errors import UnsupportedError
from crelle.kernels import cpu
from crelle.models.loader import load

# The largest difference of a logit, of size about 1, by kernel; `cpu` rounds activations to 16 bits.
TOLERANCE = {"reference": 2e-5, "dequantized": 2e-5, "cpu": 1e-3}
SCHEMES = (
    "rtn:bits=4,group=24",
    "rtn:bits=3,group=32,symmetric=true",
    "bcq:bits=3,group=32",
    "bcq:bits=2,group=row",
    "mixed:group=16,outliers=0.01",
)


def logits(path: Path, kernel: str | None = None) -> torch.Tensor:
    model, _ = load(path, device="cpu", kernel=kernel)
    tokens, cache = torch.randint(259, (1, 60), generator=torch.Generator().manual_seed(5)), model.new_cache()
    return torch.cat([model(part, cache) for part in tokens.split([40, *[1] * 20], dim=1)], dim=1)


def kernels() -> list[str]:
    return ["reference", "dequantized", *(["cpu"] if cpu.available() is None else [])]


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(3)
def test_logits_equal_those_of_the_dequantized_weights(
    scheme: str, kernel: str, tiny_model: Path, tmp_path: Path
) -> None:
    quantized_copy(tiny_model, tmp_path / "q", scheme)
    expected = logits(write_dequantized(tmp_path / "q", tmp_path / "plain"))
    assert (logits(tmp_path / "q", kernel) - expected).abs().max() <= TOLERANCE[kernel]
    assert (logits(tiny_model) - expected).abs().max() > 0.05  # quantizing changed something


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ extension")
def test_mixed_matrices_are_generated_from_by_the_fused_step(tiny_model: Path, tmp_path: Path) -> None:
    """From the checkpoint to tokens; nothing falls back to the layers one by one."""
    path = quantized_copy(tiny_model, tmp_path / "q", "mixed:group=16,outliers=0.01")
    fast, slow = (LLM.load(path, device="cpu", kernel=kernel) for kernel in (None, "reference"))
    quantized = [w for w in fast.model.linears() if w.weight.format == "mixed"]
    assert quantized
    assert {w.kernel for w in quantized} == {"cpu"}
    said = explain(path)
    assert {layer["kernel"] for layer in said["layers"] if layer["problem"]["format"] == "mixed"} == {"cpu"}
    assert said["fused"], said["why_not_fused"]
    sampling = Sampling(max_tokens=24)
    assert fast.generate("Once upon a time", sampling).tokens == slow.generate("Once upon a time", sampling).tokens


def explain(path: Path) -> Any:
    return succeed("explain", path, "--device", "cpu", "--json").json


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_embedding_and_head_equal_the_dequantized_ones(tied: bool, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tie_word_embeddings=tied)
    quantize(source, tmp_path / "q", "fp32", head="rtn:bits=3,group=32")
    expected = logits(write_dequantized(tmp_path / "q", tmp_path / "plain"))
    assert (logits(tmp_path / "q") - expected).abs().max() <= TOLERANCE["cpu"]
    assert (logits(source) - expected).abs().max() > 0.05


def test_named_kernel_multiplies_by_every_quantized_matrix_and_leaves_plain_ones(
    tiny_model: Path, tmp_path: Path
) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=24")
    model, _ = load(tmp_path / "q", device="cpu", kernel="dequantized")
    chosen = {layer.name: layer.kernel for layer in model.linears()}
    assert chosen.pop("lm_head") == "dense"
    assert set(chosen.values()) == {"dequantized"}
    model, _ = load(tmp_path / "q", device="cpu", kernel="reference")
    assert {layer.kernel for layer in model.linears()} == {"reference"}


@pytest.mark.parametrize(
    ("kernel", "quantized", "sentence"),
    [
        ("abacus", True, "there is no kernel 'abacus' here; choose one of: dense, "),
        ("abacus", False, "there is no kernel 'abacus' here"),
        ("dense", True, "kernel 'dense' cannot multiply uniform 72x72, 4 bits, group 24, float32 on cpu: it takes"),
        ("dequantized", False, "kernel 'dequantized' has nothing to do in .*: no matrix there is quantized"),
    ],
)
def test_named_kernel_that_cannot_serve_is_refused(
    kernel: str, quantized: bool, sentence: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tiny_model
    if quantized:
        path = tmp_path / "q"
        quantize(tiny_model, path, "rtn:bits=4,group=24")
    with pytest.raises(UnsupportedError, match=sentence):
        load(path, device="cpu", kernel=kernel)
