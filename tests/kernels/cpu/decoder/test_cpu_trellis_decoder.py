"""Trellis codes in the fused C++ step and prefill, against the layers one by one."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model

from crelle.formats.base import QuantTensor
from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.hadamard import known_orders
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels import ops
from crelle.kernels.cpu import available
from crelle.models.decoder import DecoderModel
from crelle.models.fused import fuse

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import TOLERANCE, error, open_model, some_tokens, take_apart
from test_cpu_decoder import fused, one_by_one

from crelle.kernels.cpu.fused_decoder import FusedDecoder

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]


def trellis_model(tmp_path: Path, kernel: str = "cpu") -> DecoderModel:
    """A small model with random codes: bare ones, and rotations that some matrices of an input share."""
    model = open_model(write_tiny_model(tmp_path / "m"))
    rng = torch.Generator().manual_seed(0)
    rotations: dict[int, Rotation] = {}
    for i, linear in enumerate(model.linears()):
        N, K = linear.weight.shape
        code = {"bits": 4.0, "code": "mul1"} if i % 5 == 1 else {"bits": (2.0, 2.5, 4.0)[i % 3], "code": "pair"}
        w: QuantTensor = TrellisTensor.random({"format": "trellis", "shape": [N, K], **code}, rng)
        if i % 7 != 3:
            shared = rotations.setdefault(K, Rotation.random(K, rng, known_orders(K)[-1]))
            w = RotatedTensor(w, shared if i % 4 else Rotation.random(K, rng))
        linear.weight, linear.prepared = w, ops.prepare(w, torch.float32, kernel)
    return model


@pytest.mark.parametrize("kernel", ["cpu", "cpu-int8"])
def test_step_matches_layers(kernel: str, tmp_path: Path, isa: str) -> None:
    model = trellis_model(tmp_path, kernel)
    tokens = some_tokens(2, 30)
    got = fused(model, FusedDecoder(take_apart(model)), tokens, 3)
    assert error(got, one_by_one(model, tokens, 3)) < TOLERANCE["exact" if kernel == "cpu" else "int8"]


@pytest.mark.parametrize("kernel", ["cpu", "cpu-int8"])
def test_prefill_matches_layers(kernel: str, tmp_path: Path, isa: str) -> None:
    model = trellis_model(tmp_path, kernel)
    decoder = FusedDecoder(take_apart(model))
    tokens = some_tokens(1, 60)
    cache = model.new_cache(1)
    cache.grow(60)
    got = decoder.prefill(tokens[0], 0, cache.layers, last=False)
    model.decoder = "not in this test"
    wanted = model(tokens, model.new_cache(1))[0]
    assert error(got, wanted) < TOLERANCE["exact" if kernel == "cpu" else "int8"]


def test_rows_have_the_same_bits_in_any_batch_and_on_any_number_of_threads(tmp_path: Path, isa: str) -> None:
    from crelle.kernels.cpu import core

    model = trellis_model(tmp_path)
    decoder = FusedDecoder(take_apart(model))
    tokens = some_tokens(9, 8)
    core().set_threads(1)
    wanted = fused(model, decoder, tokens, 0)
    core().set_threads(3)
    assert torch.equal(fused(model, decoder, tokens, 0), wanted)
    for row in (0, 8):
        assert torch.equal(fused(model, decoder, tokens[row : row + 1], 0), wanted[row : row + 1])


def test_a_loaded_model_is_fused_unless_other_formats_are_rotated(tmp_path: Path) -> None:
    from crelle.formats.base import format_of

    model = trellis_model(tmp_path)
    assert isinstance(fuse(model), FusedDecoder)
    linear = model.linears()[0]
    N, K = linear.weight.shape
    rng = torch.Generator().manual_seed(0)
    spec = {"format": "uniform", "shape": [N, K], "bits": 4, "group": 24, "symmetric": False}
    w = RotatedTensor(format_of(spec).random(spec, rng), Rotation.random(K, rng))
    linear.weight, linear.prepared = w, ops.prepare(w, torch.float32, "cpu")
    refused = fuse(model)
    assert isinstance(refused, str)
    assert "rotates inputs for trellis codes only" in refused


def test_rotated_outputs_are_refused_and_run_layer_by_layer(tmp_path: Path) -> None:
    model = trellis_model(tmp_path)
    linear = model.layers[0].mlp.down
    N, K = linear.weight.shape
    inner = TrellisTensor.random({"shape": [N, K], "bits": 2.0, "code": "pair"}, torch.Generator().manual_seed(1))
    w = RotatedTensor(inner, Rotation.of_inputs(K), Rotation.of_outputs(N))
    linear.weight, linear.prepared = w, ops.prepare(w, torch.float32)
    refused = fuse(model)
    assert isinstance(refused, str)
    assert "rotates inputs, not outputs" in refused
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    wanted = x.double() @ w.dequantize(torch.float64).T
    assert float((linear(x) - wanted).norm() / wanted.norm()) < 1e-4
