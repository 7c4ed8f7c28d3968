"""Finetune a quantized checkpoint end to end and write the result as a new one.

The checkpoint's scales (and, on affine grids, its weights) train through the whole model: distilled from the
full-precision model where that is given, otherwise by the language-model loss on the text (AlphaTuning: the codes stay,
a task is a few hundred KB). The training state is kept beside the unfinished checkpoint; a killed run resumes from it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.checkpoint import FORMAT_VERSION, Checkpoint
from crelle.formats.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.destination import destination, refuse_overlap
from crelle.formats.open import Weights
from crelle.formats.ownership import STATE
from crelle.formats.tokenizer_files import check_copied_files
from crelle.quantizers.layer_api import CalibrationModel, Progress
from crelle.quantizers.pipeline import plan
from crelle.quantizers.ste import trainable
from crelle.quantizers.ste_base import TrainableWeight
from crelle.quantizers.training import EndToEnd, Network, Training
from crelle.version import __version__

What = Literal["scales", "all"]
_SAME = 0.25  # of a weight's energy: rounding to 2 bits changes less, another basis more


@dataclass(frozen=True, slots=True)
class TuneReport:
    """Result of a training run."""

    out: Path
    scheme: str
    trained: int  # number of trained parameters
    losses: list[float]
    seconds: float
    warnings: tuple[str, ...] = ()


def tune(
    checkpoint: Checkpoint,
    teacher: Weights | None,
    out: Path,
    training: Training,
    *,
    tokens: Tensor,
    open_model: Callable[[Weights, torch.device], CalibrationModel],
    device: torch.device,
    what: What = "scales",
    scheme: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TuneReport:
    """Train `what` of a checkpoint on rows of token ids [S, T] and write the result to `out`."""
    begun = perf_counter()
    out = destination(out)
    refuse_overlap(out, checkpoint.path, None if teacher is None else teacher.path)
    check_copied_files(checkpoint.path)
    scheme = scheme or f"{checkpoint.scheme}"
    recipe = {
        "crelle": __version__,
        "format_version": FORMAT_VERSION,
        "from": {n: f["sha256"] for n, f in checkpoint.quantization["shards"].items()},
        "what": what,
        "training": asdict(training),
        "tokens": hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest(),
    }
    with CheckpointWriter(out, recipe, resume=resume, overwrite=overwrite) as writer:
        student = Network.of(open_model(checkpoint, device))
        full = None if teacher is None else Network.of(open_model(teacher, device))
        coders = _install(checkpoint, student, full, what, device)
        run = EndToEnd(student, list(coders.values()), full, tokens, training, device)
        losses = run.run(writer.partial / STATE, progress)
        tuned = {name: coder.export().to("cpu") for name, coder in coders.items()}
        _write(checkpoint, tuned, writer)
        writer.finish(checkpoint.config, scheme, checkpoint.quantization["overrides"])
    count = sum(p.numel() for c in coders.values() for p in c.parameters())
    return TuneReport(out, scheme, count, losses, perf_counter() - begun, writer.all_warnings())


def _install(
    checkpoint: Checkpoint, student: Network, full: Network | None, what: What, device: torch.device
) -> dict[str, TrainableWeight]:
    """Put a trainable module into every quantized linear of the student; returns them by module name."""
    sources = {} if full is None else {n: one for b in full.blocks for n, one in b.linears().items()}
    coders: dict[str, TrainableWeight] = {}
    for block in student.blocks:
        for name, linear in block.linears().items():
            if not format_of(checkpoint.specs[name]).quantized:
                continue
            stored = checkpoint.matrix(name).to(device)
            source = _source(stored, sources[name].weight) if name in sources else None
            coders[name] = trainable(stored, source, what).to(device)
            linear.coder = coders[name]
    if not coders:
        raise SchemeError(f"{checkpoint.path} has no quantized matrix in its layers, so there is nothing to train")
    return coders


def _source(stored: QuantTensor, weight: Tensor) -> Tensor | None:
    """Return the weight that a matrix was made from; None if other scales or rotations were folded into it since."""
    change = stored.dequantize(torch.float32) - weight
    return weight if float(change.square().sum()) < _SAME * float(weight.square().sum()) else None


def _write(checkpoint: Checkpoint, tuned: dict[str, QuantTensor], writer: CheckpointWriter) -> None:
    shards = plan(checkpoint)
    for i, shard in enumerate(shards, start=1):
        modules = [n.removesuffix(".weight") for n in shard.tensors]
        matrices = {m: tuned.get(m) or checkpoint.matrix(m) for m in modules if m in checkpoint.specs}
        others = {n: checkpoint.read(n) for n in shard.tensors if n.removesuffix(".weight") not in matrices}
        writer.add(shard_name(i, len(shards)), matrices, others)
    checkpoint.copy_tokenizer(writer.partial)
