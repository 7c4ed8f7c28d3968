"""Quantize a model with everything that a scheme needs: calibration data, a calibration model, end-to-end training.

`crelle.quantizers.pipeline` works on weights alone; this module adds tokenizer and models. On several devices what
follows the first checks runs in a process for each of them (crelle.quantize_job.rank_processes).
"""

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.destination import PARTIAL, destination, refuse_existing, refuse_overlap
from crelle.formats.storage.open import Weights, open_weights
from crelle.formats.storage.ownership import STAGE, remove_directory
from crelle.models.calibration_model import open_model
from crelle.models.loader import choose_device, family_of, in_usual_form, read_spec
from crelle.quantize_job.cost import QuantizeCost, layer_weights, measure, trains_fully
from crelle.quantize_job.data import CalibrationData, python_documentation, rows_of
from crelle.quantize_job.effort import DEFAULT, SCHEME, Effort, Machine, resolve, weights_in_layers
from crelle.quantize_job.estimate import Estimate, estimate
from crelle.quantize_job.expert_rows import with_rows_for_experts
from crelle.quantize_job.first_layers import FirstLayers, layer_count
from crelle.quantize_job.own_sequences import own_rows
from crelle.quantize_job.plan import SUFFIX, forget_plan, planned, refuse_other_file
from crelle.quantize_job.rank_devices import devices_of
from crelle.quantize_job.rank_processes import on_devices
from crelle.quantizers import pipeline
from crelle.quantizers.base import GuidedConfig, Quantizer
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.device_limit import device_limit
from crelle.quantizers.pipeline import Calibration, Report
from crelle.quantizers.ranks import world
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.trained import TrainedConfig
from crelle.quantizers.training.finetune import tune
from crelle.quantizers.unquantized import sentences_about

_STAGE = ".base"  # ending of the name of the first of two stages, beside OUT

_BY_TRANSFORMERS = """{reason}, so '{scheme}' cannot calibrate it. Schemes without calibration (rtn, bcq) work; \
gptq, hbcq, mixed and atom (without tune) can calibrate with transformers:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from crelle.integrations.transformers import quantize
    model = AutoModelForCausalLM.from_pretrained({source!r})
    tokenizer = AutoTokenizer.from_pretrained({source!r})
    batches = [tokenizer(text, return_tensors="pt") for text in ["…"]]  # text similar to what the model will read
    quantize(model, {scheme!r}, batches)
    model.save_pretrained({out!r})
    tokenizer.save_pretrained({out!r})"""


