"""Many sequences at once on a GPU: a step of one token each is a CUDA graph, prompts run as they come.

    one token each   ids, positions, lengths and tables of pages are copied into buffers that stay where they are; the
                     graph of the next larger number of sequences (BUCKETS) runs, its other rows being nobody
    prompts          all rows of all prompts go through the products together; each prompt attends by itself, through
                     torch's scaled_dot_product_attention over what its pages hold, so that it sees what later tokens
                     will see and not numbers that were never stored (`exact`: token by token, as later ones do)

    products   rows     what runs (weights in planes; dense ones beyond 4 rows: torch)
               1 … 4    decode.cu, norms and activations fused into it
               5 … 8    the same, twice
               9 …      tiles.cu, behind one launch that norms or activates

A row's numbers do not depend on what stands in the other rows, but in their last bits on how many there are: each
bucket has its own order of sums. With a cache of 4 bits that shows: a sum that differs in its last bit may round to
another code. `exact` has one order of sums for all: products of even.py, attention cut the same way for every bucket.
Then a text is, to the last bit, the same alone and in company, however its prompt was cut, and after a preemption.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.formats.kv import KVFormat, KVPages
from crelle.kernels import cuda
from crelle.kernels.cuda.decode import Op
from crelle.kernels.cuda.layout import CudaWeight
from crelle.models.cache import visible
from crelle.models.loader import Model
from crelle.models.opt import OPT
from crelle.models.products import STEPPED, Norm, Product

if TYPE_CHECKING:
    from crelle.kernels.cuda.paged import Plan

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FUSED = 4  # rows that decode.cu takes
_DIGITS = 2 * _FUSED  # rows up to which it is faster than tiles.cu

Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence has in a pass: `ids` behind the `before` tokens that are in its pages."""

    ids: Sequence[int]
    before: int
    pages: Sequence[int]
    wanted: bool  # whether the logits of its last token are


def why_not(model: Model, kv: KVFormat) -> str | None:
    """Return why a model with such a cache runs layer by layer on its device, or None where this module runs it."""
    if model.device.type != "cuda":
        return f"graphs of a whole step run on a GPU, not on {model.device.type}"
    if reason := cuda.available():
        return f"a whole step needs the CUDA kernels, and this process {reason}"
    from crelle.kernels.cuda import paged

    if reason := paged.supports(kv, model.c.head_size, model.dtype):
        return f"the paged attention {reason}"
    if others := sorted({linear.kernel for linear in model.linears()} - STEPPED):
        return f"kernel '{others[0]}' is not part of the step"
    return model.step_lacks()


