"""Sequences that a model writes for its own training: openings, batches that fit, and how many by default."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crelle.bench.model_shapes import RandomWeights
from crelle.errors import NumericsError, SchemeError
from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.models.loader import build
from crelle.quantize_job import own_sequences
from crelle.quantize_job.data import sample
from crelle.quantize_job.own_sequences import own_rows, sampling_batch, sampling_room
from crelle.quantize_job.run import quantize
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.mixed import Mixed

CPU = torch.device("cpu")
GB = 10**9


def test_a_third_continues_the_text_a_third_one_token_of_it_and_a_third_any_token(tiny_model: Path) -> None:
    text = torch.arange(5, 25).repeat(4, 3)  # 20 of 259 tokens
    found = own_rows(open_weights(tiny_model), text, 60, 24, CPU, 0, None)
    assert found.shape == (60, 24)
    starts = found[:20, :16]
    assert torch.equal(starts[:, 1:], (starts[:, :1] - 5 + torch.arange(1, 16)) % 20 + 5)
    assert set(found[:40, 0].tolist()) <= set(range(5, 25))
    assert len(set(found[40:, 0].tolist()) - set(range(5, 25))) > 10
    assert torch.equal(found, own_rows(open_weights(tiny_model), text, 60, 24, CPU, 0, None))
    assert own_rows(open_weights(tiny_model), text, 0, 24, CPU, 0, None).shape == (0, 24)


def test_long_sequences_are_made_of_pieces(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_sequences, "_LONGEST", 20)
    assert [own_sequences.pieces_of(n) for n in (1, 20, 21, 50)] == [(1, 1), (1, 20), (2, 11), (3, 17)]
    text = torch.arange(5, 25).repeat(4, 3)
    found = own_rows(open_weights(tiny_model), text, 6, 50, CPU, 0, None)
    assert found.shape == (6, 50)
    starts = found[:, :16]  # of 18 pieces the first 6 continue 16 tokens of the text, and each begins another sequence
    assert torch.equal(starts[:, 1:], (starts[:, :1] - 5 + torch.arange(1, 16)) % 20 + 5)
    assert set(found[:, 17].tolist()) <= set(range(5, 25))
    assert not set(found[:, 34].tolist()) <= set(range(5, 25))


@pytest.mark.skipif(cpu.available() is not None, reason="no C++ core")
@pytest.mark.parametrize(
    ("scheme", "count", "steps"), [("fp32", 16, 1), ("fp32", 20, 2), ("rtn:bits=4,group=24", 40, 3)]
)
def test_a_token_of_many_sequences_takes_one_step_for_sixteen(
    tiny_model: Path, tmp_path: Path, scheme: str, count: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(tiny_model, tmp_path / "q", scheme)
    model = build(open_weights(tmp_path / "q"), CPU)
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    tokens = torch.randint(0, 259, (count, 3), generator=torch.Generator().manual_seed(0))

    def logits(rows: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache(len(rows))
        return torch.cat([model(rows[:, i : i + 1], cache) for i in range(3)], 1)

    single = torch.cat([logits(tokens[b : b + 1]) for b in range(count)])
    taken: list[int] = []
    inner = FusedDecoder.step

    def step(self: FusedDecoder, *args: Any, **options: Any) -> torch.Tensor:
        taken.append(len(args[0]))
        return inner(self, *args, **options)

    monkeypatch.setattr(FusedDecoder, "step", step)
    monkeypatch.setattr(FusedDecoder, "prefill", lambda *_, **__: pytest.fail("one sequence at a time"))
    assert torch.equal(logits(tokens), single)  # and each as if alone
    assert len(taken) == 3 * steps
    assert sum(taken) == 3 * count


def test_a_token_of_more_sequences_of_a_plain_model_is_one_product(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("step", "prefill"):
        monkeypatch.setattr(FusedDecoder, call, lambda *_, **__: pytest.fail("not all in one product"))
    text = torch.arange(5, 25).repeat(4, 3)
    assert own_rows(open_weights(tiny_model), text, 40, 20, CPU, 0, None).shape == (40, 20)


def test_tokens_are_sampled_as_often_as_their_probability_says() -> None:
    chances = torch.tensor([0.5, 0.0, 0.2, 0.3]).repeat(20000, 1)
    found = sample(chances, torch.Generator().manual_seed(0)).flatten().bincount(minlength=4) / 20000
    assert found.tolist() == pytest.approx([0.5, 0.0, 0.2, 0.3], abs=0.01)
    assert found[1] == 0
    assert torch.equal(sample(torch.eye(5)), torch.arange(5)[:, None])
    with pytest.raises(NumericsError, match="not finite"):
        sample(torch.full((2, 3), torch.nan))


@pytest.mark.parametrize(
    ("shape", "length", "room", "least", "most"),
    [
        ("smollm2-135m", 1024, 140 * GB, 4096, 4096),
        ("llama3-8b", 4096, 120 * GB, 170, 200),  # a sequence's keys and values take 0.54 GB
        ("llama3-8b", 1024, 120 * GB, 680, 800),
        ("llama3-8b", 4096, 40 * GB, 40, 46),
        ("llama3-8b", 4096, 16 * GB, 1, 1),  # the model alone takes as much
    ],
)
def test_as_many_are_sampled_at_one_time_as_have_room(
    shape: str, length: int, room: int, least: int, most: int
) -> None:
    batch = sampling_batch(RandomWeights(shape, "fp16", CPU), length, torch.device("cuda"), room)
    assert least <= batch <= most
    first = RandomWeights(shape, "fp16", CPU, layers=2)
    times = len(own_sequences.read_spec(RandomWeights(shape, "fp16", CPU)).layers) / 2
    assert sampling_batch(first, length, torch.device("cuda"), room, times) == batch


def test_sampling_takes_a_part_of_the_memory_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_sequences, "total_memory", lambda device: 100 * GB)
    assert sampling_room(torch.device("cuda"), None) == 85 * GB
    assert sampling_room(torch.device("cuda"), 40 * GB) == 34 * GB
    assert sampling_room(CPU, None) == 50 * GB


def test_training_is_as_long_as_a_model_of_that_size_needs() -> None:
    small, large = 106_000_000, 6_980_000_000
    full = Auto(bits=2.35, tune="full")
    assert (full.end_to_end(small, 1024).steps, full.own_sequences(small)) == (3000, 2048)
    assert full.end_to_end(small, 256).steps == 3000
    tokens = full.end_to_end(large, 4096).steps * 8 * 4096
    assert 7e6 < tokens < 9e6
    assert full.end_to_end(large, 2048).steps * 8 * 2048 == pytest.approx(tokens, rel=0.01)
    assert 200 < full.own_sequences(large) < 250
    given = Mixed(tune="full", end=7, own=0)
    assert (given.end_to_end(large, 4096).steps, given.own_sequences(large)) == (7, 0)
    assert str(given) == "mixed:group=16,tune=full,end=7,own=0"
    with pytest.raises(SchemeError, match="own must be at least 0"):
        Auto(bits=3, own=-2)
