"""What tests let several ranks do: functions that a process of theirs can import."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from end_to_end_runs import fresh_run
from torch import Tensor, nn

from crelle.errors import SchemeError
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import dry_run_on, quantize_on
from crelle.quantize_job.tune import tune_on
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.guidance import Guidance, GuidanceMemory, guide
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.ranks import SpreadRows, World, world
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.training.adam8 import LowMemoryStep
from crelle.quantizers.training.blockwise import Training, TrainStep, whole_losses

TEXT = CalibrationData(text="It was a small text to calibrate on, and to train on as well. " * 60, rows=16, length=32)


def quantize_all(device: str, progress: Any, source: Path, schemes: Mapping[str, str]) -> dict[str, tuple[float, ...]]:
    """Quantize a model by each scheme, into the directory that it is the name of; return the losses of training."""
    losses = {}
    for out, scheme in schemes.items():
        report = quantize_on(
            source,
            Path(out),
            scheme,
            text=TEXT,
            device=device,
            head=None,
            overrides=None,
            memory=None,
            resume=False,
            overwrite=False,
            about=None,
            progress=None,
        )
        losses[out] = tuple(report.losses)
    return losses


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def primitives(device: str, progress: Any) -> dict[str, Any]:
    """Return what each of the calls gives on the first rank, and whether all ranks have the same."""
    here, on = world(), torch.device(device)
    rows = torch.arange(11 * 2).view(11, 2)
    mine = here.part(rows).to(on)
    pick = torch.tensor([10, 0, 3, 3, 7])
    weight = numbers(7, 6, 64)
    owner = here.size - 1
    made = {"m": RTN(bits=3, group=32).fit(weight)} if here.rank == owner else {}
    parts = [torch.full((3,), here.rank + 1.0, device=on), torch.full((2, 2), here.rank + 1.0, device=on)]
    here.add_all(parts)
    found = {
        "sum": here.add(numbers(here.rank, 7, 3).to(on)),
        "transposed sum": here.add(numbers(here.rank, 7, 3).to(on).T),
        "sums": torch.cat([p.flatten() for p in parts]),
        "mean": here.mean(numbers(here.rank, 4 + here.rank).to(on)),
        "gather": here.gather(mine),
        "tensors": here.tensors({"x": numbers(here.rank, 3).to(on)})["x"],
        "matrix": here.matrices(made, {"m": owner})["m"].dequantize(),
        "taken": here.gather(SpreadRows(here, mine).take(mine, pick, on)),
    }
    same = all(torch.equal(here.tensors({"x": t.to(on)})["x"], t.to(on)) for t in found.values())
    return {
        **{name: t.tolist() for name, t in found.items()},
        "same on all ranks": here.counts(int(same)),
        "counts": here.counts(here.rank),
        "value": here.value(["a", here.rank]),
        "once": here.once(lambda: [here.rank, world().size]),
        "steps": {make.__name__: steps(make, here, on) for make in (TrainStep, LowMemoryStep)},
    }


class Coder(nn.Module):
    """Weights and scales."""

    def __init__(self, on: torch.device) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers(1, 4, 4).to(on))
        self.scale = nn.Parameter(torch.ones(4, device=on))


def steps(make: Callable[..., Any], here: World, on: torch.device) -> list[list[float]]:
    """Train a few weights on 5 rows a step, some for one row only, as an expert's; return losses, weights, scales."""
    coders = [Coder(on), Coder(on), Coder(on)]

    def loss(x: Tensor) -> Tensor:
        y = (x @ coders[0].w.T) * coders[0].scale
        if bool((x[:, 0] > 0.5).any()):  # on the last row alone
            y = y + torch.where(x[:, :1] > 0.5, (x @ coders[1].w.T) * coders[1].scale, 0)
        return ((y @ coders[2].w.T) * coders[2].scale).square().mean()

    t = Training(steps=4, batch=5, rate=1e-2, scale_rate=1e-2, warmup=1)
    step = make(loss, coders, t, on)
    step.EAGER = t.steps  # what a row decides cannot be captured in a graph
    x = numbers(3, 5, 4).clamp_(max=0.5)
    x[-1, 0] = 1.0
    losses = whole_losses([step(i, here.part(x).to(on)) for i in range(t.steps)])
    return [losses, *(p.flatten().tolist() for c in coders for p in c.parameters())]


