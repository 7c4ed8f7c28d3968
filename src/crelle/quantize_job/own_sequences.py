"""Sequences that the full-precision model itself writes, to calibrate and train on beside a text."""

from math import prod

import torch
from torch import Tensor

from crelle.formats.storage.open import Weights
from crelle.models.loader import build, read_spec
from crelle.quantize_job.data import sampled_rows
from crelle.quantize_job.first_layers import in_layer
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.device_limit import total_memory
from crelle.quantizers.ranks import world

_PROMPT = 16  # tokens of the text that the model continues
_BATCH = {"cuda": 4096, "cpu": 1024}  # sequences at a time, where their cache fits: a step of few leaves a GPU idle
_LONGEST = 1024  # tokens that are sampled in one piece
_SHARE = {"cuda": 0.85, "cpu": 0.5}  # of the memory, for the model and the cache


def own_rows(
    weights: Weights,
    rows: Tensor,
    count: int,
    length: int,
    device: torch.device,
    seed: int,
    progress: Progress | None,
    memory: int | None = None,
    what: str = "calibration text",
) -> Tensor:
    """Sample sequences from the full-precision model, a third of them from each kind of opening.

    16 tokens of the text `rows`, a single token of it, or any token of the vocabulary: the first stay close to the
    text's domain, the last cover whatever else the model knows. Long sequences are made of several pieces (pieces_of).
    Of several ranks the first one samples, so that they are the same sequences as with one. `memory`: bytes of the
    device that may be used. `what`: what for, as progress calls it.
    """
    if not count:
        return rows.new_empty(0, length)

    def sample() -> Tensor:
        pieces, size = pieces_of(length)
        batch = sampling_batch(weights, size, device, sampling_room(device, memory))
        model = build(weights, device, dtype=sampling_dtype(device))
        openings = _openings(rows.flatten(), pieces * count, read_spec(weights).vocabulary, seed)
        tell = None if progress is None else lambda done, total, _: progress(done, total, f"sampling {what}")
        found = sampled_rows(model, openings, size, seed=seed, batch=batch, progress=tell)
        # Piece by piece, so that a sequence has openings of several kinds.
        return found.view(pieces, count, size).transpose(0, 1).reshape(count, pieces * size)[:, :length]

    return world().once_tensor(sample)


def pieces_of(length: int) -> tuple[int, int]:
    """Return of how many pieces a sequence is made, and their tokens: 1024 at most.

    Sampling takes a step for every token of a piece, and the shorter they are, the more of them have room in the cache:
    sequences of 4096 tokens in 4 pieces each take a quarter of the steps where memory bounds the batch. Both models see
    the pieces behind each other, so what one says of them is still what the other has to say.
    """
    pieces = -(-length // _LONGEST)
    return pieces, -(-length // pieces)


def _openings(text: Tensor, count: int, vocabulary: int, seed: int) -> Tensor:
    """Return [count, 16] token ids; -1: to be sampled."""
    chance = torch.Generator().manual_seed(seed)
    at = torch.randint(0, len(text) - _PROMPT, (count,), generator=chance)
    openings = text[at[:, None] + torch.arange(_PROMPT)]
    any_token = torch.randint(0, vocabulary, (count,), generator=chance)
    openings[count // 3 :, 1:] = -1
    openings[2 * count // 3 :, 0] = any_token[2 * count // 3 :]
    return openings


def sampling_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def sampling_room(device: torch.device, memory: int | None) -> int:
    """Return the bytes that sampling may use: of all memory, or of the `memory` that may be used of the device.

    Not by what of it is free: other batches are other samples, and a run that goes on must see the same.
    """
    return int(_SHARE[device.type] * min(total_memory(device), memory or total_memory(device)))


def sampling_batch(weights: Weights, length: int, device: torch.device, room: int, times: float = 1) -> int:
    """Return how many sequences are sampled at one time: 4096 (on a CPU 1024), or as many as have `room` beside the
    model, in bytes.

    times: how many layers the model has for each of these.
    """
    spec, size = read_spec(weights), sampling_dtype(device).itemsize
    cached = times * sum(2 * layer.attention.kv_heads * layer.attention.head_size for layer in spec.layers)
    each = length * cached * size + 24 * spec.vocabulary  # f32 logits, and what sampling makes of them
    model = size * sum(prod(weights.shape(n)) * (times if in_layer(n) else 1) for n in weights.names())
    return max(1, min(_BATCH[device.type], int((room - model) // each)))
