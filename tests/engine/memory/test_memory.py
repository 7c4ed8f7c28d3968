"""A memory budget: read, shared out, and kept."""

from pathlib import Path

import pytest
from conftest import quantized_copy

from crelle import LLM
from crelle.engine.engine import Engine
from crelle.engine.memory.plan import MemoryPlan, page_bytes, parse_bytes, plan, show_bytes, weight_bytes
from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.models.loader import load


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("512MB", 512 * 10**6),
        (" 1.5 GiB ", 3 * 2**29),
        ("3k", 3000),
        ("2mib", 2**21),
        ("1TB", 10**12),
        ("800000", 800000),
        ("7B", 7),
        (12345, 12345),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "much", "24 GigaBytes", "-3GB", "1e9", "GB", "1.GB", "5iB", "24 GB RAM", True, "nan"]
)
def test_nonsense_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(SchemeError, match=r"a memory size must look like 24GB, 512MB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GB", 0, -5, "0.1"])
def test_nothing_is_not_a_budget(text: str | int) -> None:
    with pytest.raises(SchemeError, match="at least one byte"):
        parse_bytes(text)


def test_sizes_are_shown_for_people() -> None:
    shown = {
        999: "999 bytes",
        999_900_000: "1 GB",
        999_400: "999 kB",
        1420: "1.42 kB",
        24 * 10**9: "24 GB",
        2_400_000_000_000: "2,400 GB",
    }
    assert {size: show_bytes(size) for size in shown} == shown


@pytest.mark.parametrize("kv", ["16", "8", "4", "4:group=8,page=5", "k4v2", "3,layers.0=k8v16"])
def test_an_engine_stays_within_its_budget_and_uses_it(tiny_model: Path, kv: str) -> None:
    llm, memory = LLM.load(tiny_model, device="cpu"), 3_000_000
    engine = Engine(llm, kv=kv, memory=memory, max_batch=4, budget=16)
    assert engine.runner.nbytes == engine.plan.cache == engine.plan.pages * page_bytes(llm.model, engine.kv)
    assert engine.plan.weights + engine.plan.working + engine.runner.nbytes == engine.plan.total <= memory
    assert engine.plan.total + engine.plan.page_bytes > memory, "another page would have fitted"
    assert engine.blocks.pages == engine.plan.pages


def test_fewer_bits_hold_more_tokens(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model, device="cpu")
    tokens = [Engine(llm, kv=kv, memory="4MB", max_batch=4, budget=16).plan.tokens for kv in ("16", "8", "4")]
    assert tokens == sorted(tokens)
    assert tokens[2] >= 3 * tokens[0]  # of 16 bits; heads of so few numbers pay much for their scales


def test_a_budget_below_the_weights_is_a_sentence(tiny_model: Path) -> None:
    model, _ = load(tiny_model, device="cpu")
    with pytest.raises(
        CapacityError,
        match=r"a memory limit of 200 kB leaves no room for the KV cache: the weights take .* allow more memory",
    ):
        plan([model], KVFormat(), memory="200kB", pages=None, max_batch=4, budget=16)


def test_weights_are_counted_once(tiny_model: Path, tmp_path: Path) -> None:
    model, _ = load(tiny_model, device="cpu")
    numbers = sum(linear.problem.N * linear.problem.K for linear in model.linears())
    assert weight_bytes([model]) == 4 * (numbers + 259 * 72 + 7 * 72) == weight_bytes([model, model])
    quantized_copy(tiny_model, tmp_path / "q", "bcq-nested:bits=4,group=24,data=false")
    llm = LLM.load(tmp_path / "q", device="cpu")
    each = [weight_bytes([llm.at(bits)]) for bits in llm.precisions]
    assert each == sorted(set(each)), "more bits, more bytes"
    together = weight_bytes([llm.at(bits) for bits in llm.precisions])
    assert max(each) < together < sum(each), "head, embedding and norms are shared"
    assert Engine(llm, memory="3MB", max_batch=4, budget=16).plan.weights == together


def test_a_plan_says_what_it_is_for() -> None:
    it = MemoryPlan(KVFormat(4), 10**9, 10**8, 20_000, 1000, 2048, 256)
    assert (it.tokens, it.total, it.batch(1024), it.batch(100)) == (16000, 1_120_000_000, 15, 142)
    assert str(it) == (
        "1.12 GB: weights 1 GB, workspace 100 MB, kv4 cache 20 MB (1000 pages of 16 tokens): room for 16000 tokens, "
        "15 sequences of 1024"
    )
