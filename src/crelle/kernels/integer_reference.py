"""Integer products of quantized activations and weights, in torch: the oracle of the integer kernels.

    y = Σ_g (s_x[m, g] s_w[n, g]) Σ_{k in g} q_x[m, k] q_w[n, k]

The inner sums are exact integers (int32 in other kernels), the outer one runs over the groups in order, in f32; both
scales are multiplied first. Activations are quantized per token and group (crelle.formats.activations), their scales
are f32. Formats: those with `integers`, `scale_slices`, `perm` and `activation` (grouped, two-level).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.formats.activations import ActivationSpec, QuantizedX
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels.base import Encoded, Problem

_EXACT = 2**24  # integers up to this are exact in f32
FORMATS = {GroupedTensor.format, TwoLevelTensor.format}


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Columns with one scale of the weight and one of x."""

    columns: slice
    codes: Tensor  # [width, N], integers in f32, or f64 where sums may exceed 2^24
    scale: Tensor  # f32 [N]
    x_scale: int  # index of the scale of x


@dataclass(frozen=True, slots=True, eq=False)
class IntegerWeight:
    """A weight as the reference multiplies it."""

    activation: ActivationSpec
    perm: Tensor | None  # int64 [K]
    order: bytes  # the same, for comparisons on the host
    blocks: list[_Block]
    floats: Tensor | None  # f32 [n, N]: outlier columns that are not quantized
    N: int


class IntegerReference:
    """Quantize x per token and group, multiply integers, scale."""

    name: ClassVar[str] = "integer-reference"

    def supports(self, problem: Problem) -> str | None:
        if problem.format not in FORMATS:
            return f"takes weights in integer groups, not '{problem.format}'"
        return "takes quantized activations, not floats" if problem.activation == "float" else None

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> IntegerWeight:
        assert isinstance(w, GroupedTensor | TwoLevelTensor), w.format
        act, K = w.activation, w.sizes.K
        assert act is not None
        integers = w.integers()  # [N, K], without columns of floats
        scale = w.scale.float().reshape(w.sizes.N, -1)
        starts = {k.start: i for i, k in enumerate(w.scale_slices())}
        x_starts = {k.start: i for i, k in enumerate(act.slices(K))}
        end_of_integers = integers.shape[1]
        edges = sorted({*starts, *(k for k in x_starts if k < end_of_integers), end_of_integers})
        blocks, at, x_at = [], 0, 0
        for begin, end in pairwise(edges):
            at, x_at = starts.get(begin, at), x_starts.get(begin, x_at)
            codes = integers[:, begin:end].T
            bound = (end - begin) * 2 ** (act.bits - 1) * 128 if begin < K - act.outliers else (end - begin) * 2**14
            wide = torch.float32 if bound <= _EXACT else torch.float64
            blocks.append(_Block(slice(begin, end), codes.to(wide).contiguous(), scale[:, at].contiguous(), x_at))
        floats = None
        if w.sizes.outlier_bits == 16 and w.outliers is not None:
            floats = w.outliers.float().T.contiguous()
        perm = None if w.perm is None else w.perm.long()
        order = b"" if w.perm is None else w.perm.cpu().numpy().tobytes()
        return IntegerWeight(act, perm, order, blocks, floats, w.sizes.N)

    def encode(self, x: Tensor, prepared: IntegerWeight) -> Encoded:
        stored = x if prepared.perm is None else x[:, prepared.perm]
        return Encoded((prepared.activation.quantize(stored), x.dtype))

    def shares(self, a: IntegerWeight, b: IntegerWeight) -> bool:
        return a.activation == b.activation and a.order == b.order

    def run(self, x: Tensor | Encoded, prepared: IntegerWeight) -> Tensor:
        encoded = self.encode(x, prepared) if isinstance(x, Tensor) else x
        data: tuple[QuantizedX, Any] = encoded.data
        q, dtype = data
        y = torch.zeros(len(q.codes), prepared.N, device=q.codes.device)
        for block in prepared.blocks:
            exact = q.codes[:, block.columns].to(block.codes.dtype) @ block.codes
            y.addcmul_(exact.float(), q.scales[:, block.x_scale, None] * block.scale)
        if prepared.floats is not None and q.floats is not None:
            y.addmm_(q.floats, prepared.floats)
        return y.to(dtype)
