"""Mixtures of experts: each expert's matrices by our kernels, for the tokens that were routed to it.

The number of tokens of an expert is known only when they are routed, so that CUDA graphs cannot hold this: on a GPU
such a model needs --enforce-eager.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from crelle.errors import UnsupportedError
from crelle.formats.base import Spec
from crelle.integrations.vllm.arrival import Arrival, arrival
from crelle.integrations.vllm.linear import stand_in, use_vllm_threads
from crelle.integrations.vllm.product import Experts, Product, Settings, handle_of, log_kernels


class CrelleExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer; `specs`: by expert and vLLM's name of the matrix (w1 gate, w3 up, w2 down)."""

    def __init__(self, layer: Any, specs: Mapping[tuple[int, str], tuple[str, Spec]], settings: Settings) -> None:
        super().__init__(layer.moe_config)
        self.specs, self.settings = specs, settings
        config = get_current_vllm_config()
        if config.device_config.device_type != "cpu" and not config.model_config.enforce_eager:
            raise UnsupportedError("experts of a Crelle checkpoint run on a GPU without CUDA graphs: --enforce-eager")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        parallel = self.moe.moe_parallel_config
        rank, ranks, inner = parallel.tp_rank, parallel.tp_size, intermediate_size_per_partition
        sizes = {"w1": (inner, hidden_size), "w3": (inner, hidden_size), "w2": (hidden_size, inner)}
        layer.arrivals, layer.params_dtype = {}, params_dtype
        for (expert, shard), (module, spec) in self.specs.items():
            if (local := layer._map_global_expert_id_to_local_expert_id(expert)) >= 0:
                layer.arrivals[local, shard] = arrival(module, spec, *sizes[shard], rank, ranks, self.settings.bits)
        for (_, shard), a in layer.arrivals.items():
            for part in a.parts():
                self._receive(layer, f"{'w2' if shard == 'w2' else 'w13'}_{part}", part)

    @staticmethod
    def _receive(layer: Any, name: str, part: str) -> None:
        """Give a layer the parameter that vLLM looks for when it has a tensor of an expert."""
        if name in layer._parameters:
            return

        def load(
            param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, **_: Any
        ) -> bool:
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local >= 0:
                layer.arrivals[local, shard_id].put(part, loaded_weight)
            return bool(local >= 0)

        parameter = stand_in(part)
        parameter.weight_loader = load  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        arrivals: dict[tuple[int, str], Arrival] = layer.arrivals
        device = next(layer.parameters()).device
        for name in list(layer._parameters):
            if name.startswith(("w13_", "w2_")):
                delattr(layer, name)
        del layer.arrivals
        use_vllm_threads()

        def product(expert: int, *shards: str) -> Product:
            weights = [w.to(device) for s in shards if (a := arrivals.get((expert, s))) for w in a.require()]
            return Product(weights, layer.params_dtype, self.settings.kernel)

        held = sorted({e for e, _ in arrivals})
        pairs = [(product(e, "w1", "w3"), product(e, "w2")) for e in held]
        rows = [arrivals[e, "w2"].gathered for e in held]
        for into, down in pairs:
            log_kernels(["experts, in"], into)
            log_kernels(["experts, out"], down)
        if any(rows) and self.moe.moe_parallel_config.tp_size != get_tensor_model_parallel_world_size():
            raise UnsupportedError(
                "the inputs of these experts cannot be split over ranks of data parallel: use --enable-expert-parallel"
            )
        activate = partial(_activate, layer.activation)
        gather = tensor_model_parallel_all_gather if any(rows) else None
        layer.experts = Experts(pairs, activate, layer.apply_router_weight_on_input, gather, rows)
        layer.register_buffer("handle", handle_of(layer.experts), persistent=False)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        return torch.ops.crelle.experts(x, topk_weights, ids, layer.handle)  # type: ignore[no-any-return]


def _activate(activation: Any, h: Tensor) -> Tensor:
    """Return activation(gate) * up, or what else the layer has between its matrices."""
    gated = getattr(activation, "is_gated", True)
    out = h.new_empty(h.shape[0], h.shape[1] // 2 if gated else h.shape[1])
    apply_moe_activation(activation, out, h)
    return out
