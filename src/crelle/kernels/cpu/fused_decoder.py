"""The fused decoder: a whole model in C++, a decode step of a few tokens or prompts of many.

    parts = ModelParts(spec=..., layers=[LayerParts(...), ...], ...)
    decoder = FusedDecoder(parts)
    logits = decoder.step(tokens, positions, kv)        # [B, V]; kv: per layer [2, rows, Hkv, capacity, D], or pages
    logits = decoder.prefill(tokens, position, kv)      # [1, V]

It takes prepared weights (crelle.kernels.cpu.kernel.CpuWeight) and plain tensors (f32, f16, bf16: read where they lie,
widened in registers) as they come, and gives what the same layers give one by one in f32: the products are the same
C++ kernels, the rest differs by the rounding of sums. `supports_model` says beforehand what cannot be fused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DENSE_DTYPES, DenseTensor
from crelle.formats.kv.pages import KVPages
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.kernels.cpu import available, core
from crelle.kernels.cpu.kernel import CpuWeight, Precision
from crelle.kernels.cpu.row_ops import ACTIVATIONS
from crelle.kernels.ops import Prepared
from crelle.kernels.rotated_kernel import RotatedKernel
from crelle.kernels.spec import DecoderSpec, ExpertsSpec, LayerSpec, NormSpec

Matrix = CpuWeight | Tensor  # [N, K]
MAX_ROWS = 16  # tokens of one step
_ACTIVATIONS = (*ACTIVATIONS, "swigluoai")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearParts:
    """y = x @ W.T + bias."""

    weight: Matrix
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormParts:
    """What a norm multiplies by and adds; the spec says the rest. Ones where a norm has no weight."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpParts:
    """A feed-forward."""

    up: LinearParts
    down: LinearParts
    gate: LinearParts | None = None  # gated ones


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertsParts:
    """A mixture of experts in place of a feed-forward."""

    router: LinearParts  # [experts, width]
    each: Sequence[MlpParts]  # the one that all tokens take, if there is one, is the last
    shared_gate: LinearParts | None = None  # [1, width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerParts:
    """The tensors of one layer."""

    q: LinearParts
    k: LinearParts
    v: LinearParts
    o: LinearParts
    norm_attention: NormParts  # [width]
    norm_mlp: NormParts | None  # [width]; None: that of attention
    up: LinearParts | None = None  # where there are no experts
    down: LinearParts | None = None
    gate: LinearParts | None = None  # gated feed-forwards
    experts: ExpertsParts | None = None
    post_attention_norm: NormParts | None = None  # [width]; sandwich: of what attention adds to the stream
    post_mlp_norm: NormParts | None = None
    q_norm: NormParts | None = None  # [D], or of all heads
    k_norm: NormParts | None = None
    sinks: Tensor | None = None  # [H]

    def linears(self) -> dict[str, LinearParts]:
        found = {n: getattr(self, n) for n in ("q", "k", "v", "o", "gate", "up", "down")}
        if (experts := self.experts) is not None:
            found |= {"router": experts.router, "shared_gate": experts.shared_gate}
            for i, expert in enumerate(experts.each):
                found |= {f"{n} of expert {i}": getattr(expert, n) for n in ("gate", "up", "down")}
        return {n: linear for n, linear in found.items() if linear is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParts:
    """A model taken apart: what it is (spec) and its tensors."""

    spec: DecoderSpec
    embedding: Matrix  # [V, width]
    layers: Sequence[LayerParts]
    norm: NormParts | None  # [width]
    head: LinearParts  # [V, width]; may share the embedding's memory
    positions: Tensor | None = None  # [rows, width]; learned positions
    project_in: LinearParts | None = None  # [width, words] after an embedding of `words` columns, and a head's
    project_out: LinearParts | None = None  # [words, width]


def matrix(w: QuantTensor, prepared: Prepared) -> Matrix | str:
    """Return what a decoder multiplies by in place of `prepared`, or why it cannot."""
    if isinstance(w, DenseTensor):
        return w.weight  # as stored: 16 bits are not widened in memory
    if isinstance(w, RotatedTensor) and w.outputs is not None:
        return "the fused step rotates inputs, not outputs of matrices"
    if isinstance(prepared.data, CpuWeight | Tensor):
        return prepared.data
    if isinstance(prepared.kernel, RotatedKernel):
        return f"the fused step rotates inputs for trellis codes only, not for the format '{prepared.problem.format}'"
    return f"kernel '{prepared.kernel.name}' multiplies the format '{w.format}', which the fused step cannot"


def supports(spec: DecoderSpec) -> str | None:
    """Return what of a spec the fused decoder does not have, or None when it has all of it."""
    first = spec.layers[0].attention
    if first.head_size % 2:
        return f"needs an even head size, got {first.head_size}"
    for i, layer in enumerate(spec.layers):
        a = layer.attention
        if not a.causal:
            return "decodes token by token, and an encoder's attention looks in both directions"
        if layer.mlp.activation not in _ACTIVATIONS:
            return f"has the activations {', '.join(_ACTIVATIONS)}, not {layer.mlp.activation} of layer {i}"
        if layer.parallel and layer.placement != "pre":
            return f"runs attention and feed-forward side by side where norms stand before them, not as in layer {i}"
        if (a.heads, a.kv_heads, a.head_size) != (first.heads, first.kv_heads, first.head_size):
            return f"needs heads of one shape in all layers, layer {i} has others"
        if a.rope is not None and a.rope.channels > a.head_size:
            return f"rotates at most the {a.head_size} channels of a head, got {a.rope.channels} in layer {i}"
    return None


def supports_model(parts: ModelParts) -> str | None:
    """Return why a model cannot be decoded by the fused step, or None when it can."""
    if (reason := available()) is not None:
        return f"the C++ extension {reason}"
    if (reason := supports(parts.spec)) is not None:
        return reason
    for name, m in _matrices(parts):
        if isinstance(m, CpuWeight):
            continue
        if m.device.type != "cpu":
            return f"runs on the CPU, {name} is on {m.device}"
        if m.dtype not in DENSE_DTYPES:
            return f"takes plain matrices of f32, f16 or bf16, {name} is {str(m.dtype).removeprefix('torch.')}"
        if not m.is_contiguous():
            return f"reads plain matrices row by row, {name} is not contiguous"
    coded = [m for _, m in _matrices(parts) if isinstance(m, CpuWeight)]
    if len(kinds := {m.precision for m in coded}) > 1:
        return f"needs one precision in all layers, got {' and '.join(sorted(kinds))}"
    if len(isas := {m.data.isa for m in coded}) > 1:
        return f"needs weights laid out for one instruction set, got {' and '.join(sorted(isas))}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """A cache in pages (crelle.formats.kv.pages); each call copies and checks `table`, so it may change in place."""

    layers: Sequence[KVPages]
    table: Tensor  # int32 [rows, pages of a row], contiguous
    centers: Sequence[Tensor | None] = ()  # per layer f32 [Hkv, D], where its format centres keys; empty: none


Cache = Sequence[Tensor] | Paged


class FusedDecoder:
    """Decode steps and prompts of one model. Keeps its parts alive; holds on to the cache of the latest step.

    Threads may share a decoder, each with caches of its own: calls take turns. What a call is about (tokens, positions,
    pages) is copied before it is checked, and its cache travels with it.
    """

    def __init__(self, parts: ModelParts) -> None:
        if reason := supports_model(parts):
            raise UnsupportedError(f"the fused decode step {reason}")
        precisions: set[Precision] = {m.precision for _, m in _matrices(parts) if isinstance(m, CpuWeight)}
        self.vocabulary = _shape(parts.head.weight)[0]
        try:
            self._core = core().Decoder(_for_core(parts), precisions.pop() if precisions else "exact")
        except ValueError as e:
            raise UnsupportedError(f"the fused decode step cannot run this model: {e}") from e
        self._latest: tuple[list[Tensor], Any] = [], None  # a cache's tensors and what C++ knows them as

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Cache,
        *,
        rows: Tensor | None = None,
        want: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return logits f32 [B, V] for tokens [B] that stand at positions [B] (all int64) of the cache's rows.

        Appends each token's key and value at its position and attends over [0, position]. `kv` holds per layer
        [2, rows, Hkv, capacity, D] in f32, f16 or bf16, or pages; token i belongs to row rows[i], or to row i. Several
        tokens may be of one row: a piece of its prompt, whose later tokens see the earlier. want: indices (int64) of
        the tokens whose logits are returned; default: all. Batch-invariant: a token has the same bits in any batch.
        """
        logits = torch.empty(len(tokens if want is None else want), self.vocabulary) if out is None else out
        where = tokens.numpy(), positions.numpy(), _numpy(rows), _table(kv)
        self._core.step(self._bound(kv), *where, logits.numpy(), _numpy(want))
        return logits

    def prefill(self, tokens: Tensor, position: int, kv: Cache, *, row: int = 0, last: bool = True) -> Tensor:
        """Return logits f32 [1, V] of the last, or [T, V] of all, of tokens [T] that stand at `position` and behind it.

        Appends their keys and values to a row of the cache, which holds those of [0, position) and has room for all.
        """
        count, at, rows = (torch.tensor([n]) for n in (len(tokens), position, row))
        return self.prefill_batch(tokens, count, at, kv, rows=rows, want=torch.zeros(1).long() if last else None)

    def prefill_batch(
        self,
        tokens: Tensor,
        counts: Tensor,
        positions: Tensor,
        kv: Cache,
        *,
        rows: Tensor | None = None,
        want: Tensor | None = None,
    ) -> Tensor:
        """Return logits f32 [W, V] of the last tokens of the sequences `want` [W], or [T, V] of all tokens.

        Chunks of the prompts of S sequences in one pass over the weights: the next counts[s] of tokens [T] stand at
        positions[s] and behind it in row rows[s] (default: s) of the cache, which holds all before them. want: indices
        of sequences, rising. All int64. Batch-invariant: the bits of a token depend neither on how its prompt was split
        into chunks nor on other sequences (csrc/decoder/prefill.h says how).
        """
        logits = torch.empty(len(tokens if want is None else want), self.vocabulary)
        where = tokens.numpy(), counts.numpy(), positions.numpy(), _numpy(rows), _table(kv)
        self._core.prefill(self._bound(kv), *where, logits.numpy(), _numpy(want))
        return logits

    def prefill_phases(self) -> dict[str, float]:
        """Return seconds per phase of the latest prefill."""
        return dict(self._core.prefill_phases())

    def time_phases(self, on: bool = True) -> None:
        """Start (anew) to measure the phases of a step."""
        self._core.time_phases(on)

    def phases(self) -> dict[str, float]:
        """Return seconds per phase since `time_phases`; of all of them, those `waiting` and `preparing` inputs."""
        return dict(self._core.phases())

    def _bound(self, kv: Cache) -> Any:
        """Return what C++ knows the cache as; made anew where it is another one than that of the latest call."""
        # A cache that grew consists of new tensors. Those of before are held, so that no new one can pass for them.
        tensors = _tensors(kv)
        latest, bound = self._latest  # once: another thread may replace the pair, never change it
        if (
            bound is not None
            and len(tensors) == len(latest)
            and all(a is b for a, b in zip(tensors, latest, strict=True))
        ):
            return bound
        if isinstance(kv, Paged):
            centers = kv.centers or [None] * len(kv.layers)
            layers = [_pages(p, c) for p, c in zip(kv.layers, centers, strict=True)]
            bound = self._core.pages(layers, kv.layers[0].format.page, torch.empty(0, dtype=kv.layers[0].dtype))
        else:
            bound = self._core.blocks(tensors)
        self._latest = tensors, bound
        return bound


def _tensors(kv: Cache) -> list[Tensor]:
    if not isinstance(kv, Paged):
        return list(kv)
    return [*(c for c in kv.centers if c is not None), *(t for p in kv.layers for t in p.tensors())]


def _pages(p: KVPages, center: Tensor | None) -> SimpleNamespace:
    """Return what C++ reads of a layer's pages."""
    kinds = p.format.key, p.format.value
    return SimpleNamespace(
        codes=p.codes,
        words=p.words,
        center=_numpy(center),
        bits=tuple(k.bits for k in kinds),
        groups=tuple(k.groups(p.head_size) for k in kinds),
        rotate=tuple(k.rotate for k in kinds),
    )


def _table(kv: Cache) -> Any:
    return kv.table.numpy() if isinstance(kv, Paged) else None


def _matrices(parts: ModelParts) -> Iterator[tuple[str, Matrix]]:
    yield "the embedding", parts.embedding
    for i, layer in enumerate(parts.layers):
        for name, linear in layer.linears().items():
            yield f"{name} of layer {i}", linear.weight
    yield "the head", parts.head.weight
    for name, projection in {"project_in": parts.project_in, "project_out": parts.project_out}.items():
        if projection is not None:
            yield name, projection.weight
    if parts.positions is not None:
        yield "the table of positions", parts.positions


def _numpy(t: Tensor | None) -> Any:
    return None if t is None else t.numpy()  # crosses the border to C++ quicker than a tensor


def _shape(m: Matrix) -> tuple[int, int]:
    N, K = m.shape if isinstance(m, Tensor) else m.data.shape
    return N, K


def _for_core(parts: ModelParts) -> SimpleNamespace:
    """Return what C++ reads: scalars by name, prepared weights, plain matrices as they are, vectors as f32."""
    spec, ropes = parts.spec, parts.spec.ropes
    first = spec.layers[0].attention
    return SimpleNamespace(
        width=spec.width,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_size=first.head_size,
        ropes=[_vector(r.frequency) for r in ropes],
        embedding=_matrix(parts.embedding),
        embedding_scale=spec.embedding_scale,
        positions=None if parts.positions is None else _matrix(parts.positions),
        position_offset=spec.learned_positions or 0,
        norm=_norm(parts.norm, spec.norm),
        logit_scale=spec.logit_scale,
        softcap=spec.softcap or 0.0,
        head=_linear(parts.head),
        project_in=_linear(parts.project_in),
        project_out=_linear(parts.project_out),
        layers=[
            _layer(part, layer, -1 if (rope := layer.attention.rope) is None else ropes.index(rope))
            for part, layer in zip(parts.layers, spec.layers, strict=True)
        ],
    )


def _layer(part: LayerParts, spec: LayerSpec, rope: int) -> SimpleNamespace:
    a, norm_mlp = spec.attention, part.norm_attention if spec.shared_norm else part.norm_mlp
    # C++ norms what attention and feed-forward read, what they return, or the stream after them.
    place = {"post": "stream", "reordered": "post"}.get(spec.placement, "norm")
    slots = ("norm_{}", "post_{}_norm", "stream_{}_norm")
    norms: dict[str, NormParts | None] = {slot.format(of): None for slot in slots for of in ("attention", "mlp")}
    for name, norm in (("attention", part.norm_attention), ("mlp", norm_mlp)):
        norms[f"norm_{name}" if place == "norm" else f"{place}_{name}_norm"] = norm
    if spec.placement == "sandwich":
        norms |= {"post_attention_norm": part.post_attention_norm, "post_mlp_norm": part.post_mlp_norm}
    factor = 1.0 if a.rope is None else a.rope.attention_factor**2  # of queries
    whole = a.rope is None or a.rope.channels == a.head_size
    return SimpleNamespace(
        **{n: _linear(getattr(part, n)) for n in ("q", "k", "v", "o", "gate", "up", "down")},
        **{n: _norm(norm, spec.norm) for n, norm in norms.items()},
        **{n: _norm(getattr(part, n), a.qk_norm) for n in ("q_norm", "k_norm")},
        experts=_experts(part.experts, spec.mlp.experts),
        gated=spec.mlp.gated,
        activation=spec.mlp.activation,
        window=a.window,
        rope=rope,
        scale=a.scale * (factor if whole else 1.0),
        rotated_scale=1.0 if whole else factor,
        whole_qk_norm=a.qk_norm is not None and a.whole_qk_norm,
        sinks=_vector(part.sinks),
        softcap=a.softcap or 0.0,
        residual_scale=spec.residual_scale,
        parallel=spec.parallel,
    )


def _experts(part: ExpertsParts | None, spec: ExpertsSpec | None) -> SimpleNamespace | None:
    if part is None or spec is None:
        return None
    each = [SimpleNamespace(gate=_linear(e.gate), up=_linear(e.up), down=_linear(e.down)) for e in part.each]
    router, shared_gate = _linear(part.router), _linear(part.shared_gate)
    return SimpleNamespace(top=spec.top, normalize=spec.normalize, router=router, shared_gate=shared_gate, each=each)


def _norm(part: NormParts | None, spec: NormSpec | None) -> SimpleNamespace | None:
    if part is None or spec is None:
        return None
    return SimpleNamespace(kind=spec.kind, eps=spec.eps, weight=_vector(part.weight), bias=_vector(part.bias))


def _linear(part: LinearParts | None) -> SimpleNamespace | None:
    return None if part is None else SimpleNamespace(weight=_matrix(part.weight), bias=_vector(part.bias))


def _matrix(m: Matrix) -> Any:
    return m.data if isinstance(m, CpuWeight) else m.detach().contiguous()


def _vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().float().contiguous()
