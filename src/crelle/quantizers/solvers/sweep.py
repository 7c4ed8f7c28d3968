"""One pass over the columns of a weight, each rounded to the level nearest to  t_i + Σ_j e_j mix[j, i].

`sweep_levels` takes the levels of all groups at once; on a CPU it runs in C++ (sweep.h), where errors stay in the cache
and a pass costs N K² multiply-adds, on a GPU in CUDA (crelle.kernels.cuda.solver.sweep), 64 columns a launch. `sweep`
asks for the levels of a column when it comes to it, in torch, and is what both are compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crelle.kernels import cpu, cuda
from crelle.kernels.cuda.solver.sweep import sweep_table

_BLOCK = 64  # columns per block: errors reach later blocks by one matrix product


class Choice(Protocol):
    """The levels that one column may take."""

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels nearest to want [N], and their codes."""
        ...


class SortedLevels(NamedTuple):
    """The levels of one group in ascending order: a binary search finds the nearest."""

    values: Tensor  # f32 [N, L]
    codes: Tensor  # int64 [N, L]
    borders: Tensor  # f32 [N, L-1]

    @classmethod
    def of(cls, values: Tensor, codes: Tensor) -> "SortedLevels":
        return cls(values, codes, ((values[:, 1:] + values[:, :-1]) / 2).contiguous())

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels nearest to want [N], and their codes."""
        rank = torch.searchsorted(self.borders, want[:, None])
        return self.values.gather(1, rank)[:, 0], self.codes.gather(1, rank)[:, 0]


class _Outliers(NamedTuple):
    """The levels of a column in which some weights take any value, as f16 stores it."""

    levels: SortedLevels
    outliers: Tensor  # bool [N]
    kept: Tensor  # f32 [N], where the weights of outliers go

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        value, code = self.levels.nearest(want)
        exact = want.half().float()
        self.kept.copy_(torch.where(self.outliers, exact, 0.0))
        return torch.where(self.outliers, exact, value), code


@dataclass(frozen=True, slots=True, eq=False)
class LevelTable:
    """The levels of all groups, ascending within a group: group g has rows first[g] … first[g] + count[g]."""

    values: Tensor  # f32 [levels, N]
    codes: Tensor | None  # uint8 [levels, N]; None: the code of a level is its place in its group
    first: Sequence[int]
    count: Sequence[int]

    def sorted_levels(self) -> list[SortedLevels]:
        found = []
        for first, count in zip(self.first, self.count, strict=True):
            values = self.values[first : first + count].T.contiguous()
            if self.codes is None:
                codes = torch.arange(count, device=values.device).expand(values.shape)
            else:
                codes = self.codes[first : first + count].T.long()
            found.append(SortedLevels.of(values, codes))
        return found


def sweep_levels(
    target: Tensor,
    error: Tensor | None,
    mix: Tensor,
    table: LevelTable,
    group: Sequence[int],
    outliers: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Round the columns of target [K, N], the i-th to the levels of group[i]; returns codes and weights of outliers.

    error [K, N]: of all columns before the pass; None: none, and mix is upper triangular. outliers: bool [K, N].
    """
    target = target.contiguous()
    kept = None if outliers is None else torch.zeros_like(target)
    if target.device.type == "cpu" and cpu.available() is None:
        codes = torch.empty(target.shape, dtype=torch.uint8)
        now = torch.zeros_like(target) if error is None else torch.empty_like(target).copy_(error)
        cpu.core().sweep(
            target.numpy(),
            mix.T.contiguous().numpy(),
            error is None,
            table.values.contiguous().numpy(),
            None if table.codes is None else table.codes.contiguous().numpy(),
            *(torch.tensor(t, dtype=torch.int32).numpy() for t in (table.first, table.count, group)),
            None if outliers is None else outliers.contiguous().view(torch.uint8).numpy(),
            now.numpy(),
            codes.numpy(),
            None if kept is None else kept.numpy(),
        )
        return codes, kept
    if target.device.type == "cuda" and cuda.available() is None:
        of = [(table.first[g], table.count[g]) for g in group]
        first, count = torch.tensor(of, dtype=torch.int32).T.contiguous().to(target.device)
        most = max(table.count)
        return sweep_table(target, error, mix, table.values, table.codes, first, count, most, outliers)
    by_group = table.sorted_levels()
    some = [] if outliers is None else outliers.any(1).tolist()

    def levels_at(i: int, _: Tensor) -> Choice:
        levels = by_group[group[i]]
        if outliers is None or kept is None or not some[i]:
            return levels
        return _Outliers(levels, outliers[i], kept[i])

    return sweep(target, error, mix, levels_at), kept


def sweep(
    target: Tensor,
    error: Tensor | None,
    mix: Tensor,
    levels_at: Callable[[int, Tensor], Choice],
    group: int = _BLOCK,
) -> Tensor:
    """Round the columns in order: target, error and the codes returned are [K, N], in the order of the pass.

    Within a block each column's change of error is applied to the block's later columns at once, and to those after the
    block when it ends. A block never crosses the end of a group, so a group's weights are up to date when it begins.
    `levels_at` gives the levels of the i-th column, from the target weights as adjusted so far.
    """
    K = len(target)
    want = target.clone() if error is None else torch.addmm(target, mix.T, error)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    for begin, end in _blocks(K, group):
        here = mix[begin:end, begin:end].contiguous()
        change = torch.empty_like(target[begin:end])
        for i in range(begin, end):
            value, codes[i] = levels_at(i, want).nearest(want[i])
            now = torch.sub(target[i], value, out=change[i - begin])
            if error is not None:
                now -= error[i]
            want[i + 1 : end].addr_(here[i - begin, i + 1 - begin :], now)
        want[end:].addmm_(mix[begin:end, end:].T, change)
    return codes


def _blocks(K: int, group: int) -> list[tuple[int, int]]:
    """Split K columns into blocks that do not cross the end of a group."""
    groups = [(g, min(g + group, K)) for g in range(0, K, group)]
    return [(b, min(b + _BLOCK, end)) for begin, end in groups for b in range(begin, end, _BLOCK)]
