"""Batches on pages: the logits of the plain model, and for each sequence the same bits in any batch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy, write_tiny_model, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from torch import Tensor

from crelle import LLM
from crelle.engine.block_manager import Copy
from crelle.engine.model_runner import ModelRunner
from crelle.formats.bcq import UniformTensor
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import cpu
from crelle.kernels.cpu.executor import CpuExecutor
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.executor import Chunk
from crelle.models.cache import key_centers_of
from crelle.models.decoder import DecoderModel
from crelle.models.eager_executor import EagerExecutor, invariant_elementwise, invariant_product
from crelle.models.linear import QuantLinear

# The largest difference of a logit, of size about 1, to the model's own forward: sums in another order; the C++ kernels
# round activations to 16 bits, and tiles and rows differ by that.
TOLERANCE = {"fp32": 1e-4, "rtn:bits=4,group=24": 2e-3, "bcq:bits=3,group=24": 2e-3}
quick = settings(deadline=None, max_examples=share_of(12))


def opt_model(to: Path, **options: Any) -> Path:
    import transformers

    torch.manual_seed(7)
    sizes = {"hidden_size": 72, "ffn_dim": 100, "num_attention_heads": 6, **LAYERS}
    config = transformers.OPTConfig(
        **sizes, vocab_size=259, max_position_embeddings=96, bos_token_id=256, eos_token_id=258, **options
    )
    model = transformers.OPTForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


LAYERS = {"num_hidden_layers": 2}  # two rounds through the pages; a third is the second again
MODELS = {
    "llama": lambda to: write_tiny_model(to, **LAYERS),
    "wide": lambda to: write_tiny_model(to, **LAYERS, hidden_size=64, intermediate_size=192, head_dim=16),
    "tied": lambda to: write_tiny_model(to, **LAYERS, tie_word_embeddings=True),
    "windowed": lambda to: write_tiny_model(to, **LAYERS, model_type="mistral", sliding_window=7),
    "opt": lambda to: opt_model(to),
    "opt-350m": lambda to: opt_model(to, do_layer_norm_before=False, word_embed_proj_dim=40),
    "galactica": lambda to: opt_model(to, activation_function="gelu", enable_bias=False),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str, str | None], LLM] = {}

    def get(name: str, scheme: str = "fp32", kernel: str | None = None) -> LLM:
        key = name, scheme, kernel
        if key not in made:
            to = tmp_path_factory.mktemp(name)
            path = MODELS[name](to / "m")
            if scheme != "fp32":
                path = quantized_copy(path, to / "q", scheme)
            made[key] = LLM.load(path, device="cpu", kernel=kernel)
        return made[key]

    return get


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pages:
    """Sequences on pages of their own, in an order that is not that of time, run in any chunks."""

    def __init__(self, model: DecoderModel, kv: str, sequences: int, length: int, core: bool, exact: bool) -> None:
        fmt = KVFormat.parse(kv)
        each = -(-length // fmt.page)
        spec = model.spec
        sizes = (each * sequences, spec.kv_heads, spec.head_size, torch.float32, "cpu")
        self.layers = [KVPages.new(own, *sizes) for own in fmt.layers(len(spec.layers))]
        centers = key_centers_of(model.key_centers if fmt.centered else None, self.layers)
        order = torch.randperm(each * sequences, generator=torch.Generator().manual_seed(0))
        self.pages, self.lengths = order.view(sequences, each).tolist(), [0] * sequences
        decoder: Any = model.decoder
        self.executor: Any = (
            CpuExecutor(decoder, self.layers, centers)
            if core
            else EagerExecutor(model, self.layers, centers, batch_invariant=exact)
        )

    def run(self, chunks: dict[int, list[int]], wanted: Sequence[int] | None = None) -> dict[int, Tensor]:
        """Run these prompt tokens of these sequences in one pass; return the logits of the last of each."""
        want = list(chunks) if wanted is None else wanted
        batch = [
            Chunk(ids, self.lengths[b], self.pages[b], b in want, prompt=self.lengths[b] + len(ids))
            for b, ids in chunks.items()
        ]
        logits = self.executor.run(batch)
        for b, ids in chunks.items():
            self.lengths[b] += len(ids)
        return dict(zip((b for b in chunks if b in want), logits, strict=True))


def alone(
    model: DecoderModel, kv: str, ids: list[int], sizes: Sequence[int], core: bool, exact: bool = True
) -> list[Tensor]:
    """The logits of the last tokens of chunks of these sizes."""
    pages, found, at = Pages(model, kv, 1, len(ids), core, exact), [], 0
    for n in sizes:
        found.append(pages.run({0: ids[at : at + n]})[0])
        at += n
    return found


def without_core(model: DecoderModel) -> bool:
    return not isinstance(model.decoder, FusedDecoder)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["core", "layers", "layers, not invariant"])
def test_logits_are_those_of_the_model(load: Any, name: str, how: str) -> None:
    for scheme, tolerance in TOLERANCE.items():
        llm, ids = load(name, scheme), random_ids(40)
        if how == "core" and without_core(llm.model):
            pytest.skip("has no step in C++")
        want = llm.model(torch.tensor([ids]), llm.model.new_cache())[0]
        got = alone(llm.model, "16", ids, [23, 1, 1, 15], how == "core", exact=how != "layers, not invariant")
        want = want[[22, 23, 24, 39]]
        torch.testing.assert_close(torch.stack(got), want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("kv", ["8", "4", "4:center=true,page=5"])
@pytest.mark.parametrize("core", [True, False], ids=["core", "layers"])
def test_logits_are_those_of_the_model_with_coded_pages(load: Any, kv: str, core: bool) -> None:
    llm, ids = load("llama"), random_ids(40)
    if core and without_core(llm.model):
        pytest.skip("has no step in C++")
    want = llm.model(torch.tensor([ids]), llm.model.new_cache(kv=kv))[0, [9, 39]]
    # A value that lies between two codes may go either way.
    assert (torch.stack(alone(llm.model, kv, ids, [10, 30], core)) - want).norm() < 0.02 * want.norm()


CASES = [
    ("llama", "fp32", None, "16"),
    ("llama", "rtn:bits=4,group=24", None, "4"),
    ("llama", "bcq:bits=3,group=24", "dequantized", "16"),
    ("llama", "rtn:bits=4,group=24", "reference", "8"),
    ("wide", "bcq:bits=3,group=32", None, "4:page=5"),
    ("windowed", "bcq:bits=3,group=24", None, "8:page=3"),
    ("opt", "rtn:bits=4,group=24", None, "4"),
    ("opt-350m", "fp32", None, "8"),
    ("galactica", "bcq:bits=3,group=24", None, "16"),
]
if cpu.available() is None:
    CASES.append(("tied", "bcq:bits=2,group=24", "cpu-int8", "4:center=true"))


@pytest.mark.parametrize("core", [True, False], ids=["core", "layers"])
@pytest.mark.parametrize(("name", "scheme", "kernel", "kv"), CASES, ids=lambda v: str(v))
@pytest.mark.sample(3)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    load: Any, name: str, scheme: str, kernel: str | None, kv: str, core: bool
) -> None:
    model = load(name, scheme, kernel).model
    if core and without_core(model):
        pytest.skip("has no step in C++")

    @cache  # sequences of the same seed begin alike, from one example to the next
    def last_logits(*ids: int) -> Tensor:
        return alone(model, kv, list(ids), [len(ids)], core)[0]

    @quick
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6), label="lengths")
        sequences = [random_ids(n, seed) for seed, n in enumerate(lengths)]
        pages, found = Pages(model, kv, len(sequences), 40, core, True), dict[int, dict[int, Tensor]]()
        while live := [b for b, ids in enumerate(sequences) if pages.lengths[b] < len(ids)]:
            chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True), label="who")
            n = data.draw(st.sampled_from([1, 2, 7, 17, 40]), label="tokens")
            step = {b: sequences[b][pages.lengths[b] : pages.lengths[b] + n] for b in chosen}
            for b, logits in pages.run(step).items():
                found.setdefault(b, {})[pages.lengths[b]] = logits
        for b, ids in enumerate(sequences):
            for end, logits in found[b].items():
                assert torch.equal(logits, last_logits(*ids[:end])), (b, end)

    check()


@pytest.mark.parametrize("core", [True, False], ids=["core", "layers"])
@pytest.mark.parametrize("wanted", [[], [0], [0, 2], [1], [0, 1, 2]])
def test_tokens_whose_logits_are_not_wanted_still_leave_their_keys(load: Any, wanted: list[int], core: bool) -> None:
    model = load("llama", "rtn:bits=4,group=24").model
    if core and without_core(model):
        pytest.skip("has no step in C++")
    chunks = {0: random_ids(1), 1: random_ids(25, 1), 2: random_ids(14, 2)}
    every, few = (Pages(model, "16", 3, 30, core, True) for _ in range(2))
    logits, some = every.run(chunks), few.run(chunks, wanted)
    assert list(some) == wanted
    assert all(torch.equal(some[b], logits[b]) for b in wanted)
    after = {0: random_ids(1, 3), 1: random_ids(2, 4), 2: random_ids(1, 5)}
    for b, want in every.run(after).items():
        assert torch.equal(few.run({b: after[b]})[b], want)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("N", [100, 192, 11008, 40000])
def test_activations_have_the_same_bits_in_any_number_of_rows(N: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(37, N, generator=torch.Generator().manual_seed(1))
        for f in (torch.nn.functional.silu, torch.nn.functional.gelu):
            rows = torch.cat([invariant_elementwise(f, row[None]) for row in x])
            for M in (2, 16, 37):
                assert torch.equal(invariant_elementwise(f, x[:M]), rows[:M])
                assert torch.equal(invariant_elementwise(f, x[-M:]), rows[-M:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", [*TOLERANCE])
def test_products_have_the_same_bits_in_any_number_of_rows(load: Any, scheme: str) -> None:
    for linear in load("llama", scheme).model.linears()[:7]:
        x = torch.randn(70, linear.problem.K, generator=torch.Generator().manual_seed(2))
        rows = torch.cat([invariant_product(linear, row[None]) for row in x])
        for M in (2, 15, 16, 17, 23, 24, 33, 70):
            assert torch.equal(invariant_product(linear, x[:M]), rows[:M])
            assert torch.equal(invariant_product(linear, x[-M:]), rows[-M:])


@pytest.mark.parametrize("kernel", ["cpu", "cpu-int8"])
def test_products_have_the_same_bits_on_every_instruction_set(isa: str, kernel: str) -> None:
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (70, 200), generator=random, dtype=torch.uint8)
    w = UniformTensor.from_codes(codes, 4, torch.rand(70, 4, generator=random).half(), None, 64)
    linear = QuantLinear("some", w, torch.randn(70, generator=random), torch.float32, kernel)
    x = torch.randn(50, 200, generator=random)
    rows = torch.cat([invariant_product(linear, row[None]) for row in x])
    assert all(torch.equal(invariant_product(linear, x[-M:]), rows[-M:]) for M in (2, 9, 16, 17, 31, 50))
    torch.testing.assert_close(rows, linear(x), rtol=0, atol=0.05 * float(rows.abs().max()))


def test_copies_read_before_they_write(load: Any) -> None:
    runner = ModelRunner(load("llama"), KVFormat(4), 5)
    for i, pages in enumerate(runner.layers):
        for t in pages.tensors():
            t.copy_(torch.arange(5).view(5, 1, 1, 1, 1) + 10 * i)
    runner._copy((Copy(0, 3), Copy(0, 4), Copy(1, 2)))
    for i, pages in enumerate(runner.layers):
        for t in pages.tensors():
            assert t[:, 0, 0, 0, 0].tolist() == [10 * i + page for page in (0, 1, 1, 0, 0)]
