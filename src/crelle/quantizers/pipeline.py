"""From a model on disk to a quantized one, a layer at a time.

The source is read lazily and at most one layer is in memory. Each layer becomes one shard, which is written while the
next ones are quantized (crelle.quantizers.first_writer); a killed run loses those that are not on the disk yet:
`resume=True` goes on from the journal and ends in the same bytes.
Quantized are the matrices inside the numbered layers; embeddings, the output head and norms are stored as they are
(f32 that GGUF unpacked from a quantized type: as f16).

Schemes that need data get it from a `Calibration`: its token sequences run through the layers in step with the shards
(crelle.quantizers.calibration.calibrate), also through those that a resumed run finds finished. Of several ranks
(crelle.quantizers.ranks) all take part in calibration, and the first one does everything else.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, SchemeError
from crelle.formats.base import QuantTensor, format_of, nbytes
from crelle.formats.dense import DenseTensor
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.checkpoint import FORMAT_VERSION, Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.storage.destination import destination, refuse_overlap
from crelle.formats.storage.io import read_json, to_json, write_whole
from crelle.formats.storage.open import Weights, is_matrix, matrices_of, open_weights
from crelle.formats.storage.ownership import GUIDANCE, STAGE, TRAINING
from crelle.formats.storage.tokenizer_files import check_copied_files
from crelle.quantizers.base import (
    ActivationQuantizer,
    CacheConfig,
    Cast,
    GuidedConfig,
    LayerQuantizer,
    Passthrough,
    Quantizer,
)
from crelle.quantizers.calibration.calibrate import Calibrator, memory_for
from crelle.quantizers.calibration.expert_coverage import ExpertTokens
from crelle.quantizers.calibration.experts_without_tokens import together, warnings_about
from crelle.quantizers.calibration.guidance import Guidance, guidance_memory, guide
from crelle.quantizers.calibration.layer_api import CalibrationModel, Progress
from crelle.quantizers.calibration.memory_plan import CalibrationMemory
from crelle.quantizers.calibration.stats import InputRounding, Stats
from crelle.quantizers.first_writer import Encoded, FirstWriter
from crelle.quantizers.ranks import world
from crelle.quantizers.scheme import parse
from crelle.quantizers.solvers.underflow import underflow
from crelle.quantizers.stage_times import SOLVE, TRAIN, WRITE, timed
from crelle.quantizers.unquantized import LAYER, is_layer, sentences_about, unquantized
from crelle.version import __version__

_DENSE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensors that are read, quantized and written together: a decoder layer, or a matrix outside the layers."""

    name: str
    tensors: tuple[str, ...]
    weights: int  # number of elements, for the progress bar


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token sequences for the schemes that need data, and how to open the model for calibration."""

    tokens: Tensor  # int64 [S, T]
    open: Callable[[Weights, torch.device], CalibrationModel]
    device: torch.device
    memory: int | None = None  # bytes of the device that may be used
    experts: ExpertTokens | None = None  # how often these sequences reach a mixture's

    def fingerprint(self) -> str:
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did."""

    out: Path
    scheme: str
    bits_per_weight: (
        float  # over the quantized matrices of the layers, every scale counted, and what cannot be quantized
    )
    bytes: int  # of those
    seconds: float
    resumed_units: int
    warnings: tuple[str, ...] = ()  # sentences for the user, e.g. about weights too small for their format
    losses: tuple[float, ...] = ()  # of end-to-end training
    block_losses: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of block-wise training, by layer
    effort: str | None = None  # the word that the settings come from, where there was one
    calibration_rows: int = 0  # sequences of the text
    own_sequences: int = 0  # sequences that the model itself sampled for calibration
    experts: ExpertTokens | None = None  # of a mixture that was calibrated


