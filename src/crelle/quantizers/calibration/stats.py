"""Statistics of a linear layer's inputs on calibration data.

With X̂ [T, K] the inputs that the layer gets in the quantized model, and X those in the full-precision model:

    hessian = X̂ᵀ X̂ / T       the output error of a change D of the weight is  tr(D hessian Dᵀ)
    cross   = Xᵀ X̂ / T        the weight that best compensates the error of the inputs is  W cross hessian⁻¹
    absmean                   of X̂, per input channel

They are sums over tokens, so memory is a few K² whatever the amount of data. An expert that no token was routed to has
the stats of independent inputs of size 1, so that its weights alone decide. Where the layer's activations are to be
quantized, X̂ is what the integers stand for (`rounding`); how to quantize them is decided on stats without that, which
have a sample of inputs and, of the weights W that read them, readers = Σ Wᵀ W. Of several ranks each adds its own
tokens, and all get the stats of all tokens (crelle.quantizers.ranks). On a CPU one kernel adds up all of it: from
inputs rounded to bf16 with AMX (crelle.kernels.cpu.stats), else to integers of 12 bits where the instruction set has
products of them (crelle.kernels.cpu.i16_gemm).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.activations import ActivationSpec
from crelle.kernels.cpu import i16_gemm
from crelle.kernels.cpu import stats as cpu_stats
from crelle.quantizers.calibration.layer_api import bf16_sums
from crelle.quantizers.ranks import world

_SAMPLE = 128  # inputs of every batch that are kept as they are
_SLAB = 2048  # rows of a sum that are mirrored at one time
_BLOCK = 192  # columns of a Hessian that are summed at one time, down to the diagonal: the rest is their mirror image


@dataclass(frozen=True, slots=True, eq=False)
class InputRounding:
    """Quantized activations of an input: the order of its channels, and bits, groups and outliers in that order."""

    perm: Tensor  # int64 [K]
    spec: ActivationSpec

    def __call__(self, x: Tensor) -> Tensor:
        return self.spec.round(x, self.perm.to(x.device))


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """Sums over the inputs of one linear layer, divided by the number of tokens."""

    hessian: Tensor  # f32 [K, K]
    absmean: Tensor  # f32 [K]
    tokens: int
    cross: Tensor | None = None  # f32 [K, K]
    sample: Tensor | None = None  # f32 [S, K], some of the inputs
    readers: Tensor | None = None  # f32 [K, K]
    rounding: InputRounding | None = None  # of the inputs of which these are the sums
    kept: dict[Any, Any] = field(default_factory=dict)  # what is made of this once for all weights of the input

    def output_error(self, change: Tensor) -> float:
        """Return the mean over tokens of |change x|², summed over outputs: change is W - Ŵ [N, K]."""
        change = change.float()
        return float(((change @ self.hessian) * change).sum().clamp(min=0))

    def target(self, weight: Tensor, damp: float = 0.01, solve: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the weight whose outputs on the quantized model's inputs are nearest to the full-precision outputs.

        Solved with a ridge towards the weight itself: directions that the data never shows stay as they are.
        `solve` returns b H⁻¹ for the damped Hessian, where that has been factorized already.
        """
        if self.cross is None:
            return weight
        N, K = weight.shape
        if solve is not None and weight.device.type == "cpu" and (N >= K or damp in self.kept):
            return weight.float() + weight.float() @ self._compensation(damp, solve)
        missing = weight.float() @ (self.cross - self.hessian)  # [N, K]
        if solve is not None:
            return weight.float() + solve(missing)
        ridge = damp * self.hessian.diagonal().mean().clamp(min=1e-12)
        damped = self.hessian + ridge * torch.eye(len(self.hessian), device=self.hessian.device)
        return weight.float() + torch.cholesky_solve(missing.T, torch.linalg.cholesky(damped)).T

    def _compensation(self, damp: float, solve: Callable[[Tensor], Tensor]) -> Tensor:
        """Return (cross - hessian) hessian⁻¹ [K, K]: for many outputs less work than solving for each."""
        assert self.cross is not None
        if damp not in self.kept:
            self.kept[damp] = solve(self.cross - self.hessian)
        found: Tensor = self.kept[damp]
        return found


