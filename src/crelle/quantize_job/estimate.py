"""How long quantizing will take, from a few seconds of measurements on this machine before it starts.

The first layer of the model goes through what a run does, with little data: calibration on some hundred tokens, a few
steps of training, the search on one layer, a few sampled tokens. Times that grow with the tokens, with the steps and
with the layers are scaled to what the run will have; those of the solver and of reading are of a whole layer already.
On a CPU the time of a token is the difference of two passes, after a first one that allocates what stays: weights are
packed and sums are finished once a layer, which of few tokens is as much work as the tokens themselves.
`crelle quantize --dry-run` measures a layer with all of its data instead, which takes longer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.base import QuantTensor
from crelle.formats.storage.open import Weights, is_matrix
from crelle.models.calibration_model import open_model
from crelle.models.loader import build, in_usual_form, read_spec
from crelle.quantize_job.data import CalibrationData, next_tokens, rows_of
from crelle.quantize_job.effort import weights_in_layers
from crelle.quantize_job.first_layers import FirstLayers, in_layer, layer_count
from crelle.quantize_job.own_sequences import pieces_of, sampling_batch, sampling_dtype, sampling_room
from crelle.quantizers.base import GuidedConfig, Passthrough, Quantizer
from crelle.quantizers.calibration.calibrate import Calibrator, LayerCalibration
from crelle.quantizers.calibration.guidance import guidance_memory, guide
from crelle.quantizers.calibration.layer_api import CalibrationModel
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.trained import TrainedConfig
from crelle.quantizers.search.gradient_stats import backward_stats
from crelle.quantizers.search.sensitivity import planning_rows, sensitivities
from crelle.quantizers.stage_times import (
    FULL,
    GUIDANCE_HEAD,
    HESSIAN,
    QUANTIZED,
    SEARCH,
    SEARCH_FITS,
    SEARCH_HEAD,
    StageTimes,
    recording,
    timed,
)
from crelle.quantizers.training.blockwise import TrainStep, tune_block
from crelle.quantizers.training.ste import trainable_weight

_TOKENS = {"cuda": 4096, "cpu": 2048}  # that a layer is measured with
_SMALL_TOKENS = 16384  # the same of a small layer on a GPU
_SEARCHED = 512  # tokens that a CPU searches and trains with
_LARGE = 4_000_000  # weights of a layer above which a CPU is measured with fewer tokens; up to them a layer is small
_FITTED = 1 << 20  # weights of a matrix that is quantized without data
_OF_TOKENS = (FULL, QUANTIZED, HESSIAN)
_SAMPLED = {"cuda": 15, "cpu": 3}  # steps of sampling
_WARM = 0.5  # seconds of sampling on a GPU: its first steps in a process take up to twice as long
_AGAIN = 2  # more measurements of a small layer on a GPU, which takes milliseconds: the least is what the work takes


@dataclass(slots=True)
class Estimate:
    """Seconds by part of the work."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of one layer."""

    forward: float  # a token through the full-precision layer
    token: float  # a token through all of calibration
    fixed: float  # whatever the tokens
    step: Callable[[int], float]  # of training on so many tokens a step
    begin: float  # of training, besides its steps

    def seconds(self, tokens: int) -> float:
        """Of calibration with so many tokens."""
        return self.fixed + tokens * self.token

    def fastest(self, other: "_Layer", tokens: int) -> "_Layer":
        """Return the least of two measurements, of calibration with so many tokens and of training."""
        calibration = min(self, other, key=lambda layer: layer.seconds(tokens))
        training = min(self, other, key=lambda layer: layer.step(1))
        return replace(calibration, step=training.step, begin=training.begin)

    def scaled(self, seconds: float, tokens: int) -> "_Layer":
        """Return it with calibration that takes so long, if less: recorded stages wait for the GPU at both ends."""
        f = min(1.0, seconds / self.seconds(tokens))
        return replace(self, forward=f * self.forward, token=f * self.token, fixed=f * self.fixed)