def quantize(
    source: str | Path | Weights,
    out: str | Path,
    scheme: str,
    *,
    head: str | None = None,
    overrides: Mapping[str, str] | None = None,
    calibration: Calibration | None = None,
    resume: bool = False,
    overwrite: bool = False,
    stage: bool = False,
    view: Callable[[Weights], Weights] | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the model at `source`, a path or opened weights, into a new checkpoint at `out`.

    `head` is a scheme for the embedding and the output head, which otherwise stay as they are.
    `overrides` maps patterns of module names ("*.down_proj", "model.layers.0.*", "lm_head") to other schemes;
    the first pattern that matches counts. `calibration` is for schemes that look at data (gptq, awq, hbcq, …).
    `stage` marks the checkpoint as a stage of a longer run, which may delete it; with `resume` a finished one is taken
    as it is if it was made from the same. `view` gives the tensors their usual form, where a family stores others.
    `about`: what else the checkpoint's index says of itself.
    """
    begun = perf_counter()
    out = destination(out)
    if isinstance(source, str | Path):
        refuse_overlap(out, source)
        weights = open_weights(source, encoded=True)
    else:
        weights = source
    default = parse(scheme)
    weights = weights if view is None else view(weights)
    if weights.path.is_dir():
        check_copied_files(weights.path)
    refuse_quantized(weights)
    special = {p: parse(s) for p, s in (overrides or {}).items()}
    _all_patterns_match(special, weights)
    if head is not None:
        special |= {m: parse(head) for m in matrices_of(weights) if not LAYER.match(f"{m}.") and m not in special}
    shards = plan(weights)
    calibrator = _calibrator(weights, [default, *special.values()], calibration)
    written = {p: str(q) for p, q in special.items()}
    recipe = {
        "crelle": __version__,
        "format_version": FORMAT_VERSION,
        "source": fingerprint_of(weights),
        "scheme": str(default),
        "overrides": [list(item) for item in written.items()],  # a list: the first pattern that matches counts
        "devices": world().size,  # sums over other parts differ in their last digits
    }
    if calibration is not None and calibrator is not None:
        recipe["calibration"] = calibration.fingerprint()
        if calibration.memory is not None:  # the size of batches follows from it
            recipe["memory"] = calibration.memory
    if stage and resume and world().once(lambda: _finished_stage(out, recipe, overwrite)):
        return _stage_report(out)
    all_weights, done, resumed = sum(s.weights for s in shards), 0, 0
    files = [shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    with FirstWriter(out, recipe, files, resume=resume, overwrite=overwrite) as writer:
        blocks = _block_losses(writer.partial)
        if calibration is not None and calibrator is not None:
            _guide(calibrator, calibration, writer.partial / GUIDANCE, default, special, progress)
        for file, shard in zip(files, shards, strict=True):
            calibrated = calibrator is not None and calibrator.at(shard.name)
            if writer.has(file):
                resumed += 1
                if calibrator is not None and calibrated:
                    calibrator.skip(*writer.contents(file))
            elif calibrator is not None and calibrated:
                encode, losses = _quantize_layer(weights, shard, default, special, calibrator)
                if losses:
                    blocks[shard.name] = losses
                if losses and world().first:
                    write_whole(writer.partial / TRAINING, to_json({"losses": [], "blocks": blocks}))
                with timed(WRITE):
                    writer.add(file, encode)
            else:
                with timed(WRITE):  # reading it too: these are mostly matrices that are copied
                    writer.add(file, partial(_quantize_shard, weights, shard, default, special))
            done += shard.weights
            if progress:
                progress(done, all_weights, shard.name)

        def publish(to: CheckpointWriter) -> None:
            weights.copy_tokenizer(to.partial)
            if stage:
                write_whole(to.partial / STAGE, to_json({"recipe": recipe, "warnings": together(to.all_warnings())}))
            to.finish(weights.config, str(default), written, about)

        with timed(WRITE):
            warnings = together(writer.finish(publish))
    if not world().first:
        return Report(out, str(default), 0.0, 0, perf_counter() - begun, resumed)
    report = _report(Checkpoint(out, verify=False), perf_counter() - begun, resumed, warnings)
    return replace(report, block_losses=blocks)


def refuse_quantized(weights: Weights) -> None:
    """Refuse a checkpoint of ours to quantize, but for what `keep` imported and what was never quantized (fp16)."""
    if not isinstance(weights, Checkpoint) or weights.scheme == str(Passthrough()):
        return
    if any(spec["format"] != DenseTensor.format for spec in weights.specs.values()):
        raise FormatError(f"{weights.path} is already quantized ({weights.scheme}); start from the original model")


def _report(made: Checkpoint, seconds: float, resumed: int, warnings: tuple[str, ...]) -> Report:
    size, count = measure(made)
    warnings = (*sentences_about(made), *warnings)
    return Report(made.path, made.scheme, 8 * size / max(1, count), size, seconds, resumed, warnings)


def _finished_stage(out: Path, recipe: Mapping[str, object], overwrite: bool) -> bool:
    """Tell whether there is a finished stage that was made from the same as now."""
    if not (out / STAGE).is_file():
        return False
    old, new = read_json(out / STAGE).get("recipe"), json.loads(to_json(recipe))
    if old == new:
        return True
    if overwrite:
        return False
    if isinstance(old, dict) and old.get("devices") != new["devices"]:
        began, now = old.get("devices"), new["devices"]
        raise FormatError(
            f"cannot resume: {out} was started on {began} devices, but this run has {now}; use the same number"
        )
    raise FormatError(f"cannot resume: {out} has another model, text or scheme; `overwrite=True` starts over")


def _stage_report(out: Path) -> Report:
    said = read_json(out / STAGE).get("warnings", [])
    warnings = tuple(w for w in said if isinstance(w, str)) if isinstance(said, list) else ()
    report = _report(Checkpoint(out), 0.0, 0, warnings)
    return replace(report, block_losses=_block_losses(out))


def _block_losses(directory: Path) -> dict[str, list[float | None]]:
    """Return the losses of the layers that have been trained already."""
    path = directory / TRAINING
    found = read_json(path).get("blocks", {}) if path.is_file() else {}
    if not isinstance(found, dict) or not all(_are_losses(losses) for losses in found.values()):
        raise FormatError(f"{path} does not contain training losses; delete it")
    return found


def _are_losses(value: object) -> bool:
    return isinstance(value, list) and all(x is None or type(x) in (int, float) for x in value)


def plan(weights: Weights) -> list[Shard]:
    """Group a model's tensors into shards: what comes before the layers, the layers, then the rest."""
    members: dict[str, list[str]] = {}
    for name in weights.names():
        layer = LAYER.match(name)
        matrix = len(weights.shape(name)) == 2
        key = layer[1] if layer else name.rpartition(".")[0] if matrix else "rest"
        members.setdefault(key, []).append(name)
    if not any(LAYER.match(f"{key}.") for key in members):
        raise FormatError(f"{weights.path} has no numbered layers, so there is nothing to quantize")
    keys = sorted(members, key=_natural)
    return [Shard(k, tuple(sorted(members[k])), sum(prod(weights.shape(n)) for n in members[k])) for k in keys]


def _natural(text: str) -> list[tuple[int, int | str]]:
    """Sort key that puts layer 10 behind layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]


def _quantize_shard(weights: Weights, shard: Shard, default: Quantizer, special: Mapping[str, Quantizer]) -> Encoded:
    """Return a shard's matrices, encoded, by module; its other tensors by name; and warnings."""
    matrices: dict[str, QuantTensor] = {}
    others: dict[str, Tensor] = {}
    warnings: list[str] = []
    for name in shard.tensors:
        module = name.removesuffix(".weight")
        if not is_matrix(weights, name):
            others[name] = weights.read(name)
            continue
        if _keeps(module, default, special):
            matrices[module] = weights.matrix(module)
            continue
        chosen = next((q for p, q in special.items() if fnmatchcase(module, p)), None)
        if chosen is None and not LAYER.match(name):
            matrices[module] = _as_stored(weights, module)
            if not _packed(weights, name):  # the same values as in the source: none is too small
                continue
        else:
            with _about(name):
                matrices[module] = (chosen or default).fit(weights.read(name))
        if warning := underflow(name, matrices[module], partial(weights.read, name)):
            warnings.append(warning)
    return matrices, others, warnings


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Prefix errors with the name of the tensor or layer that they are about."""
    try:
        yield
    except CrelleError as e:
        raise type(e)(f"'{name}': {e}") from e


def _calibrator(weights: Weights, quantizers: list[Quantizer], calibration: Calibration | None) -> Calibrator | None:
    """Return the calibrator, if one of the schemes needs data."""
    needing = [q for q in quantizers if q.calibrated]
    if not needing:
        return None
    if calibration is None:
        raise SchemeError(f"scheme '{needing[0]}' needs a calibration text")
    model = calibration.open(weights, calibration.device)
    kv = KVFormat.parse(quantizers[0].kv) if isinstance(quantizers[0], CacheConfig) else None
    tokens, memory = own_part(calibration, model)
    return Calibrator(model, tokens, device=calibration.device, kv=kv, memory=memory)


def own_part(calibration: Calibration, model: CalibrationModel) -> tuple[Tensor, CalibrationMemory]:
    """Return the sequences that are this rank's, and how it calibrates on them. On a CPU ranks share the memory."""
    rows, ranks = len(calibration.tokens), world().size
    if rows < ranks:
        raise SchemeError(f"{rows} calibration sequences are too few for {ranks} devices; use more (`rows`)")
    tokens = world().part(calibration.tokens)
    return tokens, memory_for(model, tokens, calibration.device, budget=_own_budget(calibration))


def _own_budget(calibration: Calibration) -> int | None:
    """Return the bytes that this rank may use."""
    shared = calibration.memory is not None and calibration.device.type == "cpu"
    return calibration.memory // world().size if shared and calibration.memory is not None else calibration.memory


def _guide(
    calibrator: Calibrator,
    calibration: Calibration,
    kept: Path,
    default: Quantizer,
    special: Mapping[str, Quantizer],
    progress: Progress | None,
) -> None:
    """Weight the tokens by the loss of the whole model where schemes ask for it; a resumed run takes what is kept."""

    def strength(module: str) -> float:
        config = next((q for p, q in special.items() if fnmatchcase(module, p)), default)
        return config.guidance if isinstance(config, GuidedConfig) else 0.0

    if not any(isinstance(q, GuidedConfig) and q.guidance for q in (default, *special.values())):
        return
    calibrator.strength = strength
    if world().once(kept.is_file):
        calibrator.guidance = Guidance.load(kept, len(calibration.tokens))
        return
    model, device, tokens = calibrator.model, calibration.device, world().part(calibration.tokens)
    states = (calibrator.hidden.full, calibrator.hidden.quantized)
    held = sum(t.nbytes for t in states if t.device.type == device.type)
    budget = _own_budget(calibration)
    memory = guidance_memory(model, tokens, device, half=calibrator.half, budget=budget, held=held)
    tell = None if progress is None else lambda done, total: progress(done, total, "guidance")
    calibrator.guidance = guide(model, tokens, memory, half=calibrator.half, device=device, progress=tell)
    calibrator.guidance.save(kept)


def _quantize_layer(
    weights: Weights, shard: Shard, default: Quantizer, special: Mapping[str, Quantizer], calibrator: Calibrator
) -> tuple[Callable[[], Encoded], list[float | None]]:
    """Return the same for a decoder layer, with calibration, to be encoded, and the losses of its training."""

    def chosen(module: str) -> Quantizer:
        return next((q for p, q in special.items() if fnmatchcase(module, p)), default)

    def fit(module: str, weight: Tensor, stats: Stats) -> QuantTensor:
        if _keeps(module, default, special):
            return weights.matrix(module)
        with _about(f"{module}.weight"), timed(SOLVE):
            return chosen(module).fit(weight, stats)

    def rounding(module: str, stats: Stats) -> InputRounding | None:
        config = chosen(module)
        if not isinstance(config, ActivationQuantizer):
            return None
        with _about(f"{module}.weight"):
            return config.rounding(stats)

    layer = calibrator.begin()
    with _about(shard.name):
        changed = default.before_layer(layer) if isinstance(default, LayerQuantizer) else {}
    kept = [m for m in layer.block.linears() if _keeps(m, default, special)]
    if layer.changed and kept:
        raise SchemeError(f"'{kept[0]}' cannot be left unchanged: scheme '{default}' rescales the inputs of its layer")
    quantizes_inputs = any(isinstance(chosen(m), ActivationQuantizer) for m in layer.block.linears())
    fitted = layer.fit(fit, rounding if quantizes_inputs else None)
    if isinstance(default, LayerQuantizer):
        with _about(shard.name), timed(TRAIN):
            trained = default.after_layer(layer, fitted)
        if trained is not fitted:
            layer.put(trained)
            fitted = trained
    layer.end()
    told = warnings_about(layer.without_tokens)
    return partial(_encoded, weights, shard, default, special, fitted, changed, told), list(layer.losses)


def _encoded(
    weights: Weights,
    shard: Shard,
    default: Quantizer,
    special: Mapping[str, Quantizer],
    fitted: Mapping[str, QuantTensor],
    changed: Mapping[str, Tensor],
    told: Sequence[str],
) -> Encoded:
    """Return a layer's matrices and other tensors as they are stored, and warnings besides those told already."""
    others = {n: weights.read(n) for n in shard.tensors if n.removesuffix(".weight") not in fitted}
    stored = {n: v.to(others[n].dtype).cpu() for n, v in changed.items()}
    matrices = {m: w.to("cpu") for m, w in fitted.items()}
    coded = {f"{m}.weight": w for m, w in matrices.items() if not _keeps(m, default, special)}
    small = [underflow(n, w, partial(weights.read, n)) for n, w in coded.items()]
    return matrices, others | stored, [*told, *(w for w in small if w)]


def _keeps(module: str, default: Quantizer, special: Mapping[str, Quantizer]) -> bool:
    """Tell whether a matrix goes from the source to the checkpoint as it is, encoded or not."""
    return isinstance(next((q for p, q in special.items() if fnmatchcase(module, p)), default), Passthrough)


def _as_stored(weights: Weights, module: str) -> QuantTensor:
    """Keep a matrix as it is; f32 that a GGUF reader made from fewer bits is kept as f16, other types as f32."""
    name = f"{module}.weight"
    if _packed(weights, name):
        return Cast("fp16").fit(weights.read(name))
    stored = weights.matrix(module)
    if stored.quantized:
        return stored
    tensor = stored.tensors()["weight"]
    return Cast(_DENSE.get(tensor.dtype, "fp32")).fit(tensor)


def _packed(weights: Weights, name: str) -> bool:
    """Tell whether a GGUF file holds a tensor in a quantized type, from which its reader makes f32."""
    packed = getattr(weights, "packed", None)
    return packed is not None and bool(packed(name))


def matching(overrides: Mapping[str, str], weights: Weights) -> dict[str, str]:
    """Return the overrides that match a matrix of the weights."""
    modules = matrices_of(weights)
    return {p: s for p, s in overrides.items() if any(fnmatchcase(m, p) for m in modules)}


def _all_patterns_match(special: Mapping[str, Quantizer], weights: Weights) -> None:
    modules = matrices_of(weights)
    for pattern in special:
        if not any(fnmatchcase(m, pattern) for m in modules):
            raise SchemeError(f"the override '{pattern}' matches no matrix; an example of a name is '{modules[0]}'")


def fingerprint_of(weights: Weights) -> list[list[str | int]]:
    """Identify the source without reading it whole: names, sizes and times of its files."""
    root = weights.path
    if not root.exists():  # weights that were opened otherwise
        return [[str(root), 0, 0]]
    files = [root] if root.is_file() else sorted(f for f in root.iterdir() if f.suffix in {".safetensors", ".json"})
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def measure(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return (bytes, weights) of the quantized matrices in the layers; of all matrices there if there are none.

    Weights of the layers that no scheme can quantize count too (crelle.quantizers.unquantized).
    """
    inside = [m for m in checkpoint.specs if is_layer(m)]
    chosen = [m for m in inside if format_of(checkpoint.specs[m]).quantized] or inside
    left = [checkpoint.read(n) for n in unquantized(checkpoint)]
    size = sum(nbytes(checkpoint.matrix(m)) for m in chosen) + sum(t.nbytes for t in left)
    return size, sum(prod(checkpoint.specs[m]["shape"]) for m in chosen) + sum(t.numel() for t in left)
