"""Whether bf16 tiles (AMX) can be used: what stats, bf16_gemm and bf16_attention are made of."""

import os

import torch

from crelle.kernels import cpu


def usable(device: torch.device) -> bool:
    """Whether this machine has the tiles, and tensors of the device can be read."""
    return device.type == "cpu" and cpu.available() is None and cpu.core().isa().startswith("amx")


def has_tiles() -> bool:
    """Whether torch computes products of bf16 by AMX; CRELLE_ISA stands for a CPU with that instruction set."""
    if not torch.cpu._is_amx_tile_supported():
        return False
    chosen = os.environ.get("CRELLE_ISA")
    return chosen is None or chosen.startswith("amx")
