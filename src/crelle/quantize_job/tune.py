"""Train a checkpoint end to end: tokenizer, models and devices around crelle.quantizers.training.finetune."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.destination import destination, refuse_existing, refuse_overlap
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import open_model
from crelle.models.loader import choose_device, read_spec
from crelle.quantize_job.data import rows_of
from crelle.quantize_job.own_sequences import own_rows
from crelle.quantize_job.rank_devices import devices_of
from crelle.quantize_job.rank_processes import on_devices
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.ranks import world
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.finetune import TuneReport, What, tune


def tune_checkpoint(
    source: str | Path,
    teacher: str | Path | None,
    out: str | Path,
    training: Training,
    *,
    text: str,
    own: int = 0,
    length: int = 512,
    what: What = "scales",
    device: str = "auto",
    devices: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    low_memory: bool | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Train a checkpoint end to end on a text, distilling from a teacher where there is one."""
    begun = perf_counter()
    out = destination(out)
    refuse_overlap(out, source, teacher)
    refuse_existing(out, resume=resume, overwrite=overwrite)
    checkpoint = open_weights(source)
    if not isinstance(checkpoint, Checkpoint):
        raise FormatError(f"{source} is not a Crelle checkpoint; quantize the model first")
    if own and teacher is None:
        raise SchemeError("`own` needs a `teacher` to generate the sequences")
    spread = devices_of(devices, device)
    if len(spread) > training.batch:
        raise SchemeError(f"{training.batch} sequences per step (`batch`) are too few for {len(spread)} devices")
    arguments = {
        "source": source,
        "teacher": teacher,
        "out": out,
        "training": training,
        "text": text,
        "own": own,
        "length": length,
        "what": what,
        "resume": resume,
        "overwrite": overwrite,
        "low_memory": low_memory,
    }
    report: TuneReport = on_devices(tune_on, spread, device, arguments, progress)
    return replace(report, seconds=perf_counter() - begun)


def tune_on(
    source: str | Path,
    teacher: str | Path | None,
    out: Path,
    training: Training,
    *,
    text: str,
    own: int,
    length: int,
    what: What,
    device: str,
    resume: bool,
    overwrite: bool,
    low_memory: bool | None,
    progress: Progress | None,
) -> TuneReport:
    """Train on one device, or as one of several ranks."""
    checkpoint = open_weights(source)
    assert isinstance(checkpoint, Checkpoint)
    full = None if teacher is None else open_weights(teacher)
    where = choose_device(device)
    length = min(length, read_spec(checkpoint).context)
    rows = world().once_tensor(lambda: rows_of(Tokenizer.of(checkpoint), text, length))
    if own and full is not None:
        rows = torch.cat([rows, own_rows(full, rows, own, length, where, training.seed, progress)])
    return tune(
        checkpoint,
        full,
        out,
        training,
        tokens=rows,
        open_model=open_model,
        device=where,
        what=what,
        resume=resume,
        overwrite=overwrite,
        low_memory=low_memory,
        progress=progress,
    )
