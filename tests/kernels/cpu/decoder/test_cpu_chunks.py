"""Prefill is batch-invariant: a prompt has the same bits in any chunks and beside any other sequences."""

import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_models import open_model, quantize, some_tokens, take_apart, write_variant
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from spec_models import SPECS, VOCABULARY, random_parts

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.executor import CpuExecutor
from crelle.kernels.cpu.fused_decoder import FusedDecoder, ModelParts, Paged
from crelle.kernels.cpu.kernel import Cpu
from crelle.kernels.executor import Chunk
from crelle.quantizers.scheme import parse

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]
SCHEMES = ["fp16", "rtn:bits=4,group=24", "bcq:bits=3,group=24", "rtn:bits=8,group=24", "mixed:group=16,outliers=0.01"]
WIDTH = 12  # pages of a sequence


class Pool:
    """Pages of some sequences, handed out in disorder."""

    def __init__(self, parts: ModelParts, text: str, sequences: int) -> None:
        fmt, spec = KVFormat.parse(text), parts.spec
        count = sequences * WIDTH
        dtype = torch.float16
        self.layers = [KVPages.new(fmt, count, spec.kv_heads, spec.head_size, dtype, "cpu") for _ in spec.layers]
        self.table = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int().view(sequences, WIDTH)
        rng = torch.Generator().manual_seed(2)
        shape = spec.kv_heads, spec.head_size
        self.centers = [torch.randn(shape, generator=rng) for _ in spec.layers] if fmt.center else []

    def paged(self, *rows: int) -> Paged:
        return Paged(self.layers, self.table[list(rows)].contiguous(), self.centers)

    def stored(self, row: int, tokens: int) -> list[Tensor]:
        """What lies in a sequence's pages."""
        pages = self.table[row].long()
        return [t[pages].movedim(3, 1).flatten(0, 1)[:tokens] for layer in self.layers for t in layer.tensors()]


def cut(length: int, rng: random.Random) -> list[int]:
    """Lengths of random chunks."""
    borders = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, 7))))
    return [b - a for a, b in pairwise([0, *borders, length])]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@cache
def parts_of(scheme: str, name: str = "llama") -> ModelParts:
    """A decoder that several tests run. Do not write to it."""
    return random_parts(SPECS[name], None if scheme == "fp16" else scheme)


@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_chunks_alone(scheme: str, text: str, isa: str) -> None:
    parts, rng = parts_of(scheme), random.Random(3)
    fused, T = FusedDecoder(parts), 150
    tokens = some_tokens(T) % VOCABULARY
    whole = Pool(parts, text, 1)
    wanted, wanted_last = fused.prefill(tokens, 0, whole.paged(0), last=False), None
    for chunks in ([1] * 40 + [T - 40], [T], [23, 24, 25, T - 72], *(cut(T, rng) for _ in range(6))):
        pool, rows, position = Pool(parts, text, 1), [], 0
        for piece in tokens.split(chunks):
            rows.append(fused.prefill(piece, position, pool.paged(0), last=False))
            position += len(piece)
        assert torch.equal(torch.cat(rows), wanted)
        assert equal(pool.stored(0, T), whole.stored(0, T))
        pool, position = Pool(parts, text, 1), 0
        for piece in tokens.split(chunks):
            last = fused.prefill(piece, position, pool.paged(0))
            position += len(piece)
        wanted_last = last if wanted_last is None else wanted_last
        assert torch.equal(last, wanted_last)
        assert equal(pool.stored(0, T), whole.stored(0, T))