def quantize(
    source: str | Path,
    out: str | Path,
    scheme: str | None = None,
    *,
    effort: str | Effort | None = None,
    text: CalibrationData | None = None,
    device: str = "auto",
    devices: str | None = None,
    head: str | None = None,
    overrides: Mapping[str, str] | None = None,
    memory: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize `source` into a checkpoint at `out`; by default into at most 4.35 bits per weight.

    `effort`: "fast", "balanced" or "best", or what `effort_for` made of it: chooses what scheme and text leave open.
    Default: "balanced" without a scheme; with one the scheme as it is. `text`: to calibrate on; default: Python's
    documentation, and with an effort sequences that the model samples. `memory`: bytes that calibration may use of the
    device. `devices`: several instead of one, like "0,1".
    """
    begun = perf_counter()
    out = destination(out)
    if isinstance(effort, str) or scheme is None:
        effort = effort_for(source, scheme, effort, text=text, device=device, devices=devices, overrides=overrides)
    scheme = scheme if effort is None else effort.scheme
    assert scheme is not None
    configs = [parse(scheme), *(parse(s) for s in (overrides or {}).values())]
    trained = configs[0] if isinstance(configs[0], TrainedConfig) else None
    staged = trained is not None and trained.tune == "full"
    refuse_overlap(out, source, beside=(PARTIAL, SUFFIX, *((_STAGE, _STAGE + PARTIAL) if staged else ())))
    refuse_existing(out, resume=resume, overwrite=overwrite)
    if isinstance(configs[0], Auto):
        refuse_other_file(out)
    if staged:
        _refuse_stage(_stage_of(out), resume, overwrite)
    if any(q.calibrated for q in configs):
        text = _data(text, effort)
        _require_family(source, scheme, out)
    spread = devices_of(devices, device)
    check_spread(len(spread), scheme, configs)
    arguments = {
        "source": source,
        "out": out,
        "scheme": scheme,
        "text": text,
        "head": head,
        "overrides": overrides,
        "memory": memory,
        "resume": resume,
        "overwrite": overwrite,
        "about": None if effort is None else effort.about(),
    }
    report: Report = on_devices(quantize_on, spread, device, arguments, progress)
    report = replace(report, seconds=perf_counter() - begun, effort=None if effort is None else effort.name)
    return report if text is None else replace(report, calibration_rows=text.rows or 0, own_sequences=text.own or 0)


def effort_for(
    source: str | Path | Weights,
    scheme: str | None = None,
    effort: str | Effort | None = None,
    *,
    text: CalibrationData | None = None,
    device: str = "auto",
    devices: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Effort:
    """Return what an effort (default: balanced) means for this model and machine: scheme and calibration data."""
    if isinstance(effort, Effort):
        return effort
    spread, scheme = devices_of(devices, device), scheme or SCHEME
    where = torch.device(spread[0].kind) if spread else choose_device(device)
    return resolve(
        effort or DEFAULT,
        scheme,
        Machine.of(where),
        weights_in_layers(open_weights(source) if isinstance(source, str | Path) else source),
        rows=None if text is None else text.rows,
        own=None if text is None else text.own,
        text=text is not None and bool(text.text),
        calibrated=any(parse(s).calibrated for s in (scheme, *(overrides or {}).values())),
    )


def estimate_for(
    source: str | Path,
    effort: Effort,
    *,
    text: CalibrationData | None = None,
    device: str = "auto",
    head: str | None = None,
    memory: int | None = None,
) -> Estimate:
    """Measure for some seconds and return how long `quantize` with the same arguments will take, on one device."""
    data = _data(text, effort) if effort.rows else None
    weights, where = open_weights(source, encoded=True), choose_device(device)
    found = estimate(weights, effort.scheme, data, where, head=head, memory=memory)
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()  # a run plans its memory by what is free
    return found


def _data(text: CalibrationData | None, effort: Effort | None) -> CalibrationData:
    """Return calibration data with nothing left open."""
    text = text or CalibrationData(text="")
    rows = effort.rows if effort is not None else 64 if text.rows is None else text.rows
    own = effort.own if effort is not None else text.own or 0
    return replace(text, text=text.text or python_documentation(), rows=rows, own=own)


def check_spread(count: int, scheme: str, configs: Sequence[Quantizer]) -> None:
    """Say why a scheme does not use so many devices."""
    if count > 1 and not any(q.calibrated for q in configs):
        raise UnsupportedError(
            f"scheme '{scheme}' needs no calibration and runs on the CPU, so `devices` does not apply"
        )
    for q in configs[:1]:
        if isinstance(q, TrainedConfig) and q.tune != "none" and count > (batch := q.block_training().batch):
            raise UnsupportedError(
                f"scheme '{scheme}' trains on {batch} sequences per step, so use at most {batch} devices"
            )


def quantize_on(
    source: str | Path,
    out: Path,
    scheme: str,
    *,
    text: CalibrationData | None,
    device: str,
    head: str | None,
    overrides: Mapping[str, str] | None,
    memory: int | None,
    resume: bool,
    overwrite: bool,
    about: Mapping[str, str] | None,
    progress: Progress | None,
) -> Report:
    """Quantize on one device, or as one of several ranks."""
    config = parse(scheme)
    calibration = None
    if text is not None and any(parse(s).calibrated for s in (scheme, *(overrides or {}).values())):
        calibration = _calibration(source, text, choose_device(device), memory, progress)
    if isinstance(config, Auto) and calibration is not None:
        overrides = _plan(config, source, out, calibration, overrides or {}, resume, overwrite, progress)
    options: dict[str, object] = {
        "view": in_usual_form,
        "head": head,
        "overrides": overrides,
        "resume": resume,
        "overwrite": overwrite,
        "about": about,
        "progress": progress,
    }
    with device_limit(choose_device(device), memory):
        if isinstance(config, TrainedConfig) and config.tune == "full":
            assert calibration is not None
            assert text is not None
            report = _in_two_stages(source, out, config, calibration, text, options)
        else:
            report = pipeline.quantize(source, out, scheme, calibration=calibration, **options)  # type: ignore[arg-type]
    if isinstance(config, Auto) and world().first:
        forget_plan(out)
    return report if calibration is None else replace(report, experts=calibration.experts)


def dry_run(
    source: str | Path,
    scheme: str | None = None,
    *,
    effort: str | Effort | None = None,
    text: CalibrationData | None = None,
    device: str = "auto",
    devices: str | None = None,
    head: str | None = None,
    overrides: Mapping[str, str] | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> QuantizeCost:
    """Quantize the first layer of a model and say what all of it would cost. The arguments are those of `quantize`.

    On a GPU two, of which the first warms up; with tune=full two, and both are trained for some steps.
    """
    if isinstance(effort, str) or scheme is None:
        effort = effort_for(source, scheme, effort, text=text, device=device, devices=devices, overrides=overrides)
    scheme = scheme if effort is None else effort.scheme
    assert scheme is not None
    spread = devices_of(devices, device)
    configs = [parse(s) for s in (scheme, *(overrides or {}).values())]
    check_spread(len(spread), scheme, configs)
    arguments = {
        "source": source,
        "scheme": scheme,
        "text": _data(text, effort) if any(q.calibrated for q in configs) else None,
        "head": head,
        "overrides": overrides,
        "memory": memory,
    }
    cost: QuantizeCost = on_devices(dry_run_on, spread, device, arguments, progress)
    return cost


def dry_run_on(
    source: str | Path,
    scheme: str,
    *,
    text: CalibrationData | None,
    device: str,
    head: str | None,
    overrides: Mapping[str, str] | None,
    memory: int | None,
    progress: Progress | None,
) -> QuantizeCost:
    """Measure on one device, or as one of several ranks."""
    weights = open_weights(source, encoded=True)
    pipeline.refuse_quantized(weights)
    where, count = choose_device(device), layer_count(weights)
    first = FirstLayers(weights, min(count, 2 if where.type == "cuda" or trains_fully(parse(scheme)) else 1))
    tokens, left_out, sequences = None, [], None
    if any(parse(s).calibrated for s in (scheme, *(overrides or {}).values())):
        assert text is not None
        length = min(text.length, read_spec(weights).context)
        tokens = _rows(weights, text.text, length, (text.rows or 0) + (text.own or 0), text.seed)
        if trains_fully(parse(scheme)):
            sequences = len(_rows(weights, text.text, min(2 * length, read_spec(weights).context)))
        if text.own:
            left_out.append(f"this does not include sampling {text.own} sequences from the model")
        if any(layer.mlp.experts is not None for layer in read_spec(weights).layers):
            left_out.append("this does not include counting how many tokens each expert takes")
    left_out += sentences_about(in_usual_form(weights))
    matching = pipeline.matching(overrides or {}, in_usual_form(first))
    cost = measure(
        first,
        scheme,
        tokens,
        where,
        layers=count,
        overrides=matching,
        head=head,
        memory=memory,
        text=sequences,
        progress=progress,
    )
    return replace(cost, left_out=(*left_out, *cost.left_out))


def _require_family(source: str | Path, scheme: str, out: Path) -> None:
    """Calibration runs the model: for one that only transformers runs, say how it is calibrated there."""
    weights = open_weights(source)
    try:
        family_of(weights)
    except UnsupportedError as e:
        reason = f"{weights.path}: {e}"
        if not weights.path.is_dir() or not isinstance(weights.config.get("model_type"), str):
            raise UnsupportedError(reason) from e
        lines = _BY_TRANSFORMERS.format(reason=reason, source=str(source), scheme=scheme, out=str(out))
        raise UnsupportedError(lines) from e
    config = parse(scheme)
    guided = isinstance(config, GuidedConfig) and config.guidance > 0
    if (isinstance(config, Auto) or trains_fully(config) or guided) and read_spec(weights).encoder:
        raise UnsupportedError(
            f"{weights.path}: '{scheme}' needs the predictions of a decoder, and this is an encoder; use rtn, bcq, "
            "gptq or mixed, with guidance=0"
        )


def _calibration(
    source: str | Path, text: CalibrationData, device: torch.device, memory: int | None, progress: Progress | None
) -> Calibration:
    weights = open_weights(source)
    length = min(text.length, read_spec(weights).context)
    rows = _rows(weights, text.text, length, text.rows, text.seed)
    experts = None
    if any(layer.mlp.experts is not None for layer in read_spec(weights).layers):
        rows, experts = with_rows_for_experts(weights, rows, text, device, memory, progress)
    if text.own and not read_spec(weights).encoder:  # an encoder generates nothing
        own = own_rows(weights, rows, text.own, length, device, text.seed, progress, memory)
        rows = torch.cat([rows, own])
    return Calibration(rows, open_model, device, memory, experts)


def _rows(weights: Weights, text: str, length: int, limit: int | None = None, seed: int = 0) -> Tensor:
    """Split a text into sequences; of several ranks the first one does."""
    return world().once_tensor(lambda: rows_of(Tokenizer.of(weights), text, length, limit, seed))


def _plan(
    auto: Auto,
    source: str | Path,
    out: Path,
    calibration: Calibration,
    given: Mapping[str, str],
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> dict[str, str]:
    """Choose bits and group for every matrix that was not given another scheme; of several ranks the first one does."""
    found: dict[str, str] = world().once(
        lambda: planned(auto, source, out, calibration, resume=resume, overwrite=overwrite, progress=progress)
    )
    return dict(given) | {module: scheme for module, scheme in found.items() if module not in given}


def _in_two_stages(
    source: str | Path,
    out: Path,
    trained: TrainedConfig,
    calibration: Calibration,
    text: CalibrationData,
    options: dict[str, object],
) -> Report:
    """Write the calibrated model beside `out`, then train it end to end into `out`."""
    base = _stage_of(out)
    scheme = str(replace(trained, tune="short"))  # type: ignore[type-var]
    first = pipeline.quantize(source, base, scheme, calibration=calibration, stage=True, **options)  # type: ignore[arg-type]
    weights = open_weights(source)
    device = calibration.device
    length = min(2 * text.length, read_spec(weights).context)
    rows, count = _rows(weights, text.text, length), layer_weights(calibration.open(weights, device))
    own = own_rows(
        weights,
        rows,
        trained.own_sequences(count),
        length,
        device,
        text.seed,
        options["progress"],  # type: ignore[arg-type]
        calibration.memory,
        what="training text",
    )
    report = tune(
        Checkpoint(base),
        weights,
        out,
        trained.end_to_end(count, length),
        tokens=torch.cat([rows, own]),
        open_model=open_model,
        device=device,
        what=trained.train,
        scheme=str(trained),
        resume=bool(options["resume"]),
        overwrite=bool(options["overwrite"]),
        memory=calibration.memory,
        about=options["about"],  # type: ignore[arg-type]
        progress=options["progress"],  # type: ignore[arg-type]
    )
    if not world().first:
        return first
    left = remove_directory(base)
    size, count = pipeline.measure(Checkpoint(out, verify=False))
    warnings = (*first.warnings, *report.warnings, *((f"the first stage was not deleted: {left}",) if left else ()))
    bits = 8 * size / max(1, count)
    return Report(out, str(trained), bits, size, report.seconds, 0, warnings, tuple(report.losses), first.block_losses)


def _stage_of(out: Path) -> Path:
    return out.with_name(out.name + _STAGE)


def _refuse_stage(base: Path, resume: bool, overwrite: bool) -> None:
    """Refuse what stands where the first stage is to be written, unless it is one."""
    if os.path.lexists(base) and (base.is_symlink() or not (base / STAGE).is_file()):
        raise FormatError(
            f"{base} exists and is not the first stage of an interrupted run, which would be written there; "
            "move it or choose another OUT"
        )
    if not (base.exists() and resume):
        refuse_existing(base, resume=resume, overwrite=overwrite)
