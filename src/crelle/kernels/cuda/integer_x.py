"""Quantized activations as the integer GEMM takes them (integer_encode.cu makes them, integer_gemm.cu reads them)."""

from typing import NamedTuple

import torch
from torch import Tensor


class IntegerX(NamedTuple):
    """x [M, K] as integers of the weight's stored order, a scale for each token and group."""

    codes: Tensor  # int8 [Mp, Kp]; Mp: M rounded up to 8; Kp: normal channels and outliers, each rounded up to 128; 0s
    scales: Tensor  # f32 [C, Mp]: groups of normal channels, then of outliers
    tokens: int  # M: rows behind it are not read into results and may hold anything
    dtype: torch.dtype  # of x, and of the product
