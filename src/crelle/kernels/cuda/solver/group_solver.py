"""Launches group_solver.cu: loops of quantizers over groups of weights, what kernels/cpu/solver.py is on a CPU.

Groups of weights are [R, G]; importances [C, G], where that of group r is row r modulo C, 0 for padding; None: all 1.
A group has as many lanes as levels, 32 at most, and lies in shared memory from the sort to the last round. Groups too
large for it lie in a workspace, of which there is a bounded amount: their rows are solved in slabs.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda.launch import load

_FILE = "solver/group_solver.cu"
_THREADS = 128  # of a thread block, as in group_solver.cu
_SHARED = 48 << 10  # bytes of a thread block, where it can be more than one warp: several blocks then run side by side
_SHARED_WARP = 96 << 10  # bytes of a block of one warp: what every device since sm_80 has
_WORKSPACE = 256 << 20  # bytes

_BITS = range(1, 9)


def variant(name: str, bits: int, in_workspace: bool) -> tuple[str, str]:
    return _FILE, f"crelle::{name}<{bits}, {str(in_workspace).lower()}>"


def codes_variant(planes: int) -> tuple[str, str]:
    return _FILE, f"crelle::binary_codes<{planes}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for bits in _BITS:
        yield codes_variant(bits)
        for i, name in enumerate(("binary_scales", "uniform_grids", "affine_grids")):
            yield variant(name, bits, in_workspace=False)
            if bits % 3 == i:
                yield variant(name, bits, in_workspace=True)


def usable(w: Tensor) -> bool:
    """Whether the kernels of this module can work on a tensor."""
    return w.device.type == "cuda" and w.dtype == torch.float32 and cuda.available() is None


def binary_scales(w: Tensor, importance: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Return alpha [R, P] and z [R] of binary coding by alternating least squares; rounds=0: greedy."""
    alpha, z = w.new_empty(len(w), P), w.new_empty(len(w))
    _solve("binary_scales", P, w, importance, (alpha, z), rounds, bias, scratch=8 * (2 * 2**P + 1))
    return alpha, z


def binary_codes(w: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight, uint8 [R, G]."""
    (R, G), P = w.shape, alpha.shape[1]
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    teams = _THREADS // _lanes(P)
    if codes.numel():
        inputs = w.contiguous(), alpha.contiguous(), z.contiguous()
        kernel = load(*codes_variant(P))
        kernel((-(-R // teams), 1, 1), _THREADS, *inputs, codes, R, G, shared=teams * 8 * (2**P + 1))
    return codes


def uniform_grids(
    w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], *, symmetric: bool, aside: int
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point [R] of the grid scale (code - zero) with the least error.

    Tried are parts of each group's range, and zero points up to `aside` steps off.
    """
    scale, zero = w.new_empty(len(w)), w.new_empty(len(w))
    tried = torch.tensor(shrinks, device=w.device)
    _solve("uniform_grids", bits, w, importance, (scale, zero), tried, len(tried), symmetric, aside)
    return scale, zero


def affine_grids(
    w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], rounds: int
) -> tuple[Tensor, Tensor]:
    """Return scale and lowest level [R] of the grid low + scale code: the best clipped range, then least squares."""
    scale, low = w.new_empty(len(w)), w.new_empty(len(w))
    tried = torch.tensor(shrinks, device=w.device)
    _solve("affine_grids", bits, w, importance, (scale, low), tried, len(tried), rounds)
    return scale, low


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a thread block's groups lie in memory."""

    warps: int
    teams: int  # of a warp
    scratch: int  # bytes of a team in shared memory
    group: int  # bytes of a team's group
    in_workspace: bool

    @classmethod
    def of(cls, bits: int, G: int, weighted: bool, scratch: int) -> "_Layout":
        """See SortedGroup::in of sorted_group.cuh: running sums, and weights with an odd stride."""
        teams, group = 32 // _lanes(bits), 8 * (G + 1) * (1 + weighted) + 4 * (G | 1)
        in_workspace = teams * (scratch + group) > _SHARED_WARP
        bytes_warp = teams * (scratch if in_workspace else scratch + group)
        warps = max(1, min(_THREADS // 32, _SHARED // max(1, bytes_warp)))
        return cls(warps, teams, scratch, group, in_workspace)

    @property
    def groups(self) -> int:
        """Return the groups of a thread block."""
        return self.warps * self.teams

    @property
    def shared(self) -> int:
        return self.groups * (self.scratch if self.in_workspace else self.scratch + self.group)

    @property
    def workspace(self) -> int:
        """Return bytes for each thread block, a multiple of 8."""
        return -(-self.groups * self.group // 8) * 8 if self.in_workspace else 0


def _lanes(bits: int) -> int:
    """Return how many lanes have a group: Team::LANES."""
    return int(min(2**bits, 32))


def _solve(
    name: str,
    bits: int,
    w: Tensor,
    importance: Tensor | None,
    outputs: tuple[Tensor, Tensor],
    *parameters: Tensor | int,
    scratch: int = 0,
) -> None:
    """Run a kernel over all groups; scratch: bytes of shared memory that a group needs beside its sums."""
    R, G = w.shape
    if R == 0:
        return
    w, h = w.contiguous(), None if importance is None else importance.contiguous()
    C = 1 if h is None else len(h)
    assert G > 0
    assert h is None or (h.shape[1] == G and R % C == 0)
    layout = _Layout.of(bits, G, h is not None, scratch)
    kernel = load(*variant(name, bits, layout.in_workspace))
    blocks = -(-R // layout.groups)
    if layout.in_workspace:
        blocks = min(blocks, max(1, _WORKSPACE // layout.workspace))
    workspace = torch.empty(blocks * layout.workspace, dtype=torch.uint8, device=w.device)
    step = blocks * layout.groups
    for begin in range(0, R, step):
        rows = slice(begin, min(begin + step, R))
        n = rows.stop - begin
        tensors = w[rows].data_ptr(), 0 if h is None else h.data_ptr(), workspace.data_ptr()
        groups = struct.pack("=QQQqiiii", *tensors, layout.workspace, n, G, C, begin % C)
        grid = -(-n // layout.groups), 1, 1
        kernel(grid, 32 * layout.warps, groups, *(t[rows] for t in outputs), *parameters, shared=layout.shared)
