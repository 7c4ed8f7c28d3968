"""Finetune a quantized checkpoint end to end and write the result as a new one.

The checkpoint's scales (and, on affine grids, its weights) train through the whole model: distilled from the
full-precision model where that is given, otherwise by the language-model loss on the text (AlphaTuning: the codes stay,
a task is a few hundred KB). The training state is kept beside the unfinished checkpoint; a killed run resumes from it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crelle.errors import NumericsError, SchemeError
from crelle.formats.base import QuantTensor, format_of
from crelle.formats.storage.checkpoint import FORMAT_VERSION, Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.storage.destination import destination, refuse_overlap
from crelle.formats.storage.open import Weights
from crelle.formats.storage.ownership import STATE
from crelle.formats.storage.tokenizer_files import check_copied_files
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel, Progress
from crelle.quantizers.device_limit import total_memory
from crelle.quantizers.first_writer import Encoded, FirstWriter
from crelle.quantizers.pipeline import Shard, plan
from crelle.quantizers.ranks import world
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.embedding_task import TaskTokens, TaskTraining
from crelle.quantizers.training.end_to_end import EndToEnd, Network, drawn
from crelle.quantizers.training.ste import trainable
from crelle.quantizers.training.ste_base import TrainableWeight
from crelle.quantizers.training.teacher import Teacher
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
    task: TaskTokens | None = None,
    open_model: Callable[[Weights, torch.device], CalibrationModel],
    device: torch.device,
    what: What = "scales",
    scheme: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    low_memory: bool | None = None,
    memory: int | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Train `what` of a checkpoint on rows of token ids [S, T], or an encoder's on a task, and write it to `out`.

    low_memory: Training.low_memory; None: where the device, or the `memory` that may be used of it, has too little for
    the fast way. about: what else the checkpoint's index says of itself.
    """
    begun = perf_counter()
    out = destination(out)
    refuse_overlap(out, checkpoint.path, None if teacher is None else teacher.path)
    check_copied_files(checkpoint.path)
    scheme = scheme or f"{checkpoint.scheme}"
    if low_memory is None:
        low_memory = too_large_for(device, checkpoint, training.batch, tokens.shape[1], memory=memory)
    training = replace(training, low_memory=low_memory)
    recipe = {
        "crelle": __version__,
        "format_version": FORMAT_VERSION,
        "from": {n: f["sha256"] for n, f in checkpoint.quantization["shards"].items()},
        "what": what,
        "training": asdict(training),
        "tokens": hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest(),
        **({} if task is None else {"task": task.fingerprint()}),
        "devices": world().size,  # sums over other parts differ in their last digits
    }
    with FirstWriter(out, recipe, [], resume=resume, overwrite=overwrite) as writer:
        found = network_of(
            checkpoint,
            checkpoint,
            teacher,
            training,
            tokens=tokens,
            task=task,
            open_model=open_model,
            device=device,
            what=what,
            memory=memory,
            folder=writer.partial,
            progress=progress,
        )
        coders = found.coders
        try:
            losses = found.run.run(writer.partial / STATE, progress)
        except NumericsError:
            if not (writer.partial / STATE).exists():  # a state is worth keeping: the device may have been at fault
                writer.discard()
            raise

        def publish(to: CheckpointWriter) -> None:
            checkpoint.copy_tokenizer(to.partial)
            to.finish(checkpoint.config, scheme, checkpoint.quantization["overrides"], about)

        shards = plan(checkpoint)
        for i, shard in enumerate(shards, start=1):
            writer.add(shard_name(i, len(shards)), partial(_encoded, checkpoint, coders, shard))
        warnings = writer.finish(publish)
    count = sum(p.numel() for c in coders.values() for p in c.parameters())
    return TuneReport(out, scheme, count, losses, perf_counter() - begun, warnings)


class TrainedNetwork(NamedTuple):
    """A run that trains, and what it trains by module."""

    run: EndToEnd
    coders: dict[str, TrainableWeight]


