"""Batches of sequences on a GPU against the plain model, and against themselves alone; without one: why not."""

import gc
from collections.abc import Sequence

import pytest
import torch
from cuda_models import ATOM, CONFIGS, LLAMA, WIDE, make, reference_logits
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda.executor import CudaExecutor, supports_model
from crelle.kernels.cuda.step import fuse, fused_linear
from crelle.kernels.cuda.step.graph_inputs import BUCKETS, bucket_of
from crelle.kernels.cuda.step.prefill_graph import PrefillBucket
from crelle.kernels.executor import Chunk
from crelle.models.loader import Model

gpu = pytest.mark.gpu
TOLERANCE = {"kv16": 2e-2, "kv8": 2.5e-2, "kv4": 0.4}  # relative, of logits, to the plain model with numbers as cache


def test_a_model_on_the_cpu_says_why_it_has_no_graphs() -> None:
    assert supports_model(make(LLAMA, "fp16", "cpu"), KVFormat(4)) == "graphs of a whole step run on a GPU, not on cpu"


def test_the_reference_of_quantized_activations_is_the_model_itself_on_a_cpu() -> None:
    model, tokens = make({**LLAMA, "num_hidden_layers": 1}, next(iter(ATOM)), "cpu", torch.float32), torch.arange(9)
    assert {linear.kernel for linear in model.linears()} <= {"integer-reference", "cpu-integer", "dense"}
    assert torch.equal(reference_logits(model, tokens[None]), model(tokens[None], model.new_cache()))
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert torch.equal(attention.q.weight.perm, attention.v.weight.perm)  # one input has one order
    assert torch.equal(mlp.gate.weight.perm, mlp.up.weight.perm)


