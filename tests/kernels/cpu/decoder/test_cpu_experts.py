"""Mixtures of experts in the C++ step and prefill: which experts are read, in which formats, alone and in a batch.

Their arithmetic is compared with f64 in test_cpu_spec.py, with transformers in tests/models/test_family_logits.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cpu_models import error
from torch import Tensor

from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from spec_models import VOCABULARY, decoder, forward, layer, random_parts

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.fused_decoder import (
    ExpertsParts,
    FusedDecoder,
    LayerParts,
    LinearParts,
    MlpParts,
    ModelParts,
)
from crelle.kernels.cpu.kernel import CpuWeight
from crelle.kernels.spec import ExpertsSpec

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]
_WIDE = {"width": 128}
SPEC = decoder(
    layer(experts=ExpertsSpec(count=6, top=2), inner=64, bias=True),
    layer(experts=ExpertsSpec(count=3, top=1, normalize=False, shared=192), inner=128),
    **_WIDE,
)
SCHEMES = ["rtn:bits=4,group=32", "bcq:bits=2,group=64", "mixed:four=0.25,outliers=0.01"]


def some_tokens(n: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def blocks(rows: int = 1, capacity: int = 200) -> list[Tensor]:
    return [torch.full((2, rows, SPEC.kv_heads, capacity, SPEC.head_size), float("nan")) for _ in SPEC.layers]


def with_mlps(parts: ModelParts, change: Callable[[int, int, MlpParts], MlpParts]) -> ModelParts:
    """Change experts, by layer and number."""
    layers = list[LayerParts]()
    for i, of in enumerate(parts.layers):
        assert isinstance(of.experts, ExpertsParts)
        each = [change(i, e, mlp) for e, mlp in enumerate(of.experts.each)]
        layers.append(replace(of, experts=replace(of.experts, each=each)))
    return replace(parts, layers=layers)


def plain(linear: LinearParts) -> LinearParts:
    if not isinstance(linear.weight, CpuWeight):
        return linear
    w = torch.empty(linear.weight.data.shape)
    linear.weight.data.dequantize(w.numpy())
    return replace(linear, weight=w)


def dequantized(parts: ModelParts) -> ModelParts:
    def mlp(_: int, __: int, of: MlpParts) -> MlpParts:
        return MlpParts(up=plain(of.up), down=plain(of.down), gate=None if of.gate is None else plain(of.gate))

    parts = with_mlps(parts, mlp)
    slots = ("q", "k", "v", "o")
    layers = [replace(of, **{slot: plain(getattr(of, slot)) for slot in slots}) for of in parts.layers]
    return replace(parts, layers=layers, head=plain(parts.head))


def in_several_formats() -> ModelParts:
    """A plain expert, and quantized ones of different formats, in one layer."""
    by_scheme = [random_parts(SPEC, scheme) for scheme in (None, *SCHEMES)]

    def choose(i: int, e: int, _: MlpParts) -> MlpParts:
        experts = by_scheme[e % len(by_scheme)].layers[i].experts
        assert experts is not None
        return experts.each[e]

    return with_mlps(by_scheme[1], choose)


def prompt_and_steps(parts: ModelParts, tokens: Tensor, prompt: int) -> Tensor:
    fused, kv = FusedDecoder(parts), blocks()
    found = [fused.prefill(tokens[:prompt], 0, kv, last=False)]
    found += [fused.step(tokens[i : i + 1], torch.tensor([i]), kv) for i in range(prompt, len(tokens))]
    return torch.cat(found)


def test_experts_of_different_formats_against_f64(parts: ModelParts) -> None:
    tokens = some_tokens(70)
    assert error(prompt_and_steps(parts, tokens, 50), forward(dequantized(parts), tokens)) < 3e-3


@pytest.fixture
def parts(isa: str) -> ModelParts:
    """Laid out for an instruction set."""
    return in_several_formats()


def test_a_step_has_the_bits_of_each_token_alone(parts: ModelParts) -> None:
    """Tokens of several sequences, and several of one."""
    fused, tokens = FusedDecoder(parts), some_tokens(16)
    rows = torch.tensor([0, 1, 2, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12])
    positions = torch.tensor([0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    alone, kv = [], blocks(rows=13)
    for i in range(16):
        alone.append(fused.step(tokens[i : i + 1], positions[i : i + 1], kv, rows=rows[i : i + 1]))
    for threads in (1, 3):
        _core.set_threads(threads)
        for count in (2, 16):
            kv = blocks(rows=13)
            found = fused.step(tokens[:count], positions[:count], kv, rows=rows[:count].clone())
            assert torch.equal(found, torch.cat(alone[:count]))


def test_a_prompt_has_the_bits_of_its_chunks_and_of_each_alone(parts: ModelParts) -> None:
    texts, fused = [some_tokens(n, n) for n in (40, 5, 90)], FusedDecoder(parts)

    def prefill(of: list[int], chunks: Iterator[tuple[int, int]]) -> Tensor:
        """The prompts `of`, chunk by chunk; the logits of all tokens, prompt by prompt."""
        kv, found = blocks(rows=len(of)), [[] for _ in of]
        for begin, end in chunks:
            here = [(row, texts[i][begin:end]) for row, i in enumerate(of) if len(texts[i]) > begin]
            counts, at = torch.tensor([len(ids) for _, ids in here]), torch.full((len(here),), begin)
            rows = torch.tensor([row for row, _ in here])
            y = fused.prefill_batch(torch.cat([ids for _, ids in here]), counts, at, kv, rows=rows)
            for (row, _), part in zip(here, y.split(counts.tolist()), strict=True):
                found[row].append(part)
        return torch.cat([torch.cat(parts) for parts in found])

    wanted = torch.cat([prefill([i], iter([(0, 90)])) for i in range(3)])
    for threads in (1, 3):
        _core.set_threads(threads)
        assert torch.equal(prefill([0, 1, 2], iter([(0, 90)])), wanted)
        assert torch.equal(prefill([0, 1, 2], pairwise([0, 3, 17, 64, 90])), wanted)


def test_only_the_chosen_experts_are_read() -> None:
    """The others are made of NaN, which a product cannot hide."""
    parts, token = random_parts(SPEC), some_tokens(1)
    at, kv = torch.tensor([0]), blocks()
    wanted = FusedDecoder(parts).step(token, at, kv)
    spoiled = dict[tuple[int, int], bool]()
    for i in range(2):
        for e in range(6 if i == 0 else 3):

            def spoil(layer: int, expert: int, mlp: MlpParts, which: tuple[int, int] = (i, e)) -> MlpParts:
                if (layer, expert) != which:
                    return mlp
                return replace(mlp, down=replace(mlp.down, weight=torch.full_like(mlp.down.weight, torch.nan)))

            found = FusedDecoder(with_mlps(parts, spoil)).step(token, at, blocks())
            spoiled[i, e] = bool(found.isnan().all())
            assert spoiled[i, e] or torch.equal(found, wanted)
    assert [sum(yes for (layer, _), yes in spoiled.items() if layer == i) for i in range(2)] == [2, 1]


def test_of_equal_scores_the_first_experts_are_taken_and_nan_stays_nan() -> None:
    def routed(value: float) -> Tensor:
        made = random_parts(SPEC)
        for of in made.layers:
            assert of.experts is not None
            assert isinstance(of.experts.router.weight, Tensor)
            of.experts.router.weight.fill_(value)
            if of.experts.router.bias is not None:
                of.experts.router.bias.fill_(0)
        tokens, fused = some_tokens(30), FusedDecoder(made)
        prompt = fused.prefill(tokens, 0, blocks(), last=False)
        assert torch.equal(fused.step(tokens[:1], torch.tensor([0]), blocks()).isnan(), prompt[:1].isnan())
        return prompt

    assert routed(0.0).isfinite().all()
    assert routed(torch.nan).isnan().all()
    assert routed(torch.inf).isnan().any()