def network_of(
    checkpoint: Checkpoint,
    student: Weights,
    teacher: Weights | None,
    training: Training,
    *,
    tokens: Tensor,
    task: TaskTokens | None = None,
    open_model: Callable[[Weights, torch.device], CalibrationModel],
    device: torch.device,
    what: What,
    memory: int | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> TrainedNetwork:
    """Run the teacher, then build the student; `student`: the checkpoint, or some of its layers, as the teacher has.

    memory, folder: Teacher.of.
    """
    full = None if teacher is None else open_model(teacher, device)
    soft = None
    if full is not None:
        soft = Teacher.of(
            full,
            tokens,
            drawn(len(tokens), training),
            device,
            batch=training.batch,
            half=training.half,
            memory=memory,
            folder=folder,
            progress=progress,
        )
    coders: dict[str, TrainableWeight] = {}
    install = _installer(checkpoint, full if what == "all" else None, what, device, coders)
    network = Network.of(open_model(student, device), install, recompute=training.low_memory)
    if not coders:
        raise SchemeError(f"{checkpoint.path} has no quantized matrix in its layers, so there is nothing to train")
    if task is not None:
        return TrainedNetwork(TaskTraining(network, list(coders.values()), task, training, device), coders)
    return TrainedNetwork(EndToEnd(network, list(coders.values()), soft, tokens, training, device), coders)


def too_large_for(
    device: torch.device,
    checkpoint: Checkpoint,
    batch: int,
    length: int,
    *,
    times: float = 1,
    memory: int | None = None,
) -> bool:
    """Tell whether the device has too little memory for the fast way, with its rows of a batch.

    times: fast_bytes. memory: bytes of the device that may be used; None: all.
    """
    need, ranks = fast_bytes(checkpoint, -(-batch // world().size) * length, times), world().size
    total = total_memory(device) // (1 if device.type == "cuda" else ranks)  # ranks on a CPU share it
    return need > min(total, memory or total)


def fast_bytes(checkpoint: Checkpoint, tokens: int, times: float = 1) -> int:
    """Return about how much memory end-to-end training takes where it need not save any.

    A weight: the trained f32, its gradient and two moments, and what products keep of it for backward. A token: inputs
    and outputs of all linears, and its logits with the teacher's. `times`: how many layers a model has for each of the
    checkpoint's.
    """
    shapes = [s["shape"] for m, s in checkpoint.specs.items() if format_of(s).quantized and ".layers." in m]
    vocabulary = int(checkpoint.config.get("vocab_size", 0))
    paths = [
        s["shape"] for s in checkpoint.specs.values() if "trellis" in (s["format"], s.get("inner", {}).get("format"))
    ]
    weights = 26 * sum(map(prod, shapes)) + 8 * sum(map(prod, paths))  # and what trellis codes stand for, for backward
    return int(times * (weights + tokens * 8 * sum(map(sum, shapes)))) + tokens * 24 * vocabulary


def _installer(
    checkpoint: Checkpoint,
    full: CalibrationModel | None,
    what: What,
    device: torch.device,
    coders: dict[str, TrainableWeight],
) -> Callable[[int, Block], None]:
    """Return what puts a trainable module into every quantized linear of a student's block, and into `coders`."""

    def install(i: int, block: Block) -> None:
        sources = {} if full is None else full.block(i).linears()
        for name, linear in block.linears().items():
            if not format_of(checkpoint.specs[name]).quantized:
                continue
            stored = checkpoint.matrix(name).to(device)
            source = _source(stored, sources[name].weight) if name in sources else None
            coders[name] = trainable(stored, source, what).to(device)
            linear.coder, linear.weight = coders[name], torch.empty(0)  # the coder computes it

    return install


def _source(stored: QuantTensor, weight: Tensor) -> Tensor | None:
    """Return the weight that a matrix was made from; None if other scales or rotations were folded into it since."""
    change = stored.dequantize(torch.float32) - weight
    return weight if float(change.square().sum()) < _SAME * float(weight.square().sum()) else None


def _encoded(checkpoint: Checkpoint, coders: dict[str, TrainableWeight], shard: Shard) -> Encoded:
    """Return a shard with the trained matrices, and all else as it was."""
    modules = [n.removesuffix(".weight") for n in shard.tensors if n.removesuffix(".weight") in checkpoint.specs]
    matrices = {m: coders[m].export().to("cpu") if m in coders else checkpoint.matrix(m) for m in modules}
    return matrices, {n: checkpoint.read(n) for n in shard.tensors if n.removesuffix(".weight") not in matrices}, []