@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_chunks_beside_others(scheme: str, text: str, isa: str) -> None:
    """Several prompts, each in chunks of its own, a chunk of each in a pass."""
    parts, rng = parts_of(scheme), random.Random(4)
    fused, lengths = FusedDecoder(parts), [150, 1, 17, 64, 100, 33]
    prompts = [some_tokens(n, seed=n) % VOCABULARY for n in lengths]
    alone, wanted = [], []
    for i, prompt in enumerate(prompts):
        pool = Pool(parts, text, len(prompts))
        wanted.append(fused.prefill(prompt, 0, pool.paged(i)))
        alone.append(pool.stored(i, len(prompt)))
    for threads in (1, 2, 3):
        _core.set_threads(threads)
        pool, left, done = Pool(parts, text, len(prompts)), [cut(n, rng) for n in lengths], [0] * len(prompts)
        while any(left):
            now = [i for i in range(len(prompts)) if left[i] and rng.random() < 0.7]
            rng.shuffle(now)
            if not now:
                continue
            counts = [left[i].pop(0) for i in now]
            ids = torch.cat([prompts[i][done[i] : done[i] + n] for i, n in zip(now, counts, strict=True)])
            at = torch.tensor([done[i] for i in now])
            ends = [s for s, i in enumerate(now) if not left[i]]
            logits = fused.prefill_batch(
                ids, torch.tensor(counts), at, pool.paged(*now), want=torch.tensor(ends, dtype=torch.int64)
            )
            for s, y in zip(ends, logits, strict=True):
                assert torch.equal(y, wanted[now[s]][0])
            for i, n in zip(now, counts, strict=True):
                done[i] += n
        for i, n in enumerate(lengths):
            assert equal(pool.stored(i, n), alone[i])


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "windows by layer", "sandwich", "partial rope"])
def test_any_chunks_of_every_kind_of_decoder(name: str, isa: str) -> None:
    parts, rng = parts_of("rtn:bits=4,group=24", name), random.Random(5)
    fused, T = FusedDecoder(parts), 130
    tokens, other = some_tokens(T) % VOCABULARY, some_tokens(90, seed=9) % VOCABULARY
    whole = Pool(parts, "kv16", 2)
    wanted = fused.prefill(tokens, 0, whole.paged(0))
    for _ in range(4):
        pool, position = Pool(parts, "kv16", 2), 0
        for piece in tokens.split(cut(T, rng)):
            beside = rng.randint(1, 90)
            last = fused.prefill_batch(
                torch.cat([other[:beside], piece]),
                torch.tensor([beside, len(piece)]),
                torch.tensor([0, position]),
                pool.paged(1, 0),
                want=torch.tensor([1]),
            )
            position += len(piece)
        assert torch.equal(last, wanted)
        assert equal(pool.stored(0, T), whole.stored(0, T))


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_either_precision(precision: Any, isa: str) -> None:
    parts = random_parts(SPECS["llama"])
    for part in parts.layers:
        for linear in part.linears().values():
            assert isinstance(linear.weight, Tensor)
            coded = Cpu(precision).prepare(parse("rtn:bits=4,group=48").fit(linear.weight), torch.float32)
            object.__setattr__(linear, "weight", coded)
    fused, tokens = FusedDecoder(parts), some_tokens(70) % VOCABULARY
    pool = Pool(parts, "kv16", 2)
    wanted = fused.prefill(tokens, 0, pool.paged(0), last=False)
    rows = [
        fused.prefill(piece, at, pool.paged(1), last=False)
        for piece, at in zip(tokens.split(7), range(0, 70, 7), strict=True)
    ]
    assert torch.equal(torch.cat(rows), wanted)
    assert equal(pool.stored(1, 70), pool.stored(0, 70))


def test_a_pass_is_split_where_it_is_long(tmp_path: Path) -> None:
    """More tiles than a pass takes, of one sequence and of many."""
    source = write_variant(tmp_path / "m", "llama", max_position_embeddings=700)
    parts = take_apart(open_model(quantize(source, tmp_path / "q", "rtn:bits=4,group=24")))
    fused, prompts = FusedDecoder(parts), [some_tokens(n, seed=n) for n in [640, *([1] * 40), 300]]
    spec = parts.spec
    cache = [torch.zeros(2, len(prompts), spec.kv_heads, 700, spec.head_size) for _ in spec.layers]
    counts = torch.tensor([len(p) for p in prompts])
    zeros, all_rows = torch.zeros(len(prompts), dtype=torch.int64), torch.arange(len(prompts))
    together = fused.prefill_batch(torch.cat(prompts), counts, zeros, cache, want=all_rows)
    every = fused.prefill_batch(torch.cat(prompts), counts, zeros, cache)
    for i, (prompt, some) in enumerate(zip(prompts, every.split(counts.tolist()), strict=True)):
        one = [torch.zeros(2, 1, spec.kv_heads, 700, spec.head_size) for _ in spec.layers]
        assert torch.equal(fused.prefill(prompt, 0, one)[0], together[i])
        assert torch.equal(fused.prefill(prompt, 0, one, last=False), some)


