"""The experts of a layer for the kernels: one layout for all, and a table of their addresses."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.experts import fp4_products, products
from crelle.kernels.cuda.experts.fp4_products import Fp4Experts
from crelle.kernels.cuda.experts.products import ACTIVATIONS, MAX_EXPERTS, MAX_TOP, ExpertWeights
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight
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
    """Return None, or why these matrices are not what the kernels read: of one kind, all experts in one layout."""
    kinds = {type(expert[name][0]) for expert in experts for name in MATRICES}
    if kinds not in ({CudaWeight}, {Fp4Weight}):
        return "the step has experts of bit-planes (bcq, uniform, affine) or of four-bit floats (mxfp4, nvfp4)"
    if any(w.perm is not None for expert in experts for w, _ in expert.values()):
        return "the step has no experts whose inputs are permuted or whose groups are padded"
    for name in MATRICES:
        forms = {form(expert[name][0]) for expert in experts}
        if len(forms) > 1:
            return f"the step reads experts of one layout, and matrix '{name}' has {len(forms)} in a layer"
    if form(experts[0]["gate"][0]) != form(experts[0]["up"][0]):
        return "the step reads gate and up of experts together, and here they differ in layout"
    return None


def products_of(e: ExpertWeights | Fp4Experts) -> ModuleType:
    """Return the module whose `up`, `down`, `grouped_up` and `grouped_down` take these experts."""
    return fp4_products if isinstance(e, Fp4Experts) else products


def form(w: CudaWeight | Fp4Weight) -> tuple[object, ...]:
    """Return what matrices have in common whose bytes one kernel reads."""
    if isinstance(w, Fp4Weight):
        return (w.N, w.K, w.format)
    return (w.N, w.K, w.P, w.kind, w.groups, w.blocks_per_scale, w.words.shape, w.scales.shape, w.scales.dtype)


def lay_out_experts(
    experts: Sequence[Expert], top: int, normalize: bool, activation: str, dtype: torch.dtype = torch.float16
) -> ExpertWeights | Fp4Experts:
    """Return the experts of a layer of a model in `dtype`; `supports_weights` has returned None.

    The caller keeps their tensors alive.
    """
    rows = [[a for name in MATRICES for a in _addresses(*expert[name])] for expert in experts]
    gate, down = (experts[0][name][0] for name in ("gate", "down"))
    more = len(experts), top, normalize, ACTIVATIONS[activation]
    if isinstance(gate, Fp4Weight):
        return Fp4Experts(torch.tensor(rows, dtype=torch.int64).to(gate.data.device), gate, down, *more, dtype)
    return ExpertWeights(torch.tensor(rows, dtype=torch.int64).to(gate.words.device), gate, down, *more)


def _addresses(w: CudaWeight | Fp4Weight, bias: Tensor | None) -> tuple[int, int, int]:
    of_bias = 0 if bias is None else bias.data_ptr()
    if isinstance(w, Fp4Weight):
        return w.data.data_ptr(), 0, of_bias
    return w.words.data_ptr(), w.scales.data_ptr(), of_bias
