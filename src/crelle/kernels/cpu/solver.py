"""Inner loops of quantizers in C++, for weights on a CPU; crelle.quantizers has them in torch too, as the reference.

Groups of weights are [R, G]; importances [C, G], where that of group r is row r modulo C, 0 for padding; None: all 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels import cpu


def usable(w: Tensor) -> bool:
    """Whether the loops of this module can work on a tensor."""
    return w.device.type == "cpu" and w.dtype == torch.float32 and cpu.available() is None


def binary_scales(w: Tensor, importance: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Return alpha [R, P] and z [R] of binary coding by alternating least squares; rounds=0: greedy."""
    alpha, z = torch.empty(len(w), P), torch.empty(len(w))
    cpu.core().binary_scales(_array(w), _array(importance), rounds, bias, alpha.numpy(), z.numpy())
    return alpha, z


def binary_codes(w: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight, uint8 [R, G]."""
    codes = torch.empty(w.shape, dtype=torch.uint8)
    cpu.core().binary_codes(_array(w), _array(alpha), _array(z), codes.numpy())
    return codes


def uniform_grids(
    w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], *, symmetric: bool, aside: int
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point [R] of the grid scale (code - zero) with the least error.

    Tried are parts of each group's range, and zero points up to `aside` steps off.
    """
    scale, zero = torch.empty(len(w)), torch.empty(len(w))
    tried = torch.tensor(shrinks).numpy()
    weights = _array(w)
    cpu.core().uniform_grids(weights, _array(importance), bits, symmetric, tried, aside, scale.numpy(), zero.numpy())
    return scale, zero


def affine_grids(
    w: Tensor, importance: Tensor | None, bits: int, shrinks: Sequence[float], rounds: int
) -> tuple[Tensor, Tensor]:
    """Return scale and lowest level [R] of the grid low + scale code: the best clipped range, then least squares."""
    scale, low = torch.empty(len(w)), torch.empty(len(w))
    tried = torch.tensor(shrinks).numpy()
    weights = _array(w)
    cpu.core().affine_grids(weights, _array(importance), bits, tried, rounds, scale.numpy(), low.numpy())
    return scale, low


def affine_sweep(target: Tensor, mix: Tensor, scale: Tensor, low: Tensor, top: Tensor) -> Tensor:
    """Round the columns of target [K, N] in order, with error feedback, to low + scale (0 … top); return the errors.

    scale, low [K, N], top [N]; mix [K, K] is upper triangular, of the error of one column in the later ones.
    """
    error = torch.empty(target.shape)
    given = (_array(t) for t in (target, mix.T, scale, low, top))
    cpu.core().affine_sweep(*given, error.numpy())
    return error


def nested_sweep(
    target: Tensor,
    error: Tensor | None,
    mix: Tensor | None,
    grids: Tensor,
    weights: Tensor,
    coarse: int,
    group: Tensor,
) -> Tensor:
    """Round the columns of target [K, N] in order to codes that several precisions have in common, uint8 [K, N].

    error [K, P N]: of all columns and precisions before the pass; None: none, and mix is upper triangular. mix [K, K],
    of the error of one column in the others; None: they are not propagated. grids [C, P, 2, N]: scale and lowest level;
    weights [P]: of the precisions; coarse: levels of the coarsest one; group [K]: of each column.
    """
    codes = torch.empty(target.shape, dtype=torch.uint8)
    given = (_array(t) for t in (target, None if mix is None else mix.T, grids, weights.sqrt()))
    cpu.core().nested_sweep(*given, coarse, _array(group.to(torch.int32)), _array(error), codes.numpy())
    return codes


def level_values(codes: Tensor, levels: Tensor, group: int, target: Tensor | None = None) -> Tensor:
    """Return the levels that codes uint8 [N, K] name, transposed to [K, N]; target [N, K]: what it has more than them.

    levels [N, C, L]: of the groups of `group` inputs of each row.
    """
    result = torch.empty(codes.shape[::-1])
    cpu.core().spread_levels(_array(codes), _array(levels), group, _array(target), result.numpy())
    return result


def row_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """Return error H error' of each row [N] of an error [K, N]."""
    result = torch.empty(error.shape[1])
    cpu.core().row_errors(_array(hessian), _array(error), result.numpy())
    return result


def solve_scales(error: Tensor, hessian: Tensor, features: Tensor, group: int, ridge: float) -> Tensor:
    """Return the change of scales [N, C, U] that lowers error H error' of each row most.

    error [K, N]; features [U, K, N]: the factor of each scale in each weight. NaN where the equations are singular.
    """
    K, N = error.shape
    change = torch.empty(-(-K // group), len(features), N)
    given = (_array(t) for t in (hessian, error, features))
    cpu.core().solve_scales(*given, group, ridge, change.numpy())
    return change.permute(2, 0, 1)


def _array(t: Tensor | None) -> object:
    return None if t is None else t.detach().contiguous().numpy()


def in_viterbi_order(values: Tensor, shift: int) -> Tensor:
    """Return values [2^16, V] of states as `viterbi` takes them, int16 [V, 2^16]: by low bits, then the others."""
    states, V = values.shape
    return values.to(torch.int16).reshape(states >> shift, 1 << shift, V).permute(2, 1, 0).reshape(V, states)


def viterbi(values: Tensor, roots: Tensor, x: Tensor, shift: int, window: int) -> Tensor:
    """Return the states uint16 [S, 128 / V] of the rings of a trellis that are nearest to x int16 [S, 128].

    values: of `in_viterbi_order`; roots f32 [columns, V, V]: state i has the values times roots[i % columns].
    """
    states = torch.empty(len(x), x.shape[1] // len(values), dtype=torch.uint16)
    cpu.core().viterbi(_array(values), _array(roots), _array(x), shift, window, states.numpy())
    return states
