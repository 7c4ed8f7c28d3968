"""The torch forward of any DecoderSpec (crelle.kernels.spec): reference, prompts, calibration, training, any device.

Token shapes are free: x is [B, T, width] for B sequences of the same length with a cache of their own, and [N, width]
for the tokens of many sequences that share pages; a cache's `attend` knows which (crelle.models.cache, .batched).
How products, activations and angles are computed is a `Compute`.

Shapes: H heads, Hkv key and value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.formats.kv.pages import KVFormat
from crelle.kernels import ops
from crelle.kernels.cpu.fused_decoder import MAX_ROWS, FusedDecoder
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.kernels.spec import Activation, AttentionSpec, DecoderSpec, Expert, ExpertsSpec, LayerSpec, RopeSpec
from crelle.models.builder import Builder
from crelle.models.cache import Cache, CacheSizes, KVCache, PagedCache, key_centers
from crelle.models.families.base import Architecture
from crelle.models.fused import fuse
from crelle.models.linear import QuantEmbedding, QuantLinear
from crelle.models.rope import angles, halves, rotate

if TYPE_CHECKING:
    from crelle.kernels.cuda.step.decode_step import Step

LIMIT = 7.0  # of gate and up in gpt-oss


def _swigluoai(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swigluoai": _swigluoai,
}
Angles = tuple[Tensor, Tensor] | None  # cos and sin [T, 1, R]


class Attend(Protocol):
    """A cache, as a layer sees it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        """Store k and v [..., Hkv, D]; return what q [..., H, D] sees, in q's shape."""
        ...


