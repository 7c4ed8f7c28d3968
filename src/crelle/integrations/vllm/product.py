"""The matrices of one layer as kernels multiply by them, and the custom ops through which a compiled model calls them.

    torch.ops.crelle.layer(x, handle, N)                 x [..., K] @ W.T as [..., N]
    torch.ops.crelle.lookup(tokens, handle, K, dtype)    rows of W, [..., K]
    torch.ops.crelle.experts(x, weights, ids, handle)    a mixture of experts

W is found by `handle`, its number (crelle.kernels.handles) as an int64 tensor on the CPU, a buffer of the layer.
`crelle::linear` takes the number itself, which a compiled graph would hold as a constant: every layer would then be
compiled for itself, and a graph from a cache on disk would name the layers of another process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.parallel import stacked
from crelle.integrations.vllm.arrival import Share, say_once
from crelle.kernels import cpu, ops
from crelle.kernels.base import Prepared
from crelle.kernels.cpu.kernel import look_up
from crelle.kernels.handles import by_number, number


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose for a checkpoint: the "crelle" of vLLM's additional config."""

    bits: int | None = None  # the precision of nested planes; default: the finest
    kernel: str | None = None  # e.g. cpu-int8; default: the most preferred

    @classmethod
    def of(cls, chosen: Any) -> "Settings":
        """Read them, or say what is wrong."""
        kinds = {"bits": int, "kernel": str}
        if not isinstance(chosen, dict) or any(type(v) is not kinds.get(k) for k, v in chosen.items()):
            raise SchemeError(f'\'crelle\' in the additional config has "bits", "kernel" or both, got {chosen!r}')
        return cls(**chosen)


class Product:
    """y = [x @ W.T of each matrix, side by side]; matrices that agree in everything but rows are multiplied as one."""

    def __init__(self, weights: Sequence[QuantTensor], dtype: torch.dtype, kernel: str | None = None) -> None:
        one = stacked(weights)
        self.prepared = [_prepare(w, dtype, kernel) for w in (weights if one is None else [one])]
        self.N = sum(p.problem.N for p in self.prepared)
        first = self.prepared[0]
        # Asked once: on a GPU the answer may read memory, which a captured graph must not.
        self.encodes_once = all(ops.shares(first, p) for p in self.prepared)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.prepared) == 1 and x.dim() == 2:
            return self.prepared[0].kernel.run(x, self.prepared[0].data)
        rows = x.reshape(-1, x.shape[-1])
        if len(self.prepared) == 1:
            y = self.prepared[0].kernel.run(rows, self.prepared[0].data)
        else:
            first = self.prepared[0]
            seen = first.kernel.encode(rows, first.data) if self.encodes_once else rows
            y = torch.cat([p.kernel.run(seen, p.data) for p in self.prepared], -1)
        return y.reshape(*x.shape[:-1], self.N)


def _prepare(w: QuantTensor, dtype: torch.dtype, kernel: str | None) -> Prepared:
    """Refuse to dequantize a whole model behind the user's back where the C++ kernels are not built."""
    if w.quantized and w.device.type == "cpu" and (reason := cpu.available()) is not None:
        raise UnsupportedError(
            f"vLLM needs Crelle's C++ kernels to serve a checkpoint on a CPU: the extension {reason}"
        )
    return ops.prepare(w, dtype, kernel if w.quantized else None)


def log_kernels(modules: Sequence[str], product: Product) -> None:
    """Log which kernels multiply by a kind of layer: one line for all layers that agree."""
    kind = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    for p in dict.fromkeys((w.problem.format, f"{w.problem.bits:g}", w.kernel.name) for w in product.prepared):
        say_once(f"{kind}: {p[0]}, {p[1]} bits, by Crelle's kernel '{p[2]}'")


