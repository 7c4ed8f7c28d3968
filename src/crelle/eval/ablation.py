"""The ablation of Atom (its paper's Table 4): perplexity as its parts are added one by one, each a checkpoint.

RTN                    one scale for a token or an output, nothing else
+ outliers in fp16     the channels with the largest activations are not quantized
+ outliers in int8     or only to 8 bits
+ groups               of channels, with scales of their own
+ clipping             of weights and activations, by grid search
+ GPTQ                 error feedback; the weights compensate the error of the activations too
+ folds                of rotations and signs into the layer, which cost nothing (not in the paper)
+ Hadamard             blocks of channels are rotated before they are rounded (not in the paper)
+ KV cache             of fewer bits
+ training             block by block, through both roundings (not in the paper)
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crelle.engine.llm import LLM
from crelle.eval.perplexity import perplexity
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize


class Step(NamedTuple):
    """One row of the ablation."""

    name: str
    scheme: str | None  # None: the model as it is
    kv: str


@dataclass(frozen=True, slots=True)
class Row:
    """What one step came to."""

    name: str
    scheme: str
    kv: str
    perplexity: float
    ratio: float  # to the model as it is
    bits_per_weight: float
    seconds: float  # of quantizing


def atom_steps(w: int, a: int, kv: str, group: int, outliers: int, train: int) -> list[Step]:
    """Return the steps; `train`: steps of block-wise training per layer, 0 for none."""
    bits, paper = f"atom:w={w},a={a}", "folds=false,hadamard=false"
    plain = f"clip=false,gptq=false,{paper}"
    best = f"group={group},outliers={outliers}"
    steps = [
        Step("full precision", None, "16"),
        Step("RTN", f"{bits},group=row,outliers=0,{plain}", "16"),
        Step("+ outliers in fp16", f"{bits},group=row,outliers={outliers},outlier_bits=16,{plain}", "16"),
        Step("+ outliers in int8", f"{bits},group=row,outliers={outliers},{plain}", "16"),
        Step("+ groups", f"{bits},{best},{plain}", "16"),
        Step("+ clipping", f"{bits},{best},gptq=false,{paper}", "16"),
        Step("+ GPTQ", f"{bits},{best},{paper}", "16"),
        Step("+ folds", f"{bits},{best},hadamard=false", "16"),
        Step("+ Hadamard", f"{bits},{best}", "16"),
        Step("+ KV cache", f"{bits},kv={kv},{best}", kv),
    ]
    if train:
        steps.append(Step("+ training", f"{bits},kv={kv},{best},tune=short,steps={train}", kv))
    return steps


def ablate(
    source: Path,
    steps: list[Step],
    text: str,
    calibration: CalibrationData,
    *,
    context: int,
    tokens: int | None,
    device: str = "auto",
    known: Sequence[Row] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Row]:
    """Quantize and measure the steps one after the other; a checkpoint is deleted when it has been measured.

    `known`: rows of an earlier run with the same model, text and calibration, which are taken as they are.
    """
    base = None
    for i, step in enumerate(steps):
        if progress:
            progress(i, len(steps), step.name)
        scheme = step.scheme or "as it is"
        if row := next((r for r in known if (r.name, r.scheme) == (step.name, scheme)), None):
            base = row.perplexity if base is None else base
            yield row
            continue
        with tempfile.TemporaryDirectory(prefix="crelle-ablation-") as folder:
            made, bits, seconds = source, 0.0, 0.0
            if step.scheme is not None:
                report = quantize(source, Path(folder) / "q", step.scheme, text=calibration, device=device)
                made, bits, seconds = report.out, report.bits_per_weight, report.seconds
            llm = LLM.load(made, device=device, kv=step.kv)
            found = perplexity(llm, text, context=context, tokens=tokens)
        base = found.perplexity if base is None else base
        yield Row(step.name, scheme, found.kv, found.perplexity, found.perplexity / base, bits, seconds)
