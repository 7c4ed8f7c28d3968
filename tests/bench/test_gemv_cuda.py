"""The GEMV bench on a GPU, as far as it goes without one: the checks before timing, copies, refusals."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from crelle.bench.energy import Energy
from crelle.bench.kernels import gemv_cuda
from crelle.bench.kernels.cuda_timer import Ceiling, clone, copies
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor, nbytes
from crelle.kernels import ops
from crelle.kernels.base import Kernel
from crelle.kernels.reference import matmul_fp64
from crelle.quantizers.scheme import parse

CEILING, BASELINE = Ceiling(4000.0, "a guess"), gemv_cuda.Baseline(10.0, None)


def weight(scheme: str = "bcq:bits=3,group=32") -> QuantTensor:
    return random_matrix(parse(scheme), 48, 96, random_generator(0, "cpu"))


def prepared(w: QuantTensor) -> ops.Prepared:
    return ops.prepare(w, torch.float32, "reference")


class Wrong:
    """A kernel with a fault, around one without."""

    def __init__(self, kernel: Kernel, fault: str) -> None:
        self.kernel, self.fault, self.calls = kernel, fault, 0
        self.name = kernel.name

    def run(self, x: torch.Tensor, data: object) -> torch.Tensor:
        self.calls += 1
        y = self.kernel.run(x, data)
        if self.fault == "one output is not written":
            y[..., 7] = torch.nan
        if self.fault == "one row is wrong":
            y[..., 7] += 0.1
        if self.fault == "runs differ":
            y[..., 7] += 1e-5 * self.calls
        return y


def test_the_oracle_in_slabs_is_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv_cuda, "_SLAB", 7 * 96)
    x, w = torch.randn(2, 96), weight()
    assert torch.equal(gemv_cuda.exact(x, w), matmul_fp64(x, w))


def test_a_right_kernel_passes_with_small_errors() -> None:
    w = weight()
    norm, largest = gemv_cuda.check(w, prepared(w), 2, torch.float32, random_generator(1, "cpu"))
    assert 0 < norm < 1e-6
    assert 0 < largest < 1e-6


@pytest.mark.parametrize(
    ("fault", "words"),
    [("one output is not written", "nan"), ("one row is wrong", "is wrong on"), ("runs differ", "two runs differ")],
)
def test_a_wrong_kernel_is_not_timed(fault: str, words: str) -> None:
    w = weight()
    good = prepared(w)
    bad = replace(good, kernel=Wrong(good.kernel, fault))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=words):
        gemv_cuda.check(w, bad, 1, torch.float32, random_generator(1, "cpu"))


def test_bytes_are_those_of_the_layout_that_is_read() -> None:
    w = weight()
    stored = nbytes(w)
    assert gemv_cuda.bytes_of(prepared(w), stored) == stored  # it reads what is stored
    dense = ops.prepare(w, torch.float32, "dequantized")
    assert gemv_cuda.bytes_of(dense, stored) == 4 * 48 * 96


def test_copies_fill_the_working_set_and_stay_few() -> None:
    assert copies(100, working_set=1000, most=50) == 10
    assert copies(1, working_set=1000, most=50) == 50
    assert copies(5000, working_set=1000, most=50) == 2


def test_a_clone_shares_no_memory() -> None:
    @dataclass(frozen=True)
    class Layout:
        words: torch.Tensor
        inner: QuantTensor
        span: int
        order: torch.Tensor | None = None

    first = Layout(torch.arange(4), weight(), 3)
    second = clone(first)
    assert second.span == 3
    assert torch.equal(first.words, second.words)
    assert first.words.data_ptr() != second.words.data_ptr()
    assert torch.equal(first.inner.dequantize(), second.inner.dequantize())
    assert first.inner.tensors()["planes"].data_ptr() != second.inner.tensors()["planes"].data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_a_sentence() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        gemv_cuda.measure(64, 64, "bcq:bits=2,group=32", ceiling=CEILING, against=BASELINE)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        gemv_cuda.baseline(64, 64, 1, torch.float16, energy=False)


class Replay:
    """Stands in for a CUDA graph: runs the calls one after the other, and every call takes 2 microseconds."""

    def __init__(self, calls: list[Callable[[], torch.Tensor]]) -> None:
        self.calls = calls

    def check(self, expected: torch.Tensor, what: str) -> None:
        for call in self.calls:
            assert torch.equal(call(), expected), what

    def microseconds(self) -> float:
        return 2.0

    def energy(self) -> Energy:
        return Energy(None, 0.0, "no counter")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be the device, and the reference kernel take f16."""
    monkeypatch.setattr(gemv_cuda, "_DEVICE", "cpu")
    monkeypatch.setattr(gemv_cuda, "Replay", Replay)
    monkeypatch.setattr(gemv_cuda, "require_cuda", lambda: None)
    monkeypatch.setattr(gemv_cuda, "copies", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A pretended GPU")


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("scheme", ["bcq:bits=2,group=128", "bcq-nested:bits=4,group=32", "fp16"])
def test_a_measurement_goes_through_all_its_parts(scheme: str) -> None:
    against = gemv_cuda.baseline(48, 96, 2, torch.float16, energy=True)
    r = gemv_cuda.measure(48, 96, scheme, batch=2, kernel="reference", ceiling=CEILING, against=against)
    assert r.kernel == ("dense" if scheme == "fp16" else "reference")
    assert r.rel_err <= gemv_cuda.TOLERANCE
    assert r.speedup == 1.0
    assert r.gb_per_s == pytest.approx(r.bytes / 2e3)
    assert (r.product_microseconds, r.joules_per_call, r.energy_note) == (None, None, "no counter")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bcq:bits=2,group=128", "rtn:bits=4,group=128", "fp16"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_figures_fit_each_other(scheme: str, batch: int) -> None:
    against = gemv_cuda.baseline(512, 1024, batch, torch.float16, energy=False)
    r = gemv_cuda.measure(512, 1024, scheme, batch=batch, ceiling=CEILING, against=against, energy=False)
    assert r.rel_err <= gemv_cuda.TOLERANCE
    assert r.gb_per_s == pytest.approx(r.bytes / r.microseconds / 1e3)
    assert r.share_of_ceiling == pytest.approx(r.gb_per_s / 4000)
    assert r.speedup == pytest.approx(against.microseconds / r.microseconds)
    assert r.energy_note == "not asked for"
    if scheme != "fp16" and batch <= 4:
        assert r.kernel == "cuda"
        assert r.product_microseconds is not None
        assert r.encode_microseconds is not None
        assert r.product_microseconds < r.microseconds


@pytest.mark.gpu
def test_an_unknown_dtype_is_a_sentence() -> None:
    with pytest.raises(SchemeError, match="float8"):
        gemv_cuda.measure(64, 64, "fp16", dtype="float8", ceiling=CEILING, against=BASELINE)


@pytest.mark.gpu
def test_the_ceiling_is_that_of_a_memory() -> None:
    from crelle.bench.kernels.cuda_timer import read_ceiling

    found = read_ceiling(1 << 30)
    assert 100 < found.gb_per_s < 20_000
    assert "GB" in found.how
