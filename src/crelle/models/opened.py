"""The Llama family taken apart for calibration and training: the layers of crelle.models.llama over open linears."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor
from crelle.formats.source import Weights
from crelle.models.llama import Builder, Layer, LlamaConfig
from crelle.models.loader import read_config
from crelle.models.rope import Rope
from crelle.quantizers.opened import Fold, OpenLinear


class _NoCache:
    """A whole sequence at a time needs no memory of the one before."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.transpose(1, 2), v.transpose(1, 2)


class _Angles:
    """Rope's cosines and sines of whole sequences, computed once: a recorded CUDA graph cannot make them."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._known: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, T: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = T, device, dtype
        if key not in self._known:
            self._known[key] = self._rope.angles(torch.arange(T, device=device), dtype)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _OpenBuilder(Builder):
    def vector(self, name: str, size: int) -> Tensor:
        # A copy: quantizers change vectors in place, and what a source reads may be its mapped file.
        return Builder.vector(self, name, size).clone()

    def linear(self, module: str, N: int, K: int, w: QuantTensor | None = None) -> Any:
        weight = (w or self.matrix(module, N, K)).dequantize(torch.float32)
        bias = self.vector(f"{module}.bias", N) if f"{module}.bias" in self.names else None
        return OpenLinear(module, weight, bias)


class OpenBlock(nn.Module):
    """One layer over whole sequences."""

    def __init__(self, layer: Layer, prefix: str, c: LlamaConfig, angles: "_Angles") -> None:
        super().__init__()
        self.layer, self.prefix, self.c, self.angles = layer, prefix, c, angles
        self._linears = {m.name: m for m in layer.modules() if isinstance(m, OpenLinear)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.angles(x.shape[1], x.device, x.dtype), _NoCache())  # type: ignore[no-any-return]

    def linears(self) -> dict[str, OpenLinear]:
        return self._linears

    def stages(self) -> list[tuple[str, ...]]:
        names = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
        return [tuple(n for n in self._linears if n.rpartition(".")[2] in kinds) for kinds in names]

    def folds(self) -> list[Fold]:
        qkv, _, gate_up, down = self.stages()
        norm, norm_mlp = (f"{self.prefix}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm"))
        up = f"{self.prefix}.mlp.up_proj.weight"
        folds = [Fold(norm, qkv), Fold(norm_mlp, gate_up), Fold(up, down)]
        if self.c.heads == self.c.kv_heads:  # otherwise several inputs of o share one row of v
            folds.append(Fold(f"{self.prefix}.self_attn.v_proj.weight", (f"{self.prefix}.self_attn.o_proj",)))
        return folds

    def vectors(self) -> dict[str, Tensor]:
        norms = {"input_layernorm": self.layer.norm_attention, "post_attention_layernorm": self.layer.norm_mlp}
        return {f"{self.prefix}.{name}.weight": norm.weight for name, norm in norms.items()}


class OpenLlama:
    """Layers built from a source when they are asked for: at most what the caller keeps is in memory."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        self.weights, self.c = weights, read_config(weights)
        self.device = torch.device(device)
        self._build = _OpenBuilder(weights, frozenset(weights.names()), torch.float32, self.device, None)
        self._angles = _Angles(self.c.rope)

    @property
    def layers(self) -> int:
        return self.c.layers

    def layer_name(self, i: int) -> str:
        return f"model.layers.{i}"

    @cached_property
    def _embedding(self) -> Tensor:
        return self._build.matrix("model.embed_tokens", self.c.vocabulary, self.c.width).dequantize(torch.float32)

    @cached_property
    def _head(self) -> Tensor:
        if self.c.tied:
            return self._embedding
        return self._build.matrix("lm_head", self.c.vocabulary, self.c.width).dequantize(torch.float32)

    @cached_property
    def _norm(self) -> Any:
        return self._build.norm("model.norm", self.c.width, self.c.norm_eps)

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def block(self, i: int) -> OpenBlock:
        return OpenBlock(Layer(self._build, i, self.c), self.layer_name(i), self.c, self._angles).eval()

    def finish(self, x: Tensor) -> Tensor:
        return self._norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._head)