def estimate(
    weights: Weights,
    scheme: str,
    text: CalibrationData | None,
    device: torch.device,
    *,
    head: str | None = None,
    memory: int | None = None,
) -> Estimate:
    """Measure, and return what quantizing the whole model should take; `text` with rows and own sequences."""
    config, layers, found = parse(scheme), layer_count(weights), Estimate()
    found.parts["writing"] = _tables(weights, head)
    if text is None or not config.calibrated:
        found.parts["layers"] = _plain(in_usual_form(weights), config)
        return found
    spec = read_spec(weights)
    length = min(text.length, spec.context)
    first = FirstLayers(weights, min(layers, 2 if device.type == "cuda" else 1))
    each = weights_in_layers(weights) // layers
    tokens = _some_rows(weights, text, length, _tokens_for(each, device))
    again = _again(each, device)
    with recording(device) as times:
        if device.type == "cuda":  # a first time, for what is compiled or loaded when it is first needed
            _layer(open_model(first, device), config, tokens, device, times, length)
        model = open_model(first, device)
        layer = _layer(model, config, tokens, device, times, length)
        for _ in range(again):
            more = _layer(open_model(first, device), config, tokens, device, times, length)
            layer = layer.fastest(more, tokens.numel())
        if device.type == "cpu":
            tokens = tokens[: max(1, _SEARCHED // tokens.shape[1])]
        search = None
        if isinstance(config, Auto) and config.search:
            search = _search(config, open_model(FirstLayers(weights, 1), device), tokens, device, times, again)
        passes = None
        if isinstance(config, GuidedConfig) and config.guidance:
            passes = _guidance(open_model(FirstLayers(weights, 1), device), tokens, device, times)
    if again:
        least = min(_unrecorded(open_model(first, device), config, tokens, device) for _ in range(1 + again))
        layer = layer.scaled(least, tokens.numel())
    rows, own = text.rows or 0, text.own or 0
    if own:
        found.parts["sampling"] = _sampling(weights, own, length, device, memory)(own, length)
    if search is not None:
        planned = planning_rows(model, torch.empty(rows + own, length, dtype=torch.long)).numel()
        found.parts["search"] = planned * (layers * search.token + search.head) + layers * search.layer
    if passes is not None:
        found.parts["guidance"] = (rows + own) * length * (layers * passes.token + passes.head) + layers * passes.layer
    found.parts["layers"] = layers * layer.seconds((rows + own) * length)
    if isinstance(config, TrainedConfig) and config.tune != "none" and config.steps:
        t = config.block_training()
        found.parts["training"] = layers * (layer.begin + t.steps * layer.step(t.batch * length))
    if isinstance(config, TrainedConfig) and config.tune == "full":
        head_token = search.head if search is not None else 0.0
        found.parts |= _end_to_end(config, weights, layer, layers, length, head_token, device, memory)
    return found


def _tokens_for(each: int, device: torch.device) -> int:
    """Return how many tokens a layer of so many weights is measured with: fewer where it is large."""
    if device.type == "cuda":
        return _TOKENS["cuda"] if each > _LARGE else _SMALL_TOKENS
    return max(64, int(_TOKENS["cpu"] * min(1.0, _LARGE / each)))


def _again(each: int, device: torch.device) -> int:
    """Return how many more times a layer of so many weights is measured."""
    return _AGAIN if device.type == "cuda" and each <= _LARGE else 0


def _some_rows(weights: Weights, text: CalibrationData, length: int, tokens: int) -> Tensor:
    """Return a few calibration sequences [S, T] of the text's beginning, of fewer tokens where a layer is large."""
    short = min(length, max(16, tokens))
    beginning = text.text[: 40 * tokens]
    rows = rows_of(Tokenizer.of(weights), beginning if len(beginning) > 400 else text.text, short)
    return rows[: max(1, tokens // short)]


def _layer(
    model: CalibrationModel,
    config: Quantizer,
    tokens: Tensor,
    device: torch.device,
    times: StageTimes,
    length: int,
) -> _Layer:
    """Calibrate and train the last layer of a model of few, and measure it."""
    counted, before = tokens.numel(), dict.fromkeys(_OF_TOKENS, 0.0)
    if device.type == "cpu" and counted > 1:
        few, plain = tokens[:1] if len(tokens) > 1 else tokens[:, : tokens.shape[1] // 2], parse("fp16")
        _calibrate(model, plain, few, device, times)
        before |= _calibrate(model, plain, few, device, times)[2]
        counted -= few.numel()
    layer, fitted, taken = _calibrate(model, config, tokens, device, times)
    more = {stage: max(0.0, taken.get(stage, 0.0) - before[stage]) / counted for stage in _OF_TOKENS}
    per_token, forward = sum(more.values()), more[FULL]
    fixed = max(0.0, sum(taken.values()) - per_token * tokens.numel())
    begin, step = 0.0, cast(Callable[[int], float], _no_step)
    if isinstance(config, TrainedConfig) and config.tune != "none" and (config.steps or config.tune == "full"):
        begin, step = _training(layer, config, fitted, device, length, tokens.numel())
    times.take()
    return _Layer(forward, per_token, fixed, step, begin)


def _calibrate(
    model: CalibrationModel, config: Quantizer, tokens: Tensor, device: torch.device, times: StageTimes
) -> tuple[LayerCalibration, dict[str, QuantTensor], dict[str, float]]:
    """Quantize the last layer of a model of few; return it, its matrices and the seconds by stage."""
    calibrator = _at_last_layer(model, tokens, device)
    times.take()
    layer, fitted = _fit(calibrator, config)
    return layer, fitted, times.take()


def _at_last_layer(model: CalibrationModel, tokens: Tensor, device: torch.device) -> Calibrator:
    calibrator = Calibrator(model, tokens, device=device)  # without guidance, which takes what other weights take
    for _ in range(model.layers - 1):
        calibrator.skip({})
    return calibrator


def _fit(calibrator: Calibrator, config: Quantizer) -> tuple[LayerCalibration, dict[str, QuantTensor]]:
    """Quantize the layer that is next."""
    layer = calibrator.begin()

    def fit(name: str, weight: Tensor, stats: Stats) -> QuantTensor:
        return config.fit(weight, stats)

    fitted = layer.fit(fit)
    layer.end()
    return layer, fitted


def _unrecorded(model: CalibrationModel, config: Quantizer, tokens: Tensor, device: torch.device) -> float:
    """Return the seconds of calibrating the last layer of a model of few on a GPU, no stage of which is recorded."""
    calibrator = _at_last_layer(model, tokens, device)
    torch.cuda.synchronize(device)
    begun = perf_counter()
    _fit(calibrator, config)
    torch.cuda.synchronize(device)
    return perf_counter() - begun


def _no_step(tokens: int) -> float:
    return 0.0


def _training(
    layer: LayerCalibration,
    config: TrainedConfig,
    fitted: dict[str, QuantTensor],
    device: torch.device,
    length: int,
    tokens: int,
) -> tuple[float, Callable[[int], float]]:
    """Return the seconds of the first steps of training, and those of a step by its tokens."""
    linears, sources = layer.block.linears(), layer.full.linears()
    coders = {n: c for n, w in fitted.items() if (c := trainable_weight(w, sources[n].weight)) is not None}
    if not coders:
        return 0.0, _no_step
    for name, coder in coders.items():
        linears[name].coder = coder
    width = layer.after.shape[-1]
    training = config.block_training()

    def seconds(steps: int, T: int, batch: int = training.batch if device.type == "cuda" else 1) -> float:
        x = torch.randn(batch, T, width, generator=torch.Generator().manual_seed(0)).to(device)
        begun = perf_counter()
        with torch.enable_grad():
            tune_block(layer.block, list(coders.values()), x, x, replace(training, steps=steps, batch=batch), device)
        return perf_counter() - begun  # losses are on the host: the device has finished

    if device.type == "cuda":
        few, many = TrainStep.EAGER + 3, TrainStep.EAGER + 19  # both captured as a graph
        seconds(few, length)
        short, long = seconds(few, length), seconds(many, length)
        each = max(0.0, long - short) / (many - few)
        return max(0.0, short - few * each), lambda n: each * n / (training.batch * length)
    T = min(length, tokens)
    seconds(1, 8)
    one, three = seconds(1, T), seconds(1, T, batch=3)
    slope = max(0.0, three - one) / (2 * T)
    fixed = max(0.0, one - slope * T)
    return 0.0, lambda n: fixed + slope * n


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of the search for bits, or of guidance."""

    token: float  # a token through a layer, forward and backward
    layer: float  # of each layer besides: fits, reading
    head: float  # a token through the output head, forward and backward


def _search(
    config: Auto, model: CalibrationModel, tokens: Tensor, device: torch.device, times: StageTimes, again: int
) -> _Passes:
    """Measure the search on one layer; of passes with few tokens and with all, the difference is the tokens'.

    again: how many more measurements there are, of which the least counts.
    """
    few = tokens[:, : max(8, tokens.shape[1] // 8)]

    def passes(rows: Tensor) -> None:
        for _ in backward_stats(model, rows, device=device, seed=config.seed):
            pass

    def search(rows: Tensor) -> None:
        sensitivities(model, rows, config.settings(), device=device, seed=config.seed)

    def measured(work: Callable[[Tensor], None], rows: Tensor) -> tuple[float, float, float]:
        """Return the seconds of passes, of the output head and of fits."""
        times.take()
        with timed(SEARCH):
            work(rows)
        taken = times.take()
        head, fits = taken.pop(SEARCH_HEAD, 0.0), taken.pop(SEARCH_FITS, 0.0)
        return sum(taken.values()), head, fits

    def least(work: Callable[[Tensor], None], rows: Tensor) -> tuple[float, float, float]:
        return min(measured(work, rows) for _ in range(1 + again))

    if device.type == "cuda":  # a first time, for what is compiled or loaded when it is first needed
        search(tokens)
    short, short_head, _ = least(passes, few)
    long, long_head, _ = least(passes, tokens)
    whole, _, fits = least(search, tokens)
    more = max(1, tokens.numel() - few.numel())
    token = max(0.0, long - short) / more
    return _Passes(token, max(0.0, whole - tokens.numel() * token) + fits, max(0.0, long_head - short_head) / more)


def _guidance(model: CalibrationModel, tokens: Tensor, device: torch.device, times: StageTimes) -> _Passes:
    """Measure guidance on one layer, with few tokens and with all."""

    def measured(rows: Tensor) -> tuple[float, float]:
        """Return the seconds of the passes and of the output head."""
        times.take()
        guide(model, rows, guidance_memory(model, rows, device), device=device)
        taken = times.take()
        head = taken.pop(GUIDANCE_HEAD, 0.0)
        return sum(taken.values()), head

    few = tokens[:, : max(8, tokens.shape[1] // 8)]
    measured(tokens if device.type == "cuda" else few)  # what is compiled or loaded when it is first needed
    short, short_head = measured(few)
    long, long_head = measured(tokens)
    more = max(1, tokens.numel() - few.numel())
    token = max(0.0, long - short) / more
    return _Passes(token, max(0.0, short - few.numel() * token), max(0.0, long_head - short_head) / more)


@torch.inference_mode()
def _sampling(
    weights: Weights, own: int, length: int, device: torch.device, memory: int | None
) -> Callable[[int, int], float]:
    """Return the seconds of sampling by sequences and their tokens, measured with the batch that `own` of them take."""
    layers = layer_count(weights)
    pieces, size = pieces_of(length)
    batch = min(pieces * own, sampling_batch(weights, size, device, sampling_room(device, memory)))

    def token_seconds(count: int) -> float:
        model = build(FirstLayers(weights, count), device, dtype=sampling_dtype(device))
        cache = model.new_cache(batch)
        cache.grow(size - 1)
        for kv in cache.layers:
            kv.zero_()
        cache.length = size // 2  # the mean: a token's time grows with the cache
        fresh = torch.ones(batch, 1, dtype=torch.long, device=device)
        random = torch.Generator(device).manual_seed(0)
        next_tokens(model, cache, fresh, random).cpu()
        steps, taken = min(_SAMPLED[device.type], max(1, size // 4)), list[float]()
        while len(taken) < steps or (device.type == "cuda" and sum(taken) < _WARM):
            begun = perf_counter()
            fresh = next_tokens(model, cache, fresh, random)
            fresh.cpu()
            taken.append(perf_counter() - begun)
        return min(taken) if device.type == "cuda" else median(taken)

    many = min(layers, 8)
    one, several = token_seconds(1), token_seconds(many)
    each = one + max(0.0, several - one) / max(1, many - 1) * (layers - 1)

    def seconds(count: int, tokens: int) -> float:
        pieces, size = pieces_of(tokens)
        return pieces * count / batch * size * each

    return seconds


def _end_to_end(
    config: TrainedConfig,
    weights: Weights,
    layer: _Layer,
    layers: int,
    length: int,
    head_token: float,
    device: torch.device,
    memory: int | None,
) -> dict[str, float]:
    """Return the seconds of tune=full: sequences that the model samples, the teacher on them, and training."""
    count = weights_in_layers(weights)
    length = min(2 * length, read_spec(weights).context)
    training, own = config.end_to_end(count, length), config.own_sequences(count)
    tokens = training.batch * length
    seen = min(own, training.steps * training.batch) * length
    found = {
        "end to end": training.steps * (layers * layer.step(tokens) + 1.5 * head_token * tokens),
        "teacher": seen * layers * layer.forward,
    }
    if own:
        found["sampling for training"] = _sampling(weights, own, length, device, memory)(own, length)
    return found


def _plain(weights: Weights, config: Quantizer) -> float:
    """Return the seconds of a scheme that looks at no data, from some rows of one matrix of a layer."""
    names = [n for n in weights.names() if in_layer(n) and is_matrix(weights, n)]
    if not names or isinstance(config, Passthrough):
        return 0.0
    begun = perf_counter()
    weight = weights.read(names[0])
    rows = weight[: max(1, _FITTED // weight.shape[1])]
    read = perf_counter() - begun
    config.fit(rows[:1])
    begun = perf_counter()
    config.fit(rows)
    fit = perf_counter() - begun
    total = sum(prod(weights.shape(n)) for n in names)
    return total * (read / weight.numel() + fit / rows.numel())


def _tables(weights: Weights, head: str | None) -> float:
    """Return the seconds of reading and encoding what is outside the layers."""
    tables = [n for n in weights.names() if not in_layer(n) and is_matrix(weights, n)]
    total = sum(prod(weights.shape(n)) for n in tables)
    if not total:
        return 0.0
    rows = torch.randn(max(1, _FITTED // 1024), 1024, generator=torch.Generator().manual_seed(0))
    config = parse(head or "fp16")
    begun = perf_counter()
    made = config.fit(rows)
    b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in made.tensors().values())
    return (perf_counter() - begun) * total / rows.numel() * 2  # and written
