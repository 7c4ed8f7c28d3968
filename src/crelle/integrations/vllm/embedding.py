"""Quantized embeddings and output heads, tied or not."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from crelle.formats.base import Spec, shape_of
from crelle.integrations.vllm.arrival import Arrival, Share
from crelle.integrations.vllm.linear import forget, receive, use_vllm_threads
from crelle.integrations.vllm.product import Product, Settings, Table, handle_of, log_kernels


class CrelleEmbeddingMethod(QuantizeMethodBase):
    """The rows of this rank's tokens: an embedding looks them up, a head multiplies by them, a tied one does both."""

    def __init__(self, module: str, spec: Spec, settings: Settings, looks_up: bool, multiplies: bool) -> None:
        self.module, self.spec, self.settings = module, spec, settings
        self.looks_up, self.multiplies = looks_up, multiplies

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        held = layer.shard_indices  # the vocabulary is padded for even shares; the checkpoint has no padding
        rows = slice(held.org_vocab_start_index, held.org_vocab_end_index)
        share = Share(rows, slice(0, shape_of(self.spec)[1]))
        layer.arrivals, layer.params_dtype = (
            [Arrival(self.module, self.spec, [share], self.settings.bits)],
            params_dtype,
        )
        receive(layer, layer.arrivals)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let the head be the embedding itself: it can be multiplied by as well."""
        return embed_tokens

    def process_weights_after_loading(self, layer: Any) -> None:
        device = forget(layer, layer.arrivals)
        weight = layer.arrivals[0].require()[0].to(device)
        del layer.arrivals
        use_vllm_threads()
        product = None
        if self.multiplies:
            product = layer.product = Product([weight], layer.params_dtype, self.settings.kernel)
            layer.register_buffer("product_handle", handle_of(layer.product), persistent=False)
            log_kernels(["lm_head" if self.module.endswith("lm_head") else "head (tied)"], product)
        # vLLM's LoRA layers read the device of a weight.
        layer.register_buffer("weight", torch.empty(0, device=device), persistent=False)
        if self.looks_up:
            layer.table = Table(weight, product)
            layer.register_buffer("table_handle", handle_of(layer.table), persistent=False)

    def embedding(self, layer: Any, tokens: Tensor) -> Tensor:
        dtype = layer.params_dtype
        return torch.ops.crelle.lookup(tokens, layer.table_handle, layer.embedding_dim, dtype)  # type: ignore[no-any-return]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.crelle.layer(x, layer.product_handle, layer.product.N)
        y = y if bias is None else y + bias[: layer.product.N]
        padding = layer.num_embeddings_per_partition - layer.product.N
        return y if not padding else nn.functional.pad(y, (0, padding))  # a pad by nothing copies
