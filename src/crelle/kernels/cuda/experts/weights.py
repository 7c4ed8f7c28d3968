"""The experts of a layer for the kernels: one layout for all, and a table of their addresses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.experts.products import ACTIVATIONS, MAX_EXPERTS, MAX_TOP, ExpertWeights
from crelle.kernels.cuda.planes.weight_layout import CudaWeight
from crelle.kernels.spec import MlpSpec

MATRICES = ("gate", "up", "down")
Expert = Mapping[str, tuple[Any, Tensor | None]]  # prepared weight and bias, by matrix


def supports(mlp: MlpSpec, width: int) -> str | None:
    """Return None, or what of a mixture of experts the kernels lack."""
    if (spec := mlp.experts) is None:
        return None
    if not mlp.gated or mlp.activation not in ACTIVATIONS:
        return (
            f"has experts with a gated {' or '.join(ACTIVATIONS)}, not {mlp.activation} {'gated' * mlp.gated}".strip()
        )
    if spec.count > MAX_EXPERTS or spec.top > MAX_TOP:
        return f"takes up to {MAX_TOP} of {MAX_EXPERTS} experts a token, not {spec.top} of {spec.count}"
    return f"takes experts of x of a multiple of 8 channels, not {width}" if width % 8 else None


def supports_weights(experts: Sequence[Expert]) -> str | None:
    """Return None, or why these matrices are not what the kernels read: bit-planes, all experts in one layout."""
    for expert in experts:
        for name in MATRICES:
            if not isinstance(expert[name][0], CudaWeight):
                return "the step has experts of bit-planes (bcq, uniform, affine)"
            if expert[name][0].perm is not None:
                return "the step has no experts whose inputs are permuted or whose groups are padded"
    for name in MATRICES:
        forms = {form(expert[name][0]) for expert in experts}
        if len(forms) > 1:
            return f"the step reads experts of one layout, and matrix '{name}' has {len(forms)} in a layer"
    if form(experts[0]["gate"][0]) != form(experts[0]["up"][0]):
        return "the step reads gate and up of experts together, and here they differ in layout"
    return None


def form(w: CudaWeight) -> tuple[object, ...]:
    """Return what matrices have in common whose bytes one kernel reads."""
    return (w.N, w.K, w.P, w.kind, w.groups, w.blocks_per_scale, w.words.shape, w.scales.shape, w.scales.dtype)


def lay_out_experts(experts: Sequence[Expert], top: int, normalize: bool, activation: str) -> ExpertWeights:
    """Return the experts of a layer; `supports_weights` has returned None. The caller keeps their tensors alive."""
    rows = [[a for name in MATRICES for a in _addresses(*expert[name])] for expert in experts]
    first = experts[0]
    table = torch.tensor(rows, dtype=torch.int64).to(first["gate"][0].words.device)
    gate, down = first["gate"][0], first["down"][0]
    return ExpertWeights(table, gate, down, len(experts), top, normalize, ACTIVATIONS[activation])


def _addresses(w: CudaWeight, bias: Tensor | None) -> tuple[int, int, int]:
    return w.words.data_ptr(), w.scales.data_ptr(), 0 if bias is None else bias.data_ptr()
