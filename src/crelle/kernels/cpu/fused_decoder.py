"""The fused decode step: a whole Llama-family model in C++, a few tokens at a time.

    parts = ModelParts(width=..., layers=[LayerParts(...), ...], ...)
    decoder = Decoder(parts)
    logits = decoder.step(tokens, positions, kv)        # [B, V]; kv: per layer [2, rows, Hkv, capacity, D]

It takes prepared weights (crelle.kernels.cpu.planes.CpuWeight) and plain tensors (f32, f16, bf16: read where they lie,
widened in registers) as they come, and gives what the same layers give one by one in f32: the products are the same
C++ kernels, the rest differs by the rounding of sums. `unsupported` says beforehand what cannot be fused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DENSE_DTYPES, DenseTensor
from crelle.formats.kv import KVPages, turned_together
from crelle.kernels.cpu import available, core
from crelle.kernels.cpu.planes import CpuWeight, Precision
from crelle.kernels.ops import Prepared

Matrix = CpuWeight | Tensor  # [N, K]
MAX_ROWS = 16  # sequences of one step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearParts:
    """y = x @ W.T + bias."""

    weight: Matrix
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerParts:
    """One transformer layer."""

    q: LinearParts
    k: LinearParts
    v: LinearParts
    o: LinearParts
    gate: LinearParts
    up: LinearParts
    down: LinearParts
    norm_attention: Tensor  # [width]
    norm_mlp: Tensor  # [width]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    window: int | None = None  # how far back attention sees; None = all the way

    def linears(self) -> dict[str, LinearParts]:
        return {n: getattr(self, n) for n in ("q", "k", "v", "o", "gate", "up", "down")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParts:
    """A model taken apart. Rope turns pairs (i, i + D/2) of a head by position * frequency[i]."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    frequency: Tensor  # f32 [D/2]
    embedding: Matrix  # [V, width]
    layers: Sequence[LayerParts]
    norm: Tensor  # [width]
    head: LinearParts  # [V, width]; may share the embedding's memory


def matrix(w: QuantTensor, prepared: Prepared) -> Matrix | str:
    """Return what a decoder multiplies by in place of `prepared`, or why it cannot."""
    if isinstance(w, DenseTensor):
        return w.weight  # as stored: 16 bits are not widened in memory
    if isinstance(prepared.data, CpuWeight | Tensor):
        return prepared.data
    return f"kernel '{prepared.kernel.name}' multiplies the format '{w.format}', which the fused step cannot"


def unsupported(parts: ModelParts) -> str | None:
    """Return why a model cannot be decoded by the fused step, or None when it can."""
    if (reason := available()) is not None:
        return f"the C++ extension {reason}"
    if parts.head_size % 2:
        return f"needs an even head size, got {parts.head_size}"
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
    """A cache in pages (crelle.formats.kv); `table` is copied and checked in every call, so it may change in place."""

    layers: Sequence[KVPages]
    table: Tensor  # int32 [rows, pages of a row], contiguous
    centers: Sequence[Tensor] = ()  # per layer f32 [Hkv, D], where the format centres keys


Cache = Sequence[Tensor] | Paged


