"""Forward passes of calibration by our own CPU kernels, as with AMX: here on tiles emulated in plain C++."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model, write_tokenizer
from mixtral import MIXTRAL, write_mixtral
from test_families import MAIN, write_random
from torch import Tensor

from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu import bf16_attention
from crelle.models.calibration_model import open_model
from crelle.models.families import families
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.calibration import layer_api
from crelle.quantizers.calibration.layer_api import Block, Tape, TrainableLinear, half_products

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, where the machine has no bf16 at all
CPU = torch.device("cpu")
if cpu.available() is not None:
    pytest.skip("needs the C++ core", allow_module_level=True)


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.delenv("CRELLE_ISA", raising=False)
    monkeypatch.setattr(layer_api, "usable", lambda device: device.type == "cpu")
    monkeypatch.setattr(layer_api, "PackedWeight", partial(layer_api.PackedWeight, emulate=True))
    monkeypatch.setattr(bf16_attention, "causal_attention", partial(bf16_attention.causal_attention, emulate=True))


@pytest.fixture(params=["llama", "llama, heads of 32", "mixtral", *MAIN])
def path(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """RMS norms and a gate; attention as tiles; a router; layer norms and no gate; norms of queries."""
    if request.param == "llama":
        return tiny_model
    if request.param == "llama, heads of 32":
        return write_tiny_model(tmp_path, head_dim=32)
    if request.param in MAIN:
        return write_random(tmp_path, request.param, **MAIN[request.param])
    monkeypatch.setitem(families(), "mixtral", MIXTRAL)
    write_mixtral(tmp_path, num_hidden_layers=2)
    write_tokenizer(tmp_path)
    return tmp_path


def passed(block: Block, x: Tensor, *, half: bool = True, tape: Tape | None = None) -> Tensor:
    if tape is not None:
        tape.rewind()
    block.use_tape(tape)
    try:
        with torch.no_grad(), half_products(CPU, half):
            return block(x)
    finally:
        block.use_tape(None)


def test_a_layer_is_as_accurate_as_with_autocast_of_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(open_weights(path))
    tokens = torch.randint(0, 250, (3, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        x = model.embed(tokens)
    for i in range(model.layers):
        block = model.block(i)
        exact, ours = passed(block, x, half=False), passed(block, x)
        with monkeypatch.context() as patch:
            patch.setattr(layer_api, "usable", lambda device: False)
            plain = passed(block, x)
        assert ours.dtype == plain.dtype == exact.dtype
        assert not torch.equal(ours, plain)  # otherwise the kernels were not taken
        scale = exact.norm()
        assert (ours - exact).norm() / scale <= 1.2 * (plain - exact).norm() / scale + 1e-5
        x = exact


def test_a_tape_repeats_what_was_computed(path: Path) -> None:
    model, tape = open_model(open_weights(path)), Tape()
    with torch.no_grad():
        x = model.embed(torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(6)))
    block = model.block(0)
    first = passed(block, x, tape=tape)
    kept = list(tape.results)
    assert torch.equal(passed(block, x, tape=tape), first)
    assert all(a is b for a, b in zip(kept, tape.results, strict=True))
    assert torch.equal(passed(block, x), first)


def test_a_linear_multiplies_by_the_weight_that_it_has_now() -> None:
    """Replaced, changed in place, of a copied layer, or an inference tensor."""
    torch.manual_seed(0)
    linear, x = TrainableLinear("one", torch.randn(40, 64), torch.randn(40)), torch.randn(5, 64)

    def check(of: TrainableLinear = linear) -> None:
        with torch.no_grad(), half_products(CPU):
            y = of(x)
        assert y.dtype == torch.bfloat16
        wanted = x.bfloat16().double() @ of.weight.bfloat16().double().T + of.bias
        torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-4)

    check()
    packed = linear._tiles._packed
    check()
    assert linear._tiles._packed is packed
    linear.weight = torch.randn(40, 64)
    check()
    with torch.no_grad():
        linear.weight.mul_(-2)
    check()
    twin = deepcopy(linear)
    twin.weight = torch.randn(40, 64)
    check(twin)
    check()
    with torch.inference_mode():
        linear.weight = torch.randn(40, 64)
        check()
        linear.weight.mul_(3)
        check()


def test_attention_is_taken_where_it_sees_all_tokens_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = bf16_attention.causal_attention

    def watched(*tensors: Tensor) -> Tensor:
        seen.append(tensors[0].shape)
        return plain(*tensors)

    monkeypatch.setattr(bf16_attention, "causal_attention", watched)
    model = open_model(open_weights(write_tiny_model(tmp_path, head_dim=32)))
    with torch.no_grad():
        x = model.embed(torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(8)))
    passed(model.block(0), x)
    assert seen == [(2, 20, 6, 32)]
    passed(model.block(0), x, half=False)
    assert len(seen) == 1


def test_gradients_and_full_precision_stay_with_torch() -> None:
    linear, x = TrainableLinear("one", torch.randn(8, 32), None), torch.randn(3, 32, requires_grad=True)
    with half_products(CPU):
        linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, 32), rtol=0.05, atol=0.05)
    with torch.no_grad():
        assert torch.equal(linear(x), x @ linear.weight.T)
    assert linear._tiles._packed is None


@pytest.mark.parametrize("scheme", ["gptq:bits=3,group=32", "atom:w=4,a=4,kv=4,group=32,outliers=16"])
def test_a_model_is_quantized_about_as_without_the_kernels(
    scheme: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CalibrationData(text="It was a small text to calibrate on, and a short one. " * 30, rows=4, length=32)
    quantize(tiny_model, tmp_path / "ours", scheme, text=text)
    monkeypatch.setattr(layer_api, "usable", lambda device: False)
    quantize(tiny_model, tmp_path / "plain", scheme, text=text)
    source = open_weights(tiny_model)
    errors = {}
    for name in ("ours", "plain"):
        made = Checkpoint(tmp_path / name)
        modules = [n.removesuffix(".weight") for n in source.names() if "_proj" in n]
        change = [
            made.matrix(m).dequantize(torch.float32) - source.matrix(m).dequantize(torch.float32) for m in modules
        ]
        errors[name] = sum(float(c.square().sum()) for c in change)
    assert errors["ours"] == pytest.approx(errors["plain"], rel=0.05)
