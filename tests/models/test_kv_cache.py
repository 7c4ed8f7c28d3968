"""The cache never shows: tokens in any portions give the logits of one pass, and a full cache is a sentence."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.errors import CapacityError
from crelle.models.cache import KVCache
from crelle.models.llama import Llama
from crelle.models.loader import load

TOLERANCE = 2e-5  # sums of f32 in another order
CPU = torch.device("cpu")
quick = settings(deadline=None, max_examples=30)
portions = st.lists(st.integers(1, 24), min_size=1, max_size=12)


def random_tokens(n: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(259, (batch, n), generator=torch.Generator().manual_seed(1))


def in_portions(model: Llama, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, parts, at = model.new_cache(len(tokens)), [], 0
    for size in sizes:
        parts.append(model(tokens[:, at : at + size], cache))
        at += size
    return torch.cat(parts, 1)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Llama:
    return load(tiny_model, device="cpu")[0]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = write_tiny_model(tmp_path_factory.mktemp("windowed"), model_type="mistral", sliding_window=7)
    return load(path, device="cpu")[0]


@quick
@pytest.mark.parametrize("which", ["tiny", "windowed"])
@given(sizes=portions)
def test_any_portions_give_the_logits_of_one_pass(which: str, request: pytest.FixtureRequest, sizes: list[int]) -> None:
    model: Llama = request.getfixturevalue(which)
    while sum(sizes) > model.c.context:
        sizes = sizes[:-1]
    tokens = random_tokens(sum(sizes))
    whole = model(tokens, model.new_cache())
    assert torch.allclose(in_portions(model, tokens, sizes), whole, rtol=0, atol=TOLERANCE)


def test_one_token_at_a_time_gives_the_logits_of_one_pass_beyond_every_growth(tmp_path: Path) -> None:
    model, _ = load(write_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=600), device="cpu")
    tokens = random_tokens(600)
    whole = model(tokens, model.new_cache())
    assert torch.allclose(in_portions(model, tokens, [1] * 600), whole, rtol=0, atol=TOLERANCE)


def test_last_gives_only_the_last_logits(tiny: Llama) -> None:
    tokens = random_tokens(20)
    last = tiny(tokens, tiny.new_cache(), last=True)
    assert last.shape == (1, 1, 259)
    assert torch.allclose(last, tiny(tokens, tiny.new_cache())[:, -1:], rtol=0, atol=TOLERANCE)


def test_batched_equals_single_rows(tiny: Llama) -> None:
    tokens, sizes = random_tokens(30, batch=3), [17, 1, 1, 11]
    single = torch.cat([in_portions(tiny, row[None], sizes) for row in tokens])
    assert torch.allclose(in_portions(tiny, tokens, sizes), single, rtol=0, atol=TOLERANCE)


def test_later_tokens_do_not_change_earlier_logits(tiny: Llama) -> None:
    tokens = random_tokens(40)
    other = tokens.clone()
    other[:, 25:] = (other[:, 25:] + 1) % 259
    a, b = (tiny(t, tiny.new_cache()) for t in (tokens, other))
    assert torch.allclose(a[:, :25], b[:, :25], rtol=0, atol=TOLERANCE)
    assert not torch.allclose(a[:, 25:], b[:, 25:], rtol=0, atol=0.01)


def test_too_many_tokens_are_refused_and_leave_the_cache_as_it_was(tiny: Llama) -> None:
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
    cache = KVCache(layers, 1, heads, head_size, sum(sizes), torch.float32, CPU)
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
