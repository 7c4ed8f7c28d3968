"""A format is known by its hooks alone: every built-in one answers them, and one defined here works everywhere."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.cli.commands.inspect import describe
from crelle.errors import FormatError, UnsupportedError
from crelle.formats import builtin
from crelle.formats.base import FORMATS, QuantTensor, Spec, expect, format_of, nbytes, register_format, shape_of, take
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import ops
from crelle.kernels.base import Problem
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import explain
from crelle.quantizers.base import BitConfig, GroupedConfig
from crelle.quantizers.scheme import parse
from crelle.quantizers.search.bit_allocation import stored_bits
from crelle.quantizers.solvers.underflow import underflow
from crelle.quantizers.training.ste import ScaleTuner, trainable

SCHEMES = (
    "fp16",
    "fp32",
    "rtn:bits=4,group=8",
    "rtn:bits=3,group=24,symmetric=true",
    "bcq:bits=3,group=16",
    "bcq:bits=2,group=16,bias=false",
    "gptq:bits=3,group=16,free=true",
    "awq:bits=4,group=16",
    "bcq-nested:bits=4,group=16",
    "auto:bits=4.4",
    "mxfp4",
    "trellis:bits=1.5",
    "trellis:bits=3,rotate=false",
    "trellis:bits=2,rotate_outputs=true,hadamard=any",
)


@dataclass(frozen=True, slots=True, eq=False)
class TwoWidthsTensor:
    """Toy format: 2-bit codes for the first half of the inputs, int8 for the other; a scale per row and one for all.

    w[n, k] = gain scale[n] code[n, k]      codes int8 [N, K], scale f16 [N, 1], gain f32 []
    """

    format: ClassVar[str] = "two-widths"
    quantized: ClassVar[bool] = True
    codes: Tensor
    scale: Tensor
    gain: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def bits(self) -> float:
        return (2 + 8) / 2

    @property
    def group(self) -> None:
        return None

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return (self.gain.to(wide) * self.scale.to(wide) * self.codes.to(wide)).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scale": self.scale, "gain": self.gain}

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "gain": self.gain}

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        return replace(self, **scales)

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape)}

    def rows(self, which: slice | Tensor) -> Self:
        return replace(self, codes=self.codes[which], scale=self.scale[which])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["codes", "scale", "gain"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape"})
        N, K = shape_of(spec)
        floats = (torch.float16, torch.float32)
        scale = expect(tensors, "scale", (N, 1), floats, cls.format)
        codes = expect(tensors, "codes", (N, K), (torch.int8,), cls.format)
        return cls(codes, scale, expect(tensors, "gain", (), floats, cls.format))

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        N, K = shape_of(spec)
        codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
        codes[:, : K // 2] &= 3
        return cls(codes, torch.full((N, 1), 1 / 64).half(), torch.ones(()))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        return 8 * shape_of(spec)[1] + 16


@dataclass(frozen=True, slots=True)
class TwoWidthsConfig(GroupedConfig):
    """A quantizer of the toy format: only what random weights and search need."""

    scheme: ClassVar[str] = "two-widths"
    searchable: ClassVar[bool] = True
    bits: int = 4
    group: int = 8

    def storage_at(self, setting: BitConfig, shape: tuple[int, int]) -> Spec:
        return {"format": TwoWidthsTensor.format, "shape": list(shape)}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_format(TwoWidthsTensor)
    yield
    del FORMATS[TwoWidthsTensor.format]


def toy(N: int = 12, K: int = 20, seed: int = 0) -> QuantTensor:
    return random_matrix(TwoWidthsConfig(), N, K, random_generator(seed, "cpu"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(8, 48), (5, 83)])
def test_a_spec_tells_the_size_and_the_random_weights_of_every_format(scheme: str, shape: tuple[int, int]) -> None:
    config = parse(scheme)
    shape = (32, shape[1]) if scheme.startswith("trellis") else shape  # rows are stored in blocks
    spec = config.storage(shape)
    w = format_of(spec).random(spec, random_generator(0, "cpu"))
    assert isinstance(w, QuantTensor)
    assert w.shape == shape
    shared = shape[0] if "signs" in w.tensors() else 1  # all rows share the signs: at most a bit more for each
    assert 0 <= shape[0] * w.row_bits(spec) - 8 * nbytes(w) < shared
    assert spec.items() >= w.spec().items()
    assert torch.equal(format_of(spec).random(spec, random_generator(0, "cpu")).dequantize(), w.dequantize())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not parse(s).calibrated])
def test_storage_is_what_fit_stores(scheme: str) -> None:
    config = parse(scheme)
    assert config.storage((6, 50)).items() >= config.fit(torch.randn(6, 50)).spec().items()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_can_be_replaced_and_have_gradients(scheme: str) -> None:
    spec = parse(scheme).storage((6, 50))
    w = format_of(spec).random(spec, random_generator(1, "cpu"))
    scales = {name: t.float().requires_grad_() for name, t in w.scales().items()}
    assert scales.keys() <= w.tensors().keys()
    again = w.with_scales(scales)
    assert torch.equal(again.dequantize().detach(), w.dequantize())
    if scales:
        again.dequantize().square().sum().backward()  # type: ignore[no-untyped-call]
        assert all(t.grad is not None and t.grad.any() for t in scales.values())
    kept = {name: t for name, t in again.tensors().items() if name not in scales}
    assert all(torch.equal(t, w.tensors()[name]) for name, t in kept.items())


def test_a_wrapper_passes_the_hooks_on() -> None:
    inner = parse("rtn:bits=4,group=8").storage((6, 40))
    spec = {"format": "permuted", "shape": [6, 40], "inner": inner}
    w = PermutedTensor.random(spec, random_generator(0, "cpu"))
    assert PermutedTensor.from_parts(w.spec(), w.tensors()).spec() == w.spec() == spec
    assert 6 * w.row_bits(spec) == 8 * nbytes(w.inner)
    coder = ScaleTuner(w)
    torch.testing.assert_close(coder(), w.dequantize())
    assert torch.equal(coder.export().tensors()["order"], w.order)


def test_plain_and_nested_matrices_have_no_scales_to_train() -> None:
    for scheme in ("bf16", "bcq-nested:bits=3,group=8"):
        spec = parse(scheme).storage((4, 16))
        with pytest.raises(UnsupportedError, match="has no trainable scales"):
            ScaleTuner(format_of(spec).random(spec, random_generator(0, "cpu")))


def test_an_unknown_format_is_a_sentence() -> None:
    assert {m.__name__.rpartition(".")[2] for m in builtin.MODULES} >= {"bcq", "dense"}
    with pytest.raises(FormatError, match="unknown format 'new'"):
        format_of({"format": "new"})
    with pytest.raises(FormatError, match="registered twice"):
        register_format(type("Other", (TwoWidthsTensor,), {}))


def test_a_new_format_multiplies_with_the_reference_kernels() -> None:
    w, x = toy(), torch.randn(3, 20)
    assert "5 bits, several group sizes" in str(Problem.of(w, torch.float32))
    able = [name for name, reason in explain(Problem.of(w, torch.float32)) if reason is None]
    assert able == ["dequantized", "reference"]
    for name in able:
        y = ops.matmul(x, ops.prepare(w, torch.float32, name))
        torch.testing.assert_close(y.double(), matmul_fp64(x, w), rtol=1e-5, atol=1e-5)


def test_a_new_format_trains_its_scales() -> None:
    w = toy()
    coder = trainable(w, None, "all")  # nothing trains its weights, so its scales do
    assert isinstance(coder, ScaleTuner)
    torch.testing.assert_close(coder(), w.dequantize())
    goal = 2 * w.dequantize()
    optimizer = torch.optim.Adam(coder.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (coder() - goal).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    trained = coder.export()
    assert torch.equal(trained.tensors()["codes"], w.tensors()["codes"])
    torch.testing.assert_close(trained.dequantize(), coder().detach(), rtol=1e-3, atol=1e-3)


def test_a_new_format_goes_through_a_checkpoint_inspect_and_search(tmp_path: Path) -> None:
    w, name = toy(), "model.layers.0.mlp.up_proj"
    plain = parse("fp16").fit(torch.randn(4, 4))
    with CheckpointWriter(tmp_path / "q", {"recipe": "toy"}) as writer:
        writer.add(shard_name(1, 1), {name: w, "lm_head": plain}, {})
        writer.finish({"model_type": "llama"}, "two-widths", {})
    again = Checkpoint(tmp_path / "q").matrix(name)
    assert type(again) is TwoWidthsTensor
    assert torch.equal(again.dequantize(), w.dequantize())
    facts = describe(tmp_path / "q")
    layer = next(x for x in facts["layers"] if x["name"] == name)
    assert (layer["format"], layer["bits"], layer["group"]) == ("two-widths", 5.0, None)
    assert facts["bytes"] == nbytes(w)  # the plain matrix is listed, not counted
    assert stored_bits(TwoWidthsConfig(), BitConfig(3, 8), (12, 20)) == 8 * (nbytes(w) - 4)  # the gain is stored once


def test_weights_too_small_for_a_new_format_are_told() -> None:
    w = toy().with_scales({"scale": torch.full((12, 1), 2.0**-24).half(), "gain": torch.tensor(2.0**-10)})
    assert "12 of 12 rows have weights too small" in str(underflow("m.weight", w, lambda: torch.full((12, 20), 1e-9)))
    assert underflow("m.weight", toy(), lambda: toy().dequantize()) is None
