"""What the host does for a product of few rows: launches bound to their weight, on its GPU; no GPU needed."""

import copy
import sys
from typing import Any

import pytest
import torch
from fake_gpus import FakeKernel, Launched, fake_gpus, on
from mixed_weights import random_mixed

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import format_of
from crelle.integrations.transformers.layers import CrelleLinear, Encoding
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda import launch
from crelle.kernels.cuda.integer.integer_kernel import CudaInteger
from crelle.kernels.cuda.mixed.mixed_kernel import CudaMixed
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.kernel import Cuda
from crelle.kernels.cuda.runtime.plans import Plans

N, K, HALF = 288, 320, torch.float16
FORMATS: dict[str, dict[str, Any]] = {
    "uniform": {"format": "uniform", "bits": 4, "group": 64, "symmetric": False},
    "bcq": {"format": "bcq", "bits": 3, "group": 64, "bias": True},
    "integer": {"format": "grouped", "bits": 4, "group": 64, "outliers": 64, "outlier_bits": 8, "permuted": True},
    "mixed": {},
}


def make(name: str) -> tuple[Any, Any]:
    """Return a kernel and a weight that it prepared."""
    if name == "mixed":
        return CudaMixed(), CudaMixed().prepare(random_mixed(N, K, 16, 0.25, 0.002), HALF)
    spec = {**FORMATS[name], "shape": [N, K]}
    if name == "integer":
        spec["activation"] = ActivationSpec(4, 64, 64).to_json()
    kernel = CudaInteger() if name == "integer" else Cuda()
    return kernel, kernel.prepare(format_of(spec).random(spec, torch.Generator().manual_seed(0)), HALF)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    return fake_gpus(monkeypatch)


def fixed(launched: Launched, known: set[bytes]) -> tuple[Any, ...]:
    """A launch without the addresses of what changes from call to call: those that the weight does not have."""
    is_address = [len(a) == 8 and a not in known and any(a) for a in launched.arguments]
    kept = [None if varies or len(a) == 128 else a for a, varies in zip(launched.arguments, is_address, strict=True)]
    return launched.expression, launched.grid, launched.options, kept


