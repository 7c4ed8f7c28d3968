"""From named weights to layers: what the model families share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.errors import FormatError
from crelle.formats.affine import NestedTensor
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.open import Weights
from crelle.kernels.base import Problem
from crelle.kernels.registry import explain
from crelle.kernels.spec import Expert, NormSpec
from crelle.models.families.base import Architecture
from crelle.models.folding import fold_mlp
from crelle.models.linear import QuantLinear
from crelle.models.nested import require

Made = TypeVar("Made")


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in f32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias, computed in f32; some models have neither weight nor bias."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Builder:
    """Takes weights from a source and makes layers of them, on a device, at a dtype, nested planes at a precision."""

    folds: ClassVar[bool] = True  # whether matrices may be in an order that is not the model's
    weights: Weights
    names: frozenset[str]
    dtype: torch.dtype
    device: torch.device
    kernel: str | None
    bits: int | None = None  # default: the finest precision
    made: dict[str, Any] | None = None  # by name, what builders of other precisions share with this one
    lock: Any = field(default_factory=RLock, repr=False, compare=False)  # of `made`, shared with it
    offload: Any = field(default=None, repr=False, compare=False)  # an ExpertOffload, where experts may leave the GPU

    def __post_init__(self) -> None:
        if self.bits is not None:
            require(self.weights, self.bits)

    def matrix(self, module: str, N: int, K: int) -> QuantTensor:
        stored = self.weights.matrix(module)
        self._check(f"{module}.weight", stored.shape, (N, K))
        if stored.format != DenseTensor.format:  # plain matrices are not read through here: NaN stays NaN in products
            for part, t in stored.tensors().items():
                self._check_finite(f"{module}.{part}", t)
        if isinstance(stored, NestedTensor):
            return stored.at(self.bits or stored.bits).to(self.device)
        return self._once(f"{module}.weight", lambda: stored.to(self.device))

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """Return a vector, with the offset of a norm's weight added."""
        v = self.weights.read(name)
        self._check(name, tuple(v.shape), (size,))
        self._check_finite(name, v)
        v = v.float() + offset if offset else v
        return self._once(name, lambda: v.to(self.device, self.dtype))

    def once_for(self, w: QuantTensor, name: str, make: Callable[[], Made]) -> Made:
        """Make something of a matrix: once for all precisions where the matrix is the same at all of them."""
        return self._once(name, make) if any(w is other for other in (self.made or {}).values()) else make()

    def _once(self, name: str, make: Callable[[], Made]) -> Made:
        if self.made is None:
            return make()
        with self.lock:  # precisions may be built in several threads
            if name not in self.made:
                self.made[name] = make()
            return self.made[name]  # type: ignore[no-any-return]

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            has, asks = (" x ".join(map(str, shape)) for shape in (found, wanted))
            raise FormatError(f"{self.weights.path}: '{name}' is {has}, but the model's config asks for {asks}")

    def _check_finite(self, name: str, t: Tensor) -> None:
        """Refuse norms, biases and scales with NaN or infinity: each spoils every answer, however it was damaged."""
        if not t.is_floating_point() or t.device.type == "meta" or t.numel() == 0:
            return
        if not all(bool(end.isfinite()) for end in t.aminmax()):  # NaN is both the least and the greatest
            wrong = (~t.isfinite()).nonzero()
            at = ", ".join(map(str, wrong[0].tolist()))
            raise FormatError(
                f"{self.weights.path}: '{name}' has {len(wrong)} of {t.numel()} values that are NaN or infinite, the "
                f"first at [{at}]; the file is damaged or was saved from a broken model: get or quantize it anew"
            )

    def linear(
        self, module: str, N: int, K: int, w: QuantTensor | None = None, rows: Tensor | None = None
    ) -> QuantLinear:
        """Build a linear; `rows`: the order of outputs that w is in, for the bias."""
        w = w or self.matrix(module, N, K)

        def make() -> QuantLinear:
            bias = self.vector(f"{module}.bias", N) if f"{module}.bias" in self.names else None
            bias = bias if bias is None or rows is None else bias[rows]
            return QuantLinear(module, w, bias, self.dtype, self._kernel_for(w))

        return self.once_for(w, module, make)

    def _kernel_for(self, w: QuantTensor) -> str | None:
        """Insist on the named kernel, except where a plain matrix (often the head) has nothing for it to do."""
        if self.kernel and w.format == "dense" and dict(explain(Problem.of(w, self.dtype))).get(self.kernel):
            return None
        return self.kernel

    def norm(self, module: str, size: int, spec: NormSpec) -> Any:
        if spec.kind == "rms":
            return RMSNorm(self.vector(f"{module}.weight", size, spec.offset), spec.eps)
        kinds = ("weight", "bias")
        weight, bias = (self.vector(f"{module}.{kind}", size) if spec.affine else None for kind in kinds)
        return LayerNorm(weight, bias, spec.eps)

    def norm_of(self, arch: Architecture, i: int, slot: str, size: int, spec: NormSpec | None) -> Any:
        """Build a norm of a layer; None where the spec has none."""
        return None if spec is None else self.norm(arch.names.of_layer(i, slot), size, spec)

    def linear_of(
        self, arch: Architecture, i: int, slot: str, N: int, K: int, rows: Tensor | None = None
    ) -> QuantLinear:
        """Build a linear of a layer, perhaps with other rows; a bias that the config promises must be there."""
        module = arch.names.of_layer(i, slot)
        self._check_bias(arch, i, module)
        if rows is None:
            return self.linear(module, N, K)
        w = self.matrix(module, N, K)
        rows = rows.to(w.device)
        return self.linear(module, N, K, w.rows(rows), rows)

    def mlp_of(self, arch: Architecture, i: int, expert: Expert = None) -> dict[str, QuantLinear]:
        """Build the linears of a feed-forward by slot, orders of channels folded where this builder folds."""
        s, width = arch.spec.layers[i].mlp, arch.spec.width
        inner = s.width_of(expert)
        sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        slots = {slot: arch.names.of_layer(i, slot, expert) for slot in sizes if s.gated or slot != "gate"}
        for module in slots.values():
            self._check_bias(arch, i, module)
        weights, rows = {slot: self.matrix(module, *sizes[slot]) for slot, module in slots.items()}, None
        if self.folds:
            weights, rows = fold_mlp(weights)
        return {
            slot: self.linear(module, *sizes[slot], weights[slot], None if slot == "down" else rows)
            for slot, module in slots.items()
        }

    def place_expert(self, i: int, count: int, linears: Sequence[Any]) -> None:
        """Let an expert of layer i, one of `count`, move to host memory where the GPU is too small for all."""
        if self.offload is not None:
            self.offload.add(i, count, [linear for linear in linears if linear is not None])

    def _check_bias(self, arch: Architecture, i: int, module: str) -> None:
        if arch.required_biases and arch.spec.layers[i].attention.bias and f"{module}.bias" not in self.names:
            raise FormatError(f"{self.weights.path} has no tensor '{module}.bias'")
