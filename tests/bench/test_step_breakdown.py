"""The time of a step is shared out among its kernels, overlaps counted once."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

from crelle.bench.kernels import step_breakdown
from crelle.bench.kernels.step_breakdown import Launch, breakdown, kind_of, of_launches, short_name
from crelle.errors import UnsupportedError

ENCODE = "void crelle::integer_encode<(crelle::Prologue)1, (int)128, (bool)1, __half>(const T7 *, int)"
GEMM = "void crelle::integer_gemm_sm90<(crelle::Scheme)0, (int)1, __half>(CUtensorMap_st, float const*)"
ATTEND = "void crelle::paged_attend<(int)128, (int)4, __half, __half>(int)"


def test_overlaps_count_for_the_kernel_that_began_first() -> None:
    found = of_launches(
        [Launch(GEMM, 1, 11), Launch(ENCODE, 0, 4), Launch(ATTEND, 13, 20), Launch(ENCODE, 19, 22)], 0.02
    )
    assert found.milliseconds["encode"] == pytest.approx((4 + 2) / 1e3)
    assert found.milliseconds["gemm"] == pytest.approx(7 / 1e3)
    assert found.milliseconds["attention"] == pytest.approx(7 / 1e3)
    assert found.milliseconds["idle"] == pytest.approx(2 / 1e3)
    assert sum(found.milliseconds.values()) == pytest.approx(found.profiled_ms) == pytest.approx(22 / 1e3)
    assert found.share("encode") == pytest.approx(6 / 22)
    assert (found.launches, found.graph_ms) == (4, 0.02)
    assert [k.launches for k in found.kernels if k.kind == "encode"] == [2]
    assert "encode 0.01 ms (27.3%)" in str(found)


def test_a_kernel_inside_another_takes_no_time() -> None:
    found = of_launches([Launch(GEMM, 0, 10), Launch(ENCODE, 2, 5)], 0.01)
    assert found.milliseconds["encode"] == 0
    assert found.profiled_ms == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (ENCODE, "encode"),
        (GEMM, "gemm"),
        (ATTEND, "attention"),
        ("void crelle::decode_attention<128, 1, 8, 4, true, __half>(__half const*)", "attention"),
        ("void crelle::paged_append_8lane<128, 4>(int)", "append"),
        ("void crelle::add_norm_pack<crelle::RMS_NORM, 16, 1, __half>(int)", "encode"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "gemm"),
        ("void crelle::dense_gemv<crelle::PLAIN, 4>(int)", "gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>(int)", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kernel_of_a_step_has_a_kind() -> None:
    sources = (ROOT / "src" / "crelle" / "kernels" / "cuda").rglob("*.cu")
    text = "\n".join(path.read_text() for path in sources if path.parent.name not in ("solver", "training"))
    found = re.findall(r"__global__[^;{]*?\b(\w+)\(\s*(?:const|[TX] )", text)
    assert len(found) == text.count("__global__") > 20  # the pattern knows every kernel
    assert {n for n in found if kind_of(f"void crelle::{n}<1>(int)") == "rest"} == {"embed", "greedy", "probe"}


def test_names_are_shortened() -> None:
    assert short_name(ENCODE) == "integer_encode<1, 128, 1, __half>"


def _events(monkeypatch: pytest.MonkeyPatch, events: list[Any]) -> None:
    class Profile:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step_breakdown, "replay_ms", lambda replay: 0.5)


def test_the_median_of_three_replays_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, begin: float, end: float, device: str = "DeviceType.CUDA") -> Any:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end))

    lengths, events = (10, 30, 20), [event("cudaGraphLaunch", 0, 1, "DeviceType.CPU")]
    for i, length in enumerate(lengths):
        events += [event(ENCODE, 100 * i, 100 * i + 5), event(GEMM, 100 * i + 4, 100 * i + length)]
    _events(monkeypatch, events)
    found = breakdown(lambda: None)
    assert found.profiled_ms == pytest.approx(0.02)
    assert found.graph_ms == 0.5


def test_a_profiler_that_sees_nothing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _events(monkeypatch, [])
    with pytest.raises(UnsupportedError, match="saw 0 kernels"):
        breakdown(lambda: None)
