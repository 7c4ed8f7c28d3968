"""Atom checkpoints in the fused C++ step and prefill, against the layers one by one."""

from pathlib import Path

import pytest
import torch

from crelle.kernels.cpu import available
from crelle.models.decoder import DecoderModel
from crelle.models.fused import fuse

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from conftest import write_tiny_model
from cpu_models import error, open_model, quantize, some_tokens, take_apart
from test_cpu_decoder import fused, one_by_one

from crelle.kernels.cpu.fused_decoder import FusedDecoder

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(6)]

# x that differs in its last bit may round the other way: a step of 2^-7, 2^-3 of a group's largest value.
TOLERANCE = {8: 1e-2, 4: 5e-2}
SCHEMES = {
    "atom:w=4,a=8,group=16,outliers=8": 8,
    "atom:w=4,a=8,group=32,outliers=8,levels=2": 8,
    "atom:w=4,a=4,group=16,outliers=8": 4,
    "atom:w=8,a=8,group=128,outliers=0": 8,
}


def atom(tmp_path: Path, scheme: str, overrides: dict[str, str] | None = None) -> DecoderModel:
    return open_model(quantize(write_tiny_model(tmp_path / "m"), tmp_path / "q", scheme, overrides))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_step_matches_layers(scheme: str, tmp_path: Path, isa: str) -> None:
    model = atom(tmp_path, scheme)
    assert {w.kernel for w in model.linears()} == {"cpu-integer", "dense"}
    tokens = some_tokens(1, 30)
    got = fused(model, FusedDecoder(take_apart(model)), tokens, 3)
    assert error(got, one_by_one(model, tokens, 3)) < TOLERANCE[SCHEMES[scheme]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefill_matches_layers(scheme: str, tmp_path: Path, isa: str) -> None:
    model = atom(tmp_path, scheme)
    decoder = FusedDecoder(take_apart(model))
    tokens = some_tokens(1, 40)
    cache = model.new_cache(1)
    cache.grow(40)
    got = decoder.prefill(tokens[0], 0, cache.layers, last=False)
    model.decoder = "not in this test"
    wanted = model(tokens, model.new_cache(1))[0]
    assert error(got, wanted) < TOLERANCE[SCHEMES[scheme]]


def test_a_loaded_model_is_fused(tmp_path: Path) -> None:
    assert isinstance(fuse(atom(tmp_path, "atom:w=4,a=8,group=16,outliers=8")), FusedDecoder)


def test_rows_have_the_same_bits_in_any_batch_and_on_any_number_of_threads(tmp_path: Path, isa: str) -> None:
    from crelle.kernels.cpu import core

    model = atom(tmp_path, "atom:w=4,a=8,group=16,outliers=8", {"*.k_proj": "rtn:bits=4,group=24", "*.v_proj": "fp16"})
    decoder = FusedDecoder(take_apart(model))
    tokens = some_tokens(9, 8)
    core().set_threads(1)
    wanted = fused(model, decoder, tokens, 0)
    core().set_threads(3)
    assert torch.equal(fused(model, decoder, tokens, 0), wanted)
    for row in (0, 8):
        assert torch.equal(fused(model, decoder, tokens[row : row + 1], 0), wanted[row : row + 1])
