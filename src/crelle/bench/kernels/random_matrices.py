"""Random weights straight in a quantized form: the bytes of a scheme without the time of its quantizer.

What comes out has the format, shape and bytes that the scheme's `fit` gives, so its speed is the scheme's speed. Each
format samples its own (`random` in crelle.formats.base).
"""

import torch

from crelle.formats.base import QuantTensor, format_of
from crelle.quantizers.base import Quantizer


def random_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """Return a generator that samples on the device."""
    return torch.Generator(device).manual_seed(seed)


def random_matrix(scheme: Quantizer, N: int, K: int, random: torch.Generator) -> QuantTensor:
    """Return a matrix [N, K] as the scheme would store it, on the generator's device."""
    spec = scheme.storage((N, K))
    return format_of(spec).random(spec, random)


def matrix_bytes(scheme: Quantizer, N: int, K: int) -> int:
    """Return the bytes of such a matrix without making it, every scale counted."""
    spec = scheme.storage((N, K))
    return N * format_of(spec).row_bits(spec) // 8
