"""Several processes work on one model, a rank for each device: torch.distributed, in the few calls that we need.

`world()` is this process's place among them. In a process that has not called `join` it is a world of one in which
nothing is communicated, so that callers need not ask. Collective calls are made by all ranks in the same order.

Sums are taken in the order of the ranks, whatever algorithm a backend prefers for a size: every rank has the same bits,
and so does every run with as many ranks. A rank gets a part of each tensor from all others, adds, and sends its part of
the sum to all: 2 (R - 1) / R of the tensor's bytes leave a rank, as in any bandwidth-optimal all-reduce.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor, format_of
from crelle.quantizers.stage_times import COMMUNICATION, timed

_CPU = torch.device("cpu")
_PIECE = 1 << 25  # elements that are summed at one time: bounds the temporaries
_COLLECTIVE = timedelta(hours=2)  # until a rank that does not come is given up; one that dies is noticed at once
_FIRST = timedelta(days=2)  # until the others give up on work of the first rank alone


@dataclass(frozen=True, slots=True)
class World:
    """A rank, how many there are, and where its tensors are."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    store: Any = None  # torch.distributed.Store; None: alone, nothing is communicated

    @property
    def first(self) -> bool:
        """Tell whether this rank is the one that writes files and reports."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.store is None

    def part(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows [S, ...] that all ranks have."""
        return rows.tensor_split(self.size)[self.rank]

    def add(self, t: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.alone:
            return t
        if not t.is_contiguous():
            return t.copy_(self.add(t.contiguous()))
        with timed(COMMUNICATION):
            for piece in torch.split(t.view(-1), _PIECE):
                self._add(piece)
        return t

    def _add(self, flat: Tensor) -> None:
        width = -(-len(flat) // self.size)
        mine = flat.new_zeros(self.size, width)  # padded: all parts are of one size
        mine.view(-1)[: len(flat)] = flat
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        for other in theirs[1:]:
            theirs[0] += other
        dist.all_gather(list(mine.unbind()), theirs[0])
        flat.copy_(mine.view(-1)[: len(flat)])

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors of one type over the ranks, in place; small ones together."""
        if self.alone:
            return
        together: list[Tensor] = []
        count = 0
        for t in tensors:
            if together and count + t.numel() > _PIECE:
                self._add_together(together)
                together, count = [], 0
            together.append(t)
            count += t.numel()
        self._add_together(together)

    def _add_together(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) < 2:
            for t in tensors:
                self.add(t)
            return
        total = self.add(torch.cat([t.reshape(-1) for t in tensors]))
        for t, new in zip(tensors, torch.split(total, [t.numel() for t in tensors]), strict=True):
            t.copy_(new.view_as(t))

    def counts(self, n: int) -> list[int]:
        """Return a number of every rank."""
        if self.alone:
            return [n]
        found = torch.zeros(self.size, dtype=torch.int64)
        found[self.rank] = n
        return [int(one) for one in self.add(found)]

    def mean(self, t: Tensor) -> Tensor:
        """Return the mean over the elements of all ranks' tensors."""
        if self.alone:
            return t.mean()
        total = self.add(t.sum(dtype=torch.float64).reshape(1))
        return (total[0] / sum(self.counts(t.numel()))).to(t.dtype)

    def gather(self, t: Tensor) -> Tensor:
        """Return the rows [n, ...] of all ranks, in the order of the ranks."""
        if self.alone:
            return t
        return torch.cat([self.tensors({"rows": t}, source)["rows"] for source in range(self.size)])

    def value(self, value: Any, source: int = 0) -> Any:
        """Return what JSON says of a value that one rank has; the others' values are ignored."""
        if self.alone:
            return value
        text = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, source)
        data = torch.frombuffer(bytearray(text or int(length)), dtype=torch.uint8)
        dist.broadcast(data, source)
        return json.loads(data.numpy().tobytes())

    def tensors(self, tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
        """Return the tensors that one rank has, on the device; the others' are ignored."""
        if self.alone:
            return dict(tensors)
        with timed(COMMUNICATION):
            facts = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()}
            facts = self.value(facts, source)
            sizes = [getattr(torch, dtype).itemsize * torch.Size(shape).numel() for dtype, shape in facts.values()]
            if self.rank == source:
                here = {n: t.to(self.device) for n, t in tensors.items()}
                sent = [t.contiguous().view(-1).view(torch.uint8) for t in here.values()]
                dist.broadcast(torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *sent]), source)
                return here
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            dist.broadcast(data, source)
            parts = zip(facts.items(), torch.split(data, sizes), strict=True)
            return {n: part.clone().view(getattr(torch, dtype)).view(shape) for (n, (dtype, shape)), part in parts}

    def matrices(self, mine: Mapping[str, QuantTensor], owners: Mapping[str, int]) -> dict[str, QuantTensor]:
        """Return encoded matrices by name, of which each rank has those that it owns."""
        if self.alone:
            return {name: mine[name] for name in owners}
        found: dict[str, QuantTensor] = {}
        for name, owner in owners.items():
            here = mine.get(name)
            spec = self.value(None if here is None else here.spec(), owner)
            tensors = self.tensors({} if here is None else here.tensors(), owner)
            found[name] = here if here is not None else format_of(spec).from_parts(spec, tensors)
        return found

    def once(self, work: Callable[[], Any]) -> Any:
        """Let the first rank alone do some work, however long it takes, and return what JSON says of its result."""
        if self.store is None:
            return work()
        with _in(World(device=self.device)):
            value = work() if self.first else None
        self.wait_for_first()
        return self.value(value)

    def once_tensor(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the same for a tensor, which is in host memory."""
        made: dict[str, Tensor] = {}
        self.once(lambda: made.update(it=work()))
        return self.tensors(made)["it"].cpu()

    def wait_for_first(self) -> None:
        """Wait until the first rank is here, too."""
        if self.store is None:
            return
        key = f"first-{self.store.add(f'waited-{self.rank}', 1)}"
        if self.first:
            self.store.set(key, b"")
        else:
            self.store.wait([key], _FIRST)


_world = World()


def world() -> World:
    """Return this process's place."""
    return _world


@contextmanager
def _in(place: World) -> Iterator[None]:
    global _world
    before, _world = _world, place
    try:
        yield
    finally:
        _world = before


@contextmanager
def join(rank: int, size: int, device: torch.device, store: str) -> Iterator[World]:
    """Be one of several ranks while the block runs; `store`: a file that all of them can open.

    Tensors in host memory go by gloo, those on GPUs by NCCL.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    shared = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=_COLLECTIVE)
    place = World(rank, size, device, shared)
    _require_equal_devices(place)
    with _in(place):
        yield place
        place.wait_for_first()
    dist.destroy_process_group()  # not after an error: it would wait for ranks that may be gone


def _require_equal_devices(place: World) -> None:
    """Refuse GPUs of different kinds: what all ranks compute for themselves has to come out the same."""
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu"
    names = [place.value(name, source) for source in range(place.size)]
    if other := next((n for n in names if n != names[0]), None):
        raise UnsupportedError(f"all devices of a run must be of the same kind, got {names[0]} and {other}")


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which rank works on what: the largest first, each to the rank with the least to do."""
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}


class SpreadRows:
    """Rows of which every rank holds a part; a batch of any of them is spread evenly."""

    def __init__(self, place: World, rows: Tensor) -> None:
        self._world = place
        self._counts = place.counts(len(rows))
        self._begins = [sum(self._counts[:r]) for r in range(place.size)]

    def __len__(self) -> int:
        return sum(self._counts)

    def take(self, rows: Tensor, pick: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part of rows `pick` [B] of all, on the device; `rows` are those of this rank."""
        me = self._world
        if me.alone:
            return rows[pick].to(device)
        with timed(COMMUNICATION):
            wanted = pick.tensor_split(me.size)  # by the rank that gets them
            sent = [self._of(part, me.rank) for part in wanted]
            got = [len(self._of(wanted[me.rank], source)) for source in range(me.size)]
            given = rows[torch.cat(sent) - self._begins[me.rank]].to(device)
            found = given.new_empty(sum(got), *rows.shape[1:])
            dist.all_to_all_single(found, given, got, [len(part) for part in sent])
        return found

    def _of(self, pick: Tensor, rank: int) -> Tensor:
        begin = self._begins[rank]
        return pick[(pick >= begin) & (pick < begin + self._counts[rank])]
