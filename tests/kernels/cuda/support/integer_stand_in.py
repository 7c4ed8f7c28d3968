"""Stands in for integer_layout.py and integer_gemm.py where there is no GPU: the same products in f64, by torch."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated import EmulatedKernel
from torch import Tensor
from torch.nn.functional import pad

from crelle.formats.activations import group_slices, spread
from crelle.kernels.cuda import integer
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.integer import integer_encode
from crelle.kernels.cuda.integer.integer_x import IntegerX

_ROWS, _BLOCK = 64, 128


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A weight: f64 [tiles, 64 rows of codes and of scales], each column's place padded as x's are."""

    N: int
    K: int
    x_group: tuple[int, ...]  # of each place
    pieces: Tensor
    row_scale: Tensor | None
    semaphores: Tensor

    @property
    def nbytes(self) -> int:
        return self.pieces.numel()


def lay_out(w: Any) -> Tiles:
    s, act = w.sizes, w.activation
    integers = w.integers().double()
    if w.format == "two-level":
        scale, rows = torch.ones(s.N, s.K, dtype=torch.float64), w.scale.float()
    else:
        scale, rows = spread(w.scale.double(), s.K, s.group, s.outliers), None
    group = torch.zeros(s.K, dtype=torch.int64)
    for i, k in enumerate(group_slices(s.K, act.group, act.outliers)):
        group[k] = i

    def places(t: Tensor) -> Tensor:
        parts = t[..., : s.normal], t[..., s.normal :]
        return torch.cat([pad(p, (0, -p.shape[-1] % _BLOCK)) for p in parts], -1)

    both = torch.stack([places(integers), places(scale)], 1)  # [N, 2, places]
    missing = -s.N % _ROWS
    pieces = pad(both, (0, 0, 0, 0, 0, missing)).reshape((s.N + missing) // _ROWS, -1)
    rows = None if rows is None else pad(rows, (0, missing))
    return Tiles(s.N, s.K, tuple(places(group[None])[0].tolist()), pieces, rows, torch.zeros(8))


def product(
    x: IntegerX,
    w: Tiles,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Any = None,
    config: Any = None,
) -> Tensor:
    M, places = x.tokens, len(w.x_group)
    assert x.codes.shape == (-(-M // 8) * 8, places)
    assert x.codes.is_contiguous()
    assert x.scales.shape == (max(w.x_group) + 1, len(x.codes))
    assert x.scales.is_contiguous()
    codes, scale = w.pieces.reshape(-1, 2, places)[: w.N].unbind(1)
    seen = x.codes[:M].double() * x.scales[list(w.x_group), :M].T.double()
    y = seen @ (codes * scale).T
    y = y if w.row_scale is None else y * w.row_scale[: w.N].double()
    y = y if bias is None else y + bias.double()
    y = (y if residual is None else y + residual.double()).to(x.dtype)
    return y if out is None else out.copy_(y)


def run_integer_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the encoding kernels, and put these products in the place of those of both modules."""
    for module in (integer_encode, dense):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    for name, functions in {"integer_layout": {"lay_out": lay_out}, "integer_gemm": {"product": product}}.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"{integer.__name__}.{name}", module)
        monkeypatch.delattr(integer, name, raising=False)
