"""Models for calibration and training: the layers that are served, over linears whose weights can be replaced."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor, input_rounding
from crelle.formats.kv.pages import KVFormat, as_stored
from crelle.formats.storage.open import Weights
from crelle.kernels.cpu import bf16_attention, f32_attention, row_ops
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.kernels.spec import Activation, DecoderSpec, NormSpec, RopeSpec
from crelle.models.builder import Builder, LayerNorm, RMSNorm
from crelle.models.cache import attention, key_center
from crelle.models.decoder import (
    ACTIVATIONS,
    Attend,
    Compute,
    Experts,
    InputLayer,
    Layer,
    Mlp,
    OutputLayer,
    scaled_logits,
)
from crelle.models.encoder import Padded
from crelle.models.families.base import Architecture
from crelle.models.loader import architecture, in_usual_form
from crelle.models.read_ahead import ReadAhead
from crelle.models.reproducible import fix_backward_order
from crelle.models.rope import angles
from crelle.models.tensor_shapes import tensor_shapes
from crelle.quantizers.calibration.layer_api import Block, ScaleFold, Tape, TrainableLinear, ValueHeads, fused_on_cpu

_NAMES: dict[Callable[[Tensor], Tensor], Activation] = {
    f: name for name, f in ACTIVATIONS.items() if name in row_ops.ACTIVATIONS
}


class _NoCache:
    """A whole sequence at a time needs no cache; it may read keys and values as one of `kv` would store them.

    both: attention in both directions (encoders).
    """

    def __init__(
        self, tape: Tape | None, kv: KVFormat | None, center: Tensor | None, both: Padded | None = None
    ) -> None:
        self._tape, self._kv, self._center, self._both = tape, kv, center, both

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        def compute() -> Tensor:
            if self._both is not None:
                return self._both.attend(layer, q, k, v)
            keys, values = k, v
            if self._kv is not None:
                keys, values = as_stored(k, self._kv.key, self._center), as_stored(v, self._kv.value)
            everything = how.plain and (how.window is None or how.window >= q.shape[1])
            fused = fused_on_cpu(q)
            if everything and fused == torch.bfloat16 and bf16_attention.supports(q, keys):
                return bf16_attention.causal_attention(q, keys, values)
            if how.plain and fused == torch.float32 and f32_attention.supports(q, keys):
                return f32_attention.causal_attention(q, keys, values, how.window)
            y = attention(q, keys.transpose(1, 2), values.transpose(1, 2), how)
            if y.is_cuda:
                fix_backward_order(y)
            return y

        # Contiguous on a tape: o's input is then a view of it, and not a copy for every pass.
        return compute() if self._tape is None else self._tape(lambda: compute().contiguous())


class _Keys:
    """Keeps the keys of a layer."""

    keys: Tensor  # [B, T, Hkv, D]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        self.keys = k
        return torch.zeros_like(q)


class _WholeSequences(Compute):
    """Angles of positions 0, 1, … are computed once: a recorded CUDA graph cannot make them."""

    tape: Tape | None = None  # of the layer that runs
    lengths: Tensor | None = None  # [B] of an encoder's sequences, where they differ

    def __init__(self) -> None:
        self._known: dict[tuple[RopeSpec, int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def first(self, rope: RopeSpec, T: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = rope, T, device, dtype
        if key not in self._known:
            self._known[key] = angles(rope, torch.arange(T, device=device), dtype)
        return self._known[key]

    def rotated(self, q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._repeated:  # attention, which alone reads them, is on the tape
            return q, k
        if (dtype := fused_on_cpu(q)) is not None:
            return row_ops.rotate(q, *cos_sin, dtype), row_ops.rotate(k, *cos_sin, dtype)
        return super().rotated(q, k, cos_sin)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        if fused_on_cpu(x) is None:
            return super().added(x, y)
        return row_ops.added(x, y, torch.promote_types(x.dtype, y.dtype))

    def linears(self, linears: Sequence[Any], x: Tensor) -> list[Tensor]:
        """Round their input to the dtype of products once, and not for each of them, where this takes time."""
        kind = x.device.type
        slow = torch.is_grad_enabled() or (kind == "cpu" and not self._repeated)
        if slow and torch.is_autocast_enabled(kind) and all(m.activation is None for m in linears):
            x = x.to(torch.get_autocast_dtype(kind))
        return super().linears(linears, x)

    def inner(self, f: Callable[[Tensor], Tensor], gate: Tensor | None, up: Tensor) -> Tensor:
        """On a CPU it takes a tenth of a pass, and is kept; on a GPU memory is dearer."""
        if self.tape is None or up.device.type != "cpu":
            return self._inner(f, gate, up)
        return self.tape(lambda: self._inner(f, gate, up))

    def _inner(self, f: Callable[[Tensor], Tensor], gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is not None and f in _NAMES and fused_on_cpu(up) is not None:
            return row_ops.gated(_NAMES[f], gate, up, up.dtype)
        return super().inner(f, gate, up)

    @property
    def _repeated(self) -> bool:
        """Whether what comes next is on the tape."""
        return self.tape is not None and not self.tape.at_end

    def expert(self, expert: Mlp, x: Tensor, rows: Tensor) -> Tensor:
        """Run an expert even on no token: every linear then reads something of every batch, in the same order."""
        for linear in (expert.gate, expert.up, expert.down):
            if isinstance(linear, TrainableLinear):
                linear.rows = rows
        return expert(x[rows], self)  # type: ignore[no-any-return]


class _TapedNorm(nn.Module):
    """A norm whose results a tape can repeat."""

    def __init__(self, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.norm = norm
        self.tape: Tape | None = None
        self.readers: tuple[TrainableLinear, ...] = ()  # where these linears alone read it

    @property
    def weight(self) -> Tensor | None:
        return self.norm.weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.norm, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self._of(x) if self.tape is None else self.tape(lambda: self._of(x))

    def _of(self, x: Tensor) -> Tensor:
        norm = self.norm
        if isinstance(norm, RMSNorm) and (dtype := fused_on_cpu(x)) is not None:
            rounded = self.readers and all(linear.activation is None for linear in self.readers)
            return row_ops.rms_norm(x, norm.weight, norm.eps, dtype if rounded else norm.weight.dtype)
        if isinstance(norm, RMSNorm) and x.is_cuda and torch.is_grad_enabled():  # one kernel each way, not twenty
            return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
        return norm(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _OpenBuilder(Builder):
    folds: ClassVar[bool] = False

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        # A copy: quantizers change vectors in place, and what a source reads may be its mapped file.
        return Builder.vector(self, name, size, offset).clone()

    def linear(self, module: str, N: int, K: int, w: QuantTensor | None = None, rows: Tensor | None = None) -> Any:
        w = w or self.matrix(module, N, K)
        bias = self.vector(f"{module}.bias", N) if f"{module}.bias" in self.names else None
        linear = TrainableLinear(module, w.dequantize(torch.float32), bias)
        linear.activation = input_rounding(w)
        return linear

    def norm(self, module: str, size: int, spec: NormSpec) -> Any:
        return _TapedNorm(Builder.norm(self, module, size, spec))


class CalibrationBlock(nn.Module):
    """One layer over whole sequences."""

    def __init__(self, layer: Layer, arch: Architecture, i: int, compute: _WholeSequences) -> None:
        super().__init__()
        self.layer, self.spec, self._compute = layer, layer.spec, compute
        self._arch, self._index = arch, i
        self._linears = {m.name: m for m in layer.modules() if isinstance(m, TrainableLinear)}
        self._find_readers()
        self._tape: Tape | None = None
        self._kv: KVFormat | None = None
        self._center: Tensor | None = None

    def _find_readers(self) -> None:
        """Tell the norms which linears read them, where nothing else does: not the residual stream, not a router."""
        a, mlp, s = self.layer.attention, self.layer.mlp, self.spec
        if s.placement in ("post", "reordered") or isinstance(mlp, Experts):
            return
        inner = tuple(m for m in (mlp.gate, mlp.up) if m is not None)
        self.layer.norm_attention.readers = (a.q, a.k, a.v, *(inner if s.shared_norm else ()))
        if self.layer.norm_mlp is not None:
            self.layer.norm_mlp.readers = inner

    @property
    def capturable(self) -> bool:
        return self.spec.mlp.experts is None

    def twin(self) -> "CalibrationBlock":
        shared = [self.spec, self.spec.attention, *(t for m in self._linears.values() for t in (m.weight, m.bias))]
        layer = deepcopy(self.layer, {id(one): one for one in shared if one is not None})
        return CalibrationBlock(layer, self._arch, self._index, self._compute).eval()

    def forward(self, x: Tensor) -> Tensor:
        both = None if self.spec.attention.causal else Padded(self._compute.lengths, x.shape[1], x.device)
        return self._run(x, _NoCache(self._tape, self._kv, self._center, both))

    def _run(self, x: Tensor, cache: Attend) -> Tensor:
        rope = self.spec.attention.rope
        cos_sin = None if rope is None else self._compute.first(rope, x.shape[1], x.device, x.dtype)
        return self.layer(x, cos_sin, cache, self._compute)  # type: ignore[no-any-return]

    @torch.no_grad()
    def round_cache(self, kv: KVFormat, x: Tensor) -> None:
        spec = self._arch.spec
        self._kv = kv.layers(len(spec.layers))[self._index]
        if self._kv.center:
            found = _Keys()
            self._run(x[:1], found)
            self._center = key_center(found.keys[0].float(), self.spec.attention.rope, spec.context)

    def use_tape(self, tape: Tape | None) -> None:
        self._tape = self._compute.tape = tape
        for module in self.layer.modules():
            if isinstance(module, TrainableLinear | _TapedNorm):
                module.tape = tape

    def _name(self, slot: str) -> str:
        return self._arch.names.of_layer(self._index, slot)

    def linears(self) -> dict[str, TrainableLinear]:
        return self._linears

    def stages(self) -> list[tuple[str, ...]]:
        a, mlp = self.layer.attention, self.layer.mlp
        attention: list[list[Any]] = [[a.q, a.k, a.v], [a.o]]
        router: list[list[Any]] = [[mlp.router]] if isinstance(mlp, Experts) else []
        each: list[Any] = list(mlp.experts) if isinstance(mlp, Experts) else [mlp]  # an expert reads its own tokens
        if isinstance(mlp, Experts) and mlp.shared is not None:
            router[0].append(mlp.shared_gate)
            each.append(mlp.shared)
        feed_forward = [stage for m in each for stage in ([x for x in (m.gate, m.up) if x is not None], [m.down])]
        return [tuple(linear.name for linear in stage) for stage in attention + router + feed_forward]

    def folds(self) -> list[ScaleFold]:
        """Scales of inputs that what stands before can take over.

        A layer norm takes none: a fold has no place for its bias, and one that stands behind attention or feed-forward
        is read by the residual stream too. gelu takes none either, and relu(x / s) = relu(x) / s.
        """
        s, name = self.spec, self._name
        folds = []
        if s.norm.kind == "rms" and s.placement in ("pre", "sandwich") and not s.parallel and s.mlp.experts is None:
            qkv, _, inner, *_ = self.stages()
            folds = [ScaleFold(f"{name('norm_attention')}.weight", qkv), ScaleFold(f"{name('norm_mlp')}.weight", inner)]
        if s.mlp.experts is None and (s.mlp.gated or s.mlp.activation == "relu"):
            folds.append(ScaleFold(f"{name('up')}.weight", (name("down"),)))
        if s.attention.heads == s.attention.kv_heads:  # otherwise several inputs of o share one row of v
            folds.append(ScaleFold(f"{name('v')}.weight", (name("o"),)))
        return folds

    def value_heads(self) -> ValueHeads:
        a = self.spec.attention
        return ValueHeads(self._name("v"), self._name("o"), a.heads, a.kv_heads, a.head_size)

    def vectors(self) -> dict[str, Tensor]:
        slots = ("norm_attention", "norm_mlp", "post_attention_norm", "post_mlp_norm")
        norms = {self._name(slot): norm for slot in slots if (norm := getattr(self.layer, slot)) is not None}
        return {
            f"{name}.{kind}": v
            for name, norm in norms.items()
            for kind in ("weight", "bias")
            if (v := getattr(norm, kind, None)) is not None
        }


class CalibrationModel:
    """Layers built from a source when they are asked for: at most what the caller keeps is in memory."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        self.weights, self.device = in_usual_form(weights), torch.device(device)
        self.arch = architecture(self.weights)
        self._ahead = ReadAhead(self.weights)
        self._build = _OpenBuilder(self._ahead, frozenset(self.weights.names()), torch.float32, self.device, None)
        self._compute = _WholeSequences()

    @property
    def spec(self) -> DecoderSpec:
        return self.arch.spec

    @property
    def layers(self) -> int:
        return len(self.arch.spec.layers)

    def layer_name(self, i: int) -> str:
        return self.arch.names.layer.format(i)

    def shapes(self) -> tuple[list[tuple[int, int]], int]:
        inside = f"{self.layer_name(0)}."
        found = [(s[0], s[1]) for n, s in tensor_shapes(self.arch).items() if n.startswith(inside) and len(s) == 2]
        return found, self.arch.spec.width

    def read_ahead(self, i: int) -> None:
        inside = f"{self.layer_name(i)}."
        self._ahead.begin(n.removesuffix(".weight") for n in self._matrices if n.startswith(inside))

    @cached_property
    def _matrices(self) -> list[str]:
        return [n for n in self.weights.names() if n.endswith(".weight") and len(self.weights.shape(n)) == 2]

    def drop_tables(self) -> None:
        for name in ("_embedding", "_head"):
            self.__dict__.pop(name, None)

    def block(self, i: int) -> Block:
        return CalibrationBlock(Layer(self._build, self.arch, i), self.arch, i, self._compute).eval()

    def embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._input(F.embedding(tokens, self._embedding), positions, self._compute)  # type: ignore[no-any-return]

    def attend_within(self, lengths: Tensor) -> None:
        self._compute.lengths = lengths

    def finish(self, x: Tensor) -> Tensor:
        return self._output(x, self._compute)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        if self.spec.encoder:
            raise UnsupportedError(
                f"{self.weights.path}: an encoder has no output head: schemes that train or measure the whole model "
                "by its predictions (auto, tune=full, `crelle tune` on a text) do not apply"
            )
        return scaled_logits(F.linear(x, self._head), self.arch.spec)

    @cached_property
    def _input(self) -> InputLayer:
        return InputLayer(self._build, self.arch)

    @cached_property
    def _output(self) -> OutputLayer:
        return OutputLayer(self._build, self.arch)

    @cached_property
    def _embedding(self) -> Tensor:
        return self._matrix(self.arch.names.embedding)

    @cached_property
    def _head(self) -> Tensor:
        return self._embedding if self.arch.spec.tied else self._matrix(self.arch.names.head)

    def _matrix(self, module: str) -> Tensor:
        s = self.arch.spec
        return self._build.matrix(module, s.vocabulary, s.embedding_width).dequantize(torch.float32)


def open_model(weights: Weights, device: torch.device | str = "cpu") -> CalibrationModel:
    """Return a model for calibration and training."""
    return CalibrationModel(weights, device)
