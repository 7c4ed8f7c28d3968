"""Decode attention over pages: one token of each of B sequences, checked against f64, beside torch's own attention.

    1. check    poisoned outputs, ragged lengths: y against f64 of the values that the pages hold (`rel_err`) and of
                those before they were stored (`stored_rel_err`); a rerun must be equal to the last bit
    2. time     all sequences at full length, over more pages than the caches hold; on a GPU by graph replays
    3. beside   torch's scaled_dot_product_attention over plain keys and values, every backend that takes the problem

The kernels are those of the device: CUDA's paged ones, else those of crelle.kernels.reference_attention. (On a CPU
the C++ step attends inside of a whole step; `crelle bench serve --batch` times that.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.bench.kernels.cuda_timer import Replay, clone, copies
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.kv.pages import KVFormat, KVPages, hadamard
from crelle.kernels import reference_attention as plain

TOLERANCE = 2e-3  # of the largest output, in f16; sums in another order and the rounding of the result
CHECKED = 8  # sequences that are compared with f64
_REPEAT = 9  # on a CPU
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


@dataclass(frozen=True, slots=True)
class Attention:
    """One measurement."""

    attention: str  # which kernels
    device: str
    kv: str
    batch: int
    context: int  # tokens of each sequence
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    rel_err: float
    stored_rel_err: float
    microseconds: float
    append_microseconds: float  # one new token of each sequence
    bytes: int  # of keys and values that are read
    gb_per_s: float
    torch_microseconds: dict[str, float]  # by backend
    torch_refused: dict[str, str]  # backend: why not
    fastest: str | None  # of torch's
    speedup: float | None  # against it


class AttentionKernels(Protocol):
    """What is timed."""

    name: str

    def append(self, k: Tensor, v: Tensor, pages: KVPages, table: Tensor, position: Tensor) -> None: ...
    def prepare(self, q: Tensor, pages: KVPages) -> Tensor: ...
    def attend(self, q: Tensor, pages: KVPages, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor: ...


class ReferenceKernels:
    """crelle.kernels.reference_attention."""

    name = "reference"

    def append(self, k: Tensor, v: Tensor, pages: KVPages, table: Tensor, position: Tensor) -> None:
        plain.append(k, v, pages, table, position)

    def prepare(self, q: Tensor, pages: KVPages) -> Tensor:
        return q

    def attend(self, q: Tensor, pages: KVPages, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        return plain.attend(q, pages, table, lengths).to(dtype)


class CudaKernels:
    """crelle.kernels.cuda.attention.paged_attention."""

    name = "cuda-paged"

    def __init__(self) -> None:
        from crelle.kernels.cuda.attention import paged_attention

        self._paged = paged_attention
        self._semaphores = torch.zeros(4096, dtype=torch.int32, device="cuda")  # as a model's step has them

    def append(self, k: Tensor, v: Tensor, pages: KVPages, table: Tensor, position: Tensor) -> None:
        self._paged.append(k, v, pages, table, position)

    def prepare(self, q: Tensor, pages: KVPages) -> Tensor:
        """Rotate q, which `append` does in a model's step."""
        rotated = self._paged.append(None, None, pages, None, None, q=q)
        assert rotated is not None
        return rotated

    def attend(self, q: Tensor, pages: KVPages, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        if q.shape[0] * q.shape[1] > self._semaphores.numel():
            self._semaphores = self._semaphores.new_zeros(q.shape[0] * q.shape[1])
        return self._paged.attend(q, pages, table, lengths, rotated=True, dtype=dtype, semaphores=self._semaphores)


def measure(
    *,
    kv: KVFormat | str | int,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    device: torch.device,
    dtype: torch.dtype,
    baseline: bool = True,
    seed: int = 0,
) -> Attention:
    """Check, then time one problem."""
    if min(batch, context, heads, kv_heads) < 1 or heads % kv_heads:
        raise SchemeError(f"{heads} heads cannot share {kv_heads} of keys; sizes are at least 1")
    fmt = KVFormat.parse(kv)
    fmt.check(head_size)
    kernels: AttentionKernels = CudaKernels() if device.type == "cuda" else ReferenceKernels()
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(dtype)

    each = -(-context // fmt.page)
    pages = KVPages.new(fmt, batch * each, kv_heads, head_size, dtype, device)
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(seed))
    table = order.view(batch, each).int().to(device)
    k, v = torch.empty(2, batch, kv_heads, context, head_size, dtype=dtype, device=device)
    for b in range(batch):
        k[b], v[b] = normal(kv_heads, context, head_size), normal(kv_heads, context, head_size)
        begin = torch.zeros(1, dtype=torch.int32, device=device)
        keys, values = (x[b].transpose(0, 1).contiguous() for x in (k, v))  # [context, Hkv, D]
        kernels.append(keys, values, pages, table[b : b + 1], begin)
    q = normal(batch, heads, head_size)
    prepared = kernels.prepare(q, pages)
    errors = _check(kernels, q, prepared, k, v, pages, table, context, dtype)

    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    count = copies(pages.nbytes, most=16) if device.type == "cuda" else 1
    sets = [pages, *(clone(pages) for _ in range(count - 1))]
    calls = [partial(kernels.attend, prepared, p, table, lengths, dtype) for p in sets]
    expected = calls[0]()
    us = _time(calls, expected, device, f"attention over {fmt}")
    last = lengths - 1
    new = [x[:, :, -1].contiguous() for x in (k, v)]
    append_us = _time([partial(_appended, kernels, new, p, table, last) for p in sets], None, device, "append")
    del sets, calls
    known, refused = _torch(q, k, v, device) if baseline else ({}, {})
    fastest = min(known, key=known.__getitem__, default=None)
    size = pages.nbytes * context // (each * fmt.page)
    return Attention(
        attention=kernels.name,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        kv=str(fmt),
        batch=batch,
        context=context,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=str(dtype).removeprefix("torch."),
        rel_err=errors[0],
        stored_rel_err=errors[1],
        microseconds=us,
        append_microseconds=append_us,
        bytes=size,
        gb_per_s=size / us / 1e3,
        torch_microseconds=known,
        torch_refused=refused,
        fastest=fastest,
        speedup=known[fastest] / us if fastest else None,
    )


def _appended(kernels: AttentionKernels, new: Sequence[Tensor], pages: KVPages, table: Tensor, at: Tensor) -> Tensor:
    kernels.append(new[0], new[1], pages, table, at)
    return pages.codes[:1]


def _check(
    kernels: AttentionKernels,
    q: Tensor,
    prepared: Tensor,
    k: Tensor,
    v: Tensor,
    pages: KVPages,
    table: Tensor,
    context: int,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Return the largest errors, relative to the largest output, against f64 of stored and of given values."""
    B, H, D = q.shape
    some = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, context + 1, (B,), generator=some).int()
    lengths[-1] = context
    on_device = lengths.to(q.device)
    if q.is_cuda:
        torch.full((B, H, D), torch.nan, dtype=dtype, device=q.device)  # what the result will most likely be made of
    y = kernels.attend(prepared, pages, table, on_device, dtype)
    if not torch.equal(y, kernels.attend(prepared, pages, table, on_device, dtype)):
        raise UnsupportedError("two runs of the same attention differ, so it is not timed")
    worst = [0.0, 0.0]
    for b in sorted({0, B - 1, *torch.randperm(B, generator=some)[:CHECKED].tolist()}):
        n = int(lengths[b])
        stored = pages.read(table[b, : -(-n // pages.format.page)].long())[:, :, :n].double()  # [2, Hkv, n, D]
        fmt = pages.format
        wanted = hadamard(_attended(hadamard(q[b], fmt.key).double(), *stored).float(), fmt.value).double()
        given = _attended(q[b].double(), k[b, :, :n].double(), v[b, :, :n].double())
        for i, want in enumerate((wanted, given)):
            error = float((y[b].double() - want).abs().max() / want.abs().max())
            worst[i] = max(worst[i], error) if error == error else float("nan")
    if not worst[0] <= TOLERANCE:  # a NaN fails too
        raise UnsupportedError(f"attention over {pages.format} is wrong by {worst[0]:.1e} here, so it is not timed")
    return worst[0], worst[1]


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q K^T / sqrt(D)) V for q [H, D] over k and v [Hkv, n, D]."""
    grouped = q.view(k.shape[0], -1, q.shape[-1])  # [Hkv, H/Hkv, D]
    seen: Tensor = (grouped @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return seen.view(q.shape)


def _torch(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """Time every backend of torch over plain keys and values [B, Hkv, S, D]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known: dict[str, float] = {}
    refused: dict[str, str] = {}
    query, grouped = q[:, :, None], q.shape[1] != k.shape[1]  # [B, H, 1, D]

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped)

    for name, backend in (
        BACKENDS.items() if device.type == "cuda" else [("math", "MATH"), ("flash", "FLASH_ATTENTION")]
    ):
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                known[name] = _time([attend], None, device, name)
        except (RuntimeError, AttributeError) as e:
            refused[name] = str(e).splitlines()[0]
    return known, refused


def _time(calls: Sequence[Callable[[], Tensor]], expected: Tensor | None, device: torch.device, what: str) -> float:
    """Return microseconds of a call."""
    if device.type == "cuda":
        replay = Replay(calls)
        if expected is not None:
            replay.check(expected, what)
        return replay.microseconds()
    times = []
    for _ in range(_REPEAT):
        begun = perf_counter()
        for call in calls:
            call()
        times.append((perf_counter() - begun) / len(calls))
    return 1e6 * median(times)


def plot_attention(path: Path, rows: list[dict[str, Any]]) -> None:
    """Plot curves over the batch where several were timed beside cuDNN, a panel for each context; else bars."""
    from crelle.plots import plot_bars, plot_lines

    if len({r["batch"] for r in rows}) > 2 and all(r["torch_microseconds"].get("cudnn") for r in rows):
        panels: dict[str, dict[str, dict[int, float]]] = {}
        for r in rows:
            panel = panels.setdefault(f"{r['heads']}/{r['kv_heads']} heads, {r['context']} tokens", {})
            cudnn = r["torch_microseconds"]["cudnn"]
            panel.setdefault(f"ours, {r['kv']}", {})[r["batch"]] = cudnn / r["microseconds"]
            if "flash" in r["torch_microseconds"]:
                panel.setdefault("torch flash", {})[r["batch"]] = cudnn / r["torch_microseconds"]["flash"]
        title = f"decode attention, {rows[0]['device']}"
        plot_lines(path, panels, title, "sequences", "times as fast as cuDNN over 16 bits")
        return
    labels = [
        f"{r['kv']}, batch {r['batch']}, {r['context']}, {r['heads']}/{r['kv_heads']} x {r['head_size']}" for r in rows
    ]
    series = {"ours": [r["microseconds"] for r in rows]}
    for name in BACKENDS:
        if name != "math" and any(name in r["torch_microseconds"] for r in rows):
            series[f"torch {name}"] = [r["torch_microseconds"].get(name, 0.0) for r in rows]
    plot_bars(path, labels, series, f"decode attention, {rows[0]['device']}", "us")