def fails(device: str, progress: Any, how: str) -> None:
    """End badly on the last rank, while the others wait for it."""
    here = world()
    if here.rank == here.size - 1:
        if how == "sentence":
            raise SchemeError("rank says no")
        raise ZeroDivisionError("a bug")
    here.add(torch.ones(3))


class StoppedError(Exception):
    """A training that was stopped."""


def resumed_training(device: str, progress: Any, source: Path, checkpoint: Path, state: Path) -> list[bool]:
    """Train, whole and stopped half way; return whether losses and weights are the same, and the state is of all."""
    training = Training(steps=20, batch=3, half=False)
    whole, stopped, resumed = (fresh_run(checkpoint, source, training) for _ in range(3))
    whole.run()

    def stop(done: int, total: int, note: str) -> None:
        if done == 10:
            raise StoppedError

    with suppress(StoppedError):
        stopped.run(None, stop)
    if world().first:
        stopped._save(state)
    world().wait_for_first()
    resumed.run(state)
    pairs = zip(whole.coders, resumed.coders, strict=True)
    return [resumed.losses == whole.losses, len(whole.losses) == 20, all(torch.equal(a(), b()) for a, b in pairs)]


def layer_stats(device: str, progress: Any, source: Path, kept: Path) -> dict[str, Tensor]:
    """Return the stats of a layer's first and third input, and the losses of training it from codes by rounding.

    With guidance, too: the tokens' weights are those that a run which goes on finds in a file.
    """
    on = torch.device(device)
    tokens = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(0))
    calibrator = Calibrator(CalibrationModel(open_weights(source), on), world().part(tokens), device=on, half=False)
    layer = calibrator.begin()
    found = {}
    guide(calibrator.model, world().part(tokens), GuidanceMemory(6, 2), half=False, device=on).save(kept)
    world().wait_for_first()
    calibrator.guidance = Guidance.load(kept, len(tokens))
    for stage in (0, 2):
        calibrator.strength = lambda name: 0.5
        found[f"guided {stage}"] = layer.stats(layer.block.stages()[stage][0]).hessian.cpu()
        calibrator.strength = lambda name: 0.0
        stats = layer.stats(layer.block.stages()[stage][0])
        kinds = {"hessian": stats.hessian, "cross": stats.cross, "absmean": stats.absmean, "sample": stats.sample}
        found |= {f"{kind} {stage}": t.cpu() for kind, t in kinds.items() if t is not None}
    near = GPTQ(bits=3, group=24, free=True, refine=0)
    alike = Stats(torch.eye(36, device=on), torch.ones(36, device=on), 1)
    fitted = {n: near.fit(w.weight, alike) for n, w in layer.full.linears().items() if w.weight.shape[1] == 36}
    layer.put(fitted)
    Auto(steps=8).after_layer(layer, fitted)
    return {**found, "losses": torch.tensor(layer.losses)}


def tuned(device: str, progress: Any, source: Path, checkpoint: Path, folder: Path) -> dict[str, list[float]]:
    """Train a checkpoint end to end both ways; return the losses."""
    training = Training(steps=4, batch=3, half=False)
    given = {"text": TEXT.text, "own": 0, "length": 32, "device": device, "resume": False, "overwrite": False}
    losses = {}
    for name, low_memory, what in (("fast", False, "all"), ("low memory", True, "all"), ("scales", None, "scales")):
        out = folder / f"tuned {name}"
        report = tune_on(
            checkpoint, source, out, training, what=what, low_memory=low_memory, progress=progress, **given
        )
        losses[name] = report.losses
    return losses


def dry(device: str, progress: Any, source: Path, scheme: str) -> dict[str, Any]:
    """Return what a dry run says."""
    given = {"head": None, "overrides": None, "memory": None, "progress": progress}
    cost = dry_run_on(source, scheme, text=TEXT, device=device, **given)
    return {"devices": cost.devices, "layers": len(cost.layer_seconds), "stages": list(cost.layer_seconds[-1])}


def everything(device: str, progress: Any, source: Path, folder: Path, schemes: Mapping[str, str]) -> dict[str, Any]:
    """Do all that can be done in one world; checkpoints go to the folder."""
    return {
        "losses": quantize_all(device, progress, source, {str(folder / n): s for n, s in schemes.items()}),
        "resumed": resumed_training(device, progress, source, folder / "auto", folder / "state"),
        "tuned": tuned(device, progress, source, folder / "auto", folder),
        "dry": dry(device, progress, source, schemes["gptq"]),
        "layer": layer_stats(device, progress, source, folder / "guidance.state"),
        "primitives": primitives(device, progress),
    }
