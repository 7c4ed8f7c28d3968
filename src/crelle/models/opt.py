"""OPT on one page: learned positions, biases, ReLU; norms before attention and feed-forward, in the 350M model behind.

    x = project_in(embed(tokens)) + positions(2, 3, …)
    for each layer:  x += attention(norm(x));       x += fc2(relu(fc1(norm(x))))      all sizes but 350M
                     x = norm(x + attention(x));    x = norm(x + fc2(relu(fc1(x))))   350M
    logits = head(project_out(norm(x)))

Only the 350M model has words narrower than its layers, hence the projections; it has no last norm.
Shapes: B sequences, T tokens, H heads, D head size, S cached tokens, V vocabulary. Source: arXiv 2205.01068.
"""

from collections.abc import Callable, Collection
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
from crelle.models.graphed import MAX_TOKENS
from crelle.models.linear import QuantEmbedding, QuantLinear
from crelle.models.settings import setting
from crelle.models.steps import OPTStep

MODEL_TYPES = ("opt",)
NOT_FUSED = "the fused step runs the Llama family, not OPT"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}  # gelu: Galactica
_FIRST = 2  # the row of the first position; the rows before were for padding


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig:
    """What the code below depends on."""

    width: int
    inner: int  # of the feed-forward
    layers: int
    heads: int
    head_size: int
    words: int  # width of the embedding and of what the head reads
    vocabulary: int
    context: int
    tied: bool
    activation: str
    biased: bool  # linears have biases
    affine: bool  # norms have weights and biases
    norm_first: bool  # before attention and feed-forward; otherwise behind them
    last_norm: bool
    norm_eps: float = 1e-5

    @property
    def kv_heads(self) -> int:
        return self.heads

    @classmethod
    def from_hf(cls, c: dict[str, Any]) -> Self:
        """Read a Hugging Face config."""
        if (act := setting(c, "activation_function")) not in ACTIVATIONS:
            raise UnsupportedError(f"the activation {shown(act)} is not one of OPT's ({', '.join(ACTIVATIONS)})")
        heads, width = setting(c, "num_attention_heads"), setting(c, "hidden_size")
        if width % heads:
            raise UnsupportedError(f"OPT's width {width} cannot be shared out among {heads} heads")
        norm_first = setting(c, "do_layer_norm_before")
        return cls(
            width=width,
            inner=setting(c, "ffn_dim"),
            layers=setting(c, "num_hidden_layers"),
            heads=heads,
            head_size=width // heads,
            words=setting(c, "word_embed_proj_dim", width),
            vocabulary=setting(c, "vocab_size"),
            context=setting(c, "max_position_embeddings"),
            tied=setting(c, "tie_word_embeddings", True),
            activation=act,
            biased=setting(c, "enable_bias"),
            affine=setting(c, "layer_norm_elementwise_affine"),
            norm_first=norm_first,
            last_norm=norm_first and not setting(c, "_remove_final_layer_norm"),
        )


def root(names: Collection[str]) -> str:
    """Return the module that all but the head is in; some checkpoints were saved without the outer `model`."""
    return "decoder" if "decoder.embed_tokens.weight" in names else "model.decoder"


class Attention(nn.Module):
    """Every head has its own keys and values."""

    def __init__(self, build: Builder, i: int, c: OPTConfig) -> None:
        super().__init__()
        at = f"{root(build.names)}.layers.{i}.self_attn"
        self.layer, self.c = i, c
        self.q_proj, self.k_proj = _linear(build, c, f"{at}.q_proj"), _linear(build, c, f"{at}.k_proj")
        self.v_proj, self.out_proj = _linear(build, c, f"{at}.v_proj"), _linear(build, c, f"{at}.out_proj")

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, self.c.heads, self.c.head_size) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = cache.attend(self.layer, q, k, v)  # [B, T, H, D]
        return self.out_proj(y.reshape(B, T, -1))  # type: ignore[no-any-return]


def _linear(build: Builder, c: OPTConfig, module: str, N: int | None = None, K: int | None = None) -> QuantLinear:
    """Build a linear of a layer, width x width unless told; where the config promises a bias, it must be there."""
    if c.biased and f"{module}.bias" not in build.names:
        raise FormatError(f"{build.weights.path} has no tensor '{module}.bias'")
    return build.linear(module, N or c.width, K or c.width)


class Layer(nn.Module):
    """Attention, then the feed-forward, each on the residual stream."""

    def __init__(self, build: Builder, i: int, c: OPTConfig) -> None:
        super().__init__()
        at = f"{root(build.names)}.layers.{i}"
        self.norm_first, self.activation = c.norm_first, ACTIVATIONS[c.activation]
        self.attention = Attention(build, i, c)
        self.norm_attention = build.layer_norm(f"{at}.self_attn_layer_norm", c.width, c.norm_eps, c.affine)
        self.norm_mlp = build.layer_norm(f"{at}.final_layer_norm", c.width, c.norm_eps, c.affine)
        self.fc1 = _linear(build, c, f"{at}.fc1", N=c.inner)
        self.fc2 = _linear(build, c, f"{at}.fc2", K=c.inner)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm_attention(x), cache)
            return x + self._feed(self.norm_mlp(x))
        x = self.norm_attention(x + self.attention(x, cache))
        return self.norm_mlp(x + self._feed(x))  # type: ignore[no-any-return]

    def _feed(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))  # type: ignore[no-any-return]


class Begin(nn.Module):
    """From words to the residual stream: positions are added."""

    def __init__(self, build: Builder, c: OPTConfig) -> None:
        super().__init__()
        at = root(build.names)
        narrow = c.words != c.width
        self.project_in = build.linear(f"{at}.project_in", c.width, c.words) if narrow else None
        positions = build.matrix(f"{at}.embed_positions", c.context + _FIRST, c.width)
        self.positions = QuantEmbedding(positions, build.dtype)

    def forward(self, words: Tensor, first: int) -> Tensor:
        """Return [B, T, width] for words [B, T, words] at the positions from `first` on."""
        x = words if self.project_in is None else self.project_in(words)
        at = torch.arange(first, first + x.shape[1], device=x.device)
        return x + self.positions(at + _FIRST)  # type: ignore[no-any-return]


class Finish(nn.Module):
    """From the residual stream to what the head reads."""

    def __init__(self, build: Builder, c: OPTConfig) -> None:
        super().__init__()
        at = root(build.names)
        narrow = c.words != c.width
        self.norm = build.layer_norm(f"{at}.final_layer_norm", c.width, c.norm_eps, c.affine) if c.last_norm else None
        self.project_out = build.linear(f"{at}.project_out", c.words, c.width) if narrow else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return x if self.project_out is None else self.project_out(x)


class OPT(Decoding):
    """The whole model."""

    c: OPTConfig

    def __init__(self, build: Builder, c: OPTConfig) -> None:
        super().__init__()
        self.c, self.build, self.dtype, self.device = c, build, build.dtype, build.device
        embedding = build.matrix(f"{root(build.names)}.embed_tokens", c.vocabulary, c.words)
        self.embedding = QuantEmbedding(embedding, build.dtype)
        self.begin = Begin(build, c)
        self.layers = nn.ModuleList(Layer(build, i, c) for i in range(c.layers))
        self.finish = Finish(build, c)
        self.head = build.linear("lm_head", c.vocabulary, c.words, embedding if c.tied else None)
        self.decoder = NOT_FUSED

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: Cache, last: bool = False) -> Tensor:
        """Return logits f32 [B, T, V] (T = 1 with `last`) for tokens [B, T] that follow what is in the cache."""
        T = tokens.shape[1]
        if isinstance(cache, KVCache) and T == 1 and len(tokens) <= MAX_TOKENS and (step := self.graphed()):
            return step.step(tokens, cache)
        cache.grow(T)
        x = self.begin(self.embedding(tokens), cache.length)  # [B, T, width]
        for layer in self.layers:
            x = layer(x, cache)
        cache.advance(T)
        x = self.finish(x[:, -1:] if last else x)  # [B, T, words]
        return self.head(x).float()  # type: ignore[no-any-return]

    def at(self, bits: int) -> "OPT":
        """Return the model at another precision of its checkpoint; all that has only one precision is shared."""
        return OPT(replace(self.build, bits=bits), self.c).eval()

    def step_lacks(self) -> str | None:
        """What of this model the step on a GPU does not have, if anything."""
        from crelle.kernels.cuda.attention import supports

        if not self.c.norm_first or self.c.words != self.c.width or not self.c.affine or not self.c.last_norm:
            return "the step has OPT's norms before its layers, with weights, and words as wide as the layers"
        if self.c.activation != "relu":
            return f"the step has OPT's relu, not {self.c.activation}"
        return supports(self.c.head_size, self.dtype)

    def make_step(self) -> OPTStep:
        """Return the step of one token on CUDA kernels; see crelle.models.graphed."""
        return OPTStep(self)

    @cached_property
    def key_centers(self) -> list[Tensor]:
        """What keys are stored relative to where a cache asks for it; found when it is first asked for."""
        with self.lock:
            return key_centers(self, None)
