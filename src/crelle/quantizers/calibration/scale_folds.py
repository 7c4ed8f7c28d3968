"""Changes of a layer that leave what it computes as it is and cost nothing at run time.

scales      W x = (W diag(s)) (x / s):  the division goes into the weight of a norm, or the rows of a linear
rotations   o (A v) = (o R) (A (Rᵀ v)):  attention A mixes tokens, not channels, so an orthogonal R of a value head's
            channels goes into the rows of v, and into the columns of o of all heads that share them
"""

import torch
from torch import Tensor

from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.calibration.layer_api import Block, ScaleFold


def signs(x: Tensor) -> Tensor:
    """Return the signs [K] by which to multiply channels of x [T, K] so that their largest values are negative.

    Codes of 4 bits are -8 … 7: a clip factor that cuts positive values off leaves most negative ones whole.
    """
    return torch.where(x.pow(3).sum(0) > 0, -1.0, 1.0)


def fold_scales(layer: LayerCalibration, fold: ScaleFold, s: Tensor) -> dict[str, Tensor]:
    """Divide an input by s [K], or values near it, in both copies of the layer; return changed norms and biases."""
    s, vectors = _exact(s, _vector(layer.full, fold.source))
    for block in (layer.full, layer.block):
        _apply(block, fold, s, vectors)
    layer.full_changed()
    return vectors


def rotate_values(layer: LayerCalibration) -> None:
    """Rotate every value head to its principal axes: a few channels of o's input then hold most of its energy.

    Axes point so that the largest values are negative (`signs`).
    """
    at = layer.full.value_heads()
    if layer.full.linears()[at.v].bias is not None:  # rotated, it could not be stored exactly
        return
    D, shared = at.head_size, at.heads // at.kv_heads
    stats = layer.stats(at.o)
    assert stats.sample is not None
    values = stats.sample.view(-1, at.kv_heads, shared, D)
    hessian = stats.hessian.view(at.kv_heads, shared, D, at.kv_heads, shared, D)
    axes = []
    for k in range(at.kv_heads):
        energy = torch.stack([hessian[k, h, :, k, h] for h in range(shared)]).sum(0)
        found = torch.linalg.eigh(energy.double()).eigenvectors.float()
        axes.append(found * signs(values[:, k].flatten(0, 1) @ found))
    into = torch.block_diag(*axes)  # type: ignore[no-untyped-call]
    out_of = torch.block_diag(*(axes[h // shared] for h in range(at.heads)))  # type: ignore[no-untyped-call]
    for block in (layer.full, layer.block):
        linears = block.linears()
        linears[at.v].weight = into.T @ linears[at.v].weight
        linears[at.o].weight = linears[at.o].weight @ out_of
    layer.full_changed()


def _vector(block: Block, source: str) -> tuple[str, Tensor | None]:
    """Return the vector that a fold divides, with its name: a norm's weight, or the bias of a linear if it has one."""
    if source in (norms := block.vectors()):
        return source, norms[source]
    module = source.removesuffix(".weight")
    return f"{module}.bias", block.linears()[module].bias


def _exact(s: Tensor, named: tuple[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return scales near s and the vector divided by them: bf16 values, exact in any checkpoint dtype."""
    name, vector = named
    if vector is None:
        return s, {}
    divided = (vector / s).bfloat16().float()
    return torch.where(divided != 0, vector / divided, s), {name: divided}


def _apply(block: Block, fold: ScaleFold, s: Tensor, divided: dict[str, Tensor]) -> None:
    """Divide what computes an input by s, multiply the columns that read it."""
    linears, norms = block.linears(), block.vectors()
    for name in fold.readers:
        linears[name].weight = linears[name].weight * s
    if fold.source in norms:
        norms[fold.source].copy_(divided[fold.source])
        return
    module = fold.source.removesuffix(".weight")
    linears[module].weight = linears[module].weight / s[:, None]
    linears[module].bias = divided.get(f"{module}.bias")