class CudaBatch:
    """A model over batches of sequences whose keys and values lie in pages; `why_not` has been asked."""

    def __init__(
        self, model: Model, layers: Sequence[KVPages], centers: Sequence[Tensor | None], *, exact: bool = False
    ) -> None:
        """Share the pages of all layers with others of the same form."""
        self.model, self.pages, self.centers, self.exact = model, layers, centers, exact
        graphed = model.graphed()
        self.step: Any = model.make_step() if graphed is None else graphed._step  # their weights lie joined, once
        self._multiply: Callable[..., Tensor] = partial(multiply, exact=exact)
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Store the tokens of all parts; return logits f32 [wanted parts, V]. The next call overwrites them."""
        singles = [i for i, part in enumerate(parts) if len(part.ids) == 1]
        longer = [i for i, part in enumerate(parts) if len(part.ids) > 1]
        found: dict[int, Tensor] = {}
        if longer:
            drawn = [i for i in longer if parts[i].wanted]
            found.update(zip(drawn, self._prompts([parts[i] for i in longer]), strict=True))
        chunks = [singles[at : at + BUCKETS[-1]] for at in range(0, len(singles), BUCKETS[-1])]
        for chunk in chunks:
            logits = self.graph(len(chunk)).run([parts[i] for i in chunk])
            if len(chunk) == len(parts) and all(part.wanted for part in parts):
                return logits  # what most steps are
            logits = logits.clone() if len(chunks) > 1 else logits
            found.update((i, row) for i, row in zip(chunk, logits, strict=True) if parts[i].wanted)
        rows = [found[i] for i, part in enumerate(parts) if part.wanted]
        return torch.stack(rows) if rows else torch.empty(0, self.model.c.vocabulary, device=self.model.device)

    def graph(self, rows: int) -> "_Graph":
        """Return the graph for so many sequences, captured when it is first asked for."""
        bucket = bucket_of(rows)
        if bucket not in self._graphs:
            self._graphs[bucket] = _Graph(self, bucket, self._buffers, self._pool)
            self._pool = self._graphs[bucket].pool
        return self._graphs[bucket]

    # --- the layers -------------------------------------------------------------------------------------------------

    def through(self, x: Tensor, attend: Attend) -> Tensor:
        """Return x [N, width] behind all layers; attend(layer, qkv, q_norm, k_norm, window) -> [N, heads * D]."""
        opt = isinstance(self.model, OPT)
        op, activation = ("LAYER_NORM", "RELU") if opt else ("RMS_NORM", "SILU_MUL")
        for i, ((qkv, o, up, down), (norm, norm_mlp)) in enumerate(self._parts):
            a = attend(i, self._multiply(qkv, x, op, norm), *self._heads[i])
            x = self._multiply(o, a, residual=x)
            x = self._multiply(down, self._multiply(up, x, op, norm_mlp), activation, residual=x)
        return x

    @cached_property
    def _parts(self) -> list[tuple[list[Product], list[Norm]]]:
        """The products and norms of each layer, in the order in which they run."""
        kinds = (Product, Norm)
        return [tuple([p for p in layer if isinstance(p, kind)] for kind in kinds) for layer in self.step.layers]  # type: ignore[misc]

    @cached_property
    def _heads(self) -> list[tuple[Tensor | None, Tensor | None, int | None]]:
        """What the heads of each layer are normed with, and how far they see."""
        if isinstance(self.model, OPT):
            return [(None, None, None)] * self.model.c.layers
        attentions: list[Any] = [layer.attention for layer in self.model.layers]
        return [(*(norm and norm.weight for norm in (a.q_norm, a.k_norm)), a.window) for a in attentions]

    def logits(self, x: Tensor) -> Tensor:
        """Return f32 [N, V] for x [N, width]."""
        op: Op = "LAYER_NORM" if isinstance(self.model, OPT) else "RMS_NORM"
        return self._multiply(self.step.head, x, op, self.step.norm, dtype=torch.float32)

    def append(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, where: "_Where") -> Tensor:
        """Store keys and values of qkv [N, (heads + 2 kv_heads) D] in the pages; return q as attention wants it."""
        from crelle.kernels.cuda import paged

        c, pages = self.model.c, self.pages[layer]
        heads = qkv.view(qkv.shape[0], -1, c.head_size)
        q, k, v = heads.split([c.heads, pages.heads, pages.heads], 1)  # type: ignore[no-untyped-call]
        turned = paged.append(
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
        self, layer: int, q: Tensor, table: Tensor, lengths: Tensor, window: int | None, cut: "Plan", **options: Any
    ) -> Tensor:
        """Return what one token of each sequence sees, [B, heads * D], for q [B, heads, D] of `append`."""
        from crelle.kernels.cuda import paged

        y = paged.attend(
            *(q, self.pages[layer], table, lengths),
            window=window,
            turned=True,
            dtype=self.model.dtype,
            cut=cut,
            **options,
        )
        return y.view(q.shape[0], -1)

    def cut(self, rows: int) -> "Plan":
        """How attention shares out the work for so many sequences; with `exact` the same for any number."""
        from crelle.kernels.cuda import paged

        c, pages = self.model.c, self.pages[0]
        longest, most = self._width * pages.format.page, BUCKETS[-1] if self.exact else rows
        found = paged.plan(pages.format, most, c.heads, pages.heads, c.head_size, longest)
        return replace(found, splits=max(1, min(8, longest // 4096))) if self.exact else found

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prompts(self, parts: Sequence[Part]) -> Tensor:
        """Run prompts, or portions of them; return the logits of those that are wanted."""
        device, context = self.model.device, self._width
        starts = [0, *accumulate(len(part.ids) for part in parts)]
        ids = torch.tensor([i for part in parts for i in part.ids], device=device)
        at = torch.tensor([part.before + i for part in parts for i in range(len(part.ids))], dtype=torch.int32)
        table = torch.zeros(len(parts), context, dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part.pages)] = torch.tensor(part.pages, dtype=torch.int32)
        before = torch.tensor([part.before for part in parts], dtype=torch.int32)
        numbers = torch.tensor(starts, dtype=torch.int32)
        where = _Where(table.to(device), before.to(device), numbers.to(device))
        assert where.starts is not None
        positions = at.to(device)
        rows = where.table.repeat_interleave(where.starts.diff(), 0) if self.exact else where.table  # [N, max_pages]
        lengths = positions + 1
        x = self.step.embed(ids, positions) if isinstance(self.model, OPT) else self.step.embed(ids)

        def attend(layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int | None) -> Tensor:
            q = self.append(layer, qkv, q_norm, k_norm, where)
            if self.exact:
                return self.attend(layer, q, rows, lengths, window, self.cut(len(ids)), overlap=False)
            y = torch.empty_like(q)
            for b, (part, (begin, end)) in enumerate(zip(parts, pairwise(starts), strict=True)):
                y[begin:end] = self._attend_one(layer, q[begin:end], where.table[b], part.before, window)
            return self._turned_back(layer, y).view(qkv.shape[0], -1)

        x = self.through(x, attend)
        last = [end - 1 for part, end in zip(parts, starts[1:], strict=True) if part.wanted]
        return self.logits(x[torch.tensor(last, device=device)]) if last else x.new_empty(0)

    def _attend_one(self, layer: int, q: Tensor, table: Tensor, before: int, window: int | None) -> Tensor:
        """One prompt's tokens q [T, H, D], as they are stored; each sees itself and those before it."""
        from torch.nn.attention.bias import causal_lower_right

        from crelle.kernels.cuda import paged

        T, S = q.shape[0], before + q.shape[0]
        k, v = paged.read(self.pages[layer], table, S)[:, None]  # [1, Hkv, S, D]
        mask, causal = visible(T, S, window, q.device) if window is not None or T == S else (None, False)
        lower: Any = causal_lower_right(T, S) if window is None and T < S else mask
        gqa = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, lower, is_causal=causal, enable_gqa=gqa)
        return y[0].transpose(0, 1)

    def _turned_back(self, layer: int, y: Tensor) -> Tensor:
        """H undoes itself."""
        from crelle.kernels.cuda import paged

        pages = self.pages[layer]
        back = paged.append(None, None, pages, None, None, q=y) if pages.format.rotate else y
        assert back is not None
        return back.to(self.model.dtype)

    @cached_property
    def _width(self) -> int:
        """Pages of the longest text."""
        page = self.pages[0].format.page
        return min(self.pages[0].count, -(-self.model.c.context // page))

    @cached_property
    def _buffers(self) -> "_Buffers":
        return _Buffers(BUCKETS[-1], self._width, self.model.device)


@dataclass(frozen=True, slots=True)
class _Where:
    table: Tensor  # int32 [B, max_pages]
    position: Tensor  # int32 [B]
    starts: Tensor | None = None  # int32 [B + 1]; None: one token each


class _Buffers:
    """What the graphs of all buckets read, on the device and as it is filled on the host."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        def both(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype).pin_memory()

        self.ids, self._ids = both(rows, dtype=torch.int64)
        self.at, self._at = both(2, rows, dtype=torch.int32)  # position; length: one more, or 0
        self.table, self._table = both(rows, width, dtype=torch.int32)
        self._rows: list[Sequence[int]] = [()] * rows  # what the host's table holds
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, parts: Sequence[Part], bucket: int) -> None:
        """Copy what a step is about to the device; rows behind the parts, up to the bucket, are nobody."""
        self._copied.synchronize()  # the host's side is free
        n = len(parts)
        ids, at, table = self._ids.numpy(), self._at.numpy(), self._table.numpy()
        ids[:n], ids[n:bucket] = [part.ids[0] for part in parts], 0
        before = [part.before for part in parts]
        at[0, :n], at[0, n:bucket], at[1, n:bucket] = before, -1, 0
        at[1, :n] = at[0, :n] + 1
        for i, part in enumerate(parts):
            if part.pages != self._rows[i]:
                table[i, : len(part.pages)] = part.pages
                self._rows[i] = list(part.pages)
        self.ids[:bucket].copy_(self._ids[:bucket], non_blocking=True)
        self.at.copy_(self._at, non_blocking=True)
        self.table[:n].copy_(self._table[:n], non_blocking=True)
        self._copied.record()


class _Graph:
    """The step of up to `bucket` sequences, captured."""

    def __init__(self, batch: CudaBatch, bucket: int, buffers: _Buffers, pool: Any) -> None:
        self.bucket, self._buffers = bucket, buffers
        self._owner = weakref.ref(batch)  # no cycle: who drops the batch drops its graphs, here and now
        self.where = _Where(buffers.table[:bucket], buffers.at[0, :bucket])
        self._cut = batch.cut(bucket)
        sets = bucket * batch.pages[0].heads * self._cut.chunks
        self._arrived = torch.zeros(sets, dtype=torch.int32, device=batch.model.device)
        buffers.fill([], bucket)  # a rehearsal for nobody
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
        batch, ids = self._batch, self._buffers.ids[: self.bucket]
        x = batch.step.embed(ids, self.where.position) if isinstance(batch.model, OPT) else batch.step.embed(ids)
        return batch.logits(batch.through(x, self._attend))

    def _attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int | None
    ) -> Tensor:
        batch, lengths = self._batch, self._buffers.at[1, : self.bucket]
        q = batch.append(layer, qkv, q_norm, k_norm, self.where)
        return batch.attend(layer, q, self.where.table, lengths, window, self._cut, arrived=self._arrived)


def bucket_of(rows: int) -> int:
    """Return the smallest bucket for so many rows, or the largest one."""
    return next((b for b in BUCKETS if b >= rows), BUCKETS[-1])


def multiply(
    product: Product,
    x: Tensor,
    op: Op = "PLAIN",
    norm: Norm | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    exact: bool = False,
) -> Tensor:
    """Return op(x) @ W.T + bias + residual for any number of rows: what Product does for a few."""
    from crelle.kernels.cuda import dense

    rows = x.shape[0]
    if not exact and rows <= (_DIGITS if isinstance(product.weights[0], CudaWeight) else _FUSED):
        portions = [slice(at, at + _FUSED) for at in range(0, rows, _FUSED)]
        y = [product(x[s], op, norm, None if residual is None else residual[s], dtype) for s in portions]
        return y[0] if len(y) == 1 else torch.cat(y)
    scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    h = x if op == "PLAIN" else dense.apply(x, op, scale, shift, eps)
    biases = [product.bias] if len(product.weights) == 1 else product._biases
    parts = [_many(h, w, bias, residual, exact) for w, bias in zip(product.weights, biases, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(dtype or product.dtype)


def _many(h: Tensor, w: CudaWeight | Tensor, bias: Tensor | None, residual: Tensor | None, exact: bool) -> Tensor:
    """Return h @ W.T + bias + residual."""
    from crelle.kernels.cuda import even, tiles

    if exact:
        y = even.matmul(h, w, bias)
    elif isinstance(w, CudaWeight):
        y = tiles.matmul(h, w, bias)
    elif residual is not None and bias is None:
        return torch.addmm(residual, h, w.T)
    else:
        y = F.linear(h, w, bias)
    return y if residual is None else y + residual