class Compute:
    """How a forward computes what more than one kernel can: here plainly, elsewhere batch-invariant."""

    def linear(self, linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x)  # type: ignore[no-any-return]

    def linears(self, linears: Sequence[Any], x: Tensor) -> list[Tensor]:
        """Multiply one input by several matrices; it is encoded once where their kernels share it."""
        if _share(linears):
            encoded = ops.encode(x, linears[0].prepared)
            return [linear(encoded) for linear in linears]
        return [self.linear(linear, x) for linear in linears]

    def activate(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return f(x)

    def inner(self, f: Callable[[Tensor], Tensor], gate: Tensor | None, up: Tensor) -> Tensor:
        """Return what a feed-forward's last product reads."""
        return self.activate(f, up) if gate is None else self.activate(f, gate) * up

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to the residual stream."""
        return x + y

    def angles(self, rope: RopeSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return angles(rope, positions, dtype)

    def rotated(self, q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries and keys at their positions, for attention."""
        return rotate(q, *cos_sin), rotate(k, *cos_sin)

    def expert(self, expert: "Mlp", x: Tensor, rows: Tensor) -> Tensor | None:
        """Run an expert on those rows of x [N, width] that are its tokens; None where it has none."""
        return expert(x[rows], self) if len(rows) else None


def _share(linears: Sequence[Any]) -> bool:
    """Whether one encoded input serves all of these; not where comparing permutations would wait for a GPU."""
    first, *others = linears
    if not all(isinstance(linear, QuantLinear) for linear in linears):
        return False
    if first.problem.permuted and first.problem.device != "cpu":
        return False
    return all(ops.shares(first.prepared, linear.prepared) for linear in others)


PLAIN = Compute()


class Attention(nn.Module):
    """Grouped-query attention over a cache."""

    def __init__(self, build: Builder, arch: Architecture, i: int) -> None:
        super().__init__()
        s: AttentionSpec = arch.spec.layers[i].attention
        self.layer, self.spec, self.width = i, s, arch.spec.width
        q, kv, width = s.heads * s.head_size, s.kv_heads * s.head_size, arch.spec.width
        sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        # Interleaved pairs become halves: by the order of rows where the model runs, else in the forward.
        orders = {} if s.rope is None else {"q": halves(s.rope, s.heads, s.head_size)}
        orders |= {} if s.rope is None else {"k": halves(s.rope, s.kv_heads, s.head_size)}
        self.reorder = None if build.folds or s.rope is None else halves(s.rope, 1, s.head_size)
        rows = orders if build.folds else {}
        linears = {slot: build.linear_of(arch, i, slot, *size, rows.get(slot)) for slot, size in sizes.items()}
        self.q, self.k, self.v, self.o = linears["q"], linears["k"], linears["v"], linears["o"]
        normed = {slot: build.norm_of(arch, i, slot, size, s.qk_norm) for slot, size in s.normed.items()}
        self.q_norm, self.k_norm = normed.get("q_norm"), normed.get("k_norm")
        self.sinks = build.vector(arch.names.of_layer(i, "sinks"), s.heads) if s.sinks else None
        self.attend_options = AttendOptions(s.window, s.softcap, self.sinks)

    def forward(self, x: Tensor, cos_sin: Angles, cache: Attend, compute: Compute = PLAIN) -> Tensor:
        s, tokens = self.spec, x.shape[:-1]
        q, k, v = compute.linears((self.q, self.k, self.v), x)
        if s.whole_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[misc]
        q, k, v = (y.view(*tokens, -1, s.head_size) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not s.whole_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.reorder is not None:
            q, k = q[..., self.reorder], k[..., self.reorder]
        if cos_sin is not None:
            q, k = compute.rotated(q, k, cos_sin)
        if s.rope is not None and (factor := s.rope.attention_factor) != 1:
            R = s.rope.channels
            q = torch.cat([q[..., :R] * factor**2, q[..., R:]], -1)
        if s.scale != s.head_size**-0.5:  # caches scale by that
            q = q * (s.scale * s.head_size**0.5)
        y = cache.attend(self.layer, q, k, v, self.attend_options)
        return compute.linear(self.o, y.reshape(*tokens, -1))


class Mlp(nn.Module):
    """The feed-forward, gated or plain."""

    def __init__(self, build: Builder, arch: Architecture, i: int, expert: Expert = None) -> None:
        super().__init__()
        name = arch.spec.layers[i].mlp.activation
        self.activation, self.limited = ACTIVATIONS[name], name == "swigluoai"
        linears = build.mlp_of(arch, i, expert)
        self.gate, self.up, self.down = linears.get("gate"), linears["up"], linears["down"]

    def forward(self, x: Tensor, compute: Compute = PLAIN) -> Tensor:
        if self.gate is None:
            gate, up = None, compute.linear(self.up, x)
        else:
            gate, up = compute.linears((self.gate, self.up), x)
        if self.limited:
            up = up.clamp(-LIMIT, LIMIT) + 1
        return compute.linear(self.down, compute.inner(self.activation, gate, up))


class Experts(nn.Module):
    """A router, and feed-forwards of which each token takes the likeliest."""

    def __init__(self, build: Builder, arch: Architecture, i: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec, self.layer, self.offload = spec, i, build.offload
        self.router = build.linear_of(arch, i, "router", spec.count, arch.spec.width)
        self.experts = nn.ModuleList()
        for e in range(spec.count):
            self.experts.append(expert := Mlp(build, arch, i, e))
            build.place_expert(i, spec.count, (expert.gate, expert.up, expert.down))
        self.shared = Mlp(build, arch, i, "shared") if spec.shared else None
        self.shared_gate = build.linear_of(arch, i, "shared_gate", 1, arch.spec.width) if spec.shared else None

    def forward(self, x: Tensor, compute: Compute = PLAIN) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [N, width]
        chance, chosen = compute.linear(self.router, flat).float().softmax(-1).topk(self.spec.top)  # [N, top]
        if self.spec.normalize:
            chance = chance / chance.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            y = compute.expert(expert, flat, rows)  # type: ignore[arg-type]
            if y is not None:
                total[rows] += chance[rows, place, None].to(y.dtype) * y
        if self.shared is not None and self.shared_gate is not None:
            gate = compute.activate(torch.sigmoid, compute.linear(self.shared_gate, flat))  # [N, 1]
            total = total + gate * self.shared(flat, compute)
        return total.view_as(x)


class Layer(nn.Module):
    """Attention and feed-forward on the residual stream, with norms where the spec places them."""

    def __init__(self, build: Builder, arch: Architecture, i: int) -> None:
        super().__init__()
        s: LayerSpec = arch.spec.layers[i]
        self.spec = s
        self.attention = Attention(build, arch, i)
        norm = partial(build.norm_of, arch, i, size=arch.spec.width, spec=s.norm)
        self.norm_attention = norm("norm_attention")
        self.norm_mlp = None if s.shared_norm else norm("norm_mlp")
        sandwich = s.placement == "sandwich"
        self.post_attention_norm = norm("post_attention_norm") if sandwich else None
        self.mlp = Mlp(build, arch, i) if s.mlp.experts is None else Experts(build, arch, i, s.mlp.experts)
        self.post_mlp_norm = norm("post_mlp_norm") if sandwich else None

    def forward(self, x: Tensor, cos_sin: Angles, cache: Attend, compute: Compute = PLAIN) -> Tensor:
        scale, of = self.spec.residual_scale, compute.added

        def added(x: Tensor, y: Tensor) -> Tensor:
            return of(x, y if scale == 1 else y * scale)

        if self.spec.placement == "reordered":
            x = added(x, self.norm_attention(self.attention(x, cos_sin, cache, compute)))
            return added(x, self.norm_mlp(self.mlp(x, compute)))  # type: ignore[misc]
        if self.spec.placement == "post":
            x = self.norm_attention(added(x, self.attention(x, cos_sin, cache, compute)))
            return self.norm_mlp(added(x, self.mlp(x, compute)))  # type: ignore[misc,no-any-return]
        h = self.norm_attention(x)
        y = self.attention(h, cos_sin, cache, compute)
        if self.spec.parallel:
            h = h if self.norm_mlp is None else self.norm_mlp(x)
            return added(added(x, y), self.mlp(h, compute))
        x = added(x, y if self.post_attention_norm is None else self.post_attention_norm(y))
        y = self.mlp(self.norm_mlp(x), compute)  # type: ignore[misc]
        return added(x, y if self.post_mlp_norm is None else self.post_mlp_norm(y))


class InputLayer(nn.Module):
    """From rows of the embedding to the residual stream: a scale, a projection, learned positions, a norm."""

    def __init__(self, build: Builder, arch: Architecture) -> None:
        super().__init__()
        s, names = arch.spec, arch.names
        self.spec = s
        narrow = s.embedding_width != s.width
        self.project_in = build.linear(names.project_in, s.width, s.embedding_width) if narrow else None
        self.positions: QuantEmbedding | None = None
        if s.learned_positions is not None:
            table = build.matrix(names.positions, s.context + s.learned_positions, s.width)
            self.positions = QuantEmbedding(table, build.dtype)
        self.token_type: Tensor | None = None  # of all tokens
        if s.token_types:
            types = build.matrix(names.token_types, s.token_types, s.width)
            self.token_type = types.dequantize(torch.float32)[0].to(build.dtype)
        self.norm = None if s.embedding_norm is None else build.norm(names.embedding_norm, s.width, s.embedding_norm)

    def forward(self, embedded: Tensor, positions: Tensor, compute: Compute = PLAIN) -> Tensor:
        """Return x [..., width] for rows of the embedding [..., embedding_width] at positions [T]."""
        x = embedded if self.spec.embedding_scale == 1 else embedded * embedded.new_tensor(self.spec.embedding_scale)
        x = x if self.project_in is None else compute.linear(self.project_in, x)
        if self.positions is not None and self.spec.learned_positions is not None:
            x = x + self.positions(positions + self.spec.learned_positions)
        x = x if self.token_type is None else x + self.token_type
        return x if self.norm is None else self.norm(x)


class OutputLayer(nn.Module):
    """From the residual stream to what the head reads: a norm, a projection."""

    def __init__(self, build: Builder, arch: Architecture) -> None:
        super().__init__()
        s, names = arch.spec, arch.names
        self.norm = None if s.norm is None else build.norm(names.norm, s.width, s.norm)
        narrow = s.embedding_width != s.width
        self.project_out = build.linear(names.project_out, s.embedding_width, s.width) if narrow else None

    def forward(self, x: Tensor, compute: Compute = PLAIN) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return x if self.project_out is None else compute.linear(self.project_out, x)


def scaled_logits(logits: Tensor, spec: DecoderSpec) -> Tensor:
    """Return logits scaled and bounded by a soft cap, where the spec has them."""
    logits, cap = logits if spec.logit_scale == 1 else logits * spec.logit_scale, spec.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


class DecoderModel(nn.Module):
    """A decoder that runs."""

    def __init__(self, build: Builder, arch: Architecture) -> None:
        super().__init__()
        s = arch.spec
        self.arch, self.spec, self.build, self.dtype, self.device = arch, s, build, build.dtype, build.device
        self.lock = RLock()  # of what is made when it is first asked for, by whichever thread
        embedding = build.matrix(arch.names.embedding, s.vocabulary, s.embedding_width)
        self.embedding = QuantEmbedding(embedding, build.dtype)
        self.input = InputLayer(build, arch)
        self.layers = nn.ModuleList(Layer(build, arch, i) for i in range(len(s.layers)))
        self.output = OutputLayer(build, arch)
        self.head = build.linear(arch.names.head, s.vocabulary, s.embedding_width, embedding if s.tied else None)
        self.coded = any(linear.weight.format != "dense" for linear in self.linears())
        if build.offload is not None:
            build.offload.finish()
        self.decoder = fuse(self)  # the whole step for one token in C++, or why there is none

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: Cache, last: bool = False) -> Tensor:
        """Return logits f32 [B, T, V] (T = 1 with `last`) for tokens [B, T] that follow what is in the cache."""
        T = tokens.shape[1]
        # Prompts of a plain model stay with torch, whose f32 products are the reference. So do steps of many sequences:
        # one product of 32 rows or more is faster than several steps of 16.
        if isinstance(self.decoder, FusedDecoder) and (self.coded or (T == 1 and len(tokens) < 2 * MAX_ROWS)):
            return self._fused(self.decoder, tokens, cache, last)
        cache.grow(T)
        positions = torch.arange(cache.length, cache.length + T, device=self.device)
        x = self.hidden(tokens, positions, cache)
        cache.advance(T)
        return self.logits(x[:, -1:] if last else x)

    def hidden(self, ids: Tensor, positions: Tensor, cache: Attend, compute: Compute = PLAIN) -> Tensor:
        """Return x [..., width] behind all layers, for ids [...] at positions [T]."""
        x = self.input(self.embedding(ids), positions, compute)
        found = {rope: compute.angles(rope, positions, self.dtype) for rope in self.spec.ropes}
        for layer, s in zip(self.layers, self.spec.layers, strict=True):
            x = layer(x, None if s.attention.rope is None else found[s.attention.rope], cache, compute)
        return x  # type: ignore[no-any-return]

    def logits(self, x: Tensor, compute: Compute = PLAIN) -> Tensor:
        """Return logits f32 [..., V]."""
        return scaled_logits(compute.linear(self.head, self.output(x, compute)).float(), self.spec)

    def _fused(self, decoder: FusedDecoder, tokens: Tensor, cache: Cache, last: bool) -> Tensor:
        """The same in C++: one token of each sequence in steps of up to 16, longer chunks sequence by sequence."""
        B, T = tokens.shape
        cache.grow(T)
        at, kv = cache.length, cache.stored()
        if T == 1:
            logits = torch.empty(B, 1, decoder.vocabulary)
            for rows in torch.split(torch.arange(B), MAX_ROWS):
                position, out = torch.full((len(rows),), at), logits[rows[0] : rows[-1] + 1, 0]
                decoder.step(tokens[rows, 0], position, kv, rows=rows.clone(), out=out)
        else:
            chunks = [tokens[b].contiguous() for b in range(B)]
            logits = torch.stack([decoder.prefill(t, at, kv, row=b, last=last) for b, t in enumerate(chunks)])
        cache.advance(T)
        return logits

    def at(self, bits: int) -> "DecoderModel":
        """Return the model at another precision of its checkpoint; all that has only one precision is shared."""
        return DecoderModel(replace(self.build, bits=bits), self.arch).eval()

    @cached_property
    def cuda_step(self) -> "Step":
        """The linears joined for a step on a GPU, once for all executors of this model."""
        from crelle.kernels.cuda.step.decode_step import Step

        with self.lock:
            return self.__dict__.get("cuda_step") or Step(self)

    @overload
    def new_cache(self, batch: int = 1) -> KVCache: ...
    @overload
    def new_cache(self, batch: int = 1, *, kv: KVFormat | str | int) -> Cache: ...

    def new_cache(self, batch: int = 1, *, kv: KVFormat | str | int = 16) -> Cache:
        """Return an empty cache for so many sequences; kv: 16 (the model's dtype), or pages of 8 to 2 bits."""
        s, fmt = self.spec, KVFormat.parse(kv)
        sizes = CacheSizes(len(s.layers), batch, s.kv_heads, s.head_size, s.context, self.dtype, self.device)
        if not fmt.coded:
            return KVCache(sizes)
        return PagedCache(fmt, sizes, self.key_centers if fmt.centered else None)

    @cached_property
    def key_centers(self) -> list[Tensor]:
        """What keys are stored relative to where a cache asks for it; found when it is first asked for."""
        with self.lock:
            return key_centers(self)

    def linears(self) -> list[QuantLinear]:
        """All linear layers, in the order in which they run."""
        return [m for m in self.modules() if isinstance(m, QuantLinear)]
