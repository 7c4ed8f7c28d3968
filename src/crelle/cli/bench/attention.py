"""crelle bench attention: one token's attention over pages of keys and values."""

from typing import Annotated

import typer
from rich.table import Column, Table

from crelle.cli.bench.rows import ResultFile, Rows, show
from crelle.cli.common.console import Json, Threads, out, use_threads
from crelle.errors import SchemeError

NAME = "attention"
_DTYPES = ("float16", "bfloat16", "float32")


def run(
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, e.g. 1,16,128.")] = "16",
    context: Annotated[str, typer.Option("--context", help="Tokens per sequence, e.g. 1024,4096.")] = "1024",
    heads: Annotated[
        list[str] | None,
        typer.Option("--heads", help="Number of query heads, or query/KV heads, e.g. 32/8; repeatable. Default: 32."),
    ] = None,
    head_size: Annotated[int, typer.Option("--head-size", help="Channels per head.")] = 128,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help="KV cache format; repeatable. Default: 16, 8, 4.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype of q and of 16-bit pages; default: float16 on a GPU, float32 on a CPU."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Device: cpu, cuda or auto.")] = "auto",
    threads: Threads = None,
    baseline: Annotated[bool, typer.Option("--baseline/--no-baseline", help="Also time torch's attention.")] = True,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Time decode attention (one new token per sequence) over a paged KV cache, and torch's attention.

    The result is first compared with f64, with different sequence lengths; a rerun must be bitwise equal. On a GPU,
    torch's flash and cuDNN attention read f16 keys and values.

    **Example**: `crelle bench attention --device cuda --batch 128 --heads 32 --heads 32/8 --out results/attention`
    """
    import torch

    from crelle.bench.kernels.attention import Attention, measure
    from crelle.bench.kernels.cuda_timer import gpu
    from crelle.bench.load.decode_throughput import parse_batches
    from crelle.models.loader import choose_device

    use_threads(threads)
    chosen = choose_device(device)
    name = dtype or ("float16" if chosen.type == "cuda" else "float32")
    if name not in _DTYPES:
        raise SchemeError(f"--dtype must be one of {', '.join(_DTYPES)}, got '{name}'")
    rows = Rows(results, {"gpu": gpu()} if chosen.type == "cuda" else None)
    sizes, lengths = parse_batches(batch, "--batch"), parse_batches(context, "--context")
    for shared in map(_heads, heads or ["32"]):
        for b, n, k in ((b, n, k) for b in sizes for n in lengths for k in kv or ["16", "8", "4"]):
            rows.add(
                f"{k} bits, batch {b}, context {n}, heads {shared[0]}/{shared[1]}",
                lambda b=b, n=n, k=k, shared=shared: measure(  # type: ignore[misc]
                    kv=k,
                    batch=b,
                    context=n,
                    heads=shared[0],
                    kv_heads=shared[1],
                    head_size=head_size,
                    device=chosen,
                    dtype=getattr(torch, name),
                    baseline=baseline,
                ),
            )
    if rows.finish(json):
        first: Attention = rows.rows[0]
        out.print(f"{first.device}, {first.attention}, heads of {first.head_size}, {first.dtype}", highlight=False)
        baselines = list(dict.fromkeys(n for r in rows.rows for n in r.torch_microseconds))
        table = Table(
            Column("cache", no_wrap=True),
            *("batch", "context", "heads", "us", "GB/s", "append us"),
            *(f"torch {n} us" for n in baselines),
            *("speedup", "error", "storage error"),
        )
        r: Attention
        for r in rows.rows:
            table.add_row(
                *(r.kv, str(r.batch), str(r.context), f"{r.heads}/{r.kv_heads}"),
                *(f"{r.microseconds:.1f}", f"{r.gb_per_s:.3g}", f"{r.append_microseconds:.1f}"),
                *(f"{r.torch_microseconds[n]:.1f}" if n in r.torch_microseconds else "–" for n in baselines),
                *("–" if r.speedup is None else f"{r.speedup:.2f}x", f"{r.rel_err:.1e}", f"{r.stored_rel_err:.1e}"),
            )
        show(table)
        for n, why in sorted({(n, why) for r in rows.rows for n, why in r.torch_refused.items()}):
            out.print(f"torch {n}: {why}", highlight=False, markup=False, soft_wrap=True)
    rows.end(json)


def _heads(text: str) -> tuple[int, int]:
    """Read 32 or 32/8."""
    q, slash, k = text.partition("/")
    if not q.isdigit() or (slash and not k.isdigit()):
        raise SchemeError(f"--heads must look like 32 or 32/8, got '{text}'")
    return int(q), int(k) if slash else int(q)