class Table:
    """Rows of a matrix, dequantized when they are looked up.

    product: of a tied head, or none. On a CPU rows are read from what it multiplies by, if a kernel has rows.
    """

    def __init__(self, w: QuantTensor, product: Product | None = None) -> None:
        self.weight: QuantTensor | None = w
        self.prepared: Prepared | None = None
        if w.quantized and w.device.type == "cpu" and cpu.available() is None:
            known = product.prepared if product is not None else [_prepare(w, torch.float32, None)]
            if len(known) == 1 and look_up(torch.zeros(1, dtype=torch.int64), known[0], torch.float32) is not None:
                self.prepared, self.weight = known[0], None

    def __call__(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        if self.prepared is not None:
            rows = look_up(tokens.flatten(), self.prepared, dtype)
        if self.weight is not None:
            rows = self.weight.rows(tokens.flatten()).dequantize(dtype)
        assert rows is not None
        return rows.reshape(*tokens.shape, -1)  # [tokens, K]


class Experts:
    """A mixture of experts: of each, gate and up as one product, and down.

    gather, rows: if the ranks could not split the inputs of down, what gathers them, and the rows of each expert here.
    """

    def __init__(
        self,
        products: Sequence[tuple[Product, Product]],
        activate: Callable[[Tensor], Tensor],
        weigh_input: bool,
        gather: Callable[[Tensor], Tensor] | None = None,
        rows: Sequence[Share | None] = (),
    ) -> None:
        self.products, self.activate, self.weigh_input = products, activate, weigh_input
        self.gather, self.rows = gather, rows

    def _down(self, e: int, h: Tensor, N: int) -> Tensor:
        share = self.rows[e] if self.rows else None
        if share is None or self.gather is None:
            return self.products[e][1](h)
        return share.placed(self.products[e][1](self.gather(h)), N)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum of the experts `ids` [M, k] of each token of x [M, K]; others than ours are -1."""
        N = x.shape[1]
        y = torch.zeros(x.shape[0], N, dtype=torch.float32, device=x.device)
        for e in torch.unique(ids).tolist():
            if e < 0:
                continue
            into = self.products[e][0]
            tokens, place = (ids == e).nonzero(as_tuple=True)
            weight = weights[tokens, place, None]
            h = x[tokens] * weight.to(x.dtype) if self.weigh_input else x[tokens]
            h = self._down(e, self.activate(into(h)), N).float()
            y.index_add_(0, tokens, h if self.weigh_input else h * weight)
        return y.to(x.dtype)


Layer = Product | Table | Experts


def handle_of(layer: Layer) -> Tensor:
    """Return a handle by which the ops of this process find a layer; the caller keeps the layer alive."""
    return torch.tensor(number(layer), dtype=torch.int64, device="cpu")


# A function straight in the dispatcher's table: `torch.library.custom_op` wraps it for autograd, which vLLM never asks
# for, and takes 8 us a call longer: 1 ms of a step of SmolLM2, whose products take 4.
_LIBRARY: Any = torch.library.Library("crelle", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(signature: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    _LIBRARY.define(signature)
    name = signature.partition("(")[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"crelle::{name}", fake, lib=_LIBRARY)


def _layer(x: Tensor, handle: Tensor, N: int) -> Tensor:
    return by_number(int(handle), Product)(x)


def _layer_fake(x: Tensor, handle: Tensor, N: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], N)


def _lookup(tokens: Tensor, handle: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    return by_number(int(handle), Table)(tokens, dtype)


def _lookup_fake(tokens: Tensor, handle: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    return tokens.new_empty(*tokens.shape, K, dtype=dtype)


def _experts(x: Tensor, weights: Tensor, ids: Tensor, handle: Tensor) -> Tensor:
    return by_number(int(handle), Experts)(x, weights, ids)


def _experts_fake(x: Tensor, weights: Tensor, ids: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(x)


_define("layer(Tensor x, Tensor handle, SymInt N) -> Tensor", _layer, _layer_fake)
_define("lookup(Tensor tokens, Tensor handle, SymInt K, ScalarType dtype) -> Tensor", _lookup, _lookup_fake)
_define("experts(Tensor x, Tensor weights, Tensor ids, Tensor handle) -> Tensor", _experts, _experts_fake)
