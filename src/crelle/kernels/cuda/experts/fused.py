"""The mixture of experts of a layer in a decoder's step: norm, router, experts, shared expert, sum.

    few tokens     router (with the norm) → expert_up (norms x, routes) → expert_down (routes, adds to x)
    many tokens    norm → router → route → sort → grouped up → grouped down → combine

Products are those of the experts' format (products.py or fp4_products.py); what stands around them is the same.
`few` is for batches whose tokens mostly take different experts, so that sorting would save nothing. With
`batch_invariant` all batches are sorted: a slot's products have one order of sums, whatever else is in the batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.dense.fused import DenseLinear
from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.experts.streaming import streamed_layer
from crelle.kernels.cuda.experts.weights import MATRICES, lay_out_experts, products_of
from crelle.kernels.cuda.step import activations
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Norm, of_norm
from crelle.kernels.spec import MlpSpec

_INVARIANT_TOKENS = 16  # slots of a pass


def matrices(expert: Any) -> Mapping[str, tuple[Any, Tensor | None]]:
    """Return the prepared weights and biases of one expert's linears."""
    return {name: (getattr(expert, name).prepared.data, getattr(expert, name).bias) for name in MATRICES}


class FusedExperts:
    """A router, its experts, and the expert that all tokens take, if there is one."""

    def __init__(self, mlp: Any, spec: MlpSpec, dtype: torch.dtype) -> None:
        """Take the layer's modules; `supports_weights` has returned None for its experts."""
        assert spec.experts is not None
        gates = [] if mlp.shared_gate is None else [mlp.shared_gate]
        self.router = fuse([mlp.router, *gates], dtype)
        self._kept = [matrices(expert) for expert in mlp.experts]  # what the table points to
        chosen = spec.experts.top, spec.experts.normalize
        self.experts = lay_out_experts(self._kept, *chosen, spec.activation, dtype)
        self.streamed = streamed_layer(mlp, self.experts)  # None: all are resident
        self.experts = self.experts if self.streamed is None else self.streamed.e
        self.shared = None
        if mlp.shared is not None:
            pair = fuse([mlp.shared.gate, mlp.shared.up], dtype), fuse([mlp.shared.down], dtype)
            self.shared = *pair, activations.activation_op(spec.activation, spec.gated)

    def takes_few(self, rows: int) -> bool:
        """Whether this number of tokens is multiplied each by itself; over PCIe an expert should be read once."""
        if self.streamed is not None and (rows > 1 or self.streamed.on_disk):
            return False
        return bool(products_of(self.experts).takes_few(rows, self.experts))

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None, batch_invariant: bool = False) -> Tensor:
        """Return residual + the experts' output for x [M, width], which is normed first, if there is a norm."""
        op: Prologue = "PLAIN" if norm is None else norm.op
        p = products_of(self.experts)
        if batch_invariant or not self.takes_few(x.shape[0]):
            return self._many(x if norm is None else norm(x), residual, batch_invariant)
        if x.shape[0] <= GEMV_ROWS:
            logits, made = self.router(x, op, norm, dtype=torch.float32), None
            if self.shared is not None:
                up, down, act = self.shared
                made = down(up(x, op, norm), act)
            inner = p.up(x, logits, self.experts, op, *of_norm(norm))
        else:
            h = x if norm is None else norm(x)
            logits, made = self._logits(h, False), self._shared(h, False)
            inner = p.up(h, logits, self.experts)
        y: Tensor = p.down(inner, logits, self.experts, residual, made)
        if self.streamed is not None:
            self.streamed.count(products.route(logits, self.experts)[0])
        return y

    def _many(self, h: Tensor, residual: Tensor | None, batch_invariant: bool) -> Tensor:
        e, logits, p = self.experts, self._logits(h, batch_invariant), products_of(self.experts)
        chosen, weights = products.route(logits, e)
        tokens = _INVARIANT_TOKENS if batch_invariant else products.at_a_time(h.shape[0], e)
        if self.streamed is not None:
            self.streamed.count(chosen)
        slots = products.sort(chosen, e, tokens)
        if self.streamed is not None and self.streamed.stages(h.shape[0]):
            made = self.streamed.grouped(h, chosen, slots, p)
        else:
            made = p.grouped_down(p.grouped_up(h, slots, e), slots, e)
        return products.combine(made, weights, residual, self._shared(h, batch_invariant), logits, e.count)

    def _logits(self, h: Tensor, batch_invariant: bool) -> Tensor:
        """Return f32 [M, experts (+ 1, the shared gate)]."""
        router = self.router
        if router.has_copy:
            return products.router_logits(h, router.plain_copy(h.device), router.bias)
        if isinstance(router, DenseLinear) and len(router.weights) == 1:
            return products.router_logits(h, router.weights[0], router.bias)
        return router.linear(h, batch_invariant=batch_invariant).float()

    def _shared(self, h: Tensor, batch_invariant: bool) -> Tensor | None:
        if self.shared is None:
            return None
        up, down, act = self.shared
        return down.linear(up.linear(h, batch_invariant=batch_invariant), act, batch_invariant=batch_invariant)
