"""The checkpoint of several ranks: the first one writes it, the others know what is there and write nothing.

Shards are written in a thread, in order, while the next layer is quantized; a few may wait for it. A killed run has
lost those. An error of writing is raised where the next shard is added, or at the end.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.destination import destination, partial_of
from crelle.quantizers.ranks import world

Encoded = tuple[Mapping[str, QuantTensor], Mapping[str, Tensor], Sequence[str]]  # matrices, other tensors, warnings


_WAITING = 4  # shards at most that are not on the disk: embedding and head take longer to write than a layer


class FirstWriter:
    """A CheckpointWriter that all ranks can ask. The same for one rank alone."""

    def __init__(
        self, out: Path, recipe: Mapping[str, Any], shards: Sequence[str], *, resume: bool, overwrite: bool
    ) -> None:
        self.partial = partial_of(destination(out))
        self._world = world()
        self._writer: CheckpointWriter | None = None
        self._thread = ThreadPoolExecutor(1, "write-checkpoint")
        self._writes: deque[Future[None]] = deque()
        self._failed = False
        if self._world.first:
            self._writer = CheckpointWriter(out, recipe, resume=resume, overwrite=overwrite)
        # The others wait here, so that no rank reads the directory before it is as it should be.
        self._finished = frozenset(self._world.value([s for s in shards if self._writer and self._writer.has(s)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()  # what is quantized is worth keeping, whatever ended the run
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)

    def has(self, shard: str) -> bool:
        """Tell whether a shard is already safely on the disk."""
        return shard in self._finished

    def contents(self, shard: str) -> tuple[dict[str, QuantTensor], dict[str, Tensor]]:
        """Return a finished shard's matrices by module name, and its other tensors by their full name."""
        matrices, others = ({}, {}) if self._writer is None else self._writer.contents(shard)
        owners = dict.fromkeys(self._world.value(list(matrices)), 0)
        return self._world.matrices(matrices, owners), self._world.tensors(others)

    def add(self, shard: str, encode: Callable[[], Encoded]) -> None:
        """Have one shard written, which is encoded here, by the rank that writes it."""
        if self._writer is not None:
            encoded = encode()
            self._wait(_WAITING - 1)
            self._writes.append(self._thread.submit(self._write, self._writer, shard, encoded))

    def _write(self, writer: CheckpointWriter, shard: str, encoded: Encoded) -> None:
        if self._failed:  # what the next ones would meet too
            return
        try:
            writer.add(shard, *encoded)
        except BaseException:
            self._failed = True
            raise

    def _wait(self, left: int) -> None:
        """Wait until at most so many shards are not on the disk; raise what went wrong with the others."""
        while self._writes and (len(self._writes) > left or self._writes[0].done()):
            self._writes.popleft().result()

    def discard(self) -> None:
        """Delete what was written, after an error that a resumed run would only meet again."""
        if self._writer is not None:
            self._writer.discard()

    def finish(self, publish: Callable[[CheckpointWriter], None]) -> tuple[str, ...]:
        """Write what else belongs to the checkpoint and publish it; returns warnings. No rank goes on before that."""
        self._wait(0)
        if self._writer is not None:
            publish(self._writer)
        self._world.wait_for_first()
        return () if self._writer is None else self._writer.all_warnings()
