"""The Llama family on one page: Llama 1, 2, 3, SmolLM2, Mistral, Qwen2, Qwen3 differ only by their config.

    x = embed(tokens)
    for each layer:  x += attention(norm(x));  x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

Shapes: B sequences, T tokens, H heads, Hkv key/value heads, D head size, S cached tokens, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.io import shown
from crelle.models.builder import Builder
from crelle.models.cache import Cache, KVCache, key_centers
from crelle.models.decoding import Decoding
from crelle.models.fused import MAX_ROWS, Decoder, fuse
from crelle.models.graphed import MAX_TOKENS
from crelle.models.linear import QuantEmbedding
from crelle.models.rope import Rope
from crelle.models.settings import layer_types, setting
from crelle.models.steps import LlamaStep

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the code below depends on."""

    width: int
    inner: int  # of the feed-forward
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
        if (act := setting(c, "hidden_act")) != "silu":
            raise UnsupportedError(f"the activation {shown(act)} is not one of the Llama family's (silu)")
        heads, width = setting(c, "num_attention_heads"), setting(c, "hidden_size")
        kv_heads = setting(c, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise FormatError(
                f"'num_attention_heads' is {heads}, which 'num_key_value_heads' = {kv_heads} cannot share"
            )
        if (head_size := setting(c, "head_dim")) is None:
            if width % heads:
                raise FormatError(f"'hidden_size' is {width}, which 'num_attention_heads' = {heads} does not divide")
            head_size = width // heads
        if head_size % 2:
            raise FormatError(f"heads are {head_size} wide, and rotary positions need an even number ('head_dim')")
        return cls(
            width=width,
            inner=setting(c, "intermediate_size"),
            layers=setting(c, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            vocabulary=setting(c, "vocab_size"),
            context=setting(c, "max_position_embeddings"),
            norm_eps=setting(c, "rms_norm_eps"),
            tied=setting(c, "tie_word_embeddings"),
            rope=Rope.from_hf(c, head_size),
            windows=_windows(c),
        )


def _windows(c: dict[str, Any]) -> tuple[int | None, ...]:
    """Mistral slides its window in every layer, Qwen only where `layer_types` or `max_window_layers` says so."""
    layers: int = setting(c, "num_hidden_layers")
    used: bool | None = setting(c, "use_sliding_window")
    if c.get("sliding_window") is None or c["model_type"] == "llama" or used is False:
        return (None,) * layers
    window: int = setting(c, "sliding_window")
    if kinds := layer_types(c, layers):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if c["model_type"] == "mistral":
        return (window,) * layers
    if not used:
        return (None,) * layers
    full = setting(c, "max_window_layers")
    return tuple(None if i < full else window for i in range(layers))


class Attention(nn.Module):
    """Grouped-query attention over the cache."""

    def __init__(self, build: Builder, i: int, c: LlamaConfig) -> None:
        super().__init__()
        at = f"model.layers.{i}.self_attn"
        self.layer, self.c, self.window = i, c, c.windows[i]
        q, kv = c.heads * c.head_size, c.kv_heads * c.head_size
        self.q_proj, self.k_proj = build.linear(f"{at}.q_proj", q, c.width), build.linear(f"{at}.k_proj", kv, c.width)
        self.v_proj, self.o_proj = build.linear(f"{at}.v_proj", kv, c.width), build.linear(f"{at}.o_proj", c.width, q)
        self.q_norm = build.norm(f"{at}.q_norm", c.head_size, c.norm_eps, optional=True)
        self.k_norm = build.norm(f"{at}.k_norm", c.head_size, c.norm_eps, optional=True)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.c.heads, self.c.head_size)
        k = self.k_proj(x).view(B, T, self.c.kv_heads, self.c.head_size)
        v = self.v_proj(x).view(B, T, self.c.kv_heads, self.c.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.c.rope.turn(q, *cos_sin), self.c.rope.turn(k, *cos_sin)
        y = cache.attend(self.layer, q, k, v, self.window)  # [B, T, H, D]
        return self.o_proj(y.reshape(B, T, -1))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention, then the gated feed-forward, each on the residual stream."""

    def __init__(self, build: Builder, i: int, c: LlamaConfig) -> None:
        super().__init__()
        at = f"model.layers.{i}"
        self.attention = Attention(build, i, c)
        self.norm_attention = build.norm(f"{at}.input_layernorm", c.width, c.norm_eps)
        self.norm_mlp = build.norm(f"{at}.post_attention_layernorm", c.width, c.norm_eps)
        self.gate = build.linear(f"{at}.mlp.gate_proj", c.inner, c.width)
        self.up = build.linear(f"{at}.mlp.up_proj", c.inner, c.width)
        self.down = build.linear(f"{at}.mlp.down_proj", c.width, c.inner)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos_sin, cache)
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Llama(Decoding):
    """The whole model."""

    c: LlamaConfig

    def __init__(self, build: Builder, c: LlamaConfig) -> None:
        super().__init__()
        self.c, self.build, self.dtype, self.device = c, build, build.dtype, build.device
        embedding = build.matrix("model.embed_tokens", c.vocabulary, c.width)
        self.embedding = QuantEmbedding(embedding, build.dtype)
        self.layers = nn.ModuleList(Layer(build, i, c) for i in range(c.layers))
        self.norm = build.norm("model.norm", c.width, c.norm_eps)
        self.head = build.linear("lm_head", c.vocabulary, c.width, embedding if c.tied else None)
        self.coded = any(linear.weight.format != "dense" for linear in self.linears())
        self.decoder = fuse(self)  # the whole step for one token in C++, or why there is none

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: Cache, last: bool = False) -> Tensor:
        """Return logits f32 [B, T, V] (T = 1 with `last`) for tokens [B, T] that follow what is in the cache."""
        # Prompts of a plain model stay with torch, whose f32 products are what everybody compares with.
        if isinstance(self.decoder, Decoder) and (self.coded or tokens.shape[1] == 1):
            return self._fused(self.decoder, tokens, cache, last)
        few = tokens.shape[1] == 1 and tokens.shape[0] <= MAX_TOKENS
        if few and isinstance(cache, KVCache) and (step := self.graphed()) is not None:
            return step.step(tokens, cache)
        x = self.embedding(tokens)  # [B, T, width]
        position = torch.arange(cache.length, cache.length + tokens.shape[1], device=self.device)
        cos_sin = self.c.rope.angles(position, self.dtype)
        cache.grow(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos_sin, cache)
        cache.advance(tokens.shape[1])
        x = self.norm(x[:, -1:] if last else x)
        return self.head(x).float()  # type: ignore[no-any-return]

    def _fused(self, decoder: Decoder, tokens: Tensor, cache: Cache, last: bool) -> Tensor:
        """The same in C++: one token of each sequence as one step, longer portions sequence by sequence."""
        B, T = tokens.shape
        cache.grow(T)
        if T == 1 and B <= MAX_ROWS:
            position = torch.full((B,), cache.length)
            logits = decoder.step(tokens[:, 0].contiguous(), position, cache.stored())[:, None]
        else:
            portion = [tokens[b].contiguous() for b in range(B)]
            at, kv = cache.length, cache.stored()
            logits = torch.stack([decoder.prefill(t, at, kv, row=b, last=last) for b, t in enumerate(portion)])
        cache.advance(T)
        return logits

    def at(self, bits: int) -> "Llama":
        """Return the model at another precision of its checkpoint; all that has only one precision is shared."""
        return Llama(replace(self.build, bits=bits), self.c).eval()

    def step_lacks(self) -> str | None:
        """What of this model the step on a GPU does not have, if anything."""
        from crelle.kernels.cuda.attention import supports

        return supports(self.c.head_size, self.dtype)

    def make_step(self) -> LlamaStep:
        """Return the step of one token on CUDA kernels; see crelle.models.graphed."""
        return LlamaStep(self)

    @cached_property
    def key_centers(self) -> list[Tensor]:
        """What keys are stored relative to where a cache asks for it; found when it is first asked for."""
        with self.lock:
            return key_centers(self, self.c.rope)
