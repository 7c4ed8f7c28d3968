"""Effort: how long `crelle quantize` works on a model, in one word, and what that means on a machine.

    fast        well under a minute on a GPU, a few minutes on a CPU
    balanced    the default: minutes on a GPU, about ten minutes on a CPU for a small model
    best        with end-to-end training on a GPU; about an hour on a CPU for a small model

A word becomes a complete scheme and an amount of calibration data, by the kind of device, the cores and instructions of
a CPU, and the size of the model: not by what is free or by a measurement, so that a resumed run gets the same. Settings
that the scheme names (`steps=`), and rows that were asked for, stay as they are.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

import torch

from crelle.errors import SchemeError
from crelle.formats.storage.open import Weights
from crelle.kernels import cpu
from crelle.kernels.threads import available_cores
from crelle.quantize_job.first_layers import in_layer
from crelle.quantizers.scheme import parse, settings_of, with_settings
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hbcq import HBCQ

Word = Literal["fast", "balanced", "best"]
WORDS: tuple[Word, ...] = get_args(Word)
DEFAULT: Word = "balanced"
SCHEME = "auto:bits=4.35"

_SMALL = 750_000_000  # weights in the layers up to which `best` trains as long as the published figures' runs did
_REFERENCE = 106_168_320  # weights in the layers of SmolLM2-135M, for which the seconds below are
_SPEEDS = {"amx": 4.7, "avx512": 2.7, "avx2": 1.5, "avx-vnni": 1.5}  # of two cores, relative to two of Neoverse N1
_TARGETS: dict[Word, float] = {"fast": 180, "balanced": 660, "best": 3600}  # seconds on a CPU


class _Rung(NamedTuple):
    """What can be done on a CPU, and the seconds that it takes for SmolLM2-135M on two cores of Neoverse N1."""

    rows: int
    settings: dict[str, str]  # of auto
    seconds: float


_PLAIN = {"search": "false", "steps": "0"}
_RUNGS = (
    _Rung(8, _PLAIN, 150),
    _Rung(16, _PLAIN, 240),
    _Rung(32, _PLAIN, 420),
    _Rung(32, {"steps": "0"}, 560),
    _Rung(32, {"steps": "8"}, 1160),
    _Rung(64, {"steps": "32"}, 3300),
    _Rung(64, {"steps": "64"}, 5700),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What an effort goes by."""

    kind: str  # "cuda" or "cpu"
    cores: int = 2
    instructions: str = "generic"  # the best set of instructions that our kernels use

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        if device.type == "cuda":
            return cls("cuda")
        return cls("cpu", available_cores(), cpu.core().isa() if cpu.available() is None else "generic")

    @property
    def speed(self) -> float:
        """Return how fast a CPU calibrates, relative to two cores of Neoverse N1."""
        return min(self.cores, 32) / 2 * next((v for k, v in _SPEEDS.items() if self.instructions.startswith(k)), 1.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """An effort as it is on a machine, for a model: nothing is left to choose."""

    name: Word
    scheme: str
    rows: int  # calibration sequences of the text; 0: the scheme looks at no data
    own: int  # calibration sequences that the model itself samples

    def about(self) -> dict[str, str]:
        """Return what a checkpoint keeps of it, in its index."""
        return {"effort": self.name, "calibration_rows": str(self.rows), "own_sequences": str(self.own)}


def weights_in_layers(weights: Weights) -> int:
    """Return how many weights the matrices of all layers have, without opening the model."""
    return sum(prod(weights.shape(n)) for n in weights.names() if in_layer(n) and len(weights.shape(n)) >= 2)


# End-loss guidance takes 4 to 14% off the logarithm of perplexity's ratio at 2 bits, on text that was calibrated on and
# on other text; at 3 and 4 bits gains and losses are about even (h200-guidance-smollm2.json).
_GUIDED_BITS = 2
_GUIDANCE = "0.5"


def check_effort(name: str) -> Word:
    """Return the effort that a word names."""
    for word in WORDS:
        if word == name:
            return word
    raise SchemeError(f"unknown effort '{name}'; choose {', '.join(WORDS[:-1])} or {WORDS[-1]}")


def resolve(
    name: str,
    scheme: str,
    machine: Machine,
    weights: int,
    *,
    rows: int | None = None,
    own: int | None = None,
    text: bool = True,
    calibrated: bool | None = None,
) -> Effort:
    """Return what an effort means for a model with so many weights in its layers.

    rows, own: where they were asked for. text: whether there is one to calibrate on; without, half of the rows of
    Python's documentation are replaced by sequences that the model itself samples. calibrated: whether data is needed;
    default: by the scheme.
    """
    word, config = check_effort(name), parse(scheme)
    given = settings_of(scheme)
    settings: dict[str, str] = {}
    if isinstance(config, Auto):
        settings, planned, sampled = _auto(word, config, machine, weights)
        if "tune" in given and config.tune != "full":
            settings = {k: v for k, v in settings.items() if k not in ("end", "own")}
    else:
        planned, sampled = _rows(word, machine, weights), 0
        if word != "fast" and isinstance(config, (GPTQ, HBCQ)) and config.bits <= _GUIDED_BITS:
            settings = {"guidance": _GUIDANCE}
    settings = {k: v for k, v in settings.items() if k not in given}
    scheme = str(parse(with_settings(scheme, settings)))
    if not (config.calibrated if calibrated is None else calibrated):
        return Effort(word, scheme, 0, 0)
    planned = planned if rows is None else rows
    if not text and (not sampled or own is not None):
        half = planned // 2
        return Effort(word, scheme, planned - half, half + (own or 0))
    return Effort(word, scheme, planned, sampled if own is None else own)


def _auto(word: Word, config: Auto, machine: Machine, weights: int) -> tuple[dict[str, str], int, int]:
    """Return settings of auto, rows of the text, and sequences that the model samples."""
    if machine.kind != "cuda":
        rung = _rung(word, machine, weights)
        return dict(rung.settings), rung.rows, 0
    if config.prefer == "quality":
        return _of_quality(word, weights)
    bits = config.bits
    if word == "fast":
        return {"steps": "16"}, 32, 0
    if word == "balanced":
        return {"steps": "256"}, 192, 192
    # What bench/quality/auto_quality.py found best with end-to-end training, at 2.35, 3.35 and 4.35 bits.
    rows, sampled, end, own = (
        (128, 384, 3000, 4096) if bits < 2.85 else (384, 192, 5000, 4096) if bits < 3.85 else (192, 192, 1500, 2048)
    )
    training = {"end": str(end), "own": str(own)} if weights <= _SMALL else {}  # larger ones: by their size
    return {"steps": "256", "tune": "full", **training}, rows, sampled


def _of_quality(word: Word, weights: int) -> tuple[dict[str, str], int, int]:
    """Return what `_auto` does for codes that take long to find: their scales train end to end, or nothing does.

    600 steps took SmolLM2 at 2.35 bits from 1.43 to 1.23 times fp32 (h200-prefer-quality-smollm2.json).
    """
    if word == "fast" or (word == "balanced" and weights > _SMALL):
        return {"tune": "none"}, 192, 192
    end, own = (600, 1024) if word == "balanced" else (3000, 4096)
    training = {"end": str(end), "own": str(own)} if weights <= _SMALL else {}
    return {"steps": "0", "tune": "full", "train": "scales", **training}, 192, 192


def _rows(word: Word, machine: Machine, weights: int) -> int:
    """Return the rows for schemes that have nothing else to choose."""
    if machine.kind == "cuda":
        return {"fast": 32, "balanced": 64, "best": 256}[word]
    return _rung(word, machine, weights).rows


def _rung(word: Word, machine: Machine, weights: int) -> _Rung:
    """Return the most that a CPU can do in the time of an effort; the least where even that takes longer."""
    room = _TARGETS[word] * machine.speed * _REFERENCE / max(1, weights)
    index = max((i for i, rung in enumerate(_RUNGS) if rung.seconds <= room), default=0)
    most = {"fast": 2, "balanced": 4, "best": len(_RUNGS) - 1}[word]  # a small model need not take all of its time
    return _RUNGS[min(index, most)]
