"""Batches on pages: the numbers of the plain model, and for each sequence the same bits in whatever company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle import LLM, quantize
from crelle.engine.block_manager import Copy
from crelle.engine.memory import kv_heads
from crelle.engine.model_runner import ModelRunner, centers
from crelle.formats.bcq import UniformTensor
from crelle.formats.kv import KVFormat, KVPages
from crelle.kernels import cpu
from crelle.models.batched import Batched, View, exact_elementwise, exact_product
from crelle.models.linear import QuantLinear

# The largest difference of a logit, of size about 1, to the model's own forward: sums in another order; the C++ kernels
# round activations to 16 bits, and tiles and rows differ by that.
TOLERANCE = {"fp32": 1e-4, "rtn:bits=4,group=24": 2e-3, "bcq:bits=3,group=24": 2e-3}
quick = settings(deadline=None, max_examples=8)


def opt_model(to: Path, **options: Any) -> Path:
    import transformers

    torch.manual_seed(7)
    sizes = {"hidden_size": 72, "ffn_dim": 100, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = transformers.OPTConfig(
        **sizes, vocab_size=259, max_position_embeddings=96, bos_token_id=256, eos_token_id=258, **options
    )
    model = transformers.OPTForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


MODELS = {
    "llama": lambda to: write_tiny_model(to),
    "wide": lambda to: write_tiny_model(to, hidden_size=64, intermediate_size=192, head_dim=16),
    "tied": lambda to: write_tiny_model(to, tie_word_embeddings=True),
    "windowed": lambda to: write_tiny_model(to, model_type="mistral", sliding_window=7),
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
                quantize(path, to / "q", scheme)
                path = to / "q"
            made[key] = LLM.load(path, device="cpu", kernel=kernel)
        return made[key]

    return get


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pages:
    """Sequences on pages of their own, in an order that is not that of time, run over in any portions."""

    def __init__(self, model: Batched, kv: str, sequences: int, length: int, seed: int = 0) -> None:
        self.model, self.fmt = model, KVFormat.parse(kv)
        each = -(-length // self.fmt.page)
        c = model.model.c
        sizes = (each * sequences, kv_heads(model.model), c.head_size, torch.float32, "cpu")
        self.layers = [KVPages.new(self.fmt, *sizes) for _ in range(c.layers)]
        order = torch.randperm(each * sequences, generator=torch.Generator().manual_seed(seed))
        self.table, self.lengths = order.view(sequences, each).int(), [0] * sequences

    def run(self, portions: dict[int, list[int]]) -> dict[int, Tensor]:
        """Run over these tokens of these sequences in one pass; return the logits of all of them."""
        tokens = sum(map(len, portions.values()))
        found = self.some(portions, range(tokens))
        return dict(zip(portions, found.split([len(ids) for ids in portions.values()]), strict=True))

    def some(self, portions: dict[int, list[int]], wanted: Sequence[int]) -> Tensor:
        """The same, but return the logits of only some tokens of the pass."""
        starts, tokens = [0], []
        for ids in portions.values():
            tokens += ids
            starts.append(len(tokens))
        before = [self.lengths[b] for b in portions]
        view = View(
            self.layers,
            self.table[list(portions)],
            starts,
            before,
            centers(self.model.model, self.fmt),
            self.model.exact,
        )
        logits = self.model(tokens, view, wanted)
        for b, ids in portions.items():
            self.lengths[b] += len(ids)
        return logits


def alone(model: Batched, kv: str, ids: list[int], portions: Sequence[int] = ()) -> Tensor:
    pages, found, at = Pages(model, kv, 1, len(ids)), [], 0
    for n in portions or [len(ids)]:
        if part := ids[at : at + n]:
            found.append(pages.run({0: part})[0])
        at += n
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("core", [True, False], ids=["core", "layers"])
def test_logits_are_those_of_the_model(load: Any, name: str, exact: bool, core: bool) -> None:
    for scheme, tolerance in TOLERANCE.items():
        llm, ids = load(name, scheme), random_ids(40)
        want = llm.model(torch.tensor([ids]), llm.model.new_cache())[0]
        got = alone(Batched(llm.model, exact=exact, core=core), "16", ids, [23, 1, 1, 15])
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("kv", ["8", "4", "4:center=true,page=5"])
def test_logits_are_those_of_the_model_with_coded_pages(load: Any, kv: str) -> None:
    llm, ids = load("llama"), random_ids(40)
    want = llm.model(torch.tensor([ids]), llm.model.new_cache(kv=kv))[0]
    # A value that lies between two codes may go either way.
    assert (alone(Batched(llm.model), kv, ids) - want).norm() < 0.02 * want.norm()


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
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    load: Any, name: str, scheme: str, kernel: str | None, kv: str, core: bool
) -> None:
    model = Batched(load(name, scheme, kernel).model, core=core)
    assert model.exact
    if core and model.decoder is None:
        pytest.skip("has no step in C++")

    @quick
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6), label="lengths")
        texts = [random_ids(n, seed) for seed, n in enumerate(lengths)]
        pages, found = Pages(model, kv, len(texts), 40), {b: list[Tensor]() for b in range(len(texts))}
        while live := [b for b, ids in enumerate(texts) if pages.lengths[b] < len(ids)]:
            chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True), label="who")
            n = data.draw(st.sampled_from([1, 2, 7, 17, 40]), label="tokens")
            step = {b: texts[b][pages.lengths[b] : pages.lengths[b] + n] for b in chosen}
            for b, logits in pages.run(step).items():
                found[b].append(logits)
        for b, ids in enumerate(texts):
            assert torch.equal(torch.cat(found[b]), alone(model, kv, ids)), b

    check()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("core", [True, False], ids=["core", "layers"])
@pytest.mark.parametrize("wanted", [[], [0], [0, 20], [39, 3], [12]])
def test_tokens_whose_logits_nobody_wants_still_leave_their_keys(
    load: Any, wanted: list[int], core: bool, exact: bool
) -> None:
    """40 tokens of three sequences: more than one call of the C++ step; the wanted ones may be in any of them."""
    model = Batched(load("llama", "rtn:bits=4,group=24").model, core=core, exact=exact)
    portions = {0: random_ids(1), 1: random_ids(25, 1), 2: random_ids(14, 2)}
    every, few = (Pages(model, "16", 3, 30) for _ in range(2))
    logits = torch.cat(list(every.run(portions).values()))
    tolerance = 0.0 if exact else 2e-3 * float(logits.abs().max())
    torch.testing.assert_close(few.some(portions, wanted), logits[wanted], rtol=0, atol=tolerance)
    after = {0: random_ids(1, 3), 1: random_ids(2, 4), 2: random_ids(1, 5)}
    for b, want in every.run(after).items():
        torch.testing.assert_close(few.run({b: after[b]})[b], want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("N", [100, 192, 11008, 40000])
def test_activations_have_the_same_bits_in_any_number_of_rows(N: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(37, N, generator=torch.Generator().manual_seed(1))
        for f in (torch.nn.functional.silu, torch.nn.functional.gelu):
            rows = torch.cat([exact_elementwise(f, row[None]) for row in x])
            for M in (2, 16, 37):
                assert torch.equal(exact_elementwise(f, x[:M]), rows[:M])
                assert torch.equal(exact_elementwise(f, x[-M:]), rows[-M:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", [*TOLERANCE])
def test_products_have_the_same_bits_in_any_number_of_rows(load: Any, scheme: str) -> None:
    for linear in load("llama", scheme).model.linears()[:7]:
        x = torch.randn(70, linear.problem.K, generator=torch.Generator().manual_seed(2))
        rows = torch.cat([exact_product(linear, row[None]) for row in x])
        for M in (2, 15, 16, 17, 23, 24, 33, 70):
            assert torch.equal(exact_product(linear, x[:M]), rows[:M])
            assert torch.equal(exact_product(linear, x[-M:]), rows[-M:])


@pytest.mark.parametrize("kernel", ["cpu", "cpu-int8"])
def test_products_have_the_same_bits_on_every_instruction_set(isa: str, kernel: str) -> None:
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (70, 200), generator=random, dtype=torch.uint8)
    w = UniformTensor.from_codes(codes, 4, torch.rand(70, 4, generator=random).half(), None, 64)
    linear = QuantLinear("some", w, torch.randn(70, generator=random), torch.float32, kernel)
    x = torch.randn(50, 200, generator=random)
    rows = torch.cat([exact_product(linear, row[None]) for row in x])
    assert all(torch.equal(exact_product(linear, x[-M:]), rows[-M:]) for M in (2, 9, 16, 17, 31, 50))
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
