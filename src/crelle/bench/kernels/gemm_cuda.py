"""Products of many rows on a GPU beside those that torch has for fewer bits than 16: Figure 10 of Atom, in kind.

    int8     torch._int_mm: x and W int8, sums int32, no scales
    fp8      torch._scaled_mm: e4m3, a scale per row of x and per output, bf16 out
    gemlite  W8A8 with a scale per token and output, where that package is installed; it quantizes x itself

The other two get x as it must be: what it costs to quantize it is not in their times, and in ours it is (`product`:
without).
Each is checked before it is timed, over more weights than the cache holds, as ours is (crelle.bench.kernels.gemv_cuda).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crelle.bench.kernels.cuda_timer import Ceiling, Replay, copies
from crelle.bench.kernels.gemv_cuda import Baseline, measure
from crelle.bench.kernels.random_matrices import random_generator
from crelle.errors import UnsupportedError

_DEVICE = "cuda"
_INT_MM_ROWS = 32  # torch._int_mm takes more than 16 rows; fewer are padded, as a user would
_FP8_LARGEST = 448.0
_PEER_ERROR = 1e-2  # bf16 out
_W8A8_ERROR = 3e-2  # int8 weights and activations with a scale per row, of normal values


@dataclass(frozen=True, slots=True)
class GemmCuda:
    """One measurement."""

    scheme: str
    shape: tuple[int, int]
    rows: int
    device: str
    dtype: str
    kernel: str
    bits_per_weight: float
    rel_err: float
    microseconds: float  # from x to y
    product_microseconds: float | None  # x given as the kernel wants it
    encode_microseconds: float | None
    tflops: float
    baseline: str
    baseline_microseconds: float
    speedup: float
    product_speedup: float | None
    peers: dict[str, float] = field(default_factory=dict)  # microseconds
    refused: dict[str, str] = field(default_factory=dict)  # peers that do not run, and why


@dataclass(frozen=True, slots=True)
class Peers:
    """What others need for one shape and number of rows."""

    microseconds: dict[str, float]
    refused: dict[str, str]


def measure_rows(
    N: int, K: int, scheme: str, rows: int, *, kernel: str | None, dtype: str, against: Baseline, peers: Peers
) -> GemmCuda:
    """Check, then time x [rows, K] @ W.T for a random W [N, K] in a scheme's form."""
    nothing = Ceiling(1.0, "not measured")
    r = measure(N, K, scheme, batch=rows, kernel=kernel, dtype=dtype, ceiling=nothing, against=against, energy=False)
    return GemmCuda(
        scheme=scheme,
        shape=(N, K),
        rows=rows,
        device=r.device,
        dtype=dtype,
        kernel=r.kernel,
        bits_per_weight=r.bits_per_weight,
        rel_err=r.rel_err,
        microseconds=r.microseconds,
        product_microseconds=r.product_microseconds,
        encode_microseconds=r.encode_microseconds,
        tflops=2e-6 * N * K * rows / r.microseconds,
        baseline=r.baseline,
        baseline_microseconds=r.baseline_microseconds,
        speedup=r.speedup,
        product_speedup=r.product_speedup,
        peers=peers.microseconds,
        refused=peers.refused,
    )


def time_peers(N: int, K: int, rows: int) -> Peers:
    """Time the products of others; one that does not run says why."""
    known: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, make in {"int8 _int_mm": _int8, "fp8 _scaled_mm": _fp8, "gemlite W8A8": _gemlite}.items():
        try:
            known[name] = Replay(make(N, K, rows)).microseconds()
        except (RuntimeError, ImportError, AttributeError, ValueError, UnsupportedError) as e:
            refused[name] = str(e).splitlines()[0] if str(e) else type(e).__name__
    return Peers(known, refused)


def _int8(N: int, K: int, rows: int) -> list[Callable[[], Tensor]]:
    random = random_generator(2, _DEVICE)
    x = _integers(max(rows, _INT_MM_ROWS), K, random)
    weights = [_integers(N, K, random) for _ in range(copies(N * K))]
    first = torch._int_mm(x, weights[0].T)
    if not torch.equal(first.double(), x.double() @ weights[0].double().T):
        raise UnsupportedError("torch._int_mm is wrong, so it is not timed")
    return [lambda w=w: torch._int_mm(x, w.T) for w in weights]  # type: ignore[misc]


def _fp8(N: int, K: int, rows: int) -> list[Callable[[], Tensor]]:
    random = random_generator(3, _DEVICE)
    x, x_scale = _to_fp8(torch.randn(rows, K, generator=random, device=_DEVICE))
    pairs = [_to_fp8(torch.randn(N, K, generator=random, device=_DEVICE)) for _ in range(copies(N * K))]

    def product(w: Tensor, scale: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.T, scale_a=x_scale, scale_b=scale.T, out_dtype=torch.bfloat16)

    w, scale = pairs[0]
    exact = (x.double() * x_scale) @ (w.double() * scale).T
    error = float((product(w, scale).double() - exact).norm() / exact.norm())
    if not error <= _PEER_ERROR:
        raise UnsupportedError(f"torch._scaled_mm has an error of {error:.2g}, so it is not timed")
    return [lambda w=w, s=s: product(w, s) for w, s in pairs]  # type: ignore[misc]


def _gemlite(N: int, K: int, rows: int) -> list[Callable[[], Tensor]]:
    from gemlite.helper import A8W8_int8_dynamic  # type: ignore[import-not-found,unused-ignore]

    random = random_generator(4, _DEVICE)
    x = torch.randn(rows, K, generator=random, dtype=torch.float16, device=_DEVICE)
    layers: list[Any] = []
    for _ in range(copies(N * K)):
        plain = torch.nn.Linear(K, N, bias=False, dtype=torch.float16, device=_DEVICE)
        exact = x.double() @ plain.weight.detach().double().T
        layers.append(A8W8_int8_dynamic(device=_DEVICE, dtype=torch.float16).from_linear(plain))
        error = float((layers[-1](x).double() - exact).norm() / exact.norm())
        if not error <= _W8A8_ERROR:
            raise UnsupportedError(f"gemlite's W8A8 has an error of {error:.2g}, so it is not timed")
    return [lambda layer=layer: layer(x) for layer in layers]  # type: ignore[misc]


def _integers(rows: int, K: int, random: torch.Generator) -> Tensor:
    return torch.randint(-127, 128, (rows, K), dtype=torch.int8, device=_DEVICE, generator=random)


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True) / _FP8_LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale


def plot_gemm(path: Any, rows: list[dict[str, Any]]) -> None:
    """Draw times as fast as cuBLAS over the number of rows, a panel for each shape."""
    from crelle.plots import plot_lines

    panels: dict[str, dict[str, dict[int, float]]] = {}
    for r in rows:
        panel = panels.setdefault("{} x {}".format(*r["shape"]), {})
        panel.setdefault(r["scheme"], {})[r["rows"]] = r["speedup"]
        for name, us in r["peers"].items():
            panel.setdefault(name, {})[r["rows"]] = r["baseline_microseconds"] / us
    first = rows[0]
    plot_lines(path, panels, first["device"], "rows of x", f"times as fast as {first['baseline']}")