def require_stats(stats: Stats | None, scheme: str, K: int) -> Stats:
    """Return the stats of a weight with K inputs, or say that they are missing or another weight's."""
    if stats is None:
        raise SchemeError(f"scheme '{scheme}' needs statistics of the layer's inputs; give a calibration text")
    if tuple(stats.hessian.shape) != (K, K):
        raise SchemeError(f"the statistics have {len(stats.hessian)} inputs, but the weight has {K}")
    return stats


def weighted(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return inputs [T, K] times their tokens' weights [T]."""
    return x if weight is None else weight[:, None] * x


def add_upper(sums: Tensor, x: Tensor) -> None:
    """Add xᵀ x of inputs [T, K] to sums [K, K]: to the upper triangle, and to little of the lower one."""
    for begin in range(0, len(sums), _BLOCK):
        end = min(begin + _BLOCK, len(sums))
        sums[:end, begin:end].addmm_(x[:, :end].T, x[:, begin:end])


def mirrored(sums: Tensor) -> Tensor:
    """Return the symmetric matrix of which `sums` has the upper triangle."""
    upper = sums.triu()
    return upper + upper.triu(1).T


def mirror_(sums: Tensor) -> Tensor:
    """Do the same in place: one matrix of 28,672 inputs has 3.3 GB."""
    for begin in range(0, len(sums), _SLAB):
        end = min(begin + _SLAB, len(sums))
        here = sums[begin:end, begin:end]
        here.copy_(here.triu() + here.triu(1).T)
        sums[end:, begin:end] = sums[begin:end, end:].T
    return sums


def without_tokens(like: Tensor) -> Stats:
    """Return the stats of an input of which there is no token; `like` [K]."""
    ones = torch.ones_like(like)
    return Stats(torch.eye(len(like), device=like.device), ones, 0)


def _kernel(device: torch.device) -> cpu_stats.StatsTiles | i16_gemm.StatsI16 | None:
    """Return our own kernel for the sums, of the fastest kind that this CPU has; None: torch adds them up."""
    if cpu_stats.usable(device):
        return cpu_stats.StatsTiles()
    return i16_gemm.StatsI16() if i16_gemm.usable(device) else None


class StatsCollector:
    """Collects the Stats of one input: in the quantized model and, for `cross`, in the full-precision one."""

    def __init__(self, K: int, device: torch.device | str = "cpu", *, cross: bool = False, half: bool = False) -> None:
        self._half = half  # bf16 products where the machine has them
        self._hessian = torch.zeros(K, K, device=device)
        self._cross = torch.zeros(K, K, device=device) if cross else None  # less the Hessian: it needs few digits
        self._abssum = torch.zeros(K, device=device)
        self._tokens = 0
        self._sample: list[Tensor] = []
        self._tiles = _kernel(self._hessian.device) if half else None

    def add(self, x: Tensor, full: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Add inputs [..., K], those of each token multiplied by its weight, [T]; default: 1."""
        x = x.detach().flatten(0, -2)
        full = None if full is None else full.detach().flatten(0, -2)
        if not len(x):
            return
        self._tokens += len(x)
        some = slice(None, None, max(1, len(x) // _SAMPLE))
        if self._tiles is not None:
            self._tiles.add(x, full, weight, self._hessian, self._cross, self._abssum)
            kept = weighted(x[some], None if weight is None else weight[some])
            self._sample.append(kept.to(torch.float32, copy=True))
            return
        x = weighted(x, weight).float()
        with bf16_sums(x.device, self._half):
            add_upper(self._hessian, x)
            if self._cross is not None and full is not None:
                self._cross.addmm_((weighted(full, weight).float() - x).T, x)
        self._abssum += x.new_ones(len(x)) @ x.abs()  # a third of the time of a sum over rows, on a CPU
        self._sample.append(x[some].clone())

    def _over_ranks(self) -> None:
        """Add what the other ranks have collected."""
        ranks, K = world(), len(self._hessian)
        ranks.add(self._hessian)
        if self._cross is not None:
            ranks.add(self._cross)
        ranks.add(self._abssum)
        self._tokens = sum(ranks.counts(self._tokens))
        if not ranks.alone:
            self._sample = [ranks.gather(torch.cat([self._abssum.new_zeros(0, K), *self._sample]))]

    def stats(self) -> Stats:
        self._over_ranks()
        if not self._tokens:
            return without_tokens(self._abssum)
        T = self._tokens
        sample = torch.cat(self._sample) if self._sample else None
        hessian = mirrored(self._hessian) / T
        cross = None if self._cross is None else self._cross / T + hessian
        return Stats(hessian, self._abssum / T, self._tokens, cross, sample)
