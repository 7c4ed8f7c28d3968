"""Quantized activations as the integer GEMM reads them (integer_gemm.cu)."""

from typing import NamedTuple

import torch
from torch import Tensor


class IntegerX(NamedTuple):
    """x [M, K] as integers, in the weight's order of channels (crelle.formats.activations).

    Mp is M rounded up to a multiple of 8; what lies in rows past M does not matter. Kp are the normal channels rounded
    up to a multiple of 128, then the outliers rounded up to a multiple of 128; padding is 0.
    """

    codes: Tensor  # int8 [Mp, Kp], contiguous
    scales: Tensor  # f32 [C, Mp]: normal groups, then those of outliers
    tokens: int  # M
    dtype: torch.dtype  # of x, and of the product
