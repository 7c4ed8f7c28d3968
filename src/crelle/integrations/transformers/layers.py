"""What stands in a transformers model instead of nn.Linear and nn.Embedding: a QuantTensor's parts as buffers.

A kernel's layout of the weight is made when the first input comes, whose dtype and device it depends on, and made again
when a part was replaced or written to. On a GPU the parts then go to the host's memory: the device has the
kernel's layout only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor, Spec, format_of
from crelle.kernels import ops
from crelle.kernels.base import Prepared
from crelle.kernels.eager import is_eager
from crelle.kernels.handles import by_number, number
from crelle.kernels.linear_op import LazyWeight
from crelle.models.nested import at_precision


class Encoding(NamedTuple):
    """A quantized matrix taken apart; the parts may be on meta."""

    spec: Spec
    parts: Mapping[str, Tensor]

    @classmethod
    def of(cls, w: QuantTensor) -> "Encoding":
        return cls(w.spec(), w.tensors())


class Choice(NamedTuple):
    """How a matrix is to be multiplied; a CrelleConfig has the defaults' other values."""

    bits: int | None = None  # precision of nested planes; default: the finest
    kernel: str | None = None  # default: the first that takes the format


DEFAULT = Choice()
_ANY = -1  # the version of a tensor of torch.inference_mode, which does not count what is written to it


