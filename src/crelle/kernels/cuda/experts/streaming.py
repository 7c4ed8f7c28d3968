"""Experts streamed from host memory: a cache of slots on the GPU, and a table that says where each expert lies now.

    few tokens     whatever the table says: the kernels read an expert from its slot, or over PCIe from pinned host
                   memory, whole sectors at a time. The host takes no part, so that steps stay CUDA graphs
    prompts        experts that are in no slot are copied, some at a time, through a buffer of two halves: while the
                   tokens of one half are multiplied, the other is filled (`LayerStream.grouped`)
    disk           (host_memory.SPILLS) layers that are not in host memory: the host waits for the experts that were
                   chosen, and copies those that are in no slot through the same buffer. Such steps are not graphs
    between steps  the host looks at counts of uses that it asked for some steps before, and starts copies of experts
                   that deserve a slot (slots.py) on a stream of their own. The host never waits for any of that

How an expert gets another one's slot. Every line is in order on the stream that runs steps, but for the copy:

    1   table: the old expert has the address of its host block          no later step reads the slot
    2   the copy's stream waits for 1, copies the new expert into the slot
    3   once the copy is seen to be done, at some later step: table: the new expert has the address of the slot

So a step never reads a slot that is being written, and the table never changes while a step runs. What is computed has
the same bits wherever an expert lies. An expert is any set of buffers: a row of the table that points into its block
is moved by the distance of block and slot, so that nothing here depends on a format.

A slot of the GPU is room for an expert; slots of a batch (products.py) are tokens at one of their experts each.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.experts.host_memory import ExpertOffload, HostLayer, staged_experts
from crelle.kernels.cuda.experts.products import Slots
from crelle.kernels.cuda.experts.slots import SlotPolicy, Swap
from crelle.kernels.cuda.launch import is_recording, load

INTERVAL = 8  # steps between two looks at the counts
TRAFFIC = 8  # copies into slots are at most this fraction of what was read over PCIe
STAGED_SLOTS = 16  # of an expert: where a prompt has more, on average, experts are staged
MOST_GRAPHED = 256  # tokens of a step whose experts are read in place, at most


class Transfers(Protocol):
    """What moves bytes; tests have one that takes notes."""

    def counts(self, counts: Tensor, to: Tensor) -> Any:
        """Copy counts behind the steps that have begun; return what `done` answers for."""
        ...

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy blocks (to, from) beside the steps that follow, behind all that has begun."""
        ...

    def publish(self, table: Tensor, rows: Sequence[int], values: Tensor) -> None:
        """Write rows of the table behind the steps that have begun, before those that follow."""
        ...

    def done(self, transfer: Any) -> bool:
        """Whether a transfer has ended, without waiting for it."""
        ...

    def wait(self, transfer: Any) -> None:
        """Have the steps that follow wait for a transfer; the host does not."""
        ...


