"""The CPU's executor: the fused C++ step and prefill over pages; see crelle.kernels.executor.

Tokens of prompts go through the large tiles of `prefill`, those of all sequences in one pass over the weights; sampled
tokens, also those that are verified, go through `step`, up to 16 of them in a call. Both are batch-invariant, so that a
sequence has the same bits alone and beside others, and however its prompt is split into chunks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cpu import available
from crelle.kernels.cpu.fused_decoder import MAX_ROWS, FusedDecoder, ModelParts, Paged
from crelle.kernels.cpu.fused_decoder import supports as step_supports
from crelle.kernels.executor import Chunk, block_table
from crelle.kernels.spec import DecoderSpec

_MAX_HEAD_SIZE = 512  # what the C++ core stores in pages


def supports(spec: DecoderSpec, kv: KVFormat) -> str | None:
    """Return None, or the sentence that says what of a decoder or its cache the fused step lacks."""
    if (reason := available()) is not None:
        return f"the C++ extension {reason}"
    if (reason := step_supports(spec)) is not None:
        return f"the fused step {reason}"
    if spec.head_size > _MAX_HEAD_SIZE:
        return f"the fused step stores heads of at most {_MAX_HEAD_SIZE} channels in pages, not of {spec.head_size}"
    if kv.coded and spec.head_size % 2:
        return f"the fused step packs channels in pairs; a head of {spec.head_size} has an odd one"
    return None


class CpuExecutor:
    """Runs one model over pages; it keeps the parts and the pages alive."""

    prefill_differs = True  # prompts run through other tiles than single tokens

    def __init__(
        self, model: ModelParts | FusedDecoder, layers: Sequence[KVPages], centers: Sequence[Tensor | None] = ()
    ) -> None:
        """Take a model and the pages of its layers; centers: of each layer's keys, where the format has them."""
        self.decoder = model if isinstance(model, FusedDecoder) else FusedDecoder(model)
        self.layers = layers
        self.centers = list(centers)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Store the keys and values of all chunks; return logits f32 [wanted rows, V], in their order."""
        if any(chunk.scored and not chunk.verified for chunk in chunks):
            return self._run_scored(chunks)
        wanted = [(i, j) for i, c in enumerate(chunks) for j in range(len(c.ids) - c.rows, len(c.ids))]
        found: list[tuple[list[tuple[int, int]], Tensor]] = []  # tokens (chunk, index), and their logits
        prompts = [(i, n) for i, chunk in enumerate(chunks) if (n := _prompt_tokens(chunk))]
        if prompts:
            found.append(self._prefill(chunks, prompts))
        prefilled = dict(prompts)
        sampled = [(i, j) for i, chunk in enumerate(chunks) for j in range(prefilled.get(i, 0), len(chunk.ids))]
        for begin in range(0, len(sampled), MAX_ROWS):
            found.append(self._step(chunks, sampled[begin : begin + MAX_ROWS]))
        if len(found) == 1:
            return found[0][1]  # in the order of the chunks; what most passes are
        rows = {token: row for row, token in enumerate(wanted)}
        logits = torch.empty(len(rows), self.decoder.vocabulary)
        for which, some in found:
            if which:
                logits[[rows[token] for token in which]] = some
        return logits

    def _run_scored(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run the prompts that are scored for themselves, since all of a pass's prompts have all logits or none."""
        others = [c for c in chunks if not c.scored or c.verified]
        plain = iter(torch.split(self.run(others), [c.rows for c in others]) if others else ())
        logits = list[Tensor]()
        for c in chunks:
            if c.scored and not c.verified:
                count, start = torch.tensor([len(c.ids)]), torch.tensor([c.start])
                logits.append(self.decoder.prefill_batch(torch.tensor(c.ids), count, start, self._pages([c])))
            else:
                logits.append(next(plain))
        return torch.cat(logits)

    def _prefill(
        self, chunks: Sequence[Chunk], prompts: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], Tensor]:
        """Run the first n tokens of chunk i for all (i, n)."""
        ids = np.array([token for i, n in prompts for token in chunks[i].ids[:n]], dtype=np.int64)
        counts = torch.tensor([n for _, n in prompts])
        starts = torch.tensor([chunks[i].start for i, _ in prompts])
        want = [s for s, (i, n) in enumerate(prompts) if chunks[i].wanted and n == len(chunks[i].ids)]
        pages = self._pages([chunks[i] for i, _ in prompts])
        logits = self.decoder.prefill_batch(
            torch.from_numpy(ids), counts, starts, pages, want=torch.tensor(want, dtype=torch.int64)
        )
        return [(i, n - 1) for i, n in (prompts[s] for s in want)], logits

    def _step(self, chunks: Sequence[Chunk], tokens: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], Tensor]:
        """Run token j of chunk i for all (i, j), at most MAX_ROWS."""
        row = {i: row for row, i in enumerate(dict.fromkeys(i for i, _ in tokens))}
        ids = torch.tensor([chunks[i].ids[j] for i, j in tokens])
        positions = torch.tensor([chunks[i].start + j for i, j in tokens])
        want = [t for t, (i, j) in enumerate(tokens) if j >= len(chunks[i].ids) - chunks[i].rows]
        logits = self.decoder.step(
            ids,
            positions,
            self._pages([chunks[i] for i in row]),
            rows=torch.tensor([row[i] for i, _ in tokens]),
            want=torch.tensor(want, dtype=torch.int64),
        )
        return [tokens[t] for t in want], logits

    def _pages(self, chunks: Sequence[Chunk]) -> Paged:
        return Paged(self.layers, block_table([chunk.pages for chunk in chunks]), self.centers)


def _prompt_tokens(chunk: Chunk) -> int:
    """Return how many of a chunk's tokens belong to the prompt, its first ones."""
    if chunk.prompt is None:
        return len(chunk.ids) if len(chunk.ids) > 1 else 0
    return min(max(chunk.prompt - chunk.start, 0), len(chunk.ids))
