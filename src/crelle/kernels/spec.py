"""What a decoder is made of, as data. Families (crelle.models.families) write specs, executors read them.

    x = embedding[ids] * embedding_scale (+ positions[at + first])
    for each layer, by the placement of its norms:
        pre        x += attention(norm(x));             x += mlp(norm(x))
        post       x = norm(x + attention(x));          x = norm(x + mlp(x))
        sandwich   x += norm(attention(norm(x)));       x += norm(mlp(norm(x)))
        reordered  x += norm(attention(x));             x += norm(mlp(x))
        parallel (pre only)                             x += attention(norm(x)) + mlp(norm(x))
    where x += y stands for x = x + residual_scale * y
    logits = cap(logit_scale * head(norm(x)))           cap(y) = softcap * tanh(y / softcap), or y
    An encoder's attention looks in both directions; it has no head, and its x is what it is asked for.

    attention   q, k, v = heads of x; q and k normed, then rotated; softmax(cap(scale * q k)) v over the window; o
                with sinks, the softmax of a head has one more score, which has no value: it only takes weight
    mlp         down(act(gate x) * up x) where gated, down(act(up x)) otherwise
                swigluoai: down(g sigmoid(1.702 g) * (u + 1)), g = min(gate x, 7), u = up x within -7 and 7
    experts     router(x) -> softmax; the top ones' mlps, weighted; and sigmoid(shared_gate x) * a shared one's

An executor answers `supports(spec, ...)` with None, or with a sentence that says what of a spec it lacks. The torch
forward (crelle.models.decoder) runs all of them.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post", "sandwich", "reordered"]
Expert = int | Literal["shared"] | None  # which feed-forward of a layer; None: it has only one
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """rms: x / rms(x) * (offset + weight); layer: (x - mean) / std * weight + bias. Sums are in f32."""

    kind: NormKind
    eps: float
    offset: float = 0.0  # added to the stored weight; loaded norms have it added already
    affine: bool = True  # has a weight (and, layer norms, a bias)


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """Rotates pairs (i, i + R/2) of the first R channels of a head by position * frequency[i].

    interleaved: the pairs are (2i, 2i + 1). Builders put the rows of q and k in the order of the other kind, which
    leaves scores as they are, so that executors know only that one.
    """

    frequency: Tensor = field(repr=False)  # f32 [R/2], radians per position
    interleaved: bool = False
    attention_factor: float = 1.0  # of cos and sin (yarn, longrope); keys are stored without, queries have its square

    @property
    def channels(self) -> int:
        return 2 * self.frequency.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention; H query heads share Hkv key and value heads of D channels."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float  # of the scores; most often head_size ** -0.5
    window: int | None = None  # tokens that a token sees, itself included; None: all
    rope: RopeSpec | None = None
    qk_norm: NormSpec | None = None  # of each head of q and k, before rope
    whole_qk_norm: bool = False  # of all heads of q, and all of k, as one vector
    softcap: float | None = None  # of the scores
    bias: bool = False  # q, k, v and o may have biases
    causal: bool = True  # a token sees no later ones
    sinks: bool = False  # a score per head that every token sees

    @property
    def normed(self) -> dict[str, int]:
        """Return the sizes of the norms of q and k, by slot."""
        if self.qk_norm is None:
            return {}
        q, k = (self.heads, self.kv_heads) if self.whole_qk_norm else (1, 1)
        return {"q_norm": q * self.head_size, "k_norm": k * self.head_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A router and a list of feed-forwards, of which each token takes some."""

    count: int
    top: int  # experts of a token
    normalize: bool = True  # the weights of a token's experts add up to 1
    shared: int = 0  # width of an expert that all tokens take, weighted by a gate of its own; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """The feed-forward."""

    inner: int
    activation: Activation
    gated: bool
    experts: ExpertsSpec | None = None

    @property
    def feed_forwards(self) -> tuple[Expert, ...]:
        if self.experts is None:
            return (None,)
        return *range(self.experts.count), *(("shared",) if self.experts.shared else ())

    def width_of(self, expert: Expert) -> int:
        return self.experts.shared if self.experts is not None and expert == "shared" else self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    placement: Placement = "pre"
    residual_scale: float = 1.0
    parallel: bool = False  # attention and feed-forward read the same x
    shared_norm: bool = False  # and, where parallel, the same norm of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole decoder."""

    width: int  # of the residual stream
    vocabulary: int
    context: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None  # before the head
    tied: bool  # the head is the embedding
    words: int = 0  # width of the embedding and of the head's input; 0: width, else projections stand between
    learned_positions: int | None = None  # row of the position table at which position 0 stands; None: no table
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None  # of the logits
    token_types: int = 0  # rows of a table whose first one is added to every token of a single text (BERT)
    embedding_norm: NormSpec | None = None  # of what goes into the first layer

    @property
    def encoder(self) -> bool:
        """Whether attention looks in both directions: such a model has no head and generates nothing."""
        return not self.layers[0].attention.causal

    @property
    def embedding_width(self) -> int:
        return self.words or self.width

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ropes of the layers, in order of appearance."""
        return tuple(dict.fromkeys(a.rope for a in self.attentions if a.rope is not None))

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.layers)

    # Caches and kernels have one shape for all layers; `uniform` families need no more than the first layer's.

    @property
    def heads(self) -> int:
        return self.layers[0].attention.heads

    @property
    def kv_heads(self) -> int:
        return self.layers[0].attention.kv_heads

    @property
    def head_size(self) -> int:
        return self.layers[0].attention.head_size

    @property
    def inner(self) -> int:
        """The widest feed-forward."""
        return max(layer.mlp.inner for layer in self.layers)
