"""Runs a decoder over batches of sequences on a GPU: decode steps as CUDA graphs, prefill as it comes.

    decode     ids, positions, lengths and page tables are copied into buffers that stay where they are; the graph of
               the next larger number of sequences (BUCKETS) is replayed, its other rows being padding. Few sequences
               (up to GEMV_ROWS) take Step.decode, whose epilogues encode x for the next product
    prefill    all rows of all chunks go through the linears together, and through varlen attention over what their
               pages hold, so that they see what later tokens will see and not values that were never stored
               (batch_invariant: token by token, as decode steps do); as graphs too (prefill_graph.py)
    verify     tokens that are guessed are rows of their own in a decode graph, which appends those of all rows before
               any attends: the same step, except that attention waits for what is appended
    linears    step/fused_linear.py

A row does not depend on the other rows' values, but in its last bits on their number: each bucket has its own order of
sums. With a cache of 4 bits that shows: a sum that differs in its last bit may round to another code. `batch_invariant`
has one order of sums for all: products of batch_invariant.py, attention with the same split for every bucket. Then a
sequence is the same to the last bit alone and in a batch, in whatever chunks its prompt ran, and after a preemption.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import cuda
from crelle.kernels.cuda.attention.varlen import pack_prefills
from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.experts.fused import matrices
from crelle.kernels.cuda.experts.weights import supports_weights
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step.decode_step import Step, StepLayer
from crelle.kernels.cuda.step.decode_step import supports as step_supports
from crelle.kernels.cuda.step.fuse import STEPPED
from crelle.kernels.cuda.step.graph_inputs import BUCKETS, GraphInputs, PendingTokens, bucket_of
from crelle.kernels.cuda.step.graphs import capture, replay_seconds
from crelle.kernels.cuda.step.placements import run_layer
from crelle.kernels.cuda.step.prefill_graph import SEQUENCES, PrefillBucket, PrefillGraph, PrefillInputs
from crelle.kernels.executor import Chunk, DecoderModules
from crelle.kernels.rotated_kernel import RotatedKernel, rotates
from crelle.kernels.spec import DecoderSpec

if TYPE_CHECKING:
    from crelle.kernels.cuda.attention.paged_attention import PagedTileConfig
    from crelle.kernels.cuda.planes.gemm import PackedX

_HEAD_KERNELS = 5  # rows up to which a dense head has a kernel for each number of them (dispatch.py), and one more
Attend = Callable[[int, StepLayer, Tensor], "Tensor | PackedX"]


def supports(spec: DecoderSpec, kv: KVFormat, dtype: torch.dtype) -> str | None:
    """Return None, or the sentence that says what of a decoder or its cache the CUDA kernels lack."""
    from crelle.kernels.cuda.attention import paged_attention

    if reason := paged_attention.supports(kv, spec.head_size, dtype):
        return f"the paged attention {reason}"
    return step_supports(spec, dtype)


def supports_model(model: DecoderModules, kv: KVFormat) -> str | None:
    """Return why a model with such a cache runs layer by layer on its device, or None where this module runs it."""
    if model.device.type != "cuda":
        return f"graphs of a whole step run on a GPU, not on {model.device.type}"
    if reason := cuda.available():
        return f"a whole step needs the CUDA kernels, and this process {reason}"
    if others := sorted({linear.kernel for linear in model.linears()} - STEPPED):
        return f"kernel '{others[0]}' is not part of the step"
    for linear in model.linears():
        if isinstance(linear.prepared.kernel, RotatedKernel):
            return f"the step does not rotate {rotates(linear.prepared.problem)}"
    for layer in cast(Iterable[Any], model.layers):
        if layer.spec.mlp.experts is not None and (why := supports_weights([*map(matrices, layer.mlp.experts)])):
            return why
    return supports(model.spec, kv, model.dtype)


class CudaExecutor:
    """A model over batches of sequences whose keys and values lie in pages; `supports_model` has returned None.

    Threads take turns. The logits of a call lie in a buffer that the next one overwrites: threads that share a batch
    hold `lock` from a call until they have read, or sampled from, what it returned.
    """

    prefill_differs = False

    def __init__(
        self,
        model: DecoderModules,
        layers: Sequence[KVPages],
        centers: Sequence[Tensor | None],
        *,
        batch_invariant: bool = False,
        step: Step | None = None,
    ) -> None:
        """Share the pages of all layers with others of the same form; step: one that has packed the weights already."""
        self.model, self.pages, self.centers, self.batch_invariant = model, layers, centers, batch_invariant
        self.step = step or Step(model)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._prefill_graphs: dict[PrefillBucket, PrefillGraph] = {}
        self._pool: Any = None
        self._turn = 0
        self.lock = RLock()

    @property
    def captures(self) -> int:
        """Number of graphs."""
        return len(self._graphs) + len(self._prefill_graphs)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Store the tokens of all chunks; return logits f32 [wanted rows, V]. The next call overwrites them."""
        verifies = any(chunk.verified for chunk in chunks)
        if verifies:
            chunks = [one for chunk in chunks for one in (_single(chunk) if chunk.verified else (chunk,))]
        with self.lock:
            self.step.before()
            return self._forward(chunks, verifies)

    def _forward(self, chunks: Sequence[Chunk], verifies: bool) -> Tensor:
        decode = [i for i, c in enumerate(chunks) if len(c.ids) == 1]
        prefill = [i for i, c in enumerate(chunks) if len(c.ids) > 1]
        found, whose = list[Tensor](), list[int]()
        if prefill:  # first: they read no buffer that a graph writes
            made, who = self._prefill([chunks[i] for i in prefill])
            found.append(made)
            whose += [prefill[row] for row in who]
        batches = [decode[at : at + BUCKETS[-1]] for at in range(0, len(decode), BUCKETS[-1])]
        for batch in batches:
            logits = self.graph(len(batch), verifies).run([chunks[i] for i in batch])
            if len(batch) == len(chunks) and all(c.wanted for c in chunks):
                return logits  # what most steps are
            found.append(logits.clone() if len(batches) > 1 else logits)
            whose += batch
        at: dict[int, list[int]] = {}
        for row, i in enumerate(whose):
            at.setdefault(i, []).append(row)
        order = [row for i, c in enumerate(chunks) if c.rows for row in at[i]]
        rows = torch.cat(found) if found else torch.empty(0, self.model.spec.vocabulary, device=self.model.device)
        return rows if order == list(range(len(whose))) else rows[self._to_device(order)]

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> PendingTokens:
        """Take the likeliest tokens of at most MAX_SAMPLES rows; the next call may name them (`Chunk.token_source`)."""
        with self.lock:
            found = self._inputs.argmax(logits.contiguous())
            self._turn ^= 1
            return PendingTokens(found, self._inputs.sampled[self._turn])

    @torch.inference_mode()
    def continue_greedily(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> list[list[int]]:
        """Store the tokens of chunks, then the likeliest next ones; return `counts` of them for each chunk.

        Each token stays on the device as the next step's input; the host waits once. Below 0: logits not finite.
        """
        found = torch.full((max(counts), len(chunks)), -1, dtype=torch.int64, device=self.model.device)
        with self.lock:
            last = torch.tensor([c.rows for c in chunks]).cumsum(0) - 1
            logits = self.run(chunks)
            picked = logits if len(logits) == len(chunks) else logits[self._to_device(last.tolist())]
            found[0] = self._inputs.argmax(picked.contiguous())
            going = list(range(len(chunks)))  # in the order of the tokens sampled last
            for i in range(1, len(found)):
                source = {c: row for row, c in enumerate(going)}
                going = [c for c in going if counts[c] > i]
                ends = [Chunk([0], chunks[c].end + i - 1, chunks[c].pages, True, source[c]) for c in going]
                self.step.before()
                made = self._inputs.argmax(self.graph(len(going)).run(ends))
                if len(going) == len(chunks):
                    found[i] = made
                else:
                    found[i, self._to_device(going)] = made
            rows = found.T.tolist()
        return [tokens[:n] for tokens, n in zip(rows, counts, strict=True)]

    @torch.inference_mode()
    def prepare_verification(self, most: int) -> dict[int, float]:
        """Capture the graphs that verify up to `most` rows; return the seconds of each, and under 0 those of one row.

        They run over padding: products take as long as ever, and attention no time.
        """
        with self.lock:
            graphs = {0: self.graph(1)} | {b: self.graph(b, True) for b in BUCKETS if 1 < b <= bucket_of(most)}
            return {rows: replay_seconds(graph.run_padding) for rows, graph in graphs.items()}

    def _to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values on the device, without waiting for what it has under way."""
        return torch.tensor(values, dtype=dtype).pin_memory().to(self.model.device, non_blocking=True)

    @torch.inference_mode()
    def graph(self, rows: int, verifies: bool = False) -> "_Graph":
        """Return the graph for so many rows, captured when it is first asked for.

        verifies: some of them may be of one sequence.
        """
        bucket = bucket_of(rows)
        with self.lock:
            if (bucket, verifies) not in self._graphs:
                found = self._graphs[bucket, verifies] = _Graph(self, bucket, self._inputs, verifies)
                self._pool = found.capture(self._pool)
            return self._graphs[bucket, verifies]

    @torch.inference_mode()
    def kernels(self, sequences: Iterable[int], prompt_tokens: Iterable[int]) -> set[tuple[str, str]]:
        """Return what decode steps of so many sequences and prefills of so many tokens launch, for jit.compile_all."""
        with self.lock, recording() as found:
            for bucket in sorted({bucket_of(n) for n in sequences}):
                for verifies in (False, True):
                    self._inputs.argmax(_Graph(self, bucket, self._inputs, verifies).run_eagerly())
            context = self.model.spec.context
            for tokens in prompt_tokens:
                parts = [min(context, tokens - at) for at in range(0, tokens, context)]
                self._prefill_eagerly([Chunk([0] * n, 0, [], True) for n in parts])
            for prompts in range(2, _HEAD_KERNELS + 1):  # whose last tokens the head multiplies
                self._prefill_eagerly([Chunk([0, 0], 0, [], True)] * prompts)
        return found

    def with_layers(self, which: Sequence[int]) -> "CudaExecutor":
        """Return an executor of some layers with the same weights, pages and inputs; it is timed to choose configs."""
        step = copy(self.step)
        step.layers = [self.step.layers[i] for i in which]
        pages, centers = [self.pages[i] for i in which], [self.centers[i] for i in which]
        some = CudaExecutor(self.model, pages, centers, batch_invariant=self.batch_invariant, step=step)
        some.__dict__["_inputs"] = self._inputs
        return some

    def first_step(self, rows: int) -> Callable[[], Tensor]:
        """Return what runs a decode step of rows that are the first token of a sequence each, in the first page."""
        graph = _Graph(self, bucket_of(rows), self._inputs, False)
        self._inputs.fill([Chunk([0], 0, [0], True)] * rows, graph.bucket)
        return graph._run

    # --- the layers -------------------------------------------------------------------------------------------------

    def run_layers(self, x: Tensor, attend: Attend) -> Tensor:
        """Return x [N, width] behind all layers; attend(i, layer, qkv) -> [N, heads * D]."""
        addend: Tensor | None = None  # of x
        for i, layer in enumerate(self.step.layers):
            x, addend = run_layer(layer, x, addend, partial(attend, i, layer), self.batch_invariant)
        return x if addend is None else x + addend

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return f32 [N, V] for x [N, width]."""
        # Few rows come as f32, others are rounded to 16 bits: batch-invariant, all are, else ties would differ.
        dtype = torch.float32 if x.shape[0] <= 4 and not self.batch_invariant else None
        y = self.step.logits(x, dtype, self.batch_invariant)
        return self.step.scaled(y.float() if out is None else out.copy_(y))

    def append(self, i: int, layer: StepLayer, qkv: Tensor, where: "_Where") -> Tensor:
        """Store keys and values of qkv [N, (heads + 2 kv_heads) D] in the pages; return q as attention wants it."""
        from crelle.kernels.cuda.attention import paged_attention

        a, pages = layer.spec.attention, self.pages[i]
        heads = qkv.view(qkv.shape[0], -1, a.head_size)
        q, k, v = heads.split([a.heads, pages.heads, pages.heads], 1)  # type: ignore[no-untyped-call]
        rotated = paged_attention.append(
            *(k, v, pages, where.table, where.position),
            starts=where.starts,
            center=self.centers[i],
            q=q,
            cos=layer.cos,
            sin=layer.sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.eps,
        )
        assert rotated is not None
        return rotated

    def attend(
        self,
        i: int,
        layer: StepLayer,
        q: Tensor,
        table: Tensor,
        lengths: Tensor,
        config: "PagedTileConfig",
        **options: Any,
    ) -> Tensor:
        """Return what one token of each sequence sees, [B, heads, D], for q [B, heads, D] of `append`."""
        from crelle.kernels.cuda.attention import paged_attention

        return paged_attention.attend(
            *(q, self.pages[i], table, lengths),
            how=layer.options,
            scale=layer.spec.attention.scale,
            rotated=True,
            dtype=self.model.dtype,
            config=config,
            **options,
        )

    def tile_config(self, rows: int, layer: int) -> "PagedTileConfig":
        """How a layer's attention shares out the work for so many sequences; if batch-invariant, for any number."""
        from crelle.kernels.cuda.attention import paged_attention

        c, pages = self.model.spec, self.pages[layer]
        longest, most = self._width * pages.format.page, BUCKETS[-1] if self.batch_invariant else rows
        found = paged_attention.tile_config(pages.format, most, c.heads, pages.heads, c.head_size, longest)
        return replace(found, splits=max(1, min(8, longest // 4096))) if self.batch_invariant else found

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[int]]:
        """Run prompts, or chunks of them; return logits, and whose they are: of those that are wanted, at least."""
        new, streams = sum(len(c.ids) for c in chunks), self.step.streams
        eager = self.batch_invariant or any(c.scored for c in chunks)
        if streams is not None and new > streams.most_in_place:
            with streams.staging_prompts():
                return self._prefill_eagerly(chunks), [i for i, c in enumerate(chunks) for _ in range(c.rows)]
        bucket = None if eager else PrefillBucket.of(chunks, self._longest)
        if bucket is None:
            return self._prefill_eagerly(chunks), [i for i, c in enumerate(chunks) for _ in range(c.rows)]
        if (graph := self._prefill_graphs.get(bucket)) is None:
            graph = PrefillGraph(bucket, self._width, self.model.device, self._prefill_logits)
            self._prefill_graphs[bucket] = graph
        logits = graph.run(chunks, lambda inputs: self._prefill_padded(inputs, bucket), self._pool)
        if self._pool is None and graph.graph is not None:
            self._pool = graph.graph.pool()
        return logits, list(range(len(chunks)))

    def _prefill_padded(self, inputs: PrefillInputs, bucket: PrefillBucket) -> Tensor:
        """Return logits [sequences, V] of a bucket's prompts."""
        where, n = _Where(inputs.table, inputs.before, inputs.offsets), bucket.sequences
        by_rows = inputs.by_rows() if any(layer.options.softcap is not None for layer in self.step.layers) else None

        def attend(i: int, layer: StepLayer, qkv: Tensor) -> Tensor:
            q = self.append(i, layer, qkv, where)
            if layer.options.softcap is not None and by_rows is not None:
                return self._attend_rows(i, layer, q, *by_rows)
            lengths = inputs.new, inputs.all, bucket.rows, bucket.keys
            seen = self._attend_prompts(i, layer, q, inputs.table[:n], *lengths)
            return self._unrotated(i, seen).view(bucket.rows, -1)

        x = self.run_layers(self.step.embed(inputs.ids, inputs.positions), attend)
        return self.logits(x[inputs.last])

    def _prefill_eagerly(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of the rows that are wanted."""
        starts = [0, *accumulate(len(c.ids) for c in chunks)]
        ids = self._to_device([i for c in chunks for i in c.ids])
        positions = self._to_device([c.start + i for c in chunks for i in range(len(c.ids))], torch.int32)
        table = torch.zeros(len(chunks), self._width, dtype=torch.int32)
        for row, c in zip(table.numpy(), chunks, strict=True):
            row[: len(c.pages)] = c.pages
        before, offsets = (self._to_device(v, torch.int32) for v in ([c.start for c in chunks], starts))
        where = _Where(table.pin_memory().to(self.model.device, non_blocking=True), before, offsets)
        rows, lengths = where.table, positions + 1
        if self.batch_invariant or any(layer.options.softcap is not None for layer in self.step.layers):
            rows = rows.repeat_interleave(offsets.diff(), 0, output_size=starts[-1])  # [N, max_pages]
        packed = pack_prefills([(c.start, len(c.ids)) for c in chunks], self._longest)  # as memory.py counts
        calls = [(who, self._to_device(who.new + who.all, torch.int32).view(2, -1)) for who in packed]
        x = self.step.embed(ids, positions, batch_invariant=self.batch_invariant)

        def attend(i: int, layer: StepLayer, qkv: Tensor) -> Tensor:
            q = self.append(i, layer, qkv, where)
            if self.batch_invariant or layer.options.softcap is not None:
                return self._attend_rows(i, layer, q, rows, lengths)
            each = [
                self._attend_prompts(
                    *(i, layer, q[who.rows], where.table[who.prompts], cu[0], cu[1], who.longest_new),
                    longest=who.longest,
                    total=who.all[-1],
                )
                for who, cu in calls
            ]
            return self._unrotated(i, each[0] if len(each) == 1 else torch.cat(each)).view(len(ids), -1)

        x = self.run_layers(x, attend)
        wanted = [row for c, end in zip(chunks, starts[1:], strict=True) for row in range(end - c.rows, end)]
        return (
            self.logits(x[self._to_device(wanted)])
            if wanted
            else x.new_empty(0, self.model.spec.vocabulary, dtype=torch.float32)
        )

    def _attend_rows(self, i: int, layer: StepLayer, q: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """Attention of new tokens q [N, H, D], each as a sequence of its own; table [N, max_pages], lengths [N].

        Every token reads all keys that it sees: for batch-invariant prompts, and for soft caps, which torch's varlen
        attention does not have.
        """
        return self.attend(i, layer, q, table, lengths, self.tile_config(len(q), i), pdl=False).view(len(q), -1)

    def _attend_prompts(
        self,
        i: int,
        layer: StepLayer,
        q: Tensor,
        table: Tensor,
        cu_new: Tensor,
        cu_all: Tensor,
        longest_new: int,
        longest: int,
        total: int | None = None,
    ) -> Tensor:
        """Attention of some prompts' new tokens q [N, H, D] over what is stored; each sees those up to itself.

        cu_new and cu_all int32 [prompts + 1]: where new tokens, and all tokens, of each begin; total: of the latter.
        """
        from crelle.kernels.cuda.attention import paged_attention

        k, v = paged_attention.read(self.pages[i], table, cu_all, longest if total is None else total)
        window, sinks = layer.options.window, layer.options.sinks
        seen: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(  # what scaled_dot_product_attention calls
            *(q, k, v, cu_new, cu_all, longest_new, longest),
            *(0.0, True, False),
            scale=layer.spec.attention.scale,
            window_size_left=None if window is None else window - 1,
        )
        if sinks is None:
            return seen[0]
        # seen[1], f32 [H, N], is the log l of the sum of exp(score), which with a sink s has exp(s) more.
        return seen[0] * torch.sigmoid(seen[1].T - sinks)[..., None].to(q.dtype)  # exp(l) / (exp(l) + exp(s))

    def _unrotated(self, layer: int, y: Tensor) -> Tensor:
        """Undo the Hadamard rotation of rotated pages, which is its own inverse."""
        from crelle.kernels.cuda.attention import paged_attention

        pages = self.pages[layer]
        back = paged_attention.append(None, None, pages, None, None, q=y) if pages.format.rotate else y
        assert back is not None
        return back.to(self.model.dtype)

    @cached_property
    def _width(self) -> int:
        """Pages of the longest sequence."""
        page = self.pages[0].format.page
        return min(self.pages[0].count, -(-self.model.spec.context // page))

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence, for whose keys and values memory was planned."""
        return min(self.model.spec.context, self.pages[0].count * self.pages[0].format.page)

    @cached_property
    def _prefill_logits(self) -> Tensor:
        return torch.empty(SEQUENCES[-1], self.model.spec.vocabulary, device=self.model.device)

    @cached_property
    def _inputs(self) -> GraphInputs:
        return GraphInputs(BUCKETS[-1], self._width, self.model.spec.vocabulary, self.model.device)


def _single(chunk: Chunk) -> list[Chunk]:
    """Return the tokens of a chunk as chunks of one token, each of which is wanted."""
    prompt, pages = chunk.prompt, chunk.pages
    return [Chunk([t], at, pages, True, prompt=prompt) for at, t in enumerate(chunk.ids, chunk.start)]


@dataclass(frozen=True, slots=True)
class _Where:
    table: Tensor  # int32 [B, max_pages]
    position: Tensor  # int32 [B]
    starts: Tensor | None = None  # int32 [B + 1]; None: one token each


class _Graph:
    """The step of up to `bucket` rows, captured."""

    def __init__(self, batch: CudaExecutor, bucket: int, inputs: GraphInputs, verifies: bool) -> None:
        self.bucket, self._inputs, self._verifies = bucket, inputs, verifies
        self._owner = weakref.ref(batch)  # no cycle: who drops the executor drops its graphs, here and now
        self.where = _Where(inputs.table[:bucket], inputs.at[0, :bucket])
        self._configs = [batch.tile_config(bucket, i) for i in range(len(batch.pages))]
        sets = bucket * batch.pages[0].heads * max(config.chunks for config in self._configs)
        self._semaphores, self._flags = torch.zeros(2, max(sets, 4096), dtype=torch.int32, device=batch.model.device)

    def capture(self, pool: Any) -> Any:
        """Record the step with memory of a pool of graphs; return the pool."""
        self._inputs.fill([], self.bucket)  # all padding
        streams = self._batch.step.streams
        if streams is not None and streams.on_disk:  # the host takes part: the step runs as it is
            self._graph, self.logits = None, self._run()
            return pool
        self._graph, self.logits = capture(self._run, pool=pool)
        return self._graph.pool()

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits f32 [chunks, V] of one token each; the next graph that runs overwrites them."""
        self._inputs.fill(chunks, self.bucket)
        self.replay()
        return self.logits[: len(chunks)]

    def run_eagerly(self) -> Tensor:
        """Return the logits of padding, without a graph."""
        self._inputs.fill([], self.bucket)
        return self._run()

    def replay(self) -> None:
        """Run on what the buffers hold."""
        if self._graph is None:
            self.logits = self._run()
        else:
            self._graph.replay()

    def run_padding(self) -> None:
        """Run on no sequence at all."""
        self._inputs.fill([], self.bucket)
        self.replay()

    @property
    def _batch(self) -> CudaExecutor:
        batch = self._owner()
        assert batch is not None
        return batch

    def _run(self) -> Tensor:
        batch, inputs, n = self._batch, self._inputs, self.bucket
        sampled = inputs.token_source[:n], inputs.argmax.ids
        x = batch.step.embed(inputs.ids[:n], self.where.position, *sampled, batch_invariant=batch.batch_invariant)
        if n <= GEMV_ROWS and not batch.batch_invariant and batch.step.chains:
            return batch.step.decode(x, self._attend_few, inputs.logits[:n])
        return batch.logits(batch.run_layers(x, self._attend), inputs.logits[:n])

    def _attend_few(self, i: int, layer: StepLayer, qkv: Tensor) -> Tensor | BitSerialX:
        """Attention of few sequences: one launch where pages are of 16 bits, encoded where `o` takes it so."""
        from crelle.kernels.cuda.attention import decode_attention, paged_attention

        batch, pages, a = self._batch, self._batch.pages[i], layer.spec.attention
        encodes = layer.o.takes_bitserial and decode_attention.can_encode(a.head_size, a.heads)
        room = self.where.table.shape[1] * pages.format.page
        if not self._verifies and decode_attention.supports_pages(pages, qkv.dtype, room) is None:
            how = decode_attention.RopeNormArgs(
                layer.cos, layer.sin, layer.options, layer.q_norm, layer.k_norm, layer.eps
            )
            attend = decode_attention.attend_encode if encodes else decode_attention.attend
            return attend(qkv, pages, self.where.table, self.where.position, a.heads, a.scale, how)
        if not encodes:
            return self._attend(i, layer, qkv)  # type: ignore[return-value]
        q, lengths = batch.append(i, layer, qkv, self.where), self._inputs.at[1, : self.bucket]
        options = {"config": self._configs[i], "semaphores": self._semaphores, "pdl": not self._verifies}
        options |= {"how": layer.options, "scale": a.scale}
        return paged_attention.attend_encode(q, pages, self.where.table, lengths, qkv.dtype, **options)

    def _attend(self, i: int, layer: StepLayer, qkv: Tensor) -> "Tensor | PackedX":
        from crelle.kernels.cuda.planes.gemm import PackedX

        batch, lengths = self._batch, self._inputs.at[1, : self.bucket]
        q = batch.append(i, layer, qkv, self.where)
        a = layer.spec.attention
        fits = a.head_size == 128
        packed_for = layer.o.takes_packed(self.bucket, a.heads * a.head_size, batch.batch_invariant) if fits else None
        # Rows that are verified see tokens that `append` has just stored: attention must not read ahead of it.
        options = {"semaphores": self._semaphores, "packed_for": packed_for, "pdl": not self._verifies}
        y = batch.attend(i, layer, q, self.where.table, lengths, self._configs[i], **options)
        return y.view(self.bucket, -1) if packed_for is None else PackedX(self.bucket, y.dtype, y, self._flags)
