"""Orders of input channels that the matrices before can take over, so that nothing is permuted at run time.

A matrix with quantized activations stores its columns in an order of its own (`perm`, crelle.formats.grouped). Between
up (and gate) and down only elementwise operations stand, so their rows in down's order give down its input as stored.
A checkpoint keeps every matrix in the model's order; this happens when a model is built. Not free, and so not done:
q, k, v, gate and up read the residual stream, whose order all layers share; o reads heads, and its order mixes
channels of different ones, while rows of v can only move within a head (docs/notes/cuda-kernels.md).
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor

_ROWS_ARE_FREE = ("dense", "grouped", "two-level")  # rows in another order cost nothing, and share no scales


def fold_mlp(weights: Mapping[str, QuantTensor]) -> tuple[dict[str, QuantTensor], Tensor | None]:
    """Return the matrices of a feed-forward, by slot, and the new order of the rows of gate and up, if any."""
    down, before = weights["down"], {slot: w for slot, w in weights.items() if slot != "down"}
    if not isinstance(down, GroupedTensor | TwoLevelTensor) or down.perm is None:
        return dict(weights), None
    if any(w.format not in _ROWS_ARE_FREE for w in before.values()):
        return dict(weights), None
    rows = down.perm.long()
    return {slot: w.rows(rows) for slot, w in before.items()} | {"down": replace(down, perm=None)}, rows
