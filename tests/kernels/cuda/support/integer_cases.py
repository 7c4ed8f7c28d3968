"""Integer weights and activations for the tests of integer_gemm.cu, and the oracle of their products."""

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from crelle.formats.activations import ActivationSpec, QuantizedX
from crelle.formats.base import format_of
from crelle.kernels.base import Encoded
from crelle.kernels.cuda.integer.integer_layout import BLOCK, IntegerTiles
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.integer_reference import IntegerReference


class Case(NamedTuple):
    """Bits and groups of a weight and its activations; group_x 0: one scale for a token."""

    format: str
    bits: int
    bits_x: int
    group: int
    group_x: int
    outliers: int
    outliers_x: bool = True  # whether outliers have a scale of their own in x


CASES = [
    Case("grouped", 4, 4, 128, 128, 128),
    Case("grouped", 4, 8, 128, 128, 128),
    Case("grouped", 4, 8, 128, 128, 0),
    Case("grouped", 3, 3, 64, 64, 17),
    Case("grouped", 4, 4, 32, 32, 40),
    Case("grouped", 8, 8, 128, 128, 64),
    Case("grouped", 4, 8, 256, 256, 0),
    Case("grouped", 4, 8, 128, 0, 20),
    Case("grouped", 4, 4, 1 << 17, 0, 20),
    Case("grouped", 8, 8, 1 << 17, 0, 0),
    Case("two-level", 4, 8, 128, 0, 64),
    Case("two-level", 4, 8, 64, 0, 64, False),
    Case("two-level", 4, 8, 128, 0, 0),
    Case("two-level", 4, 4, 128, 128, 128),
    Case("two-level", 4, 4, 32, 32, 30),
]


def spec_of(case: Case, N: int, K: int) -> dict[str, Any]:
    act = ActivationSpec(case.bits_x, case.group_x or 1 << 17, case.outliers if case.outliers_x else 0, 8, 0.9)
    spec = {"format": case.format, "shape": [N, K], "bits": case.bits, "group": case.group, "outliers": case.outliers}
    spec |= {"permuted": True, "activation": act.to_json()}
    return spec | ({"outlier_bits": 8} if case.format == "grouped" else {})


def random_integer_weight(case: Case, N: int, K: int, device: str = "cpu", seed: int = 0) -> Any:
    spec = spec_of(case, N, K)
    return format_of(spec).random(spec, torch.Generator(device).manual_seed(seed))


def inputs(M: int, K: int, dtype: torch.dtype, device: str = "cpu", seed: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=random) * torch.exp(torch.randn(K, generator=random))
    return x.to(dtype).to(device)


def quantized(x: Tensor, w: Any) -> QuantizedX:
    found: QuantizedX = w.activation.quantize(x[:, w.perm.long()])
    return found


def integer_x(q: QuantizedX, w: Any, dtype: torch.dtype) -> IntegerX:
    """What the encode kernels give, with garbage in the rows past M."""
    (M, K), n = q.codes.shape, w.sizes.outliers
    more = -M % 8
    parts = [pad(p, (0, -p.shape[1] % BLOCK)) for p in (q.codes[:, : K - n], q.codes[:, K - n :])]
    codes, scales = pad(torch.cat(parts, 1), (0, 0, 0, more), value=77), pad(q.scales, (0, 0, 0, more), value=3.0)
    return IntegerX(codes.contiguous(), scales.T.contiguous(), M, dtype)


def oracle(q: QuantizedX, w: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """What crelle.kernels.integer_reference makes of it."""
    reference = IntegerReference()
    return reference.run(Encoded((q, dtype)), reference.prepare(w, dtype))


def emulated_tensor_map(codes: Tensor, tokens: int) -> bytes:
    """What stands for a CUtensorMap in emulator/tma.cuh."""
    rows, columns = codes.shape
    return struct.pack("Pii", codes.data_ptr(), rows, columns) + struct.pack("i", tokens) + bytes(108)


def pieces_of(w: IntegerTiles) -> list[list[Tensor]]:
    """The bytes of each block of each tile."""
    sizes = [(4096 if b < w.narrow else 8192) + 128 * w.subs for b in range(w.blocks)]
    return [list(tile.split(sizes)) for tile in w.pieces.view(-1, sum(sizes))]
