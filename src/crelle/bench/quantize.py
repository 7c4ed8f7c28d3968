"""How long quantizing a model of a real shape takes: synthetic weights, the real pipeline, the first layers measured.

Weights are sampled on the device that quantizes and handed over in host memory, as a file would be read; so the time of
reading is that of sampling, not of a disk. They are Gaussian. Inputs are made to be like those of trained models where
that matters to a solver: the embedding is mostly of low rank, and norms have channels of very different size, so inputs
are correlated and their Hessians ill-conditioned; tokens are as unevenly frequent as words (Zipf).
"""

from pathlib import Path

import torch
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.bench.plan_shapes import config_named
from crelle.engine.quantize_cost import QuantizeCost, measure
from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.quantizers.layer_api import Progress

_RANK = 64  # of what tokens have in common in the embedding
_SPREAD = 0.7  # standard deviation of the logarithm of a channel's size
_WARM_UP = llama_config(256, 1, 4, 512, kv_heads=2, vocabulary=512)


class SyntheticWeights(RandomWeights):
    """Random weights with correlated inputs, in host memory."""

    def read(self, name: str) -> Tensor:
        if len(self.shape(name)) == 2:
            return self.matrix(name.removesuffix(".weight")).dequantize(torch.float16)
        if not name.endswith("norm.weight"):
            return super().read(name).cpu()
        sizes = torch.randn(self.shape(name), generator=self._random(name), device=self.device)
        return sizes.mul_(_SPREAD).exp_().half().cpu()

    def matrix(self, module: str) -> QuantTensor:
        if not module.endswith(("embed_tokens", "wte")):
            return super().matrix(module).to("cpu")
        V, width = self.shape(f"{module}.weight")
        random = self._random(module)
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32  # CPUs multiply f16 slowly

        def sample(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=random, device=self.device, dtype=dtype)

        common = (sample(V, _RANK) @ sample(_RANK, width)).mul_(_RANK**-0.5)
        return DenseTensor(common.add_(sample(V, width), alpha=0.5).half().cpu())

    def copy_tokenizer(self, to: Path) -> None:
        """There is none to copy."""


def synthetic_tokens(vocabulary: int, rows: int, length: int) -> Tensor:
    """Return token ids [rows, length], the n-th of the vocabulary with a frequency of 1/n."""
    uniform = torch.rand(rows, length, generator=torch.Generator().manual_seed(0))
    return (vocabulary**uniform).long().clamp(max=vocabulary) - 1


def bench_quantize(
    shape: str,
    scheme: str,
    device: torch.device,
    *,
    layers: int = 1,
    rows: int = 128,
    length: int = 2048,
    memory: int | None = None,
    progress: Progress | None = None,
) -> QuantizeCost:
    """Quantize the first layers of a shape and say what the whole model would cost."""
    if rows < 1 or length < 8:
        raise SchemeError(f"--rows must be at least 1 and --length at least 8, got {rows} and {length}")
    config = config_named(shape)
    weights = SyntheticWeights(config, device=device, layers=layers)
    whole = SyntheticWeights(config, device=device)
    weights.path = Path(f"synthetic-{shape}")
    if layers > (most := _layers(whole)):
        raise SchemeError(f"{shape} has 1 to {most} layers, not {layers}")
    if device.type == "cuda":  # kernels are compiled and libraries loaded before anything is timed
        small = SyntheticWeights(_WARM_UP, device=device)
        measure(small, scheme, synthetic_tokens(_WARM_UP["vocab_size"], 16, 64), device, layers=1)
    tokens = synthetic_tokens(config["vocab_size"], rows, length)
    return measure(weights, scheme, tokens, device, layers=_layers(whole), memory=memory, progress=progress)


def _layers(weights: RandomWeights) -> int:
    return int(weights.config.get("num_hidden_layers") or weights.config["n_layer"])
