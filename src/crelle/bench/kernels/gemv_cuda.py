"""How fast one matrix product is on a GPU: checked against f64, timed cold, beside cuBLAS and the memory's ceiling.

    product    x is given as digits; the matrix kernel alone
    encode     x becomes digits; in a model this is fused into what makes x, and serves all matrices that read it
    both       what `kernels.ops.matmul` does, x given as f16: the figure called `microseconds`
    baseline   torch.nn.functional.linear with an f16 weight, which is cuBLAS

Weights are random planes in the scheme's format (crelle.bench.kernels.random_matrices): no quantizer has to run.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crelle.bench.kernels.cuda_timer import Ceiling, Replay, clone, copies, poison, require_cuda
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor, nbytes
from crelle.formats.dense import DenseTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels import ops
from crelle.models.nested import at_precision
from crelle.quantizers.scheme import parse

TOLERANCE = 1e-3  # ‖y - oracle‖ / ‖oracle‖ with f16 or bf16 in and out
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_TOLERANCES = {torch.float16: TOLERANCE, torch.bfloat16: 8 * TOLERANCE}  # 3 bits fewer in every output
_DEVICE = "cuda"
_CHECKS = 2  # fresh inputs that are checked
_SLAB = 1 << 26  # weights that the oracle holds as f64 at one time
_ENCODES = 64  # calls of the encoder in one graph


@dataclass(frozen=True, slots=True)
class Baseline:
    """cuBLAS on the same shape in the same run."""

    microseconds: float
    joules: float | None


@dataclass(frozen=True, slots=True)
class GemvCuda:
    """One measurement."""

    scheme: str
    shape: tuple[int, int]
    batch: int
    device: str
    dtype: str
    kernel: str
    bytes: int  # of the prepared weight
    bits_per_weight: float  # as stored, scales counted
    copies: int  # of the weight, read round-robin
    rel_err: float  # norm of the error over norm of the f64 result
    max_rel_err: float  # largest error over the largest output
    microseconds: float  # of the whole product, from x to y
    product_microseconds: float | None  # with x given as digits, where the kernel works so
    encode_microseconds: float | None
    gb_per_s: float
    product_gb_per_s: float | None
    read_ceiling_gb_per_s: float
    read_ceiling: str  # by what it was measured
    share_of_ceiling: float
    product_share_of_ceiling: float | None
    baseline: str
    baseline_microseconds: float
    speedup: float
    product_speedup: float | None
    joules_per_call: float | None
    baseline_joules_per_call: float | None
    energy_note: str | None  # why there are no joules


def baseline(N: int, K: int, batch: int, dtype: torch.dtype, energy: bool) -> Baseline:
    """Time torch's linear on as many plain weights as exceed the cache."""
    require_cuda()
    random = random_generator(1, _DEVICE)
    x = torch.randn(batch, K, generator=random, dtype=dtype, device=_DEVICE)
    n = copies(2 * N * K)
    weights = [torch.randn(N, K, generator=random, dtype=dtype, device=_DEVICE).mul_(K**-0.5) for _ in range(n)]
    replay = Replay([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])  # type: ignore[misc]
    return Baseline(replay.microseconds(), replay.energy().joules if energy else None)


def measure(
    N: int,
    K: int,
    scheme: str,
    *,
    batch: int = 1,
    kernel: str | None = None,
    dtype: str = "float16",
    ceiling: Ceiling,
    against: Baseline,
    energy: bool = True,
    seed: int = 0,
) -> GemvCuda:
    """Check, then time x [batch, K] @ W.T for a random W [N, K] in a scheme's form."""
    require_cuda()
    if dtype not in DTYPES:
        raise SchemeError(f"the dtype is {' or '.join(DTYPES)}, not '{dtype}'")
    random = random_generator(seed, _DEVICE)
    w = at_precision(random_matrix(parse(scheme), N, K, random))
    prepared = ops.prepare(w, DTYPES[dtype], None if isinstance(w, DenseTensor) else kernel)
    rel_err, max_rel_err = check(w, prepared, batch, DTYPES[dtype], random)
    stored = nbytes(w)
    bits = 8 * stored / (N * K)
    size = bytes_of(prepared, stored)
    del w
    n = copies(size)
    weights = [prepared] + [replace(prepared, data=clone(prepared.data)) for _ in range(n - 1)]
    x = torch.randn(batch, K, generator=random, dtype=DTYPES[dtype], device=_DEVICE)
    whole = Replay([lambda p=p: ops.matmul(x, p) for p in weights])  # type: ignore[misc]
    whole.check(ops.matmul(x, prepared), scheme)
    us = whole.microseconds()
    product_us, encode_us = _apart(x, weights, scheme)
    spent = whole.energy() if energy else None
    return GemvCuda(
        scheme=scheme,
        shape=(N, K),
        batch=batch,
        device=torch.cuda.get_device_name(),
        dtype=dtype,
        kernel=prepared.kernel.name,
        bytes=size,
        bits_per_weight=bits,
        copies=n,
        rel_err=rel_err,
        max_rel_err=max_rel_err,
        microseconds=us,
        product_microseconds=product_us,
        encode_microseconds=encode_us,
        gb_per_s=size / us / 1e3,
        product_gb_per_s=None if product_us is None else size / product_us / 1e3,
        read_ceiling_gb_per_s=ceiling.gb_per_s,
        read_ceiling=ceiling.how,
        share_of_ceiling=size / us / 1e3 / ceiling.gb_per_s,
        product_share_of_ceiling=None if product_us is None else size / product_us / 1e3 / ceiling.gb_per_s,
        baseline=f"cuBLAS {dtype} (torch linear)",
        baseline_microseconds=against.microseconds,
        speedup=against.microseconds / us,
        product_speedup=None if product_us is None else against.microseconds / product_us,
        joules_per_call=spent.joules if spent else None,
        baseline_joules_per_call=against.joules,
        energy_note=spent.reason if spent else "not asked for",
    )


