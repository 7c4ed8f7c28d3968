"""The attention benchmark: checks before it times, and what is wrong is refused."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.bench.kernels import attention as attention_bench
from crelle.bench.kernels.attention import Attention, ReferenceKernels, measure, plot_attention
from crelle.errors import SchemeError, UnsupportedError

SMALL: dict[str, Any] = {
    "batch": 3,
    "context": 70,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "_REPEAT", 2)


@pytest.mark.parametrize(("kv", "most"), [("16", 1e-5), ("8", 0.05), ("4", 0.5)])
def test_errors_are_those_of_storing(kv: str, most: float) -> None:
    row = measure(kv=kv, **SMALL)
    assert row.rel_err < 1e-5  # against what the pages hold
    assert row.stored_rel_err < most
    assert (row.stored_rel_err > 10 * row.rel_err) == (kv != "16")
    assert row.microseconds > 0
    assert row.speedup == pytest.approx(min(row.torch_microseconds.values()) / row.microseconds)


def test_bytes_are_those_of_the_tokens() -> None:
    for kv, bits in (("16", 32), ("4", 5)):  # f32 on a CPU; 4 bits and a word of 16 for each head of 16
        assert measure(kv=kv, **SMALL).bytes == 3 * 70 * 2 * 2 * 16 * bits // 8


class Wrong(ReferenceKernels):
    """Sees one token too few, or something else each time."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0

    def attend(self, q: Tensor, pages: Any, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        self.calls += 1
        shorter = (lengths - 1).clamp(min=1) if self.how == "short" else lengths
        y = super().attend(q, pages, table, shorter, dtype)
        return y * torch.nan if self.how == "nan" else y + self.calls if self.how == "moody" else y


@pytest.mark.parametrize(("how", "said"), [("short", "is wrong by"), ("moody", "two runs"), ("nan", "differ|wrong")])
def test_wrong_attention_is_not_timed(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "ReferenceKernels", lambda: Wrong(how))
    with pytest.raises(UnsupportedError, match=said):
        measure(kv="8", **SMALL)


def test_heads_that_cannot_share_are_refused() -> None:
    with pytest.raises(SchemeError, match="cannot share"):
        measure(kv="4", **{**SMALL, "heads": 3})


def test_picture(tmp_path: Path) -> None:
    rows = [measure(kv=kv, **SMALL) for kv in ("16", "4")]
    plot_attention(tmp_path / "p.png", [asdict(r) for r in rows])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_picture_over_the_batch(tmp_path: Path) -> None:
    row = asdict(measure(kv="4", **SMALL))
    rows = [{**row, "batch": b, "torch_microseconds": {"cudnn": 3.0 * b, "flash": 5.0 * b}} for b in (1, 8, 64)]
    plot_attention(tmp_path / "p.png", rows)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["16", "8", "4"])
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_paged_kernels_beside_torch(kv: str, kv_heads: int) -> None:
    row: Attention = measure(
        kv=kv,
        batch=4,
        context=300,
        heads=32,
        kv_heads=kv_heads,
        head_size=128,
        device=torch.device("cuda"),
        dtype=torch.float16,
    )
    assert row.attention == "cuda-paged"
    assert row.torch_microseconds