class CudaTransfers:
    """Copies on a stream beside the one that runs steps, which is the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def counts(self, counts: Tensor, to: Tensor) -> torch.cuda.Event:
        to.copy_(counts, non_blocking=True)
        return self._mark(torch.cuda.current_stream(self.device))

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for to, block in pairs:
                to.copy_(block, non_blocking=True)
        return self._mark(self.stream)

    def publish(self, table: Tensor, rows: Sequence[int], values: Tensor) -> None:
        at = torch.tensor(rows).pin_memory().to(self.device, non_blocking=True)
        table.index_copy_(0, at, values.pin_memory().to(self.device, non_blocking=True))

    def done(self, transfer: torch.cuda.Event) -> bool:
        return bool(transfer.query())  # type: ignore[no-untyped-call]

    def wait(self, transfer: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(transfer)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class ExpertStreams:
    """The slots of all layers, their table and the counts; what happens between steps."""

    def __init__(self, offload: ExpertOffload, columns: int, transfers: Transfers | None = None) -> None:
        """columns: of the table."""
        self.device = offload.device
        self.transfers = transfers or CudaTransfers(offload.device)
        layers = list(offload.layers.values())
        self._first = dict(zip(offload.layers, np.cumsum([0, *(x.count for x in layers)]).tolist(), strict=False))
        experts = sum(x.count for x in layers)
        self.table = torch.zeros(experts, columns, dtype=torch.int64, device=self.device)
        self.host_rows = torch.zeros(experts, columns, dtype=torch.int64)  # of blocks in host memory
        self.counts = torch.zeros(experts + len(layers), dtype=torch.int32, device=self.device)
        self._seen, self._found = np.zeros(len(self.counts), np.int32), torch.zeros(len(self.counts), dtype=torch.int32)
        self._found = self._found.pin_memory() if self.device.type == "cuda" else self._found
        assert offload.staging is not None, "`finish` has allocated it"
        self.staging = offload.staging
        self.layers: list[LayerStream] = []
        self._reading: Any = None  # counts on their way
        self._filling: list[tuple[Any, LayerStream, Swap]] = []
        self._steps = 0
        self.stages = False  # whether prompts may stage experts: not in a graph, which would stage the same ones always
        self._ahead: tuple[LayerStream, list[Any]] | None = None  # staged already
        self.uses = self.hits = self.swapped = 0

    def layer(self, which: int, host: HostLayer, e: Any) -> "LayerStream":
        """Fill a layer's slots; e: its weights, of any format, with a table of addresses in host memory."""
        made = LayerStream(self, self._first[which], len(self.layers), host, e)
        self.layers.append(made)
        return made

    def before_step(self) -> None:
        """Publish copies that have ended, and begin others; to be called where steps run, before each of them."""
        ended = [self.transfers.done(item[0]) for item in self._filling]
        arrived = [item for item, done in zip(self._filling, ended, strict=True) if done]
        if arrived:
            self._filling = [item for item, done in zip(self._filling, ended, strict=True) if not done]
            self._publish([(layer, layer.policy.arrived(swap.slot), swap.slot) for _, layer, swap in arrived])
        self._steps += 1
        if self._reading is None:
            if self._steps >= INTERVAL and not self._filling:
                self._steps, self._reading = 0, self.transfers.counts(self.counts, self._found)
        elif self.transfers.done(self._reading):
            self._reading = None
            self._exchange()

    def _exchange(self) -> None:
        """Take in counts, and begin the copies that they ask for."""
        found = self._found.numpy().copy()
        new, self._seen = (found - self._seen).astype(np.int64), found  # int32 wraps around, differences do not
        chosen: list[tuple[LayerStream, Swap]] = []
        for layer in self.layers:
            mine = new[layer.counts_at : layer.counts_at + layer.e.count + 1]
            uses, hits = int(mine[:-1].sum()), int(mine[-1])
            self.uses, self.hits = self.uses + uses, self.hits + hits
            layer.policy.record(mine[:-1])
            chosen += [(layer, swap) for swap in layer.policy.swaps((uses - hits) // TRAFFIC)]
        if not chosen:
            return
        for layer, swap in chosen:
            layer.policy.begin(swap)
        self._publish([(layer, swap.out, None) for layer, swap in chosen])
        for layer, swap in chosen:
            filled = self.transfers.fill([(layer.slots[swap.slot], layer.blocks[swap.into])])
            self._filling.append((filled, layer, swap))
        self.swapped += len(chosen)

    def _publish(self, where: Sequence[tuple["LayerStream", int, int | None]]) -> None:
        """Have experts of layers lie in a slot, or (None) in host memory."""
        rows = [layer.first + expert for layer, expert, _ in where]
        values = torch.stack([layer.row(expert, slot) for layer, expert, slot in where])
        self.transfers.publish(self.table, rows, values)

    @contextmanager
    def staging_prompts(self) -> Iterator[None]:
        """Let prompts in this block stage experts."""
        self.stages, self._ahead = True, None
        try:
            yield
        finally:
            self.stages, self._ahead = False, None

    def stage_ahead(self, layer: "LayerStream") -> None:
        """Begin to stage the experts of the layer behind one, while attention runs."""
        after = self.layers.index(layer) + 1
        if after < len(self.layers) and not self.layers[after].on_disk:
            self._ahead = self.layers[after], self.layers[after].begin_staging()

    def take_ahead(self, layer: "LayerStream") -> list[Any] | None:
        """Return the copies that were begun for a layer, if any."""
        found, self._ahead = self._ahead, None
        return found[1] if found is not None and found[0] is layer else None

    @property
    def on_disk(self) -> bool:
        """Whether the host takes part in a step, which can be no graph then."""
        return any(layer.on_disk for layer in self.layers)

    @property
    def most_in_place(self) -> int:
        """Tokens of a prompt up to which experts are read where they lie, so that it can be a graph."""
        return min(layer.most_in_place for layer in self.layers)


class LayerStream:
    """The experts of a layer: blocks in host memory, some of them in slots."""

    def __init__(self, streams: ExpertStreams, first: int, index: int, host: HostLayer, e: Any) -> None:
        """first: its first row of the table, index: among the layers that have experts."""
        self._streams = weakref.ref(streams)  # no cycle: who drops a model frees its slots here and now
        self.first, self.blocks = first, host.blocks
        self.counts_at = first + index
        self.block_bytes, self.on_disk = host.block_bytes, host.on_disk
        assert host.slots is not None, "`finish` has allocated them"
        self.policy, self.slots = SlotPolicy(e.count, host.slot_count, e.top), host.slots
        rows = e.table.cpu().clone()
        streams.host_rows[first : first + e.count] = rows
        inside = [self._inside(i, row) for i, row in enumerate(rows)]
        self._column = int(inside[0].nonzero()[0, 0])  # of an address in the block
        for expert, slot in self.policy.resident.items():
            self.slots[slot].copy_(self.blocks[expert], non_blocking=True)
            rows[expert] = self.row(expert, slot)
        table = streams.table[first : first + e.count]
        table.copy_(rows)
        self.e: Any = replace(e, table=table)  # ExpertWeights, or those of another format

    @property
    def streams(self) -> ExpertStreams:
        found = self._streams()
        assert found is not None, "the model's offload keeps it"
        return found

    def _inside(self, expert: int, row: Tensor) -> Tensor:
        """Return which addresses of a row are in the expert's block."""
        begin = self.blocks[expert].data_ptr()
        return (row >= begin) & (row < begin + self.block_bytes)

    def row(self, expert: int, slot: int | None) -> Tensor:
        """Return the table's row of an expert in a slot, or (None) in host memory."""
        return self._row_at(expert, None if slot is None else self.slots[slot].data_ptr())

    def _row_at(self, expert: int, address: int | None) -> Tensor:
        row = self.streams.host_rows[self.first + expert]
        if address is None:
            return row
        return torch.where(self._inside(expert, row), row + (address - self.blocks[expert].data_ptr()), row)

    def count(self, chosen: Tensor) -> None:
        """Note the experts int32 [M, top] that tokens take."""
        e, streams = self.e, self.streams
        counts = streams.counts[self.counts_at : self.counts_at + e.count + 1]
        load(*COUNT)(
            (-(-chosen.numel() // 256), 1, 1),
            256,
            *(chosen, e.table, counts, self.slots, chosen.numel(), e.count, e.table.shape[1]),
            *(self._column, len(self.slots), self.block_bytes),
        )

    @property
    def most_in_place(self) -> int:
        """Tokens up to which an expert is read about once, so that reading it in place costs no more than a copy."""
        return 0 if self.on_disk else min(MOST_GRAPHED, STAGED_SLOTS * self.e.count // self.e.top)

    def stages(self, rows: int) -> bool:
        """Whether this number of tokens is multiplied by `grouped`."""
        return self.on_disk or (self.streams.stages and rows > self.most_in_place)

    def grouped(self, h: Tensor, chosen: Tensor, sorted_slots: Slots, p: Any = products) -> Tensor:
        """Return [slots, N], what experts make of h [M, K], in the order of tokens and their experts chosen [M, top].

        Passes of experts that are in slots of the GPU come first, then those of each half of the staging buffer. The
        bits of a token at an expert do not depend on the others. p: the module with the products of this format.
        """
        e, streams, device = self.e, self.streams, h.device
        if is_recording():
            chosen = torch.zeros_like(chosen)  # which no kernel has written
        wanted = set(chosen.flatten().tolist()) if self.on_disk else None  # waits for the GPU
        resident, groups = self.policy.resident, self._groups(wanted)
        group = torch.zeros(e.count, dtype=torch.int32)  # of each expert; 0: in a slot
        table = streams.host_rows[self.first : self.first + e.count].clone()
        for i, slot in resident.items():
            table[i] = self.row(i, slot)
        for g, experts in enumerate(groups):
            for place, i in enumerate(experts):
                group[i], table[i] = g + 1, self._row_at(i, self._staged(g, place).data_ptr())
        moved, group = _to(table, device), _to(group, device)
        group_of_slot = group[chosen.flatten().long()][:, None]  # [slots, 1]
        made = torch.empty(chosen.numel(), e.down.N, dtype=h.dtype, device=device)
        filled = streams.take_ahead(self) or self.begin_staging(groups)
        for g in range(len(groups) + 1):
            if g == 0 and not resident:
                continue
            if g:
                streams.transfers.wait(filled[g - 1])
            mine = self._passes_of(g, sorted_slots, chosen, group, moved)
            part = p.grouped_down(p.grouped_up(h, mine, e), mine, e)  # of the other slots it has no values
            torch.where(group_of_slot == g, part, made, out=made)
            if g and g + 1 < len(groups):  # that half has just been read
                filled.append(self._stage(g + 1, groups))
        streams.stage_ahead(self)
        return made

    def _passes_of(self, g: int, slots: Slots, chosen: Tensor, group: Tensor, table: Tensor) -> Slots:
        """Return the slots with only the passes of a group's experts, and where a table says that these are now."""
        passes, count = torch.empty_like(slots.passes), torch.empty_like(slots.pass_count)
        load(*PASSES)(
            (1, 1, 1),
            32,
            *(slots.passes, slots.pass_count, slots.order, chosen, group, table, passes, count, g),
            slots.passes.shape[1],
        )
        return replace(slots, passes=passes, pass_count=count)

    def _groups(self, wanted: Collection[int] | None = None) -> list[list[int]]:
        """Return the experts that are in no slot, all or of some, as many at a time as half of the buffer holds."""
        half, resident = staged_experts(self.e.count, self.block_bytes), self.policy.resident
        missing = [i for i in range(self.e.count) if i not in resident and (wanted is None or i in wanted)]
        return [missing[i : i + half] for i in range(0, len(missing), half)]

    def begin_staging(self, groups: Sequence[Sequence[int]] | None = None) -> list[Any]:
        """Begin to fill both halves of the staging buffer, which all that has begun is free to read until then."""
        groups = self._groups() if groups is None else groups
        return [self._stage(g, groups) for g in range(min(2, len(groups)))]

    def _staged(self, group: int, place: int) -> Tensor:
        return self.streams.staging[group % 2, place * self.block_bytes :][: self.block_bytes]

    def _stage(self, g: int, groups: Sequence[Sequence[int]]) -> Any:
        """Begin to copy the experts of a group to its half of the buffer."""
        pairs = [] if is_recording() else [(self._staged(g, p), self.blocks[i]) for p, i in enumerate(groups[g])]
        return self.streams.transfers.fill(pairs)


COUNT = ("experts/streaming.cu", "crelle::count_experts")
PASSES = ("experts/streaming.cu", "crelle::passes_of_group")


def _to(t: Tensor, device: torch.device) -> Tensor:
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def streamed_layer(mlp: Any, e: Any) -> LayerStream | None:
    """Return the stream of a layer's experts, or None where they are resident; mlp: its modules, e: its weights."""
    offload: ExpertOffload | None = getattr(mlp, "offload", None)
    if offload is None or not offload.active:
        return None
    if offload.streams is None:
        offload.streams = ExpertStreams(offload, e.table.shape[1])
    streams: ExpertStreams = offload.streams
    return streams.layer(mlp.layer, offload.layers[mlp.layer], e)
