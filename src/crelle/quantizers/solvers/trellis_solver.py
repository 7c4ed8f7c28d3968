"""Trellis codes that minimise the layer's output error  tr((T - Ŵ) H (T - Ŵ)ᵀ):  LDLQ with a Viterbi search.

    H = M D Mᵀ   M unit upper triangular in blocks of 4 inputs, D block diagonal
    for each block of inputs:   target_b = T_b + Σ_(j before b) E_j M_jb       E = T - Ŵ of what is rounded
                                codes of the block = paths nearest to target_b, distances weighted by D_b
    scales       at the end the least squares of every row, its codes fixed

A path goes through 32 rows and 4 inputs (crelle.formats.trellis). Its distance counts what the inputs of one state have
to do with each other, D_b in blocks of V; those of two states of a row count as independent, which costs 1%.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.formats.trellis import COLUMNS, ROWS, STATES, UNIT, WEIGHTS, Code, rings_of
from crelle.kernels.cpu import solver
from crelle.kernels.cuda.solver import viterbi as cuda_search
from crelle.quantizers.solvers.gptq_solver import LDLFactor

# Of Gaussian weights, by code and bits: the standard deviation of all values that leaves the least error, relative to
# that of the weights, and the share of their variance that it leaves.
SPREAD = {
    "pair": {1.0: 0.85, 1.5: 0.96, 2.0: 1.03, 2.5: 1.1, 3.0: 1.17, 3.5: 1.23, 4.0: 1.3},
    "mul1": {1.0: 0.85, 2.0: 1.02, 3.0: 1.03, 4.0: 1.1},
}
LEFT = {
    "pair": {1.0: 0.277, 1.5: 0.141, 2.0: 0.0731, 2.5: 0.0379, 3.0: 0.0197, 3.5: 0.0104, 4.0: 0.0056},
    "mul1": {1.0: 0.277, 2.0: 0.0704, 3.0: 0.0177, 4.0: 0.0046},
}
_RANGE = 5.12  # of weights and values in standard deviations, as 16 bits of the C++ search hold them
_CHUNK = 128  # inputs whose errors reach later ones by one product
_SLAB = 64  # sequences that are searched at a time in torch: 17 MB of costs each


@dataclass(frozen=True, slots=True, eq=False)
class BlockFactor:
    """H = M D Mᵀ in blocks of 4 inputs, padded to whole blocks."""

    mix: Tensor  # f32 [K', K'], M - I
    cost: Tensor  # f32 [blocks, 4, 4], D; 0 for padding
    damped: Tensor  # f32 [K, K]

    @classmethod
    def of(cls, by: LDLFactor) -> "BlockFactor":
        """Make it of a factor whose columns are in their own order."""
        K = len(by.cost)
        pad = -K % COLUMNS
        unit = by.mix.double()
        unit.diagonal().add_(1)
        unit = torch.nn.functional.pad(unit, (0, pad, 0, pad))
        unit.diagonal()[K:] = 1
        cost = torch.nn.functional.pad(by.cost.double(), (0, pad)).view(-1, COLUMNS)
        blocks = len(cost)
        own = unit.view(blocks, COLUMNS, blocks, COLUMNS).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [blocks, 4, 4]
        mix = (unit.view(-1, blocks, COLUMNS).transpose(0, 1) @ torch.linalg.inv(own)).transpose(0, 1).reshape_as(unit)
        mix = mix.reshape_as(unit).clone()
        mix.view(blocks, COLUMNS, blocks, COLUMNS).diagonal(dim1=0, dim2=2).zero_()
        return cls(mix.float(), (own * cost.unsqueeze(1) @ own.mT).float(), by.damped)

    def columns(self, begin: int, end: int) -> "BlockFactor":
        """Return the factor for inputs begin to end, where those before them are fixed; begin is a multiple of 4."""
        blocks = slice(begin // COLUMNS, -(-end // COLUMNS))
        here = slice(begin, blocks.stop * COLUMNS)
        return BlockFactor(self.mix[here, here], self.cost[blocks], self.damped)


def encode(target: Tensor, by: BlockFactor, code: Code, bits: float) -> tuple[Tensor, Tensor]:
    """Return codes [row blocks, column blocks, bytes] and scales f16 [N] for a target weight [N, K]."""
    N, K = target.shape
    scale = first_scales(target, code, bits)
    pad = (0, -K % COLUMNS, 0, -N % ROWS)
    rows = torch.nn.functional.pad(target, pad) / (torch.nn.functional.pad(scale, (0, pad[3]), value=1) * UNIT)[:, None]
    values, rings = _search(rows, by, code, bits)
    return rings, best_scales(target, by.damped, values[:N, :K], scale)


def first_scales(target: Tensor, code: Code, bits: float) -> Tensor:
    """Return the scale f32 [N] at which rows of a target [N, K] are searched for."""
    size = target.square().mean(1).sqrt()
    return (size / (code.std * UNIT) * SPREAD[code.name][bits]).half().float().clamp(min=1e-7)


def encode_columns(rows: Tensor, by: BlockFactor, code: Code, bits: float) -> tuple[Tensor, Tensor]:
    """Return values f32 [N, K] and codes [row blocks, column blocks, bytes] for rows [N, K] in units of their scales.

    Scales stay; `by` is of these columns (BlockFactor.columns).
    """
    N, K = rows.shape
    values, rings = _search(torch.nn.functional.pad(rows / UNIT, (0, -K % COLUMNS, 0, -N % ROWS)), by, code, bits)
    return values[:N, :K] * UNIT, rings


def compensated(rows: Tensor, error: Tensor, by: BlockFactor, end: int) -> Tensor:
    """Return rows [N, K - end] of the inputs after `end`, moved to where the outputs change least by `error` [N, C].

    error: T - Ŵ of the last C inputs before `end`. With E = (error, E') it solves  E M = 0 at all inputs after.
    """
    K = end + rows.shape[1]
    unit = by.mix[end:K, end:K].clone()
    unit.diagonal().add_(1)
    missing = error @ by.mix[end - error.shape[1] : end, end:K]
    moved: Tensor = torch.linalg.solve_triangular(unit, missing, upper=True, unitriangular=True, left=False)
    return rows + moved


def best_scales(target: Tensor, damped: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Return the f16 scale of each row with the least error for the values that its codes stand for."""
    values = values * UNIT
    with_h = values @ damped
    square = (with_h * values).sum(1)
    found = (with_h * target).sum(1) / square.clamp(min=1e-30)
    near = (found - scale).abs() < scale / 2  # elsewhere the row is 0, or its system nearly singular
    return torch.where(near & (square > 0), found, scale).half()


def _search(rows: Tensor, by: BlockFactor, code: Code, bits: float) -> tuple[Tensor, Tensor]:
    """Return the values [N', K'] and the rings of rows [N', K'] in units of the values."""
    N, K = rows.shape
    shift, V = code.shift(bits), code.weights
    values = code.values(torch.arange(STATES, device=rows.device)).float()  # [states, V]
    each = _roots(by.cost.view(-1, COLUMNS // V, V, COLUMNS // V, V).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2))
    if cuda_search.usable(rows, shift):
        return cuda_search.encode(rows, by.mix, each * _fraction(code.std), values, shift)
    ordered = solver.in_viterbi_order(values, shift)
    found, left = torch.empty_like(rows), torch.zeros_like(rows)
    rings = []
    for begin in range(0, K, _CHUNK):
        end = min(begin + _CHUNK, K)
        wanted = rows[:, begin:end] + left[:, :begin] @ by.mix[:begin, begin:end]
        for b in range(begin, end, COLUMNS):
            here = slice(b, b + COLUMNS)
            want = wanted[:, b - begin : b - begin + COLUMNS] + left[:, begin:b] @ by.mix[begin:b, here]
            roots = each[b // COLUMNS]
            x = want.reshape(N // ROWS, ROWS, COLUMNS // V, 1, V) @ roots
            x = x.reshape(N // ROWS, WEIGHTS // V, V)
            states = paths(values, roots, x, shift, code.std, ordered)
            found[:, here] = values[states].reshape(N, COLUMNS)
            left[:, here] = rows[:, here] - found[:, here]
            rings.append(rings_of(states, shift))
    return found, torch.stack(rings, 1)


def _roots(cost: Tensor) -> Tensor:
    """Return R [B, n, V, V], R Rᵀ in the proportions of cost [B, n, V, V]; a block's diagonals get the mean 1."""
    mean = cost.diagonal(dim1=2, dim2=3).mean((1, 2))[:, None, None, None]
    scaled = torch.where(mean > 0, cost / mean, 0.0)
    root, failed = torch.linalg.cholesky_ex(scaled)
    flat = torch.diag_embed(scaled.diagonal(dim1=2, dim2=3).clamp(min=0).sqrt())
    return torch.where((failed > 0)[..., None, None], flat, root)


def _fraction(unit: float) -> float:
    """Return the factor of values and weights as integers of 16 bits; unit: the standard deviation of the values."""
    return 32767 / (_RANGE * unit)


def paths(values: Tensor, roots: Tensor, x: Tensor, shift: int, unit: float, ordered: Tensor | None = None) -> Tensor:
    """Return the states int64 [S, n] of the rings nearest to x [S, n, V] in units of values, already times roots.

    values [states, V], roots [columns, V, V]: state i has the values times roots[i % columns]. ordered: the same values
    as the C++ search takes them, where they are at hand.
    """
    n, to = x.shape[1], _fraction(unit)
    on_gpu = cuda_search.usable(x, shift) and (n, len(roots)) == (WEIGHTS // x.shape[2], COLUMNS // x.shape[2])
    if on_gpu or solver.usable(x):
        given = (x * to).round_().clamp_(-32767, 32767).to(torch.int16).flatten(1)
        if on_gpu:
            return cuda_search.rings(values, roots * to, given, shift).long()
        ordered = solver.in_viterbi_order(values, shift) if ordered is None else ordered
        return solver.viterbi(ordered, roots * to, given, shift, window=n).long()
    tables = torch.stack([values @ r for r in roots])  # [columns, states, V]
    return torch.cat([_paths(tables, x[s : s + _SLAB], shift) for s in range(0, len(x), _SLAB)])


def _paths(tables: Tensor, x: Tensor, shift: int) -> Tensor:
    """Do so in torch: first for the ring opened at half its length, whose middle says where it is closed."""
    half = x.shape[1] // 2
    low = STATES >> shift
    turned = _viterbi(tables.roll(half % len(tables), 0), x.roll(half, 1), shift, None)
    return _viterbi(tables, x, shift, turned[:, half] % low)


def _viterbi(tables: Tensor, x: Tensor, shift: int, ends: Tensor | None) -> Tensor:
    """Return the nearest path [S, n]; `ends` [S]: low bits of the first state and high bits of the last one."""
    S, n, _ = x.shape
    J, low = 1 << shift, STATES >> shift
    cost, before = torch.zeros(S, low, device=x.device), []
    if ends is not None:
        cost = torch.full_like(cost, torch.inf).scatter_(1, ends[:, None], 0)
    for t in range(n):
        far = torch.zeros(S, STATES, device=x.device)
        for v in range(x.shape[2]):
            far += (x[:, t, v, None] - tables[t % len(tables), :, v]).square_()
        far.view(S, J, low).add_(cost.unsqueeze(1))
        cost, chosen = far.view(S, low, J).min(-1)  # predecessors of a state have its low bits as their high bits
        before.append(chosen.to(torch.uint8))
    group = cost.argmin(1) if ends is None else ends
    states = torch.empty(S, n, dtype=torch.int64, device=x.device)
    for t in reversed(range(n)):
        states[:, t] = (group << shift) | before[t].gather(1, group[:, None])[:, 0].long()
        group = states[:, t] & (low - 1)
    return states
