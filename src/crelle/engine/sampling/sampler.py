"""What one sequence samples by: its settings, its processor of logits, its random numbers.

Logits whose largest is NaN, infinite or minus infinity have no likeliest token, and no probabilities: whoever asks for
one gets a NumericsError. (The largest of values among which is a NaN is that NaN, in torch as in numpy.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crelle.engine.sampling.logits_processors import LogitsProcessor
from crelle.errors import NumericsError, SchemeError
from crelle.formats.storage.io import shown

_LARGEST = 1000.0  # of a penalty: logits are rarely above 100
_COLD = 1e-6  # colder than this, logits / temperature leaves f32 and only the most likely token remains anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens, and when to stop. The defaults are greedy."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 = always the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0 = all
    top_p: float = 1.0  # keep the most likely tokens that together have this probability
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the most likely one
    repetition_penalty: float = 1.0  # > 1 makes tokens that already occurred less likely
    frequency_penalty: float = 0.0  # subtracted from a logit for each time that its token was sampled
    presence_penalty: float = 0.0  # subtracted once
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    min_tokens: int = 0  # before which no end token and no stop string ends the text
    seed: int | None = None  # same seed, same text
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it

    def __post_init__(self) -> None:
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0 (greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (all)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "frequency_penalty": (abs(self.frequency_penalty) <= _LARGEST, f"between -{_LARGEST:g} and {_LARGEST:g}"),
            "presence_penalty": (abs(self.presence_penalty) <= _LARGEST, f"between -{_LARGEST:g} and {_LARGEST:g}"),
            "min_tokens": (self.min_tokens >= 0, "at least 0"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
        }
        for name, (fine, wanted) in bounds.items():
            if not fine:
                raise SchemeError(f"{name} must be {wanted}, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise SchemeError("stop must be a tuple of non-empty strings")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise SchemeError(f"logit_bias must be finite values of token ids, got {bias} for token {token}")


def sampling_of(given: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """Return a Sampling from one, or from its fields as keywords."""
    if not options:
        return given or Sampling()
    known = [f.name for f in fields(Sampling)]
    if odd := sorted(options.keys() - set(known)):
        raise SchemeError(f"there is no sampling option '{odd[0]}'; there are {', '.join(known)}")
    if given is not None:
        raise SchemeError(f"{', '.join(options)} and a Sampling were given; put all of it into the Sampling")
    stop = options.get("stop", ())
    try:
        return Sampling(**{**options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})
    except TypeError:  # of a comparison
        raise SchemeError(f"a sampling option has the wrong type: {shown(dict(options))}") from None


class Sampler:
    """How the tokens of one sequence are sampled, and its random numbers."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_tokens: int = 0,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin before the first token; prompt_tokens and end_ids: see LogitsProcessor."""
        self.s = sampling
        needed = LogitsProcessor.needed(sampling)
        self.processor = LogitsProcessor(sampling, prompt_tokens, end_ids) if needed else None
        self.random = Random(sampling.seed)

    @property
    def cold(self) -> bool:
        """Whether the token sampled is always the one with the largest logit that was processed."""
        return self.s.temperature < _COLD

    @property
    def greedy(self) -> bool:
        """Whether the token sampled is always the one with the largest logit of the model."""
        return self.cold and self.processor is None


def require_finite(largest: float, position: int) -> None:
    """Raise unless the largest logit, of the token at this position, is finite."""
    if not math.isfinite(largest):
        raise not_finite(position, f"the largest is {largest}")


def not_finite(position: int, detail: str = "NaN or infinite") -> NumericsError:
    """Return the error of a sequence whose logits at a position are not finite."""
    return NumericsError(
        f"the model's logits are not finite ({detail}) at token {position}: the checkpoint or a kernel is faulty; "
        "try another kernel (`crelle explain MODEL --why` lists the kernels), or quantize or download the checkpoint "
        "again"
    )


def likeliest(logits: Tensor) -> Tensor:
    """Return the token of the largest logit of each row [B, V], -1 where that is not finite; on the same device.

    On a CPU by numpy's argmax, which takes a sixtieth of the time of torch's.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        best = rows.argmax(-1)
        return torch.from_numpy(np.where(np.isfinite(rows[np.arange(len(rows)), best]), best, -1))
    largest, index = logits.max(-1)
    return torch.where(largest.isfinite(), index, -1)
