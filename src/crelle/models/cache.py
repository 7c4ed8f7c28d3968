"""Keys and values of the tokens so far, one block per layer that grows in steps."""

import torch
from torch import Tensor

from crelle.errors import CapacityError

_STEP = 256  # tokens by which the cache grows


class KVCache:
    """K and V [B, Hkv, S, D] for every layer; a forward pass first grows it, then appends, then advances."""

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        head_size: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length, self.context = 0, context
        # per layer [2, B, Hkv, capacity, D]: keys, then values
        empty = torch.empty(2, batch, heads, 0, head_size, dtype=dtype, device=device)
        self.layers = [empty] * layers

    def grow(self, more: int) -> None:
        """Make room for `more` tokens, or say that the context is full."""
        need = self.length + more
        if need > self.context:
            raise CapacityError(f"{need} tokens do not fit the model's context of {self.context}")
        have = self.layers[0].shape[3]
        if need > have:
            room = min(self.context, max(2 * have, -(-need // _STEP) * _STEP))
            self.layers = [
                torch.cat([kv, kv.new_empty(*kv.shape[:3], room - have, kv.shape[4])], 3) for kv in self.layers
            ]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, T, Hkv, D] behind what is there; return all of the layer's keys and values."""
        end = self.length + k.shape[1]
        kv = self.layers[layer]
        kv[0, :, :, self.length : end] = k.transpose(1, 2)
        kv[1, :, :, self.length : end] = v.transpose(1, 2)
        return kv[0, :, :, :end], kv[1, :, :, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens
