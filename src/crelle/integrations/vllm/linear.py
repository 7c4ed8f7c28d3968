"""The linear layers of a Crelle checkpoint: one matrix, or several that vLLM fuses (q, k, v; gate, up)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearMethodBase

from crelle.errors import FormatError
from crelle.formats.base import Spec, shape_of
from crelle.integrations.vllm.arrival import Arrival, arrival, fused_shares
from crelle.integrations.vllm.product import Product, Settings, handle_of, log_kernels
from crelle.kernels import cpu

# Of stored tensors that hold no floats; vLLM warns where a parameter has another dtype than what is loaded.
_INTEGERS = {
    torch.uint8: ("planes", "zero", "codes", "group_scale", "group_zero", "four", "row_zero", "second_zeros"),
    torch.int8: ("outliers",),
    torch.int16: ("first", "outlier_columns"),
    torch.int32: ("order", "perm", "words", "halves", "outlier_rows"),
}
_DTYPES = {part: dtype for dtype, parts in _INTEGERS.items() for part in parts}
_SHARDS = {"q": 0, "k": 1, "v": 2}  # what vLLM calls the parts of a fused attention layer; others have numbers


def stand_in(part: str) -> nn.Parameter:
    """Return an empty parameter in the place of a stored tensor."""
    return nn.Parameter(torch.empty(0, dtype=_DTYPES.get(part, torch.float16)), requires_grad=False)


def receive(layer: Any, arrivals: Sequence[Arrival]) -> None:
    """Give a layer a parameter for each stored tensor, under its name; what is loaded goes to the matrix it is of."""

    def put(part: str, tensor: Tensor, shard: str | int | None) -> None:
        index = 0 if shard is None else _SHARDS[shard] if isinstance(shard, str) else shard
        arrivals[index].put(part, tensor)

    for part in dict.fromkeys(part for a in arrivals for part in a.parts()):
        parameter = stand_in(part)

        def load(_: nn.Parameter, tensor: Tensor, shard: str | int | None = None, part: str = part) -> None:
            put(part, tensor, shard)

        parameter.weight_loader = load  # type: ignore[attr-defined]
        layer.register_parameter(part, parameter)


def forget(layer: Any, arrivals: Sequence[Arrival]) -> torch.device:
    """Take the parameters off a layer again; return the device that they were on."""
    parts = dict.fromkeys(part for a in arrivals for part in a.parts())
    device: torch.device = next(layer.get_parameter(part).device for part in parts)
    for part in parts:
        delattr(layer, part)
    return device


def use_vllm_threads() -> None:
    """Let our kernels have as many threads as vLLM gave to torch: it binds a worker to its share of the cores."""
    if cpu.available() is None:
        cpu.core().set_threads(torch.get_num_threads())


class CrelleLinearMethod(LinearMethodBase):
    """The matrices of one layer, in the order of its outputs; `modules`: their names and specs."""

    def __init__(self, modules: Sequence[tuple[str, Spec]], settings: Settings) -> None:
        super().__init__()
        self.modules, self.settings = modules, settings

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
        rank, ranks = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
        parts, K = output_partition_sizes, input_size_per_partition
        if len(self.modules) == 1 and len(parts) > 1:
            name, spec = self.modules[0]
            arrivals = [Arrival(name, spec, fused_shares(shape_of(spec), parts, K, rank, ranks), self.settings.bits)]
        elif len(self.modules) == len(parts):
            arrivals = [
                arrival(m, s, n, K, rank, ranks, self.settings.bits)
                for (m, s), n in zip(self.modules, parts, strict=True)
            ]
        else:
            names = ", ".join(m for m, _ in self.modules)
            raise FormatError(f"the layer has {len(parts)} parts, the checkpoint {len(self.modules)} of them ({names})")
        layer.arrivals, layer.params_dtype = arrivals, params_dtype
        receive(layer, arrivals)

    def process_weights_after_loading(self, layer: Any) -> None:
        device = forget(layer, layer.arrivals)
        weights = [w.to(device) for a in layer.arrivals for w in a.require()]
        layer.gathered, layer.outputs = layer.arrivals[0].gathered, shape_of(layer.arrivals[0].spec)[0]
        del layer.arrivals
        use_vllm_threads()
        layer.product = Product(weights, layer.params_dtype, self.settings.kernel)
        log_kernels([module for module, _ in self.modules], layer.product)
        layer.register_buffer("handle", handle_of(layer.product), persistent=False)
        # vLLM's LoRA layers read the device of a weight.
        layer.register_buffer("qweight", torch.empty(0, device=device), persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if layer.gathered is None else tensor_model_parallel_all_gather(x)
        y: Tensor = torch.ops.crelle.layer(x, layer.handle, layer.product.N)
        y = y if layer.gathered is None else layer.gathered.placed(y, layer.outputs)
        return y if bias is None else y + bias
