"""What decoders differ by, each in C++ against f64: step and prefill, every instruction set."""

import pytest
import torch
from cpu_models import error
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from spec_models import SPECS, VOCABULARY, decoder, forward, layer, random_parts

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.executor import supports
from crelle.kernels.cpu.fused_decoder import FusedDecoder, ModelParts, Paged
from crelle.kernels.spec import DecoderSpec

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]
TOLERANCE = 1e-5  # relative, of the norm of logits


def some_tokens(n: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def blocks(spec: DecoderSpec, rows: int = 1, capacity: int = 200) -> list[Tensor]:
    shape = (2, rows, spec.kv_heads, capacity, spec.head_size)
    return [torch.full(shape, float("nan")) for _ in spec.layers]


def steps(parts: ModelParts, tokens: Tensor, prompt: int) -> Tensor:
    """Logits [T, V]: those of a prompt in two chunks, then of a step for each token."""
    fused, kv = FusedDecoder(parts), blocks(parts.spec)
    found = [fused.prefill(tokens[: prompt // 3], 0, kv, last=False)]
    found.append(fused.prefill(tokens[prompt // 3 : prompt], prompt // 3, kv, last=False))
    found += [fused.step(tokens[i : i + 1], torch.tensor([i]), kv) for i in range(prompt, len(tokens))]
    return torch.cat(found)


@pytest.mark.parametrize("name", SPECS)
def test_prompt_and_steps_against_f64(name: str, isa: str) -> None:
    parts, tokens = random_parts(SPECS[name]), some_tokens(150)
    assert supports(parts.spec, KVFormat()) is None
    found, wanted = steps(parts, tokens, 110), forward(parts, tokens)
    assert error(found[:110], wanted[:110]) < TOLERANCE
    assert error(found[110:], wanted[110:]) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["gpt2", "opt", "gemma3", "sandwich", "experts", "gpt-oss", "parallel", "norms of the stream", "350M"]
)
def test_a_batch_has_the_bits_of_each_alone(name: str, isa: str) -> None:
    parts = random_parts(SPECS[name])
    fused, texts = FusedDecoder(parts), [some_tokens(n, n) for n in (40, 90, 61)]
    for threads in (1, 3):
        _core.set_threads(threads)
        kv, positions = blocks(parts.spec, rows=3), torch.tensor([39, 89, 60])
        for row, text in enumerate(texts):
            fused.prefill(text[:-1], 0, kv, row=row)
        together = fused.step(torch.stack([text[-1] for text in texts]), positions, kv)
        for text, y in zip(texts, together, strict=True):
            one = blocks(parts.spec)
            fused.prefill(text[:-1], 0, one)
            assert torch.equal(fused.step(text[-1:], torch.tensor([len(text) - 1]), one)[0], y)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma3", "sinks", "soft caps"])
@pytest.mark.parametrize(("text", "tolerance"), [("kv16", 1e-5), ("kv8:center=false", 2e-2), ("kv4:center=false", 0.3)])
def test_pages(name: str, text: str, tolerance: float) -> None:
    parts, tokens, fmt = random_parts(SPECS[name]), some_tokens(100), KVFormat.parse(text)
    spec, fused = parts.spec, FusedDecoder(parts)
    layers = [KVPages.new(fmt, 10, spec.kv_heads, spec.head_size, torch.float32, "cpu") for _ in spec.layers]
    kv = Paged(layers, torch.randperm(10, dtype=torch.int32)[None])
    found = [fused.prefill(tokens[:70], 0, kv, last=False)]
    found += [fused.step(tokens[i : i + 1], torch.tensor([i]), kv) for i in range(70, 100)]
    assert error(torch.cat(found), forward(parts, tokens)) < tolerance


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_quantized_step_and_prompt_agree(name: str, isa: str) -> None:
    parts, tokens = random_parts(SPECS[name], "rtn:bits=4,group=24"), some_tokens(60)
    whole = FusedDecoder(parts).prefill(tokens, 0, blocks(parts.spec), last=False)
    assert error(steps(parts, tokens, 6), whole) < 3e-4


def test_positions_beyond_the_table_are_refused() -> None:
    parts = random_parts(decoder(layer(rope=None), learned_positions=2, context=20))
    fused, kv = FusedDecoder(parts), blocks(parts.spec)
    assert fused.prefill(some_tokens(20), 0, kv).isfinite().all()
    with pytest.raises(ValueError, match="beyond the learned"):
        fused.prefill(some_tokens(2), 19, kv)
    with pytest.raises(ValueError, match="beyond the learned"):
        fused.step(some_tokens(1), torch.tensor([20]), kv)


def test_what_the_fused_step_lacks_is_a_sentence() -> None:
    placed = decoder(layer(parallel=True, placement="reordered"))
    assert "side by side where norms stand before them, not as in layer 0" in str(supports(placed, KVFormat()))
    wide = decoder(layer(head_size=640, rope=None))
    assert "at most 512 channels" in str(supports(wide, KVFormat.parse("kv4")))
