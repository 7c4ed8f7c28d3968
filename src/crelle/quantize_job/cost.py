"""What quantizing a model costs, measured on its first layers: seconds by stage, peak memory, and the whole model's.

The layers go through the pipeline that quantizes (crelle.quantizers.pipeline), with all of the calibration data; their
checkpoint goes to a temporary directory. The whole model is then what is done once (embedding and head are read and
written, bits are searched for) and the last measured layer as often as the model has layers: earlier ones may have paid
for kernels that are compiled and libraries that are loaded at their first call.
"""

import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import Weights
from crelle.models.calibration_model import open_model
from crelle.models.loader import in_usual_form
from crelle.quantize_job.training_cost import TrainingCost, training_cost
from crelle.quantizers import pipeline
from crelle.quantizers.calibration.layer_api import CalibrationModel, Progress
from crelle.quantizers.calibration.memory_plan import CalibrationMemory
from crelle.quantizers.device_limit import device_limit
from crelle.quantizers.pipeline import Calibration
from crelle.quantizers.ranks import world
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.trained import TrainedConfig
from crelle.quantizers.stage_times import GUIDANCE, SEARCH, SEARCH_FITS, StageTimes, recording
from crelle.quantizers.unquantized import is_layer


@dataclass(frozen=True, slots=True)
class QuantizeCost:
    """Seconds and bytes of the first layers, and what follows from them for the whole model."""

    model: str
    scheme: str
    device: str
    devices: int  # that share the work, of which the first was measured
    rows: int
    length: int
    layers: int  # of the whole model
    layer_seconds: Sequence[dict[str, float]]  # of each measured layer, by stage
    once_seconds: dict[str, float]  # of what is done once, by stage
    device_peak_bytes: int | None  # allocated by torch; None: not on a GPU
    device_reserved_bytes: int | None  # with what torch holds back for reuse
    host_peak_bytes: int  # of the process, from its start on
    memory_limit: int | None  # that was asked for
    memory_plan: CalibrationMemory | None  # None: nothing was calibrated
    bits_per_weight: float
    left_out: tuple[str, ...]  # sentences: what the figures do not hold
    training: TrainingCost | None = None  # end to end, with tune=full

    @property
    def seconds_per_layer(self) -> float:
        return sum(self.layer_seconds[-1].values())

    @property
    def extrapolated_seconds(self) -> float:
        """Return the seconds for the whole model."""
        trained = 0.0 if self.training is None else self.training.seconds
        return sum(self.once_seconds.values()) + self.layers * self.seconds_per_layer + trained


def measure(
    weights: Weights,
    scheme: str,
    tokens: Tensor | None,
    device: torch.device,
    *,
    layers: int,
    overrides: Mapping[str, str] | None = None,
    head: str | None = None,
    memory: int | None = None,
    text: int | None = None,
    progress: Progress | None = None,
) -> QuantizeCost:
    """Quantize weights that have the first layers of a model with `layers`, and measure it.

    `tokens` are the calibration sequences [S, T], for schemes that look at data; `memory`: bytes that may be used;
    `text`: sequences of 2 T tokens for training, None: as many tokens as for calibration.
    """
    calibration = None if tokens is None else Calibration(tokens, open_model, device, memory)
    recipe, left_out = parse(scheme), []
    if trains_fully(recipe):
        scheme = scheme.replace("tune=full", "tune=short")
    with (
        recording(device) as times,
        device_limit(device, memory),
        tempfile.TemporaryDirectory(prefix="crelle-cost-") as own,
    ):
        directory = world().value(own)  # of the rank that writes
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        overrides = dict(overrides or {})
        if isinstance(recipe, Auto) and recipe.search and calibration is not None:
            overrides |= _search(recipe, weights, calibration, times)
        planned = None
        if calibration is not None and recipe.calibrated:
            _, planned = pipeline.own_part(calibration, open_model(weights, device))
        seen = _Shards(times, progress)
        report = pipeline.quantize(
            weights,
            Path(directory) / "out",
            scheme,
            head=head,
            overrides=overrides,
            calibration=calibration,
            view=in_usual_form,
            progress=seen,
        )
        if not seen.layers:
            raise SchemeError(f"{weights.path} has no layers to measure")
        allocated, reserved = _device_peaks(device)  # of calibration: training has its own
        training, measured = None, len(seen.layers)
        if isinstance(recipe, TrainedConfig) and trains_fully(recipe) and tokens is not None:
            if measured > 1:
                made = Checkpoint(Path(directory) / "out")
                count = layer_weights(open_model(weights, device)) * layers // measured
                training = training_cost(
                    recipe,
                    weights,
                    made,
                    device,
                    layers=layers,
                    measured=measured,
                    count=count,
                    length=tokens.shape[1],
                    text=-(-len(tokens) // 2) if text is None else text,
                    memory=memory,
                )
            else:
                left_out.append(
                    "this does not include end-to-end training (tune=full), which cannot be measured on a model "
                    "with one layer"
                )
    once = dict(seen.once)
    # The cost of these is of each layer; their output heads are stages of their own.
    for what, stages in (("the search for bits", (SEARCH, SEARCH_FITS)), ("end-loss guidance", (GUIDANCE,))):
        if stages[0] not in once:
            continue
        for stage in stages:
            once[stage] = once.get(stage, 0.0) * layers / measured
        if measured < layers:
            left_out.append(f"the time of {what} is scaled by {layers / measured:g} from {measured} layers")
    return QuantizeCost(
        model=weights.path.name,
        scheme=str(recipe),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        devices=world().size,
        rows=0 if tokens is None else tokens.shape[0],
        length=0 if tokens is None else tokens.shape[1],
        layers=layers,
        layer_seconds=seen.layers,
        once_seconds=once,
        device_peak_bytes=allocated,
        device_reserved_bytes=reserved,
        host_peak_bytes=_peak_bytes(),
        memory_limit=memory,
        memory_plan=planned,
        bits_per_weight=report.bits_per_weight,
        left_out=tuple(left_out),
        training=training,
    )


def trains_fully(recipe: object) -> bool:
    """Whether a scheme trains the whole model end to end: then two layers are measured at least."""
    return isinstance(recipe, TrainedConfig) and recipe.tune == "full"


def layer_weights(model: CalibrationModel) -> int:
    """Return how many weights the matrices of all layers have."""
    return model.layers * sum(map(prod, model.shapes()[0]))


def _device_peaks(device: torch.device) -> tuple[int | None, int | None]:
    """Return the most memory of a GPU that torch has had allocated, and held."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _peak_bytes() -> int:
    """Return the most memory that this process has had; the system tells it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Shards:
    """Progress of the pipeline that notes the seconds of every shard."""

    def __init__(self, times: StageTimes, progress: Progress | None) -> None:
        self.layers: list[dict[str, float]] = []
        self.once: dict[str, float] = {}
        self._times, self._progress = times, progress

    def __call__(self, done: int, total: int, name: str) -> None:
        taken = self._times.take()
        if is_layer(name):
            self.layers.append(taken)
        else:
            self.once = {k: self.once.get(k, 0.0) + taken.get(k, 0.0) for k in {**self.once, **taken}}
        if self._progress:
            self._progress(done, total, name)


def _search(auto: Auto, weights: Weights, calibration: Calibration, times: StageTimes) -> dict[str, str]:
    def plan() -> dict[str, str]:
        model = calibration.open(weights, calibration.device)
        return auto.plan(model, calibration.tokens, calibration.device, None, calibration.memory)

    with times.stage(SEARCH):
        found: dict[str, str] = world().once(plan)
    return found
