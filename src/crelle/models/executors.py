"""Which executor runs a model over pages, and why not the others.

CudaExecutor    a GPU: decode steps as CUDA graphs (crelle.kernels.cuda.executor)
CpuExecutor     a CPU: the fused C++ step and prefill (crelle.kernels.cpu.executor)
EagerExecutor   any device: layer by layer in torch (crelle.models.eager_executor)
"""

from collections.abc import Sequence

import torch

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cpu.executor import CpuExecutor
from crelle.kernels.cpu.executor import supports as cpu_supports
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.executor import Executor
from crelle.models.cache import key_centers_of
from crelle.models.decoder import DecoderModel
from crelle.models.eager_executor import EagerExecutor


def page_dtype(model: DecoderModel) -> torch.dtype:
    """Return what pages of 16 bits hold: f16 where the C++ step reads them, else the model's dtype.

    A step of many sequences reads keys and values once for each of them, so that their bytes are its time.
    """
    return torch.float16 if isinstance(model.decoder, FusedDecoder) else model.dtype


def make_executor(model: DecoderModel, layers: Sequence[KVPages], kv: KVFormat, *, batch_invariant: bool) -> Executor:
    """Return the fastest executor that can run a model over these pages."""
    centers = key_centers_of(model.key_centers if kv.centered else None, layers)
    if model.device.type == "cuda":
        from crelle.kernels.cuda.executor import CudaExecutor, supports_model

        if supports_model(model, kv) is None:
            return CudaExecutor(model, layers, centers, batch_invariant=batch_invariant, step=model.cuda_step)
    decoder = model.decoder
    if isinstance(decoder, FusedDecoder) and (batch_invariant or model.coded) and cpu_supports(model.spec, kv) is None:
        return CpuExecutor(decoder, layers, centers)
    return EagerExecutor(model, layers, centers, batch_invariant=batch_invariant)