def test_buckets_hold_every_batch() -> None:
    assert [bucket_of(n) for n in (1, 3, 5, 17, 129, 256, 1000)] == [1, 4, 8, 24, 144, 256, 256]
    assert list(BUCKETS) == sorted(BUCKETS)


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have these small models multiply by what is stored, as large ones do."""
    monkeypatch.setattr(fused_linear, "SMALL", 0)


class Sequences:
    """Sequences on pages of their own, in no order; one more page than they need stays poisoned."""

    def __init__(self, model: Model, kv: str, sequences: int, length: int, exact: bool = False) -> None:
        fmt, c = KVFormat.parse(kv), model.spec
        each = -(-length // fmt.page)
        self.layers = [
            KVPages.new(fmt, each * sequences + 1, c.kv_heads, c.head_size, model.dtype, "cuda") for _ in c.layers
        ]
        order = torch.randperm(each * sequences + 1, generator=torch.Generator().manual_seed(0))
        self.pages, self.left = order[:-1].view(sequences, each).tolist(), int(order[-1])
        self.lengths = [0] * sequences
        for pages in self.layers:
            for t in pages.tensors():
                t.view(torch.uint8)[self.left] = 255
        centers = model.key_centers if fmt.center else [None] * len(c.layers)
        self.batch = CudaExecutor(model, self.layers, centers, batch_invariant=exact, step=model.cuda_step)

    def run(self, new: dict[int, Sequence[int]], wanted: Sequence[int] | None = None) -> Tensor:
        parts = [Chunk(ids, self.lengths[b], self.pages[b], wanted is None or b in wanted) for b, ids in new.items()]
        for b, ids in new.items():
            self.lengths[b] += len(ids)
        return self.batch.run(parts).clone()

    def untouched(self) -> bool:
        return all(bool((t.view(torch.uint8)[self.left] == 255).all()) for p in self.layers for t in p.tensors())


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(1000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@gpu
@pytest.mark.parametrize("kv", TOLERANCE)
@pytest.mark.parametrize(
    "scheme", ["bcq:bits=3,group=128", "rtn:bits=4,group=64", "mixed:four=0.25,outliers=0.002", "fp16"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_steps_give_the_models_logits(name: str, scheme: str, kv: str) -> None:
    model = make(CONFIGS[name], scheme, "cuda")
    assert supports_model(model, KVFormat.parse(kv)) is None
    sequences = Sequences(model, kv, 12, 80)
    ids = {b: random_ids(60 + b, seed=b) for b in range(12)}
    with torch.inference_mode():
        wanted = {b: model(torch.tensor([i], device="cuda"), model.new_cache(1))[0] for b, i in ids.items()}  # [T, V]
    # all prompts at once, some in two chunks, then steps of 3, 8 and 12 sequences
    found = sequences.run({b: ids[b][: 20 + b] for b in range(12)})
    for b in range(12):
        assert error(found[b], wanted[b][19 + b]) < TOLERANCE[kv]
    found = sequences.run({b: ids[b][20 + b : 41 + b] for b in (1, 5)} | {2: [ids[2][22]]}, wanted=[2, 5])
    assert error(found[0], wanted[5][45]) < TOLERANCE[kv]
    assert error(found[1], wanted[2][22]) < TOLERANCE[kv]
    for rows in (range(3), range(2, 10), range(12), range(1)):
        for _ in range(3):
            found = sequences.run({b: [ids[b][sequences.lengths[b]]] for b in rows})
            for row, b in enumerate(rows):
                assert error(found[row], wanted[b][sequences.lengths[b] - 1]) < TOLERANCE[kv]
    assert sequences.untouched()


@gpu
@pytest.mark.parametrize("scheme", ATOM)
@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
def test_quantized_activations_give_the_logits_of_the_integer_reference(name: str, scheme: str) -> None:
    """One layer: a code of few bits that rounds the other way moves others, and more so in every layer."""
    config = {**CONFIGS[name], "num_hidden_layers": 1}
    model = make(config, scheme, "cuda")
    assert supports_model(model, KVFormat.parse("kv16")) is None
    assert {linear.kernel for linear in model.linears()} == {"cuda-integer", "dense"}
    ids = {b: random_ids(40, seed=b) for b in range(12)}
    wanted = {b: reference_logits(model, torch.tensor([i]))[0] for b, i in ids.items()}
    sequences = Sequences(model, "kv16", 12, 48)
    rows = list(zip(sequences.run({b: i[:20] for b, i in ids.items()}), (wanted[b][19] for b in ids), strict=True))
    for some in (range(3), range(2, 10), range(12), range(1)):
        for _ in range(3):
            found = sequences.run({b: [ids[b][sequences.lengths[b]]] for b in some})
            rows += [(row, wanted[b][sequences.lengths[b] - 1]) for row, b in zip(found, some, strict=True)]
    found, expected = (torch.stack(each) for each in zip(*((a.cpu(), b) for a, b in rows), strict=True))
    assert error(found, expected) < ATOM[scheme]
    assert sequences.untouched()


@gpu
def test_prompts_that_attend_in_several_calls_are_as_those_in_one() -> None:
    """A context of 64 holds three of them."""
    short = make({**LLAMA, "max_position_embeddings": 64}, "fp16", "cuda")
    ids = {b: random_ids(20, seed=b) for b in range(7)}
    together, alone = (Sequences(short, "kv16", 7, 48) for _ in range(2))
    for begin, end in ((0, 12), (12, 20)):
        found = together.run({b: i[begin:end] for b, i in ids.items()})
        for b, i in ids.items():
            assert error(found[b], alone.run({b: i[begin:end]})[0]) < TOLERANCE["kv16"]


@gpu
@pytest.mark.parametrize("kv", ["kv16", "kv4"])
@pytest.mark.parametrize(
    "scheme",
    [
        "bcq:bits=3,group=128",
        "rtn:bits=4,group=64",
        "mixed:four=0.25,outliers=0.002",
        "atom:w=4,a=4,group=128,outliers=128",
        "atom:w=4,a=8,levels=2,group=128,outliers=128",
        "fp16",
    ],
)
def test_exact_batches_are_bit_for_bit_the_single_ones(scheme: str, kv: str) -> None:
    model = make(LLAMA, scheme, "cuda")
    ids = {b: random_ids(60, seed=b) for b in range(20)}
    together, alone, chunked = (Sequences(model, kv, 20, 64, exact=True) for _ in range(3))
    found = {b: [row] for b, row in enumerate(together.run({b: i[:40] for b, i in ids.items()}))}
    for at in range(40, 60):
        for b, row in enumerate(together.run({b: [i[at]] for b, i in ids.items()})):
            found[b].append(row)
    for b, i in ids.items():
        rows = [alone.run({b: i[:40]})[0]] + [alone.run({b: [i[at]]})[0] for at in range(40, 60)]
        assert torch.equal(torch.stack(rows), torch.stack(found[b]))
    for chunk in ((0, 7), (7, 30), (30, 40)):
        last = chunked.run({b: i[slice(*chunk)] for b, i in ids.items()})
    assert torch.equal(last, torch.stack([rows[0] for rows in found.values()]))


@gpu
def test_a_bucket_gives_the_same_bits_whoever_else_is_in_it() -> None:
    model = make(LLAMA, "rtn:bits=4,group=64", "cuda")
    ids = {b: random_ids(33, seed=b) for b in range(16)}
    full, few = (Sequences(model, "kv4", 16, 48) for _ in range(2))
    for sequences in (full, few):
        for b in range(16):
            sequences.run({b: ids[b][:32]})
    a = full.run({b: [ids[b][32]] for b in range(16)})
    b = few.run({b: [ids[b][32]] for b in range(3, 12)})  # 9 of 16 rows
    assert torch.equal(a[3:12], b)


@gpu
def test_no_one_has_no_logits() -> None:
    model = make(LLAMA, "fp16", "cuda")
    sequences = Sequences(model, "kv16", 2, 40)
    assert sequences.run({0: random_ids(5), 1: [7]}, wanted=[]).shape == (0, 1000)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=128", "rtn:bits=4,group=128", "bcq:bits=2,group=32"])
@pytest.mark.parametrize("kv", ["kv16", "kv8", "kv4"])
def test_steps_whose_epilogues_encode_give_the_models_logits(kv: str, scheme: str, dtype: torch.dtype) -> None:
    model = make(WIDE, scheme, "cuda", dtype)
    sequences, ids = Sequences(model, kv, 4, 80), {b: random_ids(70, seed=b) for b in range(4)}
    with torch.inference_mode():
        wanted = {b: model(torch.tensor([i], device="cuda"), model.new_cache(1))[0] for b, i in ids.items()}  # [T, V]
    sequences.run({b: i[: 13 + 2 * b] for b, i in ids.items()})
    for rows in (range(4), range(1), range(1, 4), range(2), range(3, 4)):
        for _ in range(8):
            found = sequences.run({b: [ids[b][sequences.lengths[b]]] for b in rows})
            for row, b in enumerate(rows):
                assert error(found[row], wanted[b][sequences.lengths[b] - 1]) < max(TOLERANCE[kv], 6e-2)
    assert sequences.untouched()


@gpu
@pytest.mark.parametrize("kv", ["kv16", "kv4"])
@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=128", "mixed:four=0.25,outliers=0.002", "fp16"])
@pytest.mark.parametrize("name", ["llama", "opt", "mistral", "gemma3"])
def test_prefill_by_graph_is_prefill_without(name: str, scheme: str, kv: str) -> None:
    """Buckets of rows, sequences and keys, with padding in all of them; then what was stored is read by a step."""
    model = make(CONFIGS[name], scheme, "cuda")
    lengths = [(20,), (9,), (5, 3, 30), (2, 2), (47,), (64, 30), (100,)]
    for turn, each in enumerate(lengths):
        graphs, plain = Sequences(model, kv, 3, 400), Sequences(model, kv, 3, 400)
        plain.batch._prefill = lambda c, b=plain.batch: (b._prefill_eagerly(c), list(range(len(c))))  # type: ignore
        for again in range(4):
            ids = {b: random_ids(n, seed=10 * turn + again + b) for b, n in enumerate(each)}
            found, wanted = graphs.run(ids), plain.run(ids)
            assert found.shape == wanted.shape
            assert error(found, wanted) < TOLERANCE[kv]
        assert any(g.graph is not None for g in graphs.batch._prefill_graphs.values())
        after = {b: [7 + b] for b in range(len(each))}
        assert error(graphs.run(after), plain.run(after)) < TOLERANCE[kv]
        assert graphs.untouched()


@gpu
@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=64", "rtn:bits=4,group=64", "mixed:four=0.25,outliers=0.002"])
@pytest.mark.parametrize("name", CONFIGS)
def test_small_matrices_are_multiplied_dequantized(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 2 << 20)
    model = make(CONFIGS[name], scheme, "cuda")
    sequences, ids = Sequences(model, "kv16", 4, 80), {b: random_ids(70, seed=b) for b in range(4)}
    with torch.inference_mode():
        wanted = {b: model(torch.tensor([i], device="cuda"), model.new_cache(1))[0] for b, i in ids.items()}  # [T, V]
    sequences.batch.kernels([1, 4], [16])  # which must keep nothing that was not computed
    sequences.run({b: i[: 13 + 2 * b] for b, i in ids.items()})
    for rows in (range(4), range(1), range(1, 4)):
        for _ in range(8):
            found = sequences.run({b: [ids[b][sequences.lengths[b]]] for b in rows})
            for row, b in enumerate(rows):
                assert error(found[row], wanted[b][sequences.lengths[b] - 1]) < TOLERANCE["kv16"]
    linears = [linear for layer in model.cuda_step.layers for linear in layer.linears]
    copies = [linear._dense for linear in linears if linear._dense is not None]
    assert len(copies) == len(linears)
    inner = [linear for linear in model.linears() if linear is not model.head]
    assert sum(c.numel() * c.element_size() for c in copies) == fuse.copy_bytes(inner, 2)


@gpu
def test_a_prompt_has_the_same_bits_before_and_after_its_graph_is_captured() -> None:
    model, ids = make(LLAMA, "bcq:bits=3,group=128", "cuda"), random_ids(50)
    batch = Sequences(model, "kv16", 1, 64).batch
    runs = [batch.run([Chunk(ids, 0, [0, 1, 2, 3], True)]).clone() for _ in range(4)]
    assert all(torch.equal(runs[0], again) for again in runs[1:])


def test_prefills_have_the_smallest_bucket_that_holds_them() -> None:
    def bucket(*chunks: tuple[int, int], context: int = 8192) -> tuple[int, int, int] | None:
        found = PrefillBucket.of([Chunk([0] * n, start, [], True) for start, n in chunks], context)
        return None if found is None else (found.rows, found.sequences, found.keys)

    assert bucket((0, 2)) == (16, 1, 16)
    assert bucket((0, 16)) == (16, 1, 16)
    assert bucket((0, 17)) == (32, 1, 32)
    assert bucket((0, 100), (0, 28)) == (128, 16, 128)
    assert bucket((2000, 30)) == (32, 1, 4096)
    assert bucket((2000, 30), context=2048) == (32, 1, 2048)
    assert bucket((1500, 30), (600, 2), context=2048) is None  # keys for which no memory was planned
    assert bucket((5000, 30)) is None
    assert bucket((0, 1025)) is None
    assert bucket(*[(0, 2)] * 17) is None


@gpu
def test_executors_of_one_model_share_one_copy_of_the_weights() -> None:
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make(config, "bcq:bits=3,group=128", "cuda")
    alone = torch.cuda.memory_allocated() - before
    for _ in range(2):
        Sequences(model, "kv16", 1, 16).run({0: [1]})
    assert torch.cuda.memory_allocated() - before < 1.25 * alone + 40e6  # pages, digits, the graph's own pool
