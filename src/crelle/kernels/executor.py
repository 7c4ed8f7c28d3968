"""What runs a decoder over a batch of sequences whose keys and values lie in pages.

    executor.run([Chunk(ids, start, pages, wanted=True), ...])     logits f32 [wanted chunks, V]

A chunk of which all are wanted has the logits of all of its tokens there instead: of a prompt that is scored, or of
tokens that were guessed and are verified, which are computed as if each had been sampled and run by itself.

An executor is made for one model and the pages of all its layers. Before that, its module's `supports(spec, kv, ...)`
says what it cannot run. A chunk is one token of a sequence (decode), several of its prompt (chunked prefill), or some
after the prompt (verification, or a preempted sequence's tokens once more).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from crelle.kernels.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence in a pass: `ids` behind the `start` tokens that are in its pages."""

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: bool  # whether the logits of its last token are
    token_source: int = -1  # 0 …: its one id is this row of the tokens sampled last, which the host need not know yet
    prompt: int | None = None  # tokens of the sequence's prompt; those behind it were sampled. None: all of it
    scored: bool = False  # the logits of all of its tokens are wanted

    @property
    def verified(self) -> bool:
        """Whether its tokens are verified: all after the prompt, and logits wanted of each."""
        return self.scored and self.prompt is not None and self.start >= self.prompt

    @property
    def rows(self) -> int:
        """Rows of logits that are wanted."""
        return len(self.ids) if self.scored else int(self.wanted)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def block_table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return int32 [B, max_pages] of the pages of each sequence; behind a row's last page stands 0, never read."""
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return torch.from_numpy(table)


class Executor(Protocol):
    """Runs one model at one precision."""

    prefill_differs: bool  # a token of a prompt has other bits than the same token where it was sampled

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Store the keys and values of all chunks; return logits f32 [wanted rows, V], in their order."""
        ...


class DecoderModules(Protocol):
    """A model as executors read it: its spec, and modules in the spec's slots (crelle.models.decoder has them)."""

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    embedding: Any
    input: Any  # project_in, positions
    layers: Any  # of attention (q, k, v, o, q_norm, k_norm), mlp (gate, up, down) and norms
    output: Any  # norm, project_out
    head: Any

    def linears(self) -> Iterable[Any]: ...
