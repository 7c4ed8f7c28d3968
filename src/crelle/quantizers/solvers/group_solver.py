"""Where the loops over groups of weights run: C++ on a CPU, CUDA kernels on a GPU, otherwise torch, the reference."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from crelle.kernels.cpu import solver as cpu_solver
from crelle.kernels.cuda.solver import group_solver as cuda_solver


class GroupSolver(Protocol):
    """Levels of groups [R, G] with importances [C, G], that of group r being row r modulo C; see kernels/cpu/solver.py.

    None: all 1; padding has 0.
    """

    def binary_scales(
        self, w: Tensor, importance: Tensor | None, P: int, rounds: int, bias: bool
    ) -> tuple[Tensor, Tensor]: ...

    def binary_codes(self, w: Tensor, alpha: Tensor, z: Tensor) -> Tensor: ...

    def uniform_grids(
        self, w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], *, symmetric: bool, aside: int
    ) -> tuple[Tensor, Tensor]: ...

    def affine_grids(
        self, w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], rounds: int
    ) -> tuple[Tensor, Tensor]: ...


def group_solver(w: Tensor) -> GroupSolver | None:
    """Return the solver for groups on this tensor's device; None: the caller's own, in torch."""
    if cpu_solver.usable(w):
        return cpu_solver
    if cuda_solver.usable(w):
        return cuda_solver
    return None


def expanded(importance: Tensor, R: int) -> Tensor:
    """Return importances [C, G] as [R, G], for solvers in torch."""
    return importance.repeat(R // len(importance), 1)
