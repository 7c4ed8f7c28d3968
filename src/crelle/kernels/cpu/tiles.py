"""Whether bf16 tiles (AMX) can be used: what stats, bf16_gemm and bf16_attention are made of."""

import torch

from crelle.kernels import cpu


def usable(device: torch.device) -> bool:
    """Whether this machine has the tiles, and tensors of the device can be read."""
    return device.type == "cpu" and cpu.available() is None and cpu.core().isa().startswith("amx")
