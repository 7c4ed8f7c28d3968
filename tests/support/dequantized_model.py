"""A plain model with the dequantized matrices of a checkpoint, as the oracle of quantized models."""

import json
from pathlib import Path

import safetensors.torch

from crelle.formats.storage.checkpoint import Checkpoint


def write_dequantized(checkpoint: Path, to: Path) -> Path:
    """A plain model whose matrices are the checkpoint's, dequantized."""
    weights = Checkpoint(checkpoint)
    tensors = {n: weights.read(n) for n in weights.names() if n.removesuffix(".weight") not in weights.specs}
    tensors |= {f"{m}.weight": weights.matrix(m).dequantize() for m in weights.specs}
    to.mkdir()
    safetensors.torch.save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({k: v for k, v in weights.config.items() if "quant" not in k}))
    return to