class CodedWeight(Tensor):
    """Stands for a quantized matrix where its shape, dtype or device is asked for; has no values."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "CodedWeight":
        made: CodedWeight = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made._is_hf_initialized = True  # type: ignore[attr-defined]
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"CodedWeight({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if op is torch.ops.aten.detach.default and isinstance(first, cls):
            return cls(first.shape, first.dtype, first.device)
        raise UnsupportedError(
            f"'{op.__name__.partition('.')[0]}' needs the values of a linear layer that has codes only; an adapter "
            "cannot be merged into a quantized matrix: keep it apart, or call model.dequantize() before it is added"
        )


class QuantModule(nn.Module, LazyWeight):
    """The parts of a quantized matrix as buffers; a mixin, which `hold` makes usable."""

    spec: Spec
    on_host: ClassVar[bool] = True  # whether the parts may go to the host once a GPU's kernel has its own layout

    def hold(self, w: Encoding, dtype: torch.dtype, how: Choice) -> None:
        """Take over a matrix, whose parts may be on meta and come later; dtype: of the layer's floats."""
        self.spec, self.how, self.dtype = w.spec, how, dtype
        for name, part in w.parts.items():
            self.register_buffer(name, part)
        self.part_names = tuple(w.parts)
        self._made: tuple[Any, Prepared] | None = None
        self._held: QuantTensor | None = None
        self._seen: list[
            tuple[str, Tensor, int]
        ] = []  # parts that both were made of, and how often each was written to
        self.number = number(self)

    def quant_tensor(self) -> QuantTensor:
        """Return the matrix as it is stored; shares memory with the buffers."""
        return format_of(self.spec).from_parts(self.spec, {n: getattr(self, n) for n in self.part_names})

    def matrix(self) -> QuantTensor:
        """Return the matrix at the precision that was asked for."""
        self._forget_if_changed()
        if self._held is None:
            self._held = at_precision(self.quant_tensor(), self.how.bits)
        return self._held

    def prepared(self, x: Tensor) -> Prepared:
        """Return the matrix in the layout of a kernel for inputs like x."""
        self._forget_if_changed()
        key = x.dtype, x.device
        if self._made is None or self._made[0] != key:
            self._made = key, ops.prepare(self.matrix().to(x.device), x.dtype, self.how.kernel)
            if self.on_host and x.device.type != "cpu":
                self._held = None
                for name in self.part_names:
                    self._buffers[name] = getattr(self, name).to("cpu")
                self._note_parts()
        return self._made[1]

    def dequantized(self, x: Tensor) -> Tensor:
        return self.matrix().to(x.device).dequantize(torch.float32).to(x.dtype)

    def _note_parts(self) -> None:
        parts = [(name, getattr(self, name)) for name in self.part_names]
        self._seen = [(name, part, _ANY if part.is_inference() else part._version) for name, part in parts]

    def _forget_if_changed(self) -> None:
        """Drop what was made of other parts: load_state_dict, accelerate and users replace buffers or write to them."""
        buffers = self._buffers
        for name, seen, version in self._seen:
            part = buffers[name]
            if part is not seen or (version != _ANY and part._version != version):
                break
        else:
            if self._seen:
                return
        self._made = self._held = None
        self._note_parts()

    @property
    def kernel(self) -> str | None:
        """The kernel that was chosen, as soon as there was an input to choose it for."""
        return None if self._made is None else self._made[1].kernel.name

    def __getattr__(self, name: str) -> Any:
        """Some models look at `layer.weight.dtype`, peft at its device; computing with it raises a sentence."""
        if name == "weight":
            shape: Any = self.spec["shape"]
            if torch.compiler.is_compiling():
                return torch.empty(tuple(shape), dtype=self.dtype, device="meta")
            device = getattr(self, self.part_names[0]).device if self._made is None else self._made[0][1]
            return CodedWeight(shape, self.dtype, device)
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move, but leave the parts in their dtype: `model.half()` must not round scales."""
        before = {name: getattr(self, name) for name in self.part_names}
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, part in before.items():
            moved = getattr(self, name)
            if moved.dtype != part.dtype:
                self._buffers[name] = part if part.is_meta else part.to(moved.device)
        self._made = self._held = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None, "_held": None, "_seen": [], "number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.number = number(self)  # a copy is another weight

    def extra_repr(self) -> str:
        N, K = self.spec["shape"]
        return f"in_features={K}, out_features={N}, bias={getattr(self, 'bias', None) is not None}, " + ", ".join(
            f"{k}={v}" for k, v in self.spec.items() if k != "shape" and not isinstance(v, dict | list)
        )


class CrelleLinear(QuantModule, nn.Linear):
    """y = x @ W.T + bias, by whatever kernel takes the weight's format; a linear also to peft's adapters."""

    def __init__(self, w: Encoding, bias: nn.Parameter | None, dtype: torch.dtype, how: Choice = DEFAULT) -> None:
        nn.Module.__init__(self)
        self.hold(w, dtype, how)
        self.out_features, self.in_features = w.spec["shape"]
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if is_eager(x):
            y = ops.matmul(x, self.prepared(x))
        else:
            y = torch.ops.crelle.linear(x, self.number, self.out_features)
        bias = self._parameters["bias"]  # not self.bias: nn.Module looks in three places
        return y if bias is None else y + bias


class TiedLinear(nn.Module):
    """An output head that multiplies by a quantized embedding's matrix and has none of its own."""

    bias: nn.Parameter | None

    def __init__(self, embedding: QuantModule, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple: the embedding is not a child of the head
        self.out_features, self.in_features = embedding.spec["shape"]
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        found: Tensor = self._embedding[0].weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        if is_eager(x):
            y = ops.matmul(x, self._embedding[0].prepared(x))
        else:
            y = torch.ops.crelle.linear(x, self._embedding[0].number, self.out_features)
        bias = self._parameters["bias"]  # not self.bias: nn.Module looks in three places
        return y if bias is None else y + bias


class _Rows(QuantModule, nn.Embedding):
    """nn.Embedding whose rows are dequantized when they are looked up."""

    on_host: ClassVar[bool] = False

    def forward(self, tokens: Tensor) -> Tensor:
        if is_eager(tokens):
            return self.rows(tokens, self.dtype)
        rows: Tensor = torch.ops.crelle.embedding(tokens, self.number, self.embedding_dim, self.dtype)
        return rows

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        w = self.matrix()
        found = w.rows(tokens.flatten().to(w.device)).dequantize(dtype)
        return found.to(tokens.device).reshape(*tokens.shape, -1)


_CLASSES: dict[type[nn.Embedding], type[_Rows]] = {nn.Embedding: _Rows}


def _embedding_class(cls: type[nn.Embedding]) -> type[_Rows]:
    """Return cls over quantized rows: what cls does to tokens before and to rows behind the look-up stays."""
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Crelle{cls.__name__}", (cls, _Rows), {})
    return _CLASSES[cls]


def quantize_embedding(module: nn.Embedding, w: Encoding, how: Choice = DEFAULT) -> None:
    """Turn an embedding, of whatever class, into one with quantized rows."""
    dtype = module.weight.dtype
    del module.weight
    module.__class__ = _embedding_class(type(module))
    assert isinstance(module, _Rows)
    module.hold(w, dtype, how)


@torch.library.custom_op("crelle::embedding", mutates_args=())
def embedding(tokens: Tensor, weight: int, K: int, dtype: torch.dtype) -> Tensor:
    """Return the rows [..., K] of a quantized matrix for tokens [...]."""
    return by_number(weight, _Rows).rows(tokens, dtype)


@embedding.register_fake
def _(tokens: Tensor, weight: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*tokens.shape, K, dtype=dtype, device=tokens.device)


class JoinedLinear(nn.Module):
    """One linear whose outputs are those of several, stored one by one: q, k and v, or gate and up.

    The parts are modules of the model, under the names that a checkpoint has for them. They are looked up when they are
    multiplied: an adapter may stand in their places.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[str], order: Tensor | None = None, transposed: bool = False
    ) -> None:
        """order: which output of the parts each of the joined linear is; default: they are in its order."""
        super().__init__()
        self._order, self.transposed = order, transposed  # transposed: it was a Conv1D
        self._model, self._parts = (model,), tuple(parts)  # in a tuple: no child

    @property
    def weight(self) -> Tensor:
        """A family that initializes its own weights looks here; nothing is stored."""
        return torch.empty(0, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        found = [self._model[0].get_submodule(part)(x) for part in self._parts]
        y = found[0] if len(found) == 1 else torch.cat(found, -1)
        return y if self._order is None else y[..., self._order.to(y.device)]
