"""A prompt in C++ against the same layers one by one in Python: shapes, chunks, windows, caches, threads."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from torch import Tensor

from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu, Precision
from crelle.models.decoder import DecoderModel

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import (
    DTYPES,
    TOLERANCE,
    VARIANTS,
    cast,
    error,
    open_model,
    quantize,
    some_tokens,
    take_apart,
    write_variant,
)

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.fused_decoder import FusedDecoder

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]
CONTEXT = 1300  # three chunks of 512


def nan_cache(
    model: DecoderModel, rows: int = 1, capacity: int = CONTEXT, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    c = model.spec
    return [torch.full((2, rows, c.kv_heads, capacity, c.head_size), float("nan"), dtype=dtype) for _ in model.layers]


def in_python(model: DecoderModel, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and the cache, from the layers one by one."""
    model.decoder, cache = "not in this test", model.new_cache()
    return model(tokens[None], cache)[0], [kv[:, 0, :, : len(tokens)] for kv in cache.layers]


def check(model: DecoderModel, T: int, tolerance: float, pieces: tuple[int, ...] = ()) -> None:
    """All logits, the last ones alone, and what the cache holds; the prompt in pieces, the rest of the cache NaN."""
    tokens = some_tokens(T)
    decoder = FusedDecoder(take_apart(model))
    wanted, wanted_kv = in_python(model, tokens)
    for last in (False, True):
        kv, logits, position = nan_cache(model, rows=2), [], 0
        for piece in tokens.split((*pieces, T - sum(pieces))):
            logits.append(decoder.prefill(piece, position, kv, row=1, last=last))
            position += len(piece)
        assert error(logits[-1] if last else torch.cat(logits), wanted[-1:] if last else wanted) < tolerance
        for own, theirs in zip(kv, wanted_kv, strict=True):
            assert error(own[:, 1, :, :T], theirs) < tolerance
            assert own[:, 1, :, T:].isnan().all()
            assert own[:, 0].isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_prompt_matches_layers(variant: str, tmp_path: Path, isa: str) -> None:
    check(open_model(write_variant(tmp_path / "m", variant, max_position_embeddings=CONTEXT)), 150, TOLERANCE["dense"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=32", "bcq:bits=2,group=24", "mixed:group=16,outliers=0.01"])
def test_quantized_prompt_matches_layers(variant: str, scheme: str, tmp_path: Path) -> None:
    model = open_model(
        quantize(write_variant(tmp_path / "m", variant, max_position_embeddings=CONTEXT), tmp_path / "q", scheme)
    )
    assert {w.kernel for w in model.linears()} == {"cpu", "dense"}
    check(model, 101, TOLERANCE["exact"])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several cuts of the same input, plain matrices among them."""
    to = tmp_path_factory.mktemp("prefill")
    overrides = {
        "*.q_proj": "rtn:bits=4,group=72",
        "*.v_proj": "fp16",
        "*.up_proj": "rtn:bits=4,group=32",
        "*.gate_proj": "mixed",
    }
    source = write_tiny_model(to / "m", max_position_embeddings=CONTEXT)
    return quantize(source, to / "q", "bcq:bits=2,group=24", {**overrides, "lm_head": "rtn:bits=8,group=24"})


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 23, 24, 25, 33, 48, 49, 64, 65, 100])
def test_any_length(T: int, mixed: Path, isa: str) -> None:
    check(open_model(mixed), T, TOLERANCE["exact"])


@pytest.mark.parametrize("T", [512, 513, 1025, CONTEXT])
def test_long_prompts_go_in_chunks(T: int, mixed: Path) -> None:
    check(open_model(mixed), T, TOLERANCE["exact"])


@pytest.mark.parametrize("variant", ["llama", "mistral", "long window"])
@pytest.mark.parametrize("pieces", [(1, 1, 30), (70,), (63, 64, 2), (120,)])
def test_goes_on_from_a_cache(variant: str, pieces: tuple[int, ...], tmp_path: Path, isa: str) -> None:
    check(
        open_model(write_variant(tmp_path / "m", variant, max_position_embeddings=CONTEXT)),
        180,
        TOLERANCE["dense"],
        pieces,
    )


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_precision_is_that_of_the_weights(precision: Precision, mixed: Path, isa: str) -> None:
    model = open_model(mixed)
    for w in model.linears():
        if w.kernel == "cpu":
            object.__setattr__(w.prepared, "data", Cpu(precision).prepare(w.weight, torch.float32))
    check(model, 60, TOLERANCE[precision])


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_matrices_of_any_dtype(dtype: torch.dtype, tmp_path: Path, isa: str) -> None:
    check(open_model(cast(write_tiny_model(tmp_path / "m", tie_word_embeddings=True), dtype)), 70, TOLERANCE["dense"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cache_of_16_bits(dtype: torch.dtype, tiny_model: Path, isa: str) -> None:
    model = open_model(tiny_model)
    decoder, tokens = FusedDecoder(take_apart(model)), some_tokens(90)
    got = decoder.prefill(tokens, 0, nan_cache(model, dtype=dtype), last=False)
    assert error(got, in_python(model, tokens)[0]) < (2e-3 if dtype == torch.float16 else 2e-2)


def test_step_goes_on_where_the_prompt_ended(mixed: Path) -> None:
    model, tokens = open_model(mixed), some_tokens(80)
    decoder, kv = FusedDecoder(take_apart(model)), nan_cache(model)
    decoder.prefill(tokens[:-1], 0, kv)
    got = decoder.step(tokens[-1:], torch.tensor([79]), kv)
    assert error(got, in_python(model, tokens)[0][-1:]) < TOLERANCE["exact"]


def test_result_does_not_depend_on_threads(mixed: Path, isa: str) -> None:
    model, tokens = open_model(mixed), some_tokens(333)
    decoder, results = FusedDecoder(take_apart(model)), []
    for threads in (1, 2, 3, 2, 7, 1):
        _core.set_threads(threads)
        kv = nan_cache(model)
        results.append([decoder.prefill(tokens, 0, kv, last=False), *(layer[..., :333, :] for layer in kv)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_mistakes_are_named(mixed: Path) -> None:
    model = open_model(mixed)
    decoder, kv = FusedDecoder(take_apart(model)), nan_cache(model, capacity=20)
    with pytest.raises(ValueError, match="does not fit the cache"):
        decoder.prefill(some_tokens(20), 1, kv)
    with pytest.raises(ValueError, match="no such row"):
        decoder.prefill(some_tokens(3), 0, kv, row=1)
    with pytest.raises(ValueError, match="no such token"):
        decoder.prefill(torch.tensor([3, 259]), 0, kv)
    with pytest.raises(ValueError, match="at least one token"):
        decoder.prefill(torch.empty(0, dtype=torch.int64), 0, kv)