def bytes_of(prepared: ops.Prepared, stored: int) -> int:
    """Return the bytes that a product reads: of the kernel's own layout where it has one."""
    size = getattr(prepared.data, "nbytes", stored)
    return size if isinstance(size, int) else stored


def check(
    w: QuantTensor, prepared: ops.Prepared, batch: int, dtype: torch.dtype, random: torch.Generator
) -> tuple[float, float]:
    """Return the worst (norm, largest) error on fresh inputs; refuse a product that is wrong or not repeatable."""
    worst = (0.0, 0.0)
    N, K = w.shape
    inputs = torch.randn(_CHECKS, batch, K, generator=random, dtype=dtype, device=w.device)
    oracles = exact(inputs.view(-1, K), w).view(_CHECKS, batch, N)  # W is dequantized once for all
    for x, oracle in zip(inputs, oracles, strict=True):
        if w.device.type == "cuda":
            poison(batch, N, dtype=dtype)
        y = ops.matmul(x, prepared)
        again = ops.matmul(x, prepared)
        error = y.double() - oracle
        norm = (error.norm() / oracle.norm()).item()
        if not norm <= _TOLERANCES.get(dtype, TOLERANCE):  # a NaN fails too
            raise UnsupportedError(
                f"kernel '{prepared.kernel.name}' is wrong on {prepared.problem}, batch {batch}: "
                f"relative error {norm:.3g}, so it is not timed"
            )
        if not torch.equal(y, again):
            raise UnsupportedError(
                f"kernel '{prepared.kernel.name}' on {prepared.problem}, batch {batch}: two runs differ, "
                "so it is not timed"
            )
        largest = (error.abs().max() / oracle.abs().max()).item()
        worst = (max(worst[0], norm), max(worst[1], largest))
    return worst


def exact(x: Tensor, w: QuantTensor) -> Tensor:
    """Return x @ W.T in f64, some rows of W at a time; x as the format rounds it, where it does."""
    N, K = w.shape
    if isinstance(w, GroupedTensor | TwoLevelTensor):
        x = w.round_input(x.float())
    step = max(1, _SLAB // K)
    rows = (w.rows(slice(n, n + step)).dequantize(torch.float64) for n in range(0, N, step))
    return torch.cat([x.double() @ slab.T for slab in rows], dim=-1)


def _apart(x: Tensor, weights: list[ops.Prepared], what: str) -> tuple[float | None, float | None]:
    """Return the microseconds of the product with x encoded, and of encoding x; None where they are one."""
    from crelle.kernels.cuda import dispatch
    from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemv
    from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
    from crelle.kernels.cuda.planes import bmma_gemv
    from crelle.kernels.cuda.planes.weight_layout import CudaWeight

    first: Any = weights[0].data
    if weights[0].kernel.name == "cuda" and isinstance(first, CudaWeight) and x.shape[0] <= dispatch.GEMV_ROWS:
        digits = bmma_gemv.encode(x, first)

        def encode() -> Tensor:
            return bmma_gemv.encode(x, first).bits

        def product(w: Any, out: Tensor | None = None) -> Tensor:
            return bmma_gemv.product(digits, w, x.dtype, out=out)

    elif isinstance(first, MixedWeight) and dispatch.mixed_route(x.shape[0]) == "gemv":
        asynchronous = weights[0].kernel.name == "cuda-mixed-async"
        if not asynchronous and mixed_decode.supports(x, [first]):
            return None, None
        xs = mixed_gemv.encode(x, first)

        def encode() -> Tensor:
            return mixed_gemv.encode(x, first).rows

        def product(w: Any, out: Tensor | None = None) -> Tensor:
            return mixed_gemv.product(xs, w, x.dtype, out=out, asynchronous=asynchronous)

    elif weights[0].kernel.name == "cuda-integer":
        kernel = weights[0].kernel
        integers = kernel.encode(x, first)

        def encode() -> Tensor:
            return _first_tensor(kernel.encode(x, first).data)

        def product(w: Any, out: Tensor | None = None) -> Tensor:
            return kernel.run(integers, w)

    else:
        return None, None
    out = torch.full((x.shape[0], first.N), torch.nan, dtype=x.dtype, device=x.device)
    y = product(first, out)
    if not torch.equal(y, ops.matmul(x, weights[0])):
        raise UnsupportedError(f"{what}: the product of encoded x differs from the whole product; it is not timed")
    alone = Replay([lambda w=p.data: product(w) for p in weights])  # type: ignore[misc]
    alone.check(y, what)
    return alone.microseconds(), Replay([encode] * _ENCODES).microseconds()


def _first_tensor(encoded: Any) -> Tensor:
    """Return a tensor of what an encoder made: a graph keeps the others alive with it."""
    return encoded if isinstance(encoded, Tensor) else _first_tensor(encoded[0])
