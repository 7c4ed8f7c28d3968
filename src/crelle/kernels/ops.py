"""The interface to the kernels: `prepare` a weight once, then `matmul` with it.

y = matmul(x, w)
encoded = encode(x, q)                                      # once, where several weights read the same input
y = [matmul(encoded, w) for w in (q, k, v)]                 # the same bits as matmul(x, w) of each
"""

from dataclasses import replace

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.kernels.base import Encoded, Prepared, Problem
from crelle.kernels.registry import select

__all__ = ["Encoded", "Prepared", "encode", "matmul", "prepare", "shares"]


def prepare(w: QuantTensor, dtype: torch.dtype, kernel: str | None = None) -> Prepared:
    """Choose a kernel for w (or take the named one) and let it lay the weight out."""
    problem = Problem.of(w, dtype)
    chosen = select(problem, kernel)
    return Prepared(problem, chosen, chosen.prepare(w, dtype))


def encode(x: Tensor, w: Prepared) -> Encoded:
    """Return x [..., K] in the form that w's kernel multiplies, for w and every weight that `shares` it."""
    _check(x.shape[-1], w)
    encoded = w.kernel.encode(x.reshape(-1, w.problem.K), w.data)
    return replace(encoded, weight=w, lead=tuple(x.shape[:-1]))


def shares(a: Prepared, b: Prepared) -> bool:
    """Whether an input encoded for a serves b: the same kernel, inputs, groups of inputs and order of inputs."""
    if a is b:
        return True
    p, q = a.problem, b.problem
    a_reads, b_reads = ((r.K, r.device, r.dtype, r.activation, r.permuted, r.rotated) for r in (p, q))
    same = a_reads == b_reads and a.kernel.name == b.kernel.name and type(a.kernel) is type(b.kernel)
    return same and b.kernel.shares(a.data, b.data)


def matmul(x: Tensor | Encoded, w: Prepared) -> Tensor:
    """Return x [..., K] @ W.T as [..., N], in x.dtype, accumulated at least in f32."""
    if isinstance(x, Encoded):
        if x.weight is None or not shares(x.weight, w):
            whose = "no weight" if x.weight is None else f"{x.weight.problem} by kernel '{x.weight.kernel.name}'"
            raise UnsupportedError(f"x was encoded for {whose}, which does not serve {w.problem}: encode it again")
        return w.kernel.run(x, w.data).reshape(*x.lead, w.problem.N)
    lead = x.shape[:-1]
    _check(x.shape[-1], w)
    if len(lead) == 1:
        return w.kernel.run(x, w.data)
    y = w.kernel.run(x.reshape(-1, w.problem.K), w.data)  # [M, N]
    return y.view(*lead, w.problem.N)


def _check(K: int, w: Prepared) -> None:
    if w.problem.K != K:
        raise UnsupportedError(f"x has {K} inputs, the weight takes {w.problem.K}")
