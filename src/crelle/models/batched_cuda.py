"""Many sequences at once on a GPU: a step of one token each is a CUDA graph, prompts run as they come.

    one token each   ids, positions, lengths and tables of pages are copied into buffers that stay where they are; the
                     graph of the next larger number of sequences (BUCKETS) runs, its other rows being nobody
    prompts          all rows of all prompts go through the products together, and through torch's attention over what
                     their pages hold, so that they see what later tokens will see and not numbers that were never
                     stored (`exact`: token by token, as later ones do)

    products         crelle.kernels.cuda.norm_linear

A row's numbers do not depend on what stands in the other rows, but in their last bits on how many there are: each
bucket has its own order of sums. With a cache of 4 bits that shows: a sum that differs in its last bit may round to
another code. `exact` has one order of sums for all: products of even.py, attention cut the same way for every bucket.
Then a text is, to the last bit, the same alone and in company, however its prompt was cut, and after a preemption.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.formats.kv import KVFormat, KVPages
from crelle.kernels import cuda
from crelle.kernels.cuda.activations import Prologue
from crelle.kernels.cuda.fused_linear import STEPPED, FusedLinear, Norm
from crelle.kernels.cuda.norm_linear import linear_residual, norm_linear, takes_packed
from crelle.models.companies import Company, companies
from crelle.models.loader import Model
from crelle.models.opt import OPT
from crelle.models.step_buffers import BUCKETS, Buffers, Drawn, Part, bucket_of

if TYPE_CHECKING:
    from crelle.kernels.cuda.gemm import PackedX
    from crelle.kernels.cuda.paged_attention import PagedTileConfig

Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, int | None], "Tensor | PackedX"]


def why_not(model: Model, kv: KVFormat) -> str | None:
    """Return why a model with such a cache runs layer by layer on its device, or None where this module runs it."""
    if model.device.type != "cuda":
        return f"graphs of a whole step run on a GPU, not on {model.device.type}"
    if reason := cuda.available():
        return f"a whole step needs the CUDA kernels, and this process {reason}"
    from crelle.kernels.cuda import paged_attention

    if reason := paged_attention.supports(kv, model.c.head_size, model.dtype):
        return f"the paged attention {reason}"
    if others := sorted({linear.kernel for linear in model.linears()} - STEPPED):
        return f"kernel '{others[0]}' is not part of the step"
    return model.step_lacks()


class CudaBatch:
    """A model over batches of sequences whose keys and values lie in pages; `why_not` has been asked.

    Threads take turns. The logits of a call lie in a buffer that the next one overwrites: threads that share a batch
    hold `lock` from a call until they have read, or drawn from, what it returned.
    """

    def __init__(
        self, model: Model, layers: Sequence[KVPages], centers: Sequence[Tensor | None], *, exact: bool = False
    ) -> None:
        """Share the pages of all layers with others of the same form."""
        self.model, self.pages, self.centers, self.exact = model, layers, centers, exact
        graphed = model.graphed()
        self.step: Any = model.make_step() if graphed is None else graphed.run  # its weights lie joined, once
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        self._turn = 0
        self.lock = RLock()

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Store the tokens of all parts; return logits f32 [wanted parts, V]. The next call overwrites them."""
        with self.lock:
            return self._forward(parts)

    def _forward(self, parts: Sequence[Part]) -> Tensor:
        singles = [i for i, part in enumerate(parts) if len(part.ids) == 1]
        longer = [i for i, part in enumerate(parts) if len(part.ids) > 1]
        found, whose = list[Tensor](), list[int]()
        if longer:  # first: they read no buffer that a graph writes
            found.append(self._prompts([parts[i] for i in longer]))
            whose += [i for i in longer if parts[i].wanted]
        chunks = [singles[at : at + BUCKETS[-1]] for at in range(0, len(singles), BUCKETS[-1])]
        for chunk in chunks:
            logits = self.graph(len(chunk)).run([parts[i] for i in chunk])
            if len(chunk) == len(parts) and all(part.wanted for part in parts):
                return logits  # what most steps are
            found.append(logits.clone() if len(chunks) > 1 else logits)
            whose += chunk
        at = {i: row for row, i in enumerate(whose)}
        order = [at[i] for i, part in enumerate(parts) if part.wanted]
        rows = torch.cat(found) if found else torch.empty(0, self.model.c.vocabulary, device=self.model.device)
        return rows if order == list(range(len(whose))) else rows[self._there(order)]

    @torch.inference_mode()
    def draw(self, logits: Tensor) -> Drawn:
        """Take the likeliest tokens of at most DRAWS rows; the next call may refer to them (`Part.follows`)."""
        with self.lock:
            found = self._buffers.argmax(logits.contiguous())
            self._turn ^= 1
            return Drawn(found, self._buffers.told[self._turn])

    def _there(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers on the device, without waiting for what it has under way."""
        return torch.tensor(numbers, dtype=dtype).pin_memory().to(self.model.device, non_blocking=True)

    @torch.inference_mode()
    def graph(self, rows: int) -> "_Graph":
        """Return the graph for so many sequences, captured when it is first asked for."""
        bucket = bucket_of(rows)
        with self.lock:
            if bucket not in self._graphs:
                self._graphs[bucket] = _Graph(self, bucket, self._buffers, self._pool)
                self._pool = self._graphs[bucket].pool
            return self._graphs[bucket]

    # --- the layers -------------------------------------------------------------------------------------------------

    def through(self, x: Tensor, attend: Attend) -> Tensor:
        """Return x [N, width] behind all layers; attend(layer, qkv, q_norm, k_norm, window) -> [N, heads * D]."""
        activation: Prologue = "RELU" if isinstance(self.model, OPT) else "SILU_MUL"
        more: Tensor | None = None  # to be added to x
        for i, ((qkv, o, up, down), (norm, norm_mlp)) in enumerate(self._parts):
            y, x = norm_linear(qkv, x, more, self._norm, norm, self.exact)
            x, more = linear_residual(o, attend(i, y, *self._heads[i]), x, batch_invariant=self.exact)
            y, x = norm_linear(up, x, more, self._norm, norm_mlp, self.exact)
            x, more = linear_residual(down, y, x, activation, self.exact)
        return x if more is None else x + more

    @property
    def _norm(self) -> Prologue:
        return "LAYER_NORM" if isinstance(self.model, OPT) else "RMS_NORM"

    @cached_property
    def _parts(self) -> list[tuple[list[FusedLinear], list[Norm]]]:
        """The products and norms of each layer, in the order in which they run."""
        kinds = (FusedLinear, Norm)
        return [tuple([p for p in layer if isinstance(p, kind)] for kind in kinds) for layer in self.step.layers]  # type: ignore[misc]

    @cached_property
    def _heads(self) -> list[tuple[Tensor | None, Tensor | None, int | None]]:
        """What the heads of each layer are normed with, and how far they see."""
        if isinstance(self.model, OPT):
            return [(None, None, None)] * self.model.c.layers
        attentions: list[Any] = [layer.attention for layer in self.model.layers]
        return [(*(norm and norm.weight for norm in (a.q_norm, a.k_norm)), a.window) for a in attentions]

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return f32 [N, V] for x [N, width]."""
        dtype = torch.float32 if x.shape[0] <= 4 else None  # few rows come as f32, others are made so once
        y, _ = norm_linear(self.step.head, x, None, self._norm, self.step.norm, self.exact, dtype)
        return y.float() if out is None else out.copy_(y)

    def append(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, where: "_Where") -> Tensor:
        """Store keys and values of qkv [N, (heads + 2 kv_heads) D] in the pages; return q as attention wants it."""
        from crelle.kernels.cuda import paged_attention

        c, pages = self.model.c, self.pages[layer]
        heads = qkv.view(qkv.shape[0], -1, c.head_size)
        q, k, v = heads.split([c.heads, pages.heads, pages.heads], 1)  # type: ignore[no-untyped-call]
        turned = paged_attention.append(
            *(k, v, pages, where.table, where.position),
            starts=where.starts,
            center=self.centers[layer],
            q=q,
            cos=None if isinstance(self.model, OPT) else self.step.cos,
            sin=None if isinstance(self.model, OPT) else self.step.sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=c.norm_eps,
        )
        assert turned is not None
        return turned

    def attend(
        self,
        layer: int,
        q: Tensor,
        table: Tensor,
        lengths: Tensor,
        window: int | None,
        cut: "PagedTileConfig",
        **options: Any,
    ) -> Tensor:
        """Return what one token of each sequence sees, [B, heads, D], for q [B, heads, D] of `append`."""
        from crelle.kernels.cuda import paged_attention

        return paged_attention.attend(
            *(q, self.pages[layer], table, lengths),
            window=window,
            rotated=True,
            dtype=self.model.dtype,
            config=cut,
            **options,
        )

    def cut(self, rows: int) -> "PagedTileConfig":
        """How attention shares out the work for so many sequences; with `exact` the same for any number."""
        from crelle.kernels.cuda import paged_attention

        c, pages = self.model.c, self.pages[0]
        longest, most = self._width * pages.format.page, BUCKETS[-1] if self.exact else rows
        found = paged_attention.tile_config(pages.format, most, c.heads, pages.heads, c.head_size, longest)
        return replace(found, splits=max(1, min(8, longest // 4096))) if self.exact else found

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prompts(self, parts: Sequence[Part]) -> Tensor:
        """Run prompts, or portions of them; return the logits of those that are wanted."""
        starts = [0, *accumulate(len(part.ids) for part in parts)]
        ids = self._there([i for part in parts for i in part.ids])
        positions = self._there([part.before + i for part in parts for i in range(len(part.ids))], torch.int32)
        table = torch.zeros(len(parts), self._width, dtype=torch.int32)
        for row, part in zip(table.numpy(), parts, strict=True):
            row[: len(part.pages)] = part.pages
        before, numbers = self._there([part.before for part in parts], torch.int32), self._there(starts, torch.int32)
        where = _Where(table.pin_memory().to(self.model.device, non_blocking=True), before, numbers)
        rows = where.table  # [N, max_pages]
        if self.exact:
            rows = rows.repeat_interleave(numbers.diff(), 0, output_size=starts[-1])
        lengths = positions + 1
        company = companies(
            [(part.before, len(part.ids)) for part in parts], self.model.c.context
        )  # as memory.py counts
        calls = [_Call(who, self._there(who.new + who.all, torch.int32).view(2, -1)) for who in company]
        x = self.step.embed(ids, positions) if isinstance(self.model, OPT) else self.step.embed(ids)

        def attend(layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int | None) -> Tensor:
            q = self.append(layer, qkv, q_norm, k_norm, where)
            if self.exact:
                seen = self.attend(layer, q, rows, lengths, window, self.cut(len(ids)), pdl=False)
                return seen.view(len(ids), -1)
            each = [self._attend_prompts(layer, q, where.table, some, window) for some in calls]
            return self._turned_back(layer, each[0] if len(each) == 1 else torch.cat(each)).view(len(ids), -1)

        x = self.through(x, attend)
        last = [end - 1 for part, end in zip(parts, starts[1:], strict=True) if part.wanted]
        return (
            self.logits(x[self._there(last)]) if last else x.new_empty(0, self.model.c.vocabulary, dtype=torch.float32)
        )

    def _attend_prompts(self, layer: int, q: Tensor, table: Tensor, call: "_Call", window: int | None) -> Tensor:
        """Some prompts' tokens of q [N, H, D], as they are stored; each sees itself and those before it in its text."""
        from crelle.kernels.cuda import paged_attention

        who = call.who
        k, v = paged_attention.read(self.pages[layer], table[who.prompts], call.all, who.all[-1])
        seen: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(  # what scaled_dot_product_attention calls
            *(q[who.rows], k, v, call.new, call.all, who.longest_new, who.longest),
            *(0.0, True, False),
            window_size_left=None if window is None else window - 1,
        )
        return seen[0]

    def _turned_back(self, layer: int, y: Tensor) -> Tensor:
        """H undoes itself."""
        from crelle.kernels.cuda import paged_attention

        pages = self.pages[layer]
        back = paged_attention.append(None, None, pages, None, None, q=y) if pages.format.rotate else y
        assert back is not None
        return back.to(self.model.dtype)

    @cached_property
    def _width(self) -> int:
        """Pages of the longest text."""
        page = self.pages[0].format.page
        return min(self.pages[0].count, -(-self.model.c.context // page))

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(BUCKETS[-1], self._width, self.model.c.vocabulary, self.model.device)


@cache
def _rehearsals(device: torch.device) -> torch.cuda.Stream:
    """One stream for all graphs of all engines: cuBLAS keeps memory for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Where:
    table: Tensor  # int32 [B, max_pages]
    position: Tensor  # int32 [B]
    starts: Tensor | None = None  # int32 [B + 1]; None: one token each


class _Call:
    """What torch's attention is told of some prompts: where their new tokens begin, and all of their tokens."""

    def __init__(self, who: Company, starts: Tensor) -> None:
        self.who = who
        self.new, self.all = starts  # int32 [prompts + 1]


class _Graph:
    """The step of up to `bucket` sequences, captured."""

    def __init__(self, batch: CudaBatch, bucket: int, buffers: Buffers, pool: Any) -> None:
        self.bucket, self._buffers = bucket, buffers
        self._owner = weakref.ref(batch)  # no cycle: who drops the batch drops its graphs, here and now
        self.where = _Where(buffers.table[:bucket], buffers.at[0, :bucket])
        self._cut = batch.cut(bucket)
        sets = bucket * batch.pages[0].heads * self._cut.chunks
        self._arrived, self._flags = torch.zeros(2, max(sets, 4096), dtype=torch.int32, device=batch.model.device)
        buffers.fill([], bucket)  # a rehearsal for nobody
        stream = _rehearsals(batch.model.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()  # compiles and loads, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()  # a graph of somebody else's that is freed during a capture ends it
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.logits = self._run()
        self.pool = self._graph.pool()

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Return logits f32 [parts, V] of one token each; the next graph that runs overwrites them."""
        self._buffers.fill(parts, self.bucket)
        self._graph.replay()
        return self.logits[: len(parts)]

    def replay(self) -> None:
        """Run on what the buffers hold."""
        self._graph.replay()

    @property
    def _batch(self) -> CudaBatch:
        batch = self._owner()
        assert batch is not None
        return batch

    def _run(self) -> Tensor:
        batch, buffers = self._batch, self._buffers
        follows = buffers.follows[: self.bucket]
        ids = torch.where(follows < 0, buffers.ids[: self.bucket], buffers.argmax.ids[follows])
        x = batch.step.embed(ids, self.where.position) if isinstance(batch.model, OPT) else batch.step.embed(ids)
        return batch.logits(batch.through(x, self._attend), buffers.logits[: self.bucket])

    def _attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int | None
    ) -> "Tensor | PackedX":
        from crelle.kernels.cuda.gemm import PackedX

        batch, lengths = self._batch, self._buffers.at[1, : self.bucket]
        q = batch.append(layer, qkv, q_norm, k_norm, self.where)
        inputs, o = batch.model.c.heads * batch.model.c.head_size, batch._parts[layer][0][1]
        arranged = takes_packed(o, self.bucket, inputs, batch.exact) if batch.model.c.head_size == 128 else None
        options = {"semaphores": self._arrived, "packed_for": arranged}
        y = batch.attend(layer, q, self.where.table, lengths, window, self._cut, **options)
        return y.view(self.bucket, -1) if arranged is None else PackedX(self.bucket, y.dtype, y, self._flags)