class Decoder:
    """Decode steps of one model. Keeps its parts alive; holds on to the cache of the latest step.

    Threads may share a decoder, each with caches of its own: calls take turns. What a call is about (tokens, positions,
    pages) is copied before it is checked, and its cache travels with it.
    """

    def __init__(self, parts: ModelParts) -> None:
        if reason := unsupported(parts):
            raise UnsupportedError(f"the fused decode step {reason}")
        precisions: set[Precision] = {m.precision for _, m in _matrices(parts) if isinstance(m, CpuWeight)}
        self.vocabulary = _shape(parts.head.weight)[0]
        try:
            self._core = core().Decoder(_plain(parts), precisions.pop() if precisions else "exact")
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
        the tokens whose logits are returned; default: all. A token has the same bits in whatever company.
        """
        some = () if want is None else (want.numpy(),)
        logits = torch.empty(len(tokens if want is None else want), self.vocabulary) if out is None else out
        where = tokens.numpy(), positions.numpy(), _numpy(rows), _table(kv)
        self._core.step(self._bound(kv), *where, logits.numpy(), None, *some)
        return logits

    def step_greedy(self, tokens: Tensor, positions: Tensor, kv: Cache, *, rows: Tensor | None = None) -> Tensor:
        """Return the most likely next tokens [B], the first of equals; the logits stay inside.

        As numpy and torch have it, a logit that is NaN is the largest: its token is returned.
        """
        best = torch.empty(tokens.shape[0], dtype=torch.int64)
        where = tokens.numpy(), positions.numpy(), _numpy(rows), _table(kv)
        self._core.step(self._bound(kv), *where, None, best.numpy())
        return best

    def generate_greedy(self, token: int, position: int, kv: Cache, count: int, ends: Sequence[int] = ()) -> list[int]:
        """Return up to `count` most likely tokens after `token`, the first of `ends` included; room must be there."""
        out = torch.empty(count, dtype=torch.int64)
        made = self._core.generate(self._bound(kv), token, position, _table(kv), out.numpy(), list(ends))
        return out[:made].tolist()

    def prefill(self, tokens: Tensor, position: int, kv: Cache, *, row: int = 0, last: bool = True) -> Tensor:
        """Return logits f32 [1, V] of the last, or [T, V] of all, of tokens [T] that stand at `position` and behind it.

        Appends their keys and values to a row of the cache, which holds those of [0, position) and has room for all.
        """
        logits = torch.empty(1 if last else tokens.shape[0], self.vocabulary)
        self._core.prefill(self._bound(kv), tokens.numpy(), position, row, _table(kv), logits.numpy(), last)
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
            fmt, size = kv.layers[0].format, kv.layers[0].head_size
            turned = turned_together(size) if fmt.rotate else 0
            words = [p.words.numpy() for p in kv.layers if p.words is not None]
            centers = [c.numpy() for c in kv.centers]
            bound = self._core.pages([p.codes for p in kv.layers], words, fmt.bits, turned, centers)
        else:
            bound = self._core.blocks(tensors)
        self._latest = tensors, bound
        return bound


def _tensors(kv: Cache) -> list[Tensor]:
    if not isinstance(kv, Paged):
        return list(kv)
    return [*kv.centers, *(t for p in kv.layers for t in p.tensors())]


def _table(kv: Cache) -> Any:
    return kv.table.numpy() if isinstance(kv, Paged) else None


def _matrices(parts: ModelParts) -> Iterator[tuple[str, Matrix]]:
    yield "the embedding", parts.embedding
    for i, layer in enumerate(parts.layers):
        for name, linear in layer.linears().items():
            yield f"{name} of layer {i}", linear.weight
    yield "the head", parts.head.weight


def _numpy(t: Tensor | None) -> Any:
    return None if t is None else t.numpy()  # crosses the border to C++ quicker than a tensor


def _shape(m: Matrix) -> tuple[int, int]:
    N, K = m.shape if isinstance(m, Tensor) else m.data.shape
    return N, K


@dataclass(frozen=True, slots=True)
class _Plain:
    """Names and what C++ reads under them."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


def _plain(part: Any) -> Any:
    """Turn parts into what C++ takes: prepared weights and plain matrices as they are, vectors as f32."""
    if isinstance(part, CpuWeight):
        return part.data
    if isinstance(part, Tensor):
        part = part.detach()
        return part.contiguous() if part.dim() == 2 else part.float().contiguous()
    if isinstance(part, LinearParts | LayerParts | ModelParts):
        return _Plain({n: _plain(getattr(part, n)) for n in part.__dataclass_fields__})
    if isinstance(part, list | tuple):
        return [_plain(p) for p in part]
    return part
