"""The interface between quantizers and models: decoder layers one by one, with linears whose weights can be replaced.

Quantizers are a layer below models in the import order, so the protocols that calibration and training need are defined
here, and models/ implements them with the very decoder layers that are served: only the linears are TrainableLinear.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cpu import i16_gemm
from crelle.kernels.cpu.bf16_gemm import PackedWeight
from crelle.kernels.cpu.i16_gemm import PackedI16Weight
from crelle.kernels.cpu.tiles import has_tiles, usable

Progress = Callable[[int, int, str], None]  # (done, total, what), called after each piece of work


def has_half_products(device: torch.device) -> bool:
    """Whether the hardware has instructions for products of bf16, and CRELLE_ISA does not exclude them."""
    return device.type == "cuda" or (device.type == "cpu" and has_tiles())


_integers: ContextVar[bool] = ContextVar("integer_products", default=False)


@contextmanager
def half_products(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Let matrix products round their factors where that is faster; sums and residuals stay f32.

    To bf16 by autocast where the hardware has instructions for it. On other CPUs passes without gradients may round to
    integers of 12 bits (crelle.kernels.cpu.i16_gemm), where the instruction set has products of them.
    """
    half = wanted and has_half_products(device)
    token = _integers.set(wanted and not half and i16_gemm.usable(device))
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            yield
    finally:
        _integers.reset(token)


def fused_on_cpu(x: Tensor) -> torch.dtype | None:
    """Return what a pass on x computes where it can take our own kernels: bf16 on a CPU with AMX, or f32; None: no.

    They keep nothing for gradients.
    """
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled("cpu"):
        return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 and usable(x.device) else None
    return torch.float32 if _integers.get() else None


@contextmanager
def bf16_sums(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Let a CPU with AMX round the factors of f32 products to bf16; sums and results stay f32, unlike autocast's.

    For Hessians: the products of the layers round their inputs to bf16 there too, so H is that of what they multiply.
    """
    if not wanted or device.type != "cpu" or not has_tiles():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Tape:
    """Products, norms and attention of a forward pass in order: a pass over the same input repeats them instead of
    computing them.
    """

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def forget_last(self) -> None:
        """Have the latest result computed again."""
        if self.results:
            self.results.pop()

    @property
    def at_end(self) -> bool:
        """Whether what comes next has to be computed."""
        return self._next == len(self.results)

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        if self.at_end:
            self.results.append(compute())
        self._next += 1
        return self.results[self._next - 1]


class _Tiles:
    """A weight as bf16 tiles or 16-bit integers: packed when it is first multiplied by, and again once it is another
    one or changed.
    """

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._version = 0
        self._dtype = torch.float32  # of the results
        self._packed: PackedWeight | PackedI16Weight | None = None

    def packed(self, weight: Tensor, dtype: torch.dtype) -> PackedWeight | PackedI16Weight:
        version = -1 if weight.is_inference() else weight._version  # an inference tensor does not count its changes
        known = self._of is weight and self._version == version >= 0 and self._dtype == dtype
        if self._packed is None or not known:
            self._packed = PackedWeight(weight) if dtype == torch.bfloat16 else PackedI16Weight(weight)
            self._of, self._version, self._dtype = weight, version, dtype
        return self._packed

    def __deepcopy__(self, memo: object) -> "_Tiles":
        return _Tiles()  # a copied layer is given other weights


class TrainableLinear(nn.Module):
    """y = x Wᵀ + bias, where W can be replaced or computed by a trainable module, and x observed or rounded."""

    weight: Tensor  # f32 [N, K]

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.name, self.bias = name, bias
        self.register_buffer("weight", weight, persistent=False)
        self.coder: nn.Module | None = None  # computes W [N, K] instead of `weight`
        self.watch: Callable[[Tensor], None] | None = None  # called with every input
        self.activation: Callable[[Tensor], Tensor] | None = None  # rounds x before the product (quantized activations)
        self.tape: Tape | None = None
        self._tiles = _Tiles()
        self.rows: Tensor | None = None  # which of the batch's B T tokens x is of, where not all: an expert's

    def forward(self, x: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(x)
        return self._product(x) if self.tape is None else self.tape(lambda: self._product(x))

    def _product(self, x: Tensor) -> Tensor:
        x = x if self.activation is None else self.activation(x)
        if self.coder is None and (dtype := fused_on_cpu(x)) is not None:
            return self._tiles.packed(self.weight, dtype).product(x, self.bias)
        return F.linear(x, self.weight if self.coder is None else self.coder(), self.bias)


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """Linears that share an input, and the tensor before them into which a scale of that input can be folded.

    `source` is a norm's weight [K], or the weight of a linear, whose output rows [K, …] (and bias) are scaled.
    """

    source: str  # full name of the tensor, e.g. model.layers.0.input_layernorm.weight
    readers: tuple[str, ...]  # full names of the linears


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """The linears around attention's sum of values: `heads` heads of o's input, the first ones share v's first head."""

    v: str  # full names
    o: str
    heads: int
    kv_heads: int
    head_size: int


class Block(Protocol):
    """One decoder layer: hidden states [B, T, width] to hidden states."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured as a CUDA graph: not where the tokens choose their experts."""
        ...

    def use_tape(self, tape: Tape | None) -> None:
        """Take what is on the tape from there, and write the rest to it, from now on."""
        ...

    def twin(self) -> "Block":
        """Return a copy that shares the linears' weights with this one, until they are replaced; not the norms."""
        ...

    def linears(self) -> dict[str, TrainableLinear]:
        """Return the linears by full name, in execution order."""
        ...

    def stages(self) -> Sequence[tuple[str, ...]]:
        """Return the names of linears that read the same input, in execution order."""
        ...

    def folds(self) -> Sequence[ScaleFold]: ...

    def value_heads(self) -> ValueHeads: ...

    def round_cache(self, kv: KVFormat, x: Tensor) -> None:
        """Let attention read keys and values as a cache stores them; x [B, T, width]: from what keys are centred."""
        ...

    def vectors(self) -> dict[str, Tensor]:
        """Return the other tensors (norms) by full name; they may be changed in place."""
        ...


class CalibrationModel(Protocol):
    """A model whose decoder layers are built on demand, in f32."""

    @property
    def layers(self) -> int: ...

    def layer_name(self, i: int) -> str:
        """Return the prefix of a layer's tensors, e.g. model.layers.0."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, T, width] of tokens [B, T]."""
        ...

    def shapes(self) -> tuple[list[tuple[int, int]], int]:
        """Return the shapes (N, K) of a layer's linears, and the width of the hidden states."""
        ...

    def block(self, i: int) -> Block: ...

    def read_ahead(self, i: int) -> None:
        """Start reading the weights of a layer that will be asked for next."""
        ...

    def drop_tables(self) -> None:
        """Forget embedding and output head until they are asked for again."""
        ...

    def attend_within(self, lengths: Tensor) -> None:
        """Let no token of an encoder's batch see what is past its text's `lengths` [B], from now on."""
        ...

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm: returns what the output head reads."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states after `finish`."""
        ...
