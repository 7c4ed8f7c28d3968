"""What end-to-end training (tune=full) of a whole model costs, measured on its first layers.

Some steps of training, and of sampling the model's own sequences, run with one layer and with all that were quantized.
The difference is the cost of a layer, from which the whole model's follows. Whether memory is saved (8-bit moments,
layers computed twice) is decided for the whole model, and the measured steps do the same.
"""

import gc
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import Weights
from crelle.models.calibration_model import open_model
from crelle.models.loader import build, read_spec
from crelle.quantize_job.data import next_tokens
from crelle.quantize_job.first_layers import FirstLayers
from crelle.quantize_job.own_sequences import pieces_of, sampling_batch, sampling_dtype, sampling_room
from crelle.quantizers.ranks import world
from crelle.quantizers.schemes.trained import TrainedConfig
from crelle.quantizers.training.blockwise import Training, TrainStep
from crelle.quantizers.training.end_to_end import drawn
from crelle.quantizers.training.finetune import network_of, too_large_for

_SAMPLED = 8  # tokens of each sequence at most, after as many that warm up
_PREFILL = 64  # tokens of each sequence in one pass, which bounds the activations


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Of the whole model, extrapolated from `measured` layers and one."""

    what: str  # "all" or "scales"
    steps: int
    batch: int  # sequences
    length: int  # tokens of each
    low_memory: bool
    measured: int  # layers
    step_seconds: float
    peak_bytes: int | None  # allocated by torch; None: not on a GPU
    own: int  # sequences that the model writes
    pieces: int  # of which each is made
    sampling_batch: int  # pieces at a time
    sampling_seconds: float
    teacher_seconds: float  # the full-precision model on every sequence, before training

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds + self.sampling_seconds + self.teacher_seconds


@dataclass(frozen=True, slots=True)
class _Measured:
    step_seconds: float
    peak_bytes: int
    token_seconds: float  # of one token of every sequence of a batch
    teacher_seconds: float  # of one sequence


def training_cost(
    recipe: TrainedConfig,
    weights: Weights,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    layers: int,
    measured: int,
    count: int,
    length: int,
    text: int,
    memory: int | None = None,
) -> TrainingCost:
    """Measure on `weights` with `measured` layers, at least 2, that were quantized into `checkpoint`.

    layers: of the whole model, count: weights in them, length: tokens of a calibration sequence, text: sequences for
    training that the text has.
    """
    length = min(2 * length, read_spec(weights).context)
    training = recipe.end_to_end(count, length)
    low = too_large_for(device, checkpoint, training.batch, length, times=layers / measured, memory=memory)
    own = recipe.own_sequences(count)
    room = sampling_room(device, memory)
    pieces, size = pieces_of(length)
    batch = min(pieces * own, sampling_batch(weights, size, device, room, times=layers / measured))
    rows = torch.randint(read_spec(weights).vocabulary, (2 * training.batch, length), generator=torch.Generator())
    few, many = (
        _measure(weights, checkpoint, n, recipe, replace(training, low_memory=low), rows, batch, device, memory)
        for n in (1, measured)
    )

    def whole(one: float, all_measured: float) -> float:
        return one + max(0.0, all_measured - one) / (measured - 1) * (layers - 1)

    token = whole(few.token_seconds, many.token_seconds)
    return TrainingCost(
        what=recipe.train,
        steps=training.steps,
        batch=training.batch,
        length=length,
        low_memory=low,
        measured=measured,
        step_seconds=whole(few.step_seconds, many.step_seconds),
        peak_bytes=int(whole(few.peak_bytes, many.peak_bytes)) if device.type == "cuda" else None,
        own=own,
        pieces=pieces,
        sampling_batch=batch,
        sampling_seconds=-(-pieces * own // max(1, batch)) * size * token,
        teacher_seconds=len(drawn(own + text, training)) * whole(few.teacher_seconds, many.teacher_seconds),
    )


def _measure(
    weights: Weights,
    checkpoint: Checkpoint,
    layers: int,
    recipe: TrainedConfig,
    training: Training,
    rows: Tensor,
    batch: int,
    device: torch.device,
    memory: int | None,
) -> _Measured:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    teacher = FirstLayers(weights, layers)
    steps = TrainStep.EAGER + 3 if device.type == "cuda" else 2  # the first ones warm up, or are captured
    training = replace(training, steps=max(steps, training.steps))
    run = network_of(
        checkpoint,
        FirstLayers(checkpoint, layers),
        teacher,
        training,
        tokens=rows,
        open_model=open_model,
        device=device,
        what=recipe.train,
        memory=memory,
    ).run
    assert run.teacher is not None
    each = run.teacher.seconds / len(run.teacher.states)
    seconds = []
    for step in range(steps):
        begun = perf_counter()
        float(run.take(step))  # waits for the device
        seconds.append(perf_counter() - begun)
    run.step.close()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    del run
    return _Measured(min(seconds[1:]), peak, _token_seconds(teacher, rows, batch, device) if batch else 0.0, each)


@torch.inference_mode()
def _token_seconds(weights: Weights, rows: Tensor, batch: int, device: torch.device) -> float:
    """Return how long one more token of `batch` sequences takes; of several ranks the first one samples.

    At half of a piece: a token's time grows with the cache, so that is the mean of a whole piece.
    """

    def seconds() -> float:
        model, size = build(weights, device, dtype=sampling_dtype(device)), pieces_of(rows.shape[1])[1]
        cache = model.new_cache(batch)
        cache.grow(size - 1)
        count = max(1, min(_SAMPLED, size // 4))
        opening = rows[torch.arange(batch) % len(rows), : max(1, size // 2 - count)].to(device)
        for part in torch.split(opening, _PREFILL, dim=1):
            fresh = next_tokens(model, cache, part)

        def sample() -> float:
            nonlocal fresh
            begun = perf_counter()
            for _ in range(count):
                fresh = next_tokens(model, cache, fresh)
            fresh.cpu()  # waits for the device
            return perf_counter() - begun

        sample()  # what is set up lazily
        return sample() / count

    found: float = world().once(seconds)
    return found