def test_mistakes_are_named() -> None:
    parts = parts_of("fp16")
    fused, pool = FusedDecoder(parts), Pool(parts, "kv16", 2)

    def run(counts: list[int], at: list[int], rows: list[int] | None = None, want: list[int] | None = None) -> None:
        given = {"rows": rows, "want": want}
        some = {k: torch.tensor(v) for k, v in given.items() if v is not None}
        fused.prefill_batch(
            some_tokens(6) % VOCABULARY, torch.tensor(counts), torch.tensor(at), pool.paged(0, 1), **some
        )

    run([2, 4], [0, 0])
    for sentence, bad in {
        "more tokens than there are": ([2, 5], [0, 0]),
        "fewer tokens than there are": ([2, 3], [0, 0]),
        "at least one token": ([0, 6], [0, 0]),
        "one position": ([6], [0, 0]),
        "no such row": ([2, 4], [0, 0], [0, 2]),
        "share a row": ([2, 4], [0, 2], [1, 1]),
        "in order": ([2, 4], [0, 0], None, [1, 0]),
        "does not fit": ([2, 4], [0, 16 * WIDTH]),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            run(*bad)


# --- the executor -----------------------------------------------------------------------------------------------------


def generate(executor: CpuExecutor, pool: Pool, row: int, ids: list[int], prompt: int, chunks: list[int]) -> Tensor:
    """Logits of each token from the prompt's last on; the tokens are given, so that all runs have the same."""
    found, start, pages = [], 0, pool.table[row].tolist()
    for n in [*chunks, *([1] * (len(ids) - prompt))]:
        start, end = start + n, start + n
        found.append(executor.run([Chunk(ids[end - n : end], end - n, pages, wanted=end >= prompt, prompt=prompt)]))
    return torch.cat(found)


@pytest.mark.parametrize("text", ["kv16", "kv4"])
def test_executor_is_batch_invariant(text: str, isa: str) -> None:
    """Prompts in chunks and sampled tokens of all sequences in the same passes, some tokens of a sequence anew."""
    parts, rng = parts_of("rtn:bits=4,group=24"), random.Random(6)
    prompts = [40, 1, 90, 17, 5, 33]
    ids = [(some_tokens(n + 12, seed=n) % VOCABULARY).tolist() for n in prompts]
    alone = []
    for i, n in enumerate(prompts):
        pool = Pool(parts, text, len(ids))
        alone.append(generate(CpuExecutor(parts, pool.layers, pool.centers), pool, i, ids[i], n, [n]))
    pool, done = Pool(parts, text, len(ids)), [0] * len(ids)
    executor = CpuExecutor(FusedDecoder(parts), pool.layers, pool.centers)
    rounds, restarted = 0, False
    while any(at < len(tokens) for at, tokens in zip(done, ids, strict=True)):
        rounds += 1
        if rounds == 9 and not restarted:  # preempted: all of it once more, prompt and sampled tokens in one chunk
            restarted, done[0] = True, 0
        chunks, which = [], []
        for i in rng.sample(range(len(ids)), len(ids)):
            n = prompts[i]
            if done[i] >= len(ids[i]):
                continue
            size = rng.randint(1, n - done[i]) if done[i] < n else 1
            if restarted and i == 0 and done[0] == 0:
                size = n + 5
            end = done[i] + size
            chunks.append(Chunk(ids[i][done[i] : end], done[i], pool.table[i].tolist(), wanted=end >= n, prompt=n))
            which.append((i, end))
            done[i] = end
        found = iter(executor.run(chunks))
        for i, end in which:
            if end >= prompts[i]:
                assert torch.equal(next(found), alone[i][end - prompts[i]]), (i, end)
        assert next(found, None) is None
    assert restarted


def test_executor_takes_what_is_no_prompt_by_steps() -> None:
    parts = parts_of("rtn:bits=4,group=24")
    pool, tokens = Pool(parts, "kv16", 1), (some_tokens(30) % VOCABULARY).tolist()
    executor, pages = CpuExecutor(parts, pool.layers), pool.table[0].tolist()
    several = executor.run([Chunk(tokens, 0, pages, wanted=True)])  # prompt is None: more than one token is a prompt
    assert torch.equal(several, executor.run([Chunk(tokens, 0, pages, wanted=True, prompt=30)]))
    one = executor.run([Chunk(tokens[-1:], 29, pages, wanted=True)])
    assert torch.equal(one, executor.run([Chunk(tokens[-1:], 29, pages, wanted=True, prompt=29)]))
    assert executor.run([Chunk(tokens[:3], 0, pages, wanted=False)]).shape == (0, VOCABULARY)
