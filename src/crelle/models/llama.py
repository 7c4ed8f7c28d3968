"""The Llama family on one page: Llama 1, 2, 3, SmolLM2, Mistral, Qwen2, Qwen3 differ only by their config.

    x = embed(tokens)
    for each layer:  x += attention(norm(x));  x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

Shapes: B sequences, T tokens, H heads, Hkv key/value heads, D head size, S cached tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.source import Weights
from crelle.models.cache import KVCache
from crelle.models.linear import QuantLinear
from crelle.models.rope import Rope

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the code below depends on."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    norm_eps: float
    tied: bool
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: how far back attention sees; None = all the way

    @classmethod
    def from_hf(cls, c: dict[str, Any]) -> Self:
        """Read a Hugging Face config."""
        if (kind := c.get("model_type")) not in MODEL_TYPES:
            raise UnsupportedError(f"model type '{kind}' is not one that Crelle runs ({', '.join(MODEL_TYPES)})")
        if (act := c.get("hidden_act", "silu")) != "silu":
            raise UnsupportedError(f"the activation '{act}' is not one of the Llama family's (silu)")
        heads, width = c["num_attention_heads"], c["hidden_size"]
        head_size = c.get("head_dim") or width // heads
        return cls(
            width=width,
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_size=head_size,
            vocabulary=c["vocab_size"],
            context=c.get("max_position_embeddings", 2048),
            norm_eps=c.get("rms_norm_eps", 1e-6),
            tied=c.get("tie_word_embeddings", False),
            rope=Rope.from_hf(c, head_size),
            windows=_windows(c),
        )


def _windows(c: dict[str, Any]) -> tuple[int | None, ...]:
    """Mistral slides its window in every layer, Qwen only where `layer_types` or `max_window_layers` says so."""
    layers: int = c["num_hidden_layers"]
    window: int | None = c.get("sliding_window")
    if window is None or c["model_type"] == "llama" or c.get("use_sliding_window") is False:
        return (None,) * layers
    if kinds := c.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if c["model_type"] == "mistral":
        return (window,) * layers
    if not c.get("use_sliding_window", False):
        return (None,) * layers
    full = c.get("max_window_layers", 0)
    return tuple(None if i < full else window for i in range(layers))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in f32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the cache."""

    def __init__(self, build: "Builder", i: int, c: LlamaConfig) -> None:
        super().__init__()
        at = f"model.layers.{i}.self_attn"
        self.layer, self.c, self.window = i, c, c.windows[i]
        self.q_proj, self.k_proj = build.linear(f"{at}.q_proj"), build.linear(f"{at}.k_proj")
        self.v_proj, self.o_proj = build.linear(f"{at}.v_proj"), build.linear(f"{at}.o_proj")
        self.q_norm = build.norm(f"{at}.q_norm", c.norm_eps, optional=True)
        self.k_norm = build.norm(f"{at}.k_norm", c.norm_eps, optional=True)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.c.heads, self.c.head_size)
        k = self.k_proj(x).view(B, T, self.c.kv_heads, self.c.head_size)
        v = self.v_proj(x).view(B, T, self.c.kv_heads, self.c.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.c.rope.turn(q, *cos_sin), self.c.rope.turn(k, *cos_sin)
        k, v = cache.append(self.layer, k, v)  # [B, Hkv, S, D]
        mask, causal = _mask(T, k.shape[2], self.window, x.device)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


def _mask(T: int, S: int, window: int | None, device: torch.device) -> tuple[Tensor | None, bool]:
    """Which of S cached tokens each of the last T may see: (bool [T, S] or None for all, plainly causal or not)."""
    if window is None or window >= S:
        if T == 1:
            return None, False
        if T == S:
            return None, True
    query = torch.arange(S - T, S, device=device)[:, None]
    key = torch.arange(S, device=device)
    seen = key <= query
    return (seen if window is None else seen & (key > query - window)), False


class Layer(nn.Module):
    """Attention, then the gated feed-forward, each on the residual stream."""

    def __init__(self, build: "Builder", i: int, c: LlamaConfig) -> None:
        super().__init__()
        at = f"model.layers.{i}"
        self.attention = Attention(build, i, c)
        self.norm_attention = build.norm(f"{at}.input_layernorm", c.norm_eps)
        self.norm_mlp = build.norm(f"{at}.post_attention_layernorm", c.norm_eps)
        self.gate, self.up = build.linear(f"{at}.mlp.gate_proj"), build.linear(f"{at}.mlp.up_proj")
        self.down = build.linear(f"{at}.mlp.down_proj")

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos_sin, cache)
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The whole model."""

    def __init__(self, build: "Builder", c: LlamaConfig) -> None:
        super().__init__()
        self.c, self.dtype, self.device = c, build.dtype, build.device
        embedding = build.matrix("model.embed_tokens")
        self.embedding = embedding.dequantize(build.dtype)  # [V, width]
        self.layers = nn.ModuleList(Layer(build, i, c) for i in range(c.layers))
        self.norm = build.norm("model.norm", c.norm_eps)
        tied = DenseTensor(self.embedding) if embedding.format == "dense" else embedding
        self.head = build.linear("lm_head", tied if c.tied else None)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, last: bool = False) -> Tensor:
        """Return logits f32 [B, T, V] (T = 1 with `last`) for tokens [B, T] that follow what is in the cache."""
        x = F.embedding(tokens, self.embedding)  # [B, T, width]
        position = torch.arange(cache.length, cache.length + tokens.shape[1], device=self.device)
        cos_sin = self.c.rope.angles(position, self.dtype)
        cache.grow(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos_sin, cache)
        cache.advance(tokens.shape[1])
        x = self.norm(x[:, -1:] if last else x)
        return self.head(x).float()  # type: ignore[no-any-return]

    def new_cache(self, batch: int = 1) -> KVCache:
        c = self.c
        return KVCache(c.layers, batch, c.kv_heads, c.head_size, c.context, self.dtype, self.device)

    def linears(self) -> list[QuantLinear]:
        """All linear layers, in the order in which they run."""
        return [m for m in self.modules() if isinstance(m, QuantLinear)]


@dataclass(frozen=True, slots=True)
class Builder:
    """Takes weights from a source and makes layers of them, on a device, at a dtype."""

    weights: Weights
    names: frozenset[str]
    dtype: torch.dtype
    device: torch.device
    kernel: str | None

    def matrix(self, module: str) -> QuantTensor:
        return self.weights.matrix(module).to(self.device)

    def tensor(self, name: str) -> Tensor:
        return self.weights.read(name).to(self.device, self.dtype)

    def linear(self, module: str, w: QuantTensor | None = None) -> QuantLinear:
        bias = self.tensor(f"{module}.bias") if f"{module}.bias" in self.names else None
        return QuantLinear(module, w or self.matrix(module), bias, self.dtype, self.kernel)

    def norm(self, module: str, eps: float, optional: bool = False) -> Any:
        if optional and f"{module}.weight" not in self.names:
            return None
        return RMSNorm(self.tensor(f"{module}.weight"), eps)
