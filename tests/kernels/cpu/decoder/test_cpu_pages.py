"""The C++ step and prompt over pages of 16, 8 and 4 bits against the readable kernels over the same pages."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import cpu
from crelle.kernels.cpu.fused_decoder import FusedDecoder, Paged
from crelle.models.cache import key_centers_of
from crelle.models.decoder import DecoderModel
from crelle.models.loader import build

pytestmark = [pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())), pytest.mark.sample(3)]

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FORMATS = [
    *("kv16", "kv8", "kv4", "kv4:group=16,rotate=false,center=false", "kv8:page=5", "kv4:page=32,group=64"),
    *("kv3", "kv2", "k4v2", "k8v4:page=5", "k16v3", "k3v16:page=32", "k2v8:group=16,rotate=false", "4,layers.1=k8v16"),
]
# Relative, of the norm of logits: a code that falls to the other side of a half moves them by more than f32 does.
# With AMX, prompts of the step are bf16 tiles, those of a layer by itself int8 tiles below 256 rows: 1e-4 apart, so
# that some codes fall to the other side. Measured: 0.00205, 0.035 at 8, 4 bits.
TOLERANCE = {16: 1e-4, 8: 4e-3, 4: 6e-2, 3: 6e-2, 2: 6e-2}


@cache
def make(**options: Any) -> DecoderModel:
    """A random model, for all tests that want the same. Do not write to it."""
    model = build(RandomWeights({**CONFIG, **options}, "rtn:bits=4,group=48", CPU, seed=1), CPU)
    assert isinstance(model.decoder, FusedDecoder)
    return model


def pages_for(model: DecoderModel, fmt: KVFormat, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Paged:
    """Pages enough for all rows, handed out in disorder."""
    c, count = model.spec, rows * width + 3
    layers = [KVPages.new(own, count, c.kv_heads, c.head_size, dtype, "cpu") for own in fmt.layers(len(c.layers))]
    table = torch.randperm(count)[: rows * width].to(torch.int32).view(rows, width).contiguous()
    centers = key_centers_of(model.key_centers if fmt.centered else None, layers)
    return Paged(layers, table, centers)


def layer_by_layer(model: DecoderModel, tokens: Tensor, fmt: KVFormat, cuts: list[int]) -> Tensor:
    """Logits [T, V] of tokens [T] that come in chunks, without the C++ step."""
    decoder, model.decoder = model.decoder, "not now"
    try:
        cache = model.new_cache(1, kv=fmt)
        return torch.cat([model(part[None], cache)[0] for part in tokens.split(cuts)])
    finally:
        model.decoder = decoder


def close(found: Tensor, wanted: Tensor, fmt: KVFormat) -> bool:
    return ((found - wanted).norm() / wanted.norm()).item() < TOLERANCE[min(fmt.bits, fmt.v_bits)]


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    "options", [{}, {"head_dim": 64}, {"head_dim": 80}, {"model_type": "mistral", "sliding_window": 20}]
)
@pytest.mark.sample(2)
def test_prompt_and_steps_match_layer_by_layer(text: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, fmt = make(**options), KVFormat.parse(text)
    tokens = torch.randint(0, 300, (90,))
    wanted = layer_by_layer(model, tokens, fmt, [70] + [1] * 20)
    paged = pages_for(model, fmt, rows=3, width=-(-96 // fmt.page))
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    found = [decoder.prefill(tokens[:70], 0, paged, row=1, last=False)]
    for i in range(70, 90):
        found.append(decoder.step(tokens[i : i + 1], torch.tensor([i]), paged, rows=torch.tensor([1])))
    assert close(torch.cat(found), wanted, fmt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pages_of_16_bits_match_layer_by_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, fmt = make(), KVFormat(16)
    tokens, decoder = torch.randint(0, 300, (90,)), model.decoder
    wanted = layer_by_layer(model, tokens, fmt, [70] + [1] * 20)
    assert isinstance(decoder, FusedDecoder)
    paged = pages_for(model, fmt, rows=1, width=6, dtype=dtype)
    found = [decoder.prefill(tokens[:70], 0, paged, last=False)]
    found += [decoder.step(tokens[i : i + 1], torch.tensor([i]), paged) for i in range(70, 90)]
    assert (
        0
        < ((torch.cat(found) - wanted).norm() / wanted.norm()).item()
        < {2**-10: 2e-3, 2**-7: 2e-2}[torch.finfo(dtype).eps]
    )


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = cpu.core().threads()
    yield cpu.core().set_threads
    cpu.core().set_threads(before)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 2), (8, 2), (5, 1)], ids=str)
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("kv16", torch.float32),
        ("kv16", torch.float16),
        ("kv16", torch.bfloat16),
        ("kv16:page=5", torch.float16),
        ("kv8", torch.float32),
        ("kv4", torch.float32),
        ("kv3", torch.float16),
        ("k4v2", torch.float16),
        ("16,layers.0=k16v2", torch.float16),
    ],
    ids=str,
)
@pytest.mark.sample(4)
def test_a_row_does_not_depend_on_who_steps_beside_it(
    text: str, dtype: torch.dtype, heads: tuple[int, int], threads: Callable[[int], None]
) -> None:
    """Nor on how many threads there are: they share out the heads, and heads of one key attend together."""
    torch.manual_seed(0)
    model, fmt = make(num_attention_heads=heads[0], num_key_value_heads=heads[1]), KVFormat.parse(text)
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    lengths, tokens = [3, 40, 17, 150, 63, 64], torch.randint(0, 300, (6, 170))

    def step(paged: Paged, rows: list[int], i: int) -> Tensor:
        fresh = torch.stack([tokens[r, lengths[r] + i] for r in rows])
        return decoder.step(fresh, torch.tensor([lengths[r] + i for r in rows]), paged, rows=torch.tensor(rows))

    def run(batches: list[list[int]], count: int) -> list[Tensor]:
        threads(1)  # prompts are not what is compared
        torch.manual_seed(5)
        paged = pages_for(model, fmt, rows=6, width=-(-170 // fmt.page), dtype=dtype)
        for row, n in enumerate(lengths):
            decoder.prefill(tokens[row, :n], 0, paged, row=row)
        threads(count)
        return [torch.cat([step(paged, rows, i) for rows in batches]) for i in range(4)]

    alone = run([[r] for r in range(6)], 1)
    for batches, count in (([list(range(6))], 1), ([list(range(6))], 3), ([[0, 1], [2], [3, 4, 5]], 2)):
        for a, b in zip(alone, run(batches, count), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("text", ["kv4", "kv8", "kv3", "kv2", "k4v2", "k16v3"])
@pytest.mark.parametrize("head_dim", [48, 64, 20])
def test_codes_are_those_of_the_format(text: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, fmt = make(head_dim=head_dim), KVFormat.parse(text)
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    tokens = torch.randint(0, 300, (64,))
    paged = pages_for(model, fmt, rows=1, width=4)
    decoder.prefill(tokens, 0, paged)
    monkeypatch.setattr(model, "decoder", "not now")
    cache = model.new_cache(1, kv=fmt)
    model(tokens[None], cache)
    theirs = cache.layers[0].read(cache.table[0, :4].long())
    mine = paged.layers[0].read(paged.table[0].long())
    assert ((mine - theirs).abs() > 1e-4).float().mean().item() < 3e-3  # a rounding may fall to the other side


def test_a_table_that_names_no_page_is_refused() -> None:
    model, fmt = make(), KVFormat(8)
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    paged = pages_for(model, fmt, rows=1, width=4)
    decoder.step(torch.tensor([1]), torch.tensor([0]), paged)
    paged.table[0, 1] = 999
    decoder.step(torch.tensor([1]), torch.tensor([1]), paged)  # the second page is not needed yet
    with pytest.raises(ValueError, match="a page that is not there"):
        decoder.step(torch.tensor([1]), torch.tensor([16]), paged)
    with pytest.raises(ValueError, match="outside of the cache"):
        decoder.step(torch.tensor([1]), torch.tensor([64]), paged)
