"""How long quantizing a model of a real shape takes: synthetic weights, the real pipeline, the first layers measured.

Weights are sampled on the device that quantizes and handed over in host memory, as a file would be read; so the time of
reading is that of sampling, not of a disk. They are Gaussian. Inputs are made to be like those of trained models where
that matters to a solver: the embedding is mostly of low rank, and norms have channels of very different size, so inputs
are correlated and their Hessians ill-conditioned; tokens are as unevenly frequent as words (Zipf).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.bench.planner.plan_shapes import config_named
from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.models.loader import choose_device
from crelle.quantize_job.cost import QuantizeCost, measure, trains_fully
from crelle.quantize_job.rank_devices import devices_of
from crelle.quantize_job.rank_processes import on_devices
from crelle.quantize_job.run import check_spread
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.ranks import world
from crelle.quantizers.scheme import parse

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
    *,
    device: str = "auto",
    devices: str | None = None,
    layers: int = 1,
    rows: int = 128,
    length: int = 2048,
    memory: int | None = None,
    progress: Progress | None = None,
) -> QuantizeCost:
    """Quantize the first layers of a shape and say what the whole model would cost.

    `devices`: several instead of one, like "0,1". Figures are of the first one, which waits for the others.
    """
    if rows < 1 or length < 8:
        raise SchemeError(f"--rows must be at least 1 and --length at least 8, got {rows} and {length}")
    config = config_named(shape)
    most = _layers(config)
    if not 1 <= layers <= most:
        raise SchemeError(f"{shape} has 1 to {most} layers, not {layers}")
    if trains_fully(parse(scheme)):
        layers = min(most, max(2, layers))  # the cost of a layer is the difference between one and more
    spread = devices_of(devices, device)
    check_spread(len(spread), scheme, [parse(scheme)])
    arguments = {
        "config": config,
        "name": f"synthetic-{shape}",
        "scheme": scheme,
        "layers": layers,
        "rows": rows,
        "length": length,
        "memory": memory,
    }
    cost: QuantizeCost = on_devices(bench_on, spread, device, arguments, progress)
    return cost


def bench_on(
    config: Mapping[str, Any],
    name: str,
    scheme: str,
    *,
    device: str,
    layers: int,
    rows: int,
    length: int,
    memory: int | None,
    progress: Progress | None,
) -> QuantizeCost:
    """Measure on one device, or as one of several ranks."""
    where = choose_device(device)
    weights = SyntheticWeights(config, device=where, layers=layers)
    weights.path = Path(name)
    if where.type == "cuda":  # kernels are compiled and libraries loaded before anything is timed
        small = SyntheticWeights(_WARM_UP, device=where)
        measure(small, scheme, synthetic_tokens(_WARM_UP["vocab_size"], max(16, world().size), 64), where, layers=1)
    tokens = synthetic_tokens(config["vocab_size"], rows, length)
    return measure(weights, scheme, tokens, where, layers=_layers(config), memory=memory, progress=progress)


def _layers(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or config["n_layer"])
