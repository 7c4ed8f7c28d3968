"""The cache never shows: tokens in any chunks give the logits of one pass, and a full cache is a sentence."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_opt import write_random

from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.reference_attention import AttendOptions
from crelle.models.cache import CacheSizes, KVCache, PagedCache, attention
from crelle.models.decoder import DecoderModel
from crelle.models.loader import load

TOLERANCE = 2e-5  # sums of f32 in another order
CPU = torch.device("cpu")
quick = settings(deadline=None, max_examples=30)
chunks = st.lists(st.integers(1, 24), min_size=1, max_size=12)


def random_tokens(n: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(259, (batch, n), generator=torch.Generator().manual_seed(1))


def in_chunks(model: DecoderModel, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, parts, at = model.new_cache(len(tokens)), [], 0
    for size in sizes:
        parts.append(model(tokens[:, at : at + size], cache))
        at += size
    return torch.cat(parts, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load(write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2), device="cpu")[0]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    path = write_tiny_model(
        tmp_path_factory.mktemp("windowed"), num_hidden_layers=2, model_type="mistral", sliding_window=7
    )
    return load(path, device="cpu")[0]


@quick
@pytest.mark.parametrize("which", ["tiny", "windowed"])
@given(sizes=chunks)
def test_any_chunks_give_the_logits_of_one_pass(which: str, request: pytest.FixtureRequest, sizes: list[int]) -> None:
    model: DecoderModel = request.getfixturevalue(which)
    while sum(sizes) > model.spec.context:
        sizes = sizes[:-1]
    tokens = random_tokens(sum(sizes))
    whole = model(tokens, model.new_cache())
    assert torch.allclose(in_chunks(model, tokens, sizes), whole, rtol=0, atol=TOLERANCE)


def test_one_token_at_a_time_gives_the_logits_of_one_pass_beyond_every_growth(tmp_path: Path) -> None:
    model, _ = load(write_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=600), device="cpu")
    tokens = random_tokens(600)
    whole = model(tokens, model.new_cache())
    assert torch.allclose(in_chunks(model, tokens, [1] * 600), whole, rtol=0, atol=TOLERANCE)


def test_last_gives_only_the_last_logits(tiny: DecoderModel) -> None:
    tokens = random_tokens(20)
    last = tiny(tokens, tiny.new_cache(), last=True)
    assert last.shape == (1, 1, 259)
    assert torch.allclose(last, tiny(tokens, tiny.new_cache())[:, -1:], rtol=0, atol=TOLERANCE)


def test_batched_equals_single_rows(tiny: DecoderModel) -> None:
    tokens, sizes = random_tokens(30, batch=3), [17, 1, 1, 11]
    single = torch.cat([in_chunks(tiny, row[None], sizes) for row in tokens])
    assert torch.allclose(in_chunks(tiny, tokens, sizes), single, rtol=0, atol=TOLERANCE)


def test_later_tokens_do_not_change_earlier_logits(tiny: DecoderModel) -> None:
    tokens = random_tokens(40)
    other = tokens.clone()
    other[:, 25:] = (other[:, 25:] + 1) % 259
    a, b = (tiny(t, tiny.new_cache()) for t in (tokens, other))
    assert torch.allclose(a[:, :25], b[:, :25], rtol=0, atol=TOLERANCE)
    assert not torch.allclose(a[:, 25:], b[:, 25:], rtol=0, atol=0.01)


def test_too_many_tokens_are_refused_and_leave_the_cache_as_it_was(tiny: DecoderModel) -> None:
    tokens = random_tokens(97)
    cache = tiny.new_cache()
    tiny(tokens[:, :90], cache)
    with pytest.raises(CapacityError, match="97 tokens do not fit the model's context of 96"):
        tiny(tokens[:, 90:], cache)
    assert cache.length == 90
    rest = tiny(tokens[:, 90:96], cache)
    assert torch.allclose(rest, tiny(tokens[:, :96], tiny.new_cache())[:, 90:], rtol=0, atol=TOLERANCE)


@quick
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_cache_returns_all_that_was_appended(sizes: list[int]) -> None:
    heads, head_size, layers = 2, 4, 2
    cache = KVCache(CacheSizes(layers, 1, heads, head_size, sum(sizes), torch.float32, CPU))
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, layers, 1, sum(sizes), heads, head_size, generator=random)
    at = 0
    for size in sizes:
        cache.grow(size)
        for layer in range(layers):
            now = slice(at, at + size)
            all_k, all_v = cache.append(layer, k[layer, :, now], v[layer, :, now])
            assert torch.equal(all_k, k[layer, :, : at + size].transpose(1, 2))
            assert torch.equal(all_v, v[layer, :, : at + size].transpose(1, 2))
        cache.advance(size)
        at += size
    with pytest.raises(CapacityError, match=f"{at + 1} tokens do not fit the model's context of {at}"):
        cache.grow(1)


# Pages of 8 and 4 bits ---------------------------------------------------------------------------------------------

CODED = ["kv8", "kv4", "kv4:center=false", "kv8:center=false", "kv4:group=8,page=8", "kv4:rotate=false"]


@pytest.fixture(scope="module")
def opt_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("opt"))


@pytest.fixture(scope="module")
def opt(opt_path: Path) -> DecoderModel:
    return load(opt_path, device="cpu")[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("T", "heads", "kv_heads"), [(1, 8, 2), (1, 4, 4), (5, 8, 2), (33, 4, 1)])
def test_attention_over_a_part_of_a_cache_is_that_of_f64(
    device: str, dtype: torch.dtype, window: int | None, T: int, heads: int, kv_heads: int
) -> None:
    B, S, D = 3, 33, 64
    room = torch.full((2, B, kv_heads, S + 31, D), torch.nan, dtype=dtype, device=device)
    room[:, :, :, :S] = torch.randn(2, B, kv_heads, S, D, device=device)
    q, (k, v) = torch.randn(B, T, heads, D, device=device).to(dtype), room[:, :, :, :S]
    found = attention(q, k, v, AttendOptions(window))
    keys, values = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = q.double().transpose(1, 2) @ keys.mT / D**0.5
    behind = torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device)
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    wanted = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(1, 2)
    assert float((found.double() - wanted).norm() / wanted.norm()) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_kv_16_is_the_cache_of_numbers(tiny: DecoderModel) -> None:
    assert isinstance(tiny.new_cache(kv=16), KVCache)
    assert isinstance(tiny.new_cache(kv="kv4"), PagedCache)
    with pytest.raises(SchemeError, match="one of 16, 8, 4, 3, 2"):
        tiny.new_cache(kv="5")


@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize("which", ["tiny", "windowed", "opt"])
def test_coded_pages_give_nearly_the_logits_of_numbers(which: str, kv: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    tokens = random_tokens(60, batch=2) % model.spec.vocabulary
    exact, cache = model(tokens, model.new_cache(2)), model.new_cache(2, kv=kv)
    error = (model(tokens, cache) - exact).pow(2).mean().sqrt() / exact.std()
    assert 0 < error <= (0.02 if KVFormat.parse(kv).bits == 8 else 0.25)
    assert cache.nbytes == cache.format.page_bytes(cache.layers[0].heads, model.spec.head_size) * sum(
        pages.count for pages in cache.layers
    )


@quick
@pytest.mark.parametrize("kv", ["kv8", "kv4"])
@given(sizes=chunks)
def test_any_chunks_give_the_logits_of_one_pass_over_pages(tiny: DecoderModel, kv: str, sizes: list[int]) -> None:
    while sum(sizes) > tiny.spec.context:
        sizes = sizes[:-1]
    tokens = random_tokens(sum(sizes))
    whole, cache, at = tiny(tokens, tiny.new_cache(kv=kv)), tiny.new_cache(kv=kv), 0
    for size in sizes:
        logits = tiny(tokens[:, at : at + size], cache)
        # A sum in another order may tip a value over to the next level of its grid, not more.
        assert (logits - whole[:, at : at + size]).pow(2).mean().sqrt() <= 0.05 * whole.std()
        at += size


def test_a_batch_over_pages_equals_single_rows_beyond_every_growth(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=600)
    model, _ = load(path, device="cpu")
    tokens = random_tokens(600, batch=2)
    cache, parts = model.new_cache(2, kv=4), []
    for at in (0, 250, 251, 520):
        until = {0: 250, 250: 251, 251: 520, 520: 600}[at]
        parts.append(model(tokens[:, at:until], cache))
    single = torch.cat([model(row[None], model.new_cache(kv=4)) for row in tokens])
    assert (torch.cat(parts, 1) - single).pow(2).mean().sqrt() <= 0.05 * single.std()
    with pytest.raises(CapacityError, match="601 tokens do not fit the model's context of 600"):
        model(tokens[:, :1], cache)
    assert cache.length == 600


def test_centres_are_where_the_keys_are(tiny_model: Path, opt_path: Path) -> None:
    """Keys minus their centre are much smaller than keys, for tokens that the centres were not found with."""
    llama, opt = (load(path, device="cpu")[0] for path in (tiny_model, opt_path))
    llama.decoder = "its biases are those of before"
    for model, rotated in ((llama, True), (opt, False)):
        for layer in model.layers:  # far from 0, as trained models have them
            k = layer.attention.k
            k.bias = 4 * torch.randn(k.weight.shape[0], generator=torch.Generator().manual_seed(3))
        cache = model.new_cache()
        model(random_tokens(40) % model.spec.vocabulary, cache)
        for kv, center in zip(cache.layers, model.key_centers, strict=True):
            keys = kv[0, 0, :, 1:40].transpose(0, 1)  # [T, Hkv, D]
            assert center.shape == keys.shape[1:]
            share = (keys - center).pow(2).mean() / keys.pow(2).mean()
            assert share < (0.75 if rotated else 0.2)  # quick pairs of rope keep no mean
        assert model.key_centers is model.key_centers


@pytest.mark.parametrize("bits", [8, 4])
def test_the_step_in_one_call_matches_layer_by_layer(tiny: DecoderModel, bits: int) -> None:
    tokens = random_tokens(30)
    fused, cache = [], tiny.new_cache(kv=bits)
    for part in tokens.split([20, 1, 1, 8], 1):
        fused.append(tiny(part, cache))
    decoder, tiny.decoder = tiny.decoder, "not now"
    try:
        wanted, cache = [], tiny.new_cache(kv=bits)
        for part in tokens.split([20, 1, 1, 8], 1):
            wanted.append(tiny(part, cache))
    finally:
        tiny.decoder = decoder
    error = (torch.cat(fused, 1) - torch.cat(wanted, 1)).norm() / torch.cat(wanted, 1).norm()
    assert error < {8: 2e-3, 4: 1e-2}[bits]
