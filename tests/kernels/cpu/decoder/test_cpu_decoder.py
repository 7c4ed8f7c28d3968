"""The fused decode step against the layers one by one, and its building blocks against torch in f64."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import write_tiny_model
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.storage.open import open_weights
from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu, Precision
from crelle.kernels.spec import DecoderSpec, RopeSpec
from crelle.models.decoder import DecoderModel
from crelle.models.loader import build
from crelle.quantizers.scheme import parse

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
from crelle.kernels.cpu.fused_decoder import FusedDecoder, LinearParts, matrix, supports_model

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(6)]

OPS = 2e-6  # of a building block against f64


def fused(model: DecoderModel, decoder: FusedDecoder, tokens: Tensor, prompt: int) -> Tensor:
    """Logits of tokens [B, T] from `prompt` on, a step each, into outputs full of NaN."""
    cache, all_logits = model.new_cache(tokens.shape[0]), []
    if prompt:
        model(tokens[:, :prompt], cache)
    for i in range(prompt, tokens.shape[1]):
        cache.grow(1)
        out = torch.full((tokens.shape[0], model.spec.vocabulary), float("nan"))
        positions = torch.full((tokens.shape[0],), cache.length)
        all_logits.append(decoder.step(tokens[:, i].contiguous(), positions, cache.layers, out=out))
        cache.advance(1)
    return torch.stack(all_logits, dim=1)


def one_by_one(model: DecoderModel, tokens: Tensor, prompt: int) -> Tensor:
    """The same through the layers in Python."""
    model.decoder = "not in this test"
    cache = model.new_cache(tokens.shape[0])
    model(tokens[:, :prompt], cache)
    steps = [model(tokens[:, i : i + 1], cache) for i in range(prompt, tokens.shape[1])]
    return torch.cat(steps, dim=1)


# --- whole models -----------------------------------------------------------------------------------------------------


LONG = some_tokens(1, 80)  # beyond one run of 64 keys and every window


@pytest.fixture(scope="module", params=VARIANTS)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A model and what its layers in Python make of LONG: on any instruction set the same."""
    path = write_variant(tmp_path_factory.mktemp("dense"), request.param)
    return path, one_by_one(open_model(path), LONG, 3)


