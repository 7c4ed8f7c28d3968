"""The quality to expect of a recipe: ratios of perplexity that were measured, never guessed.

All on SmolLM2-135M-Instruct: perplexity over that of the unquantized model on three texts, 20,480 tokens of each
(WikiText-2 test, TinyStories, Python's documentation). A range is from the best of the three to the worst, over all
runs of the recipe in the file. The model is small: larger ones lose less.
"""

from dataclasses import dataclass, replace
from math import exp, log

from crelle.quantize_job.effort import Effort
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.gptq import GPTQ

MODEL = "SmolLM2-135M-Instruct"
GPU_FILE = "bench/results/h200-auto-quality-smollm2.json"
CPU_FILE = "bench/results/cpu-effort-smollm2.json"
QUALITY_FILE = "bench/results/h200-prefer-quality-smollm2.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row, or several runs of the same, of a file of results."""

    scheme: str
    rows: int
    own: int
    least: float
    most: float
    file: str = GPU_FILE


MEASURED = (
    Measured("auto:bits=2.35,steps=16", 32, 0, 2.41, 5.43),
    Measured("auto:bits=3.35,steps=16", 32, 0, 1.26, 1.51),
    Measured("auto:bits=4.35,steps=16", 32, 0, 1.07, 1.11),
    Measured("auto:bits=2.35,steps=256", 192, 192, 1.60, 2.06),
    Measured("auto:bits=3.35,steps=256", 192, 192, 1.16, 1.27),
    Measured("auto:bits=4.35,steps=256", 192, 192, 1.04, 1.08),
    Measured("auto:bits=2.35,tune=full,steps=256,end=3000,own=4096", 128, 384, 1.26, 1.46),
    Measured("auto:bits=3.35,tune=full,steps=256,end=5000,own=4096", 384, 192, 1.06, 1.16),
    Measured("auto:bits=4.35,tune=full,steps=256,end=1500,own=2048", 192, 192, 1.01, 1.06),
    Measured("auto:bits=4.35,search=false,steps=0", 4, 4, 1.08, 1.14, CPU_FILE),
    Measured("auto:bits=4.35,search=false,steps=0", 16, 16, 1.06, 1.12, CPU_FILE),
    Measured("auto:bits=4.35,steps=0", 16, 16, 1.05, 1.10, CPU_FILE),
    Measured("auto:bits=2.35,tune=none,prefer=quality", 192, 192, 1.42, 1.53, QUALITY_FILE),
    Measured("auto:bits=3.35,tune=none,prefer=quality", 192, 192, 1.07, 1.10, QUALITY_FILE),
    Measured("auto:bits=4.35,tune=none,prefer=quality", 192, 192, 1.01, 1.02, QUALITY_FILE),
    Measured(
        "auto:bits=2.35,tune=full,steps=0,end=600,own=1024,train=scales,prefer=quality",
        192,
        192,
        1.22,
        1.34,
        QUALITY_FILE,
    ),
    Measured("gptq:bits=3,group=64", 64, 0, 1.34, 1.63),
    Measured("gptq:bits=4,group=64", 64, 0, 1.06, 1.13),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """The range of ratios, and where it is from."""

    least: float
    most: float
    file: str
    bits: tuple[float, ...]  # that were measured: one, or two between which the range is interpolated


def expected(effort: Effort) -> Expected | None:
    """Return what to expect of a recipe, or None where neither it nor its neighbours in bits have been measured."""
    config = parse(effort.scheme)
    if isinstance(config, GPTQ):
        return next(
            (Expected(m.least, m.most, m.file, (config.bits,)) for m in MEASURED if m.scheme == str(config)), None
        )
    if not isinstance(config, Auto):
        return None
    data = effort.rows + effort.own
    alike = {
        found.bits: m  # the last is the nearest in data
        for m in sorted(MEASURED, key=lambda m: -abs(m.rows + m.own - data))
        if isinstance(found := parse(m.scheme), Auto)
        and replace(found, bits=config.bits, end=config.end, own=config.own) == config
        and data / 2 <= m.rows + m.own <= 2 * data
    }
    for bits, m in alike.items():
        if abs(bits - config.bits) < 0.03:
            return Expected(m.least, m.most, m.file, (bits,))
    below, above = (b for b in alike if b < config.bits), (b for b in alike if b > config.bits)
    low, high = max(below, default=None), min(above, default=None)
    if low is None or high is None:
        return None
    at = (config.bits - low) / (high - low)
    least, most = (
        1 + exp((1 - at) * log(a - 1) + at * log(b - 1))  # the loss is about exponential in the bits
        for a, b in ((alike[low].least, alike[high].least), (alike[low].most, alike[high].most))
    )
    return Expected(least, most, alike[low].file, (low, high))
