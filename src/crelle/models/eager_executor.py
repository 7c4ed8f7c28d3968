"""Runs a decoder over batches of sequences layer by layer in torch, on any device; see crelle.kernels.executor.

    tokens     of sequence a: 1      of b: 1      of c: 5 of its prompt       N = 7 rows [N, width]
    linears    all rows at once: a weight is read once for the whole batch
    attention  sequence by sequence, each over its own pages (PagedBatch)
    head       only for the rows that are wanted: those from which a token is sampled, or that are scored

The forward is the model's own (crelle.models.decoder), with positions token by token.

batch_invariant   A token's bits do not depend on what else is in the pass: not on other sequences, not on how its
        prompt was split into chunks, not on whether it was sampled here or runs again after a preemption. Only rows go
        together that are computed by the same instructions in the same order however many they are:
            products      the C++ kernels have two paths, for fewer than 24 rows and (AMX tiles) for more, which
                          differ in the last bits; rows go in chunks of 16. Other kernels always get 16 rows, some
                          of them padding: torch takes another path for each small number of rows.
            activations   torch's exp is one function within a vector register and another one for the rest of a
                          thread's share; rows go in chunks without a rest and for one thread
            attention     each token by itself
            positions     cos and sin from a table that is made in blocks of fixed size, for the same reason
        The default on a CPU. What it costs is in docs/notes/engine.md. Elsewhere rows go together as they come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.formats.kv.pages import KVPages
from crelle.kernels import cpu
from crelle.kernels import reference_attention as paged
from crelle.kernels.executor import Chunk, block_table
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.kernels.spec import RopeSpec
from crelle.models.decoder import PLAIN, Compute, DecoderModel
from crelle.models.linear import QuantLinear
from crelle.models.rope import AngleTable

ROWS = 16  # of a chunk of a batch-invariant product
_SERIAL = 16384  # elements that torch leaves to one thread: gelu shares out more, other activations from 32768 on
_LANES = 64  # a multiple of what torch takes at once of any dtype


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """Where the tokens of one pass find the keys and values of their sequences: what a model knows as a cache."""

    layers: Sequence[KVPages]
    table: Tensor  # int32 [B, max_pages]: the pages of each sequence
    starts: Sequence[int]  # cu_seqlens: tokens starts[b] … starts[b+1]-1 of the pass belong to sequence b
    before: Sequence[int]  # tokens that each sequence has in its pages already
    centers: Sequence[Tensor | None]  # of each layer's keys
    batch_invariant: bool = True
    _reads: tuple[Tensor, list[int], list[int]] = field(init=False)  # table, lengths and starts of `attend`

    def __post_init__(self) -> None:
        counts = [end - begin for begin, end in pairwise(self.starts)]
        if self.batch_invariant:  # every token reads as if it were the only one of its sequence
            table = self.table.repeat_interleave(torch.tensor(counts, device=self.table.device), 0)  # [N, max_pages]
            reads = table, [p + 1 for p in self.positions], list(range(1 + self.starts[-1]))
        else:
            reads = self.table, [b + n for b, n in zip(self.before, counts, strict=True)], list(self.starts)
        object.__setattr__(self, "_reads", reads)

    @property
    def positions(self) -> list[int]:
        """Where each token of the pass stands in its sequence."""
        spans = zip(self.before, pairwise(self.starts), strict=True)
        return [before + i for before, (begin, end) in spans for i in range(end - begin)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        """Store k and v [N, Hkv, D]; return what q [N, H, D] sees."""
        pages = self.layers[layer]
        paged.append(k, v, pages, self.table, self.before, starts=self.starts, center=self.centers[layer])
        table, lengths, starts = self._reads
        return paged.attend(
            q, pages, table, lengths, starts=starts, window=how.window, softcap=how.softcap, sinks=how.sinks
        )


class EagerExecutor:
    """Runs any model; it shares all weights with the model it is made of."""

    prefill_differs = False

    def __init__(
        self,
        model: DecoderModel,
        layers: Sequence[KVPages],
        centers: Sequence[Tensor | None],
        *,
        batch_invariant: bool | None = None,
    ) -> None:
        """Take the pages of all layers and what their keys are stored relative to; batch_invariant: on a CPU."""
        self.model, self.layers, self.centers = model, layers, centers
        self.batch_invariant = model.device.type == "cpu" if batch_invariant is None else batch_invariant
        self._compute = BatchInvariant(model.dtype, model.device) if self.batch_invariant else PLAIN

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Store the keys and values of all chunks; return logits f32 [wanted rows, V], in their order."""
        starts, device = [0, *accumulate(len(c.ids) for c in chunks)], self.model.device
        table = block_table([c.pages for c in chunks]).to(device)
        before = [c.start for c in chunks]
        batch = PagedBatch(self.layers, table, starts, before, self.centers, self.batch_invariant)
        wanted = [row for c, end in zip(chunks, starts[1:], strict=True) for row in range(end - c.rows, end)]
        ids = torch.tensor([i for c in chunks for i in c.ids], device=device)
        x = self.model.hidden(ids, torch.tensor(batch.positions, device=device), batch, self._compute)
        return self.model.logits(x[torch.tensor(wanted, dtype=torch.long, device=device)], self._compute)


class BatchInvariant(Compute):
    """A row has the same bits in any batch."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._tables: dict[RopeSpec, AngleTable] = {}
        self._of = dtype, device

    def linear(self, linear: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(linear, QuantLinear)
        return invariant_product(linear, x)

    def linears(self, linears: Sequence[Any], x: Tensor) -> list[Tensor]:
        return [self.linear(linear, x) for linear in linears]

    def activate(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return invariant_elementwise(f, x)

    def angles(self, rope: RopeSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        table = self._tables.setdefault(rope, AngleTable(rope, *self._of))
        return table.at(positions)


def invariant_product(linear: QuantLinear, x: Tensor) -> Tensor:
    """Return linear(x) for x [M, K], each row with the bits that it has in any other batch."""
    kernel, data = linear.prepared.kernel, linear.prepared.data
    y = x.new_empty(len(x), linear.problem.N)  # [M, N]
    if linear.kernel == "dense" and isinstance(data, Tensor) and _in_core(x, data):
        cpu.core().dense_matmul(x.contiguous().numpy(), data, y.numpy())  # row by row at heart
        return y if linear.bias is None else y + linear.bias
    whole = linear.kernel in ("cpu", "cpu-int8", "cpu-integer")  # any number of rows up to ROWS takes the same path
    for at in range(0, len(x), ROWS):
        rows = x[at : at + ROWS]
        missing = 0 if whole else ROWS - len(rows)
        y[at : at + ROWS] = kernel.run(F.pad(rows, (0, 0, 0, missing)) if missing else rows, data)[: len(rows)]
    return y if linear.bias is None else y + linear.bias


def _in_core(x: Tensor, w: Tensor) -> bool:
    plain = x.dtype == w.dtype == torch.float32 and x.device.type == w.device.type == "cpu"
    return plain and cpu.available() is None and w.is_contiguous()


def invariant_elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f(x) for x [M, N], each row with the bits that it has in any other batch."""
    M, N = x.shape
    rows_at_once = max(1, _SERIAL // N) if N % _LANES == 0 else 1
    return f(x) if rows_at_once >= M else torch.cat([f(x[at : at + rows_at_once]) for at in range(0, M, rows_at_once)])