def addresses(w: Any) -> set[bytes]:
    """Of all tensors of a weight."""
    found, more = set[bytes](), [w]
    for thing in more:
        for slot in getattr(type(thing), "__slots__", ()):
            value = getattr(thing, slot)
            if isinstance(value, torch.Tensor):
                found.add(value.data_ptr().to_bytes(8, "little"))
            elif hasattr(type(value), "__slots__") and hasattr(type(value), "__dataclass_fields__"):
                more.append(value)
    return found


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=["hopper", "ampere"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_bound_launches_are_those_of_the_first_call(
    name: str, rows: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fake_gpus(monkeypatch, capability)
    kernel, w = make(name)
    x = torch.randn(rows, K).to(HALF)
    each = []
    for _ in range(3):
        launches.clear()
        y = kernel.run(x, w)
        assert y.shape == (rows, N)
        assert y.dtype == HALF
        assert x.data_ptr().to_bytes(8, "little") in launches[0].arguments
        assert y.data_ptr().to_bytes(8, "little") in launches[-1].arguments
        if len(launches) == 2:  # what the first writes the second reads, if only as a tensor map
            first, second = (b"".join(a for a in some.arguments if len(a) >= 8) for some in launches)
            words = [{b[i : i + 8] for i in range(0, len(b) - 7, 8)} for b in (first, second)]
            assert len((words[0] & words[1]) - addresses(w) - {bytes(8)}) >= (1 if name == "mixed" else 2)
        each.append([fixed(some, addresses(w)) for some in launches])
    assert each[1] == each[0]
    assert each[2] == each[0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_of_one_row_is_two_launches_and_few_calls(name: str, launches: list[Launched]) -> None:
    """Bounded by what our code calls, Python and C functions; `choose` alone made 700 calls before it was kept."""
    kernel, w = make(name)
    spec = {**FORMATS["uniform"], "shape": [N, K]}
    stored = format_of(spec).random(spec, torch.Generator().manual_seed(0))
    layer = CrelleLinear(Encoding.of(stored), None, HALF)
    layer._note_parts()
    layer._made = (HALF, torch.device("cpu")), Prepared(Problem.of(stored, HALF), kernel, w)
    x = torch.randn(1, 1, K).to(HALF)
    calls = [0]

    def count(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event in ("call", "c_call") and "/crelle/" in frame.f_code.co_filename

    with torch.no_grad():
        layer(x)
        launches.clear()
        sys.setprofile(count)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert len(launches) == (1 if name == "mixed" else 2)
    assert calls[0] < 90


def test_a_tile_config_is_chosen_once(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[int]()
    choose = bmma_gemv.choose
    monkeypatch.setattr(bmma_gemv, "choose", lambda w, rows, **how: chosen.append(rows) or choose(w, rows, **how))  # type: ignore[func-returns-value]
    kernel, w = make("uniform")
    for rows in (1, 1, 2, 1, 2):
        x = torch.randn(rows, K).to(HALF)
        kernel.run(x, w)
        kernel.run(kernel.encode(x, w), w)
    assert chosen == [1, 2]


@pytest.mark.parametrize("rows", [1, 3, 20, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_run_on_the_gpu_that_has_the_weight(name: str, rows: int, launches: list[Launched]) -> None:
    kernel, w = make(name)
    x = torch.randn(rows, K).to(HALF)
    tiles = w.tiles.pieces if name == "integer" else w.tiles if name == "mixed" else w.words
    on(1, x, tiles)
    kernel.run(x, w)
    kernel.run(x, w)
    kernel.run(kernel.encode(x, w), w)
    assert {(some.device, some.stream) for some in launches} == {(1, 7001)}
    assert torch.cuda.current_device() == 0
    on(0, x)
    with pytest.raises(
        UnsupportedError, match=r"x is on cpu, but the weight is on cpu"
    ):  # fakes, as their .device says
        kernel.run(x, w)


def test_a_launch_follows_its_tensors(launches: list[Launched]) -> None:
    """Kernels of the quantizers, which are loaded for the current device."""
    kernel = launch.load("scale.cu", "scale")
    x, y = torch.ones(4), torch.ones(4)
    kernel((1, 1, 1), 32, x, y, 4)
    on(2, x)
    kernel((1, 1, 1), 32, x, y, 4)
    assert [(some.device, some.stream) for some in launches] == [(0, 7000), (2, 7002)]
    assert launches[0].arguments == launches[1].arguments


def test_bound_kernels_are_recorded_all_the_same(launches: list[Launched]) -> None:
    for name in FORMATS:
        kernel, w = make(name)
        x = torch.randn(1, K).to(HALF)
        kernel.run(x, w)
        wanted = {some.expression for some in launches}
        launches.clear()
        with launch.recording() as found:
            kernel.run(x, w)
        assert {expression for _, expression in found} == wanted
        assert not launches
        kernel.run(x, w)
        assert {some.expression for some in launches} == wanted
        launches.clear()


def test_a_copy_of_a_weight_has_no_launches_of_the_first(launches: list[Launched]) -> None:
    for name in FORMATS:
        kernel, w = make(name)
        x = torch.randn(1, K).to(HALF)
        kernel.run(x, w)
        other = copy.deepcopy(w)
        launches.clear()
        kernel.run(x, other)
        kernel.run(x, other)
        given = {a for some in launches for a in some.arguments}
        assert not given & (addresses(w) - addresses(other))
        assert given & addresses(other) or name == "mixed"  # whose addresses are in a struct


def test_plans_do_not_grow() -> None:
    plans = Plans()
    for i in range(1000):
        plans[i] = i
    assert 0 < len(plans) <= 64
    assert plans[999] == 999


def test_bound_bytes_have_the_length_of_their_parameter(launches: list[Launched]) -> None:
    kernel = FakeKernel("f.cu", "f", 0, launches)
    bound = kernel.bind((1, 1, 1), 32, launch.VaryingBytes(16), launch.ADDRESS, 5)
    bound(memoryview(bytes(range(16))).cast("Q"), 2**40)
    assert launches[0].arguments == (bytes(range(16)), (2**40).to_bytes(8, "little"), (5).to_bytes(4, "little"))
    with pytest.raises(ValueError, match="zip"):
        bound(memoryview(bytes(16)).cast("Q"))
    with pytest.raises(ValueError, match="memoryview"):
        bound(memoryview(bytes(24)).cast("Q"), 0)