def test_dense_step_matches_layers(dense: tuple[Path, Tensor], isa: str) -> None:
    model = open_model(dense[0])
    got = fused(model, FusedDecoder(take_apart(model)), LONG, 3)
    assert error(got, dense[1]) < TOLERANCE["dense"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=32", "bcq:bits=2,group=24", "mixed:group=16,outliers=0.01"])
def test_quantized_step_matches_layers(variant: str, scheme: str, tmp_path: Path) -> None:
    model = open_model(quantize(write_variant(tmp_path / "m", variant), tmp_path / "q", scheme))
    assert {w.kernel for w in model.linears()} == {"cpu", "dense"}
    tokens = some_tokens(1, 40)
    got = fused(model, FusedDecoder(take_apart(model)), tokens, 3)
    assert error(got, one_by_one(model, tokens, 3)) < TOLERANCE["exact"]


@pytest.mark.parametrize(
    ("scheme", "overrides"),
    [
        ("bcq:bits=3,group=32", {"lm_head": "rtn:bits=4,group=24"}),
        ("rtn:bits=8,group=72", {"model.embed_tokens": "rtn:bits=4,group=8"}),
        (
            "rtn:bits=2,group=16",
            {"*.q_proj": "bcq:bits=1,group=32", "*.v_proj": "fp16", "*.up_proj": "rtn:bits=4,group=32"},
        ),
        ("mixed:group=8,four=0.4", {"model.embed_tokens": "rtn:bits=4,group=8", "*.k_proj": "rtn:bits=4,group=24"}),
        ("bcq:bits=2,group=24", {"*.up_proj": "mixed:group=64,four=0", "*.o_proj": "mixed:four=1,outliers=0"}),
        ("rtn:bits=4,group=40", {"model.layers.1.*": "bf16", "*.down_proj": "bcq:bits=3,group=8"}),
    ],
)
def test_mixed_formats_match_f64(scheme: str, overrides: dict[str, str], tmp_path: Path, isa: str) -> None:
    path = quantize(write_tiny_model(tmp_path / "m"), tmp_path / "q", scheme, overrides)
    tokens = some_tokens(1, 20)
    wanted = one_by_one(build(open_weights(path), torch.device("cpu"), torch.float64, "reference"), tokens, 3)
    got = fused(model := open_model(path), FusedDecoder(take_apart(model)), tokens, 3)
    assert error(got, wanted) < TOLERANCE["exact"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_dtypes_are_read_in_place(dtype: torch.dtype, tmp_path: Path, isa: str) -> None:
    model = open_model(cast(write_tiny_model(tmp_path / "m", tie_word_embeddings=True), dtype))
    parts = take_apart(model)
    assert isinstance(parts.embedding, Tensor)
    assert parts.embedding.dtype == dtype
    assert parts.embedding is parts.head.weight
    tokens = some_tokens(1, 12)
    assert error(fused(model, FusedDecoder(parts), tokens, 3), one_by_one(model, tokens, 3)) < TOLERANCE["dense"]


@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=32", "bcq:bits=3,group=32", "mixed:group=16,outliers=0.01"])
def test_precision_is_that_of_the_weights(precision: Precision, scheme: str, tmp_path: Path, isa: str) -> None:
    model = open_model(quantize(write_tiny_model(tmp_path / "m"), tmp_path / "q", scheme))
    for w in model.linears():
        if w.kernel == "cpu":
            object.__setattr__(w.prepared, "data", Cpu(precision).prepare(w.weight, torch.float32))
    tokens = some_tokens(1, 20)
    got = fused(model, FusedDecoder(take_apart(model)), tokens, 3)
    assert error(got, one_by_one(model, tokens, 3)) < TOLERANCE[precision]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("decoder")
    return quantize(
        write_tiny_model(to / "m"),
        to / "q",
        "bcq:bits=2,group=24",
        {"*.q_proj": "rtn:bits=4,group=72", "*.o_proj": "mixed", "*.gate_proj": "mixed"},
    )


# --- batches, caches, threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [2, 5, 16])
def test_batched_equals_single_rows(B: int, quantized: Path, isa: str) -> None:
    """Rows at different positions, in one cache, in any order of its rows: bitwise what each gives alone."""
    model = open_model(quantized)
    decoder = FusedDecoder(take_apart(model))
    lengths = [(7 * b + 3) % 71 + 1 for b in range(B)]
    kv = [
        torch.full((2, B, model.spec.kv_heads, 96, model.spec.head_size), float("nan"))
        for _ in range(len(model.spec.layers))
    ]
    rows = torch.arange(B).flip(0).contiguous()
    next_tokens, wanted = some_tokens(B, seed=5), []
    for b, length in enumerate(lengths):
        prompt, cache = some_tokens(1, length, seed=b), model.new_cache()
        model(prompt, cache)
        for layer in range(len(model.spec.layers)):
            kv[layer][:, rows[b], :, :length] = cache.layers[layer][:, 0, :, :length]
        cache.grow(1)
        alone = decoder.step(next_tokens[b : b + 1].contiguous(), torch.tensor([length]), cache.layers)
        wanted.append((alone[0], [own[:, 0, :, length].clone() for own in cache.layers]))
    out = torch.full((B, model.spec.vocabulary), float("nan"))
    got = decoder.step(next_tokens, torch.tensor(lengths), kv, rows=rows, out=out)
    for b, (logits, own) in enumerate(wanted):
        assert torch.equal(got[b], logits)
        for layer in range(len(model.spec.layers)):
            assert torch.equal(kv[layer][:, rows[b], :, lengths[b]], own[layer])
            assert kv[layer][:, rows[b], :, lengths[b] + 1 :].isnan().all()


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("sizes", [[16, 16, 16, 16, 16, 9], [1, 7, 15, 3, 2]])
def test_tokens_of_one_text_have_the_bits_of_single_steps(
    sizes: list[int], variant: str, tmp_path: Path, isa: str
) -> None:
    path = quantize(write_variant(tmp_path / "m", variant), tmp_path / "q", "rtn:bits=4,group=24")
    model = open_model(path)
    tokens, decoder = some_tokens(2, sum(sizes)), FusedDecoder(take_apart(model))
    single = torch.cat([fused(model, decoder, text[None], 0) for text in tokens])
    cache, at = model.new_cache(2), 0
    cache.grow(sum(sizes))
    for n in sizes:  # n tokens of the second text, between them where there is room one of the first
        ids, positions, rows = tokens[1, at : at + n].tolist(), list(range(at, at + n)), [1] * n
        if n < 16:
            ids[n // 2 : n // 2], positions[n // 2 : n // 2], rows[n // 2 : n // 2] = [int(tokens[0, 0])], [0], [0]
        want = [0, len(ids) - 1]
        out = torch.full((2, model.spec.vocabulary), float("nan"))
        given = {"rows": torch.tensor(rows), "want": torch.tensor(want), "out": out}
        got = decoder.step(torch.tensor(ids), torch.tensor(positions), cache.layers, **given)
        for i, logits in zip(want, got, strict=True):
            assert torch.equal(logits, single[rows[i], positions[i]])
        at += n


def test_no_logits_are_made_where_none_are_wanted(quantized: Path) -> None:
    model = open_model(quantized)
    decoder, cache = FusedDecoder(take_apart(model)), model.new_cache(1)
    cache.grow(4)
    ids, none = some_tokens(1, 4)[0], torch.empty(0, dtype=torch.int64)
    single = fused(model, decoder, ids[None], 0)[0, 3]
    row = torch.zeros(3, dtype=torch.int64)
    assert decoder.step(ids[:3].contiguous(), torch.arange(3), cache.layers, rows=row, want=none).shape[0] == 0
    last = decoder.step(ids[3:].contiguous(), torch.tensor([3]), cache.layers)
    assert torch.equal(last[0], single)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cache_of_16_bits(dtype: torch.dtype, tiny_model: Path, isa: str) -> None:
    model = open_model(tiny_model)
    decoder, tokens = FusedDecoder(take_apart(model)), some_tokens(1, 80)
    cache = model.new_cache()
    cache.layers = [kv.to(dtype) for kv in cache.layers]
    exact = one_by_one(model, tokens, 1)
    got = []
    for i in range(80):
        cache.grow(1)
        got.append(decoder.step(tokens[:, i].contiguous(), torch.tensor([i]), cache.layers))
        cache.advance(1)
    assert error(torch.stack(got[1:], dim=1), exact) < (2e-3 if dtype == torch.float16 else 2e-2)


def test_cache_may_grow_or_change(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crelle.models.cache._STEP", 8)
    model = open_model(quantized)
    decoder, tokens = FusedDecoder(take_apart(model)), some_tokens(1, 60)
    first = fused(model, decoder, tokens, 1)
    monkeypatch.setattr("crelle.models.cache._STEP", 256)
    assert torch.equal(first, fused(model, decoder, tokens, 1))


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.sample(2)
def test_result_does_not_depend_on_threads(B: int, quantized: Path, isa: str) -> None:
    model = open_model(quantized)
    decoder, tokens, results = FusedDecoder(take_apart(model)), some_tokens(B, 75), []
    prompt = model.new_cache(B)
    model(tokens[:, :62], prompt)  # the next tokens reach beyond one run of 64 keys
    for threads in (1, 2, 3, 7):
        _core.set_threads(threads)
        cache = copy.deepcopy(prompt)
        cache.grow(13)
        for i in range(62, 75):
            y = decoder.step(tokens[:, i].contiguous(), torch.full((B,), i), cache.layers)
        results.append((y, [kv[:, :, :, :75].clone() for kv in cache.layers]))
    for y, kv in results[1:]:
        assert torch.equal(y, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(kv, results[0][1], strict=True))


def test_rerun_is_bitwise_equal(quantized: Path) -> None:
    model = open_model(quantized)
    decoder, tokens = FusedDecoder(take_apart(model)), some_tokens(1, 30)
    assert torch.equal(fused(model, decoder, tokens, 1), fused(model, decoder, tokens, 1))


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """The same with other attention in all layers."""
    layers = (replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def test_refusals_are_sentences(quantized: Path) -> None:
    model = open_model(quantized)
    parts = take_apart(model)
    assert supports_model(parts) is None
    spec = parts.spec
    wrong: dict[str, dict[str, Any]] = {
        "f32, f16 or bf16": {"embedding": torch.zeros(259, 72, dtype=torch.float64)},
        "not contiguous": {"embedding": torch.zeros(72, 259).T},
        "multiple of kv_heads": {"spec": changed(spec, kv_heads=4)},
        "the same columns": {"embedding": torch.zeros(259, 71)},
        "at most the 12 channels": {"spec": changed(spec, rope=RopeSpec(torch.ones(7)))},
        "one shape in all layers": {"spec": replace(spec, layers=(spec.layers[0], *changed(spec, heads=2).layers[1:]))},
        "one precision": {
            "head": LinearParts(weight=Cpu("int8").prepare(parse("rtn:bits=4").fit(torch.ones(259, 72)), torch.float32))
        },
    }
    for sentence, change in wrong.items():
        with pytest.raises(UnsupportedError, match=sentence):
            FusedDecoder(take_apart(model, **change))
    slow = open_model(quantized, "reference").layers[0].mlp.gate
    assert "reference" in str(matrix(slow.weight, slow.prepared))


def test_step_checks_its_arguments(quantized: Path) -> None:
    model = open_model(quantized)
    decoder, cache = FusedDecoder(take_apart(model)), model.new_cache(2)
    cache.grow(4)

    def step(tokens: list[int], positions: list[int], rows: list[int] | None = None, kv: Any = None) -> Tensor:
        given = None if rows is None else torch.tensor(rows)
        return decoder.step(torch.tensor(tokens), torch.tensor(positions), kv or cache.layers, rows=given)

    assert step([1, 2], [0, 0]).isfinite().all()
    for sentence, bad in {
        "no such token": ([259], [0]),
        "outside of the cache": ([1], [96]),
        "one position": ([1, 2], [0]),
        "no such row": ([1], [0], [2]),
        "share a place": ([1, 2, 3], [0, 1, 1], [1, 1, 1]),
        "1 to 16 tokens": ([1] * 17, [0] * 17),
        "one array per layer": ([1], [0], None, cache.layers[:1]),
        "alike in all layers": ([1], [0], None, [cache.layers[0][:, :, :1].contiguous(), *cache.layers[1:]]),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            step(*bad)


# --- building blocks --------------------------------------------------------------------------------------------------

SIZES = [1, 7, 16, 17, 64, 100, 576]


def random(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("K", SIZES)
def test_rms_norm(K: int, isa: str) -> None:
    x, weight, y = random(3, K), random(K, seed=2), torch.full((3, K), float("nan"))
    _core.rms_norm(x.numpy(), weight.numpy(), 1e-5, y.numpy())
    wide = x.double()
    assert error(y, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight) < OPS


@pytest.mark.parametrize("D", [2, 12, 64, 80, 128])
def test_rope(D: int, isa: str) -> None:
    x, angle = random(5, D), random(D // 2, seed=2)
    a, b = x.double().chunk(2, dim=-1)
    c, s = angle.cos().double(), angle.sin().double()
    wanted = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
    _core.rope(x.numpy(), angle.cos().numpy(), angle.sin().numpy())
    assert error(x, wanted) < OPS


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_layer_norm(K: int, shift: float, isa: str) -> None:
    x, weight, bias, y = random(3, K) + shift, random(K, seed=2), random(K, seed=4), torch.full((3, K), float("nan"))
    _core.layer_norm(x.numpy(), weight.numpy(), bias.numpy(), 1e-5, y.numpy())
    wanted = F.layer_norm(x.double(), (K,), weight.double(), bias.double(), 1e-5)
    assert error(y, wanted) < OPS * (1 + shift)
    _core.layer_norm(x.numpy(), weight.numpy(), None, 1e-5, y.numpy())
    assert (y.double() - (wanted - bias)).norm() < OPS * (1 + shift) * wanted.norm()


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str, n: int, isa: str) -> None:
    x, up = 4 * random(n), random(n, seed=2)
    wanted, gated = ACTIVATIONS[kind](x.double()), x.clone()
    _core.activate(kind, gated.numpy(), up.numpy())
    assert (gated.double() - wanted * up.double()).norm() <= OPS * (wanted * up.double()).norm()
    _core.activate(kind, x.numpy(), None)
    assert (x.double() - wanted).norm() <= OPS * wanted.norm()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_every_size(kind: str, isa: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.logspace(-30, 15, 200), -torch.logspace(-30, 15, 200)])
    wanted = ACTIVATIONS[kind](x.double())
    _core.activate(kind, x.numpy(), None)
    assert ((x.double() - wanted).abs() <= 2e-6 * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_of_large_numbers(kind: str, isa: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30])
    wanted = ACTIVATIONS[kind](gate)
    _core.activate(kind, gate.numpy(), torch.ones(8).numpy())
    assert torch.allclose(gate, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 576), (1, 7, 33), (4, 9, 16), (5, 13, 100), (16, 3, 1), (2, 1, 65)])
def test_dense_matmul(M: int, N: int, K: int, dtype: torch.dtype, isa: str) -> None:
    x, w = random(M, K), random(N, K + 1, seed=2).to(dtype).flatten()[1 : 1 + N * K].view(N, K)  # unaligned
    y = torch.full((M, N), float("nan"))
    _core.dense_matmul(x.numpy(), w, y.numpy())
    assert error(y, x.double() @ w.double().T) < OPS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(64, 576), (13, 100), (2, 33)])
def test_dense_rows_have_the_same_bits_in_any_number(N: int, K: int, dtype: torch.dtype, isa: str) -> None:
    x, w = random(23, K), random(N, K, seed=12).to(dtype)

    def product(rows: Tensor) -> Tensor:
        y = torch.full((len(rows), N), float("nan"))
        _core.dense_matmul(rows.contiguous().numpy(), w, y.numpy())
        return y

    single = torch.cat([product(row[None]) for row in x])
    for M in (2, 4, 7, 8, 9, 16, 20, 23):
        assert torch.equal(product(x[:M]), single[:M])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [6, 16, 64, 80, 128])
def test_attention(D: int, dtype: torch.dtype, isa: str) -> None:
    q = 3 * random(D)
    for S in (1, 2, 15, 16, 17, 64, 65, 200):
        k, v = random(S, D, seed=2).to(dtype), random(S, D, seed=3).to(dtype)
        out = torch.full((D,), float("nan"))
        _core.attention(q.numpy(), k, v, out.numpy())
        weight = torch.softmax(k.double() @ q.double() / math.sqrt(D), dim=0)
        assert error(out, weight @ v.double()) < 2 * OPS, S


def test_attention_survives_large_scores(isa: str) -> None:
    q, k, v = torch.full((16,), 100.0), random(130, 16), random(130, 16, seed=3)
    out = torch.full((16,), float("nan"))
    _core.attention(q.numpy(), k, v, out.numpy())
    assert error(out, torch.softmax(k.double() @ q.double() / 4, dim=0) @ v.double()) < 1e-4
