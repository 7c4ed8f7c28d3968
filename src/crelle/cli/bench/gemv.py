"""crelle bench gemv: one matrix product, on the CPU or on a GPU."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from crelle.cli.bench.rows import Energy, ResultFile, Rows, ThreadCounts, parse_shapes, parse_threads, refuse, show
from crelle.cli.common.console import Json, KernelName, err, out
from crelle.errors import SchemeError

NAME = "gemv"
SCHEMES = [f"{s}:bits={b},group=128" for b in (2, 3, 4) for s in ("bcq", "rtn")]


def run(
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="OUTPUTSxINPUTS; repeatable or separated by commas. Default: 4096x4096."),
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="Scheme to time; repeatable. Default: 2, 3 and 4 bits.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Number of rows of x: 1 for decoding, hundreds for prefill.")
    ] = 1,
    device: Annotated[str, typer.Option("--device", help="Device: cpu, cuda or auto.")] = "cpu",
    working_set: Annotated[
        str | None,
        typer.Option(
            "--working-set",
            help="CPU: weights in cache (hot, default), in memory (cold), or both. A GPU always runs cold.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="CPU: activation precision, exact (16 bits, default) or int8.")
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option("--isa", help="CPU: force this instruction set; `crelle doctor` lists those of this machine."),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="CPU: command that times the same product (docs/notes/cpu-kernels.md)."),
    ] = None,
    threads: ThreadCounts = "",
    kernel: KernelName = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="GPU: dtype of x and y, float16 (default) or bfloat16.")
    ] = None,
    energy: Energy = True,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Time one matrix product, with torch and the memory bandwidth in the same run.

    Every kernel is first compared with an f64 product of the dequantized weight. CPU: `hot` weights are in the caches,
    `cold` weights in memory; the roofline is a plain read of the same bytes by the same threads. GPU: graph replays
    over more weights than the cache holds, compared with cuBLAS; a second run must be bitwise equal.

    **Example**: `crelle bench gemv --shape 11008x4096 --scheme bcq:bits=2,group=128 --working-set both --threads 1,2`

    **Example**: `crelle bench gemv --device cuda --shape 4096x4096,12288x12288 --out bench/results/h200-gemv`

    `--json` prints one object for one measurement, and {"rows": […]} for several.
    """
    from crelle.models.loader import choose_device

    shapes, schemes = parse_shapes(shape or ["4096x4096"]), scheme or SCHEMES
    if batch < 1:
        raise SchemeError(f"--batch must be at least 1, got {batch}")
    if choose_device(device).type == "cuda":
        refuse("cuda", working_set=working_set, precision=precision, isa=isa, peer=peer, threads=threads)
        _on_gpu(shapes, schemes, batch, kernel, dtype or "float16", energy, results, json)
    else:
        refuse("cpu", kernel=kernel, dtype=dtype)
        working_set, precision = working_set or "hot", precision or "exact"
        _on_cpu(shapes, schemes, batch, working_set, precision, isa, peer, parse_threads(threads), results, json)


def _on_cpu(
    shapes: list[tuple[int, int]],
    schemes: list[str],
    batch: int,
    working_set: str,
    precision: str,
    isa: str | None,
    peer: str | None,
    threads: list[int],
    results: Path | None,
    json: bool,
) -> None:
    from crelle.bench.kernels.gemv import Gemv, measure

    rows = Rows(results)
    sets = ["hot", "cold"] if working_set == "both" else [working_set]
    for (N, K), s, where, n in ((a, b, c, d) for a in shapes for b in schemes for c in sets for d in threads):
        rows.add(
            f"{N}x{K} {s}, {where}, {n} threads",
            lambda N=N, K=K, s=s, where=where, n=n: measure(  # type: ignore[misc]
                N, K, s, batch=batch, threads=n, working_set=where, precision=precision, isa=isa, peer=peer
            ),
        )
    if rows.finish(json):
        table = Table(
            "shape",
            Column("scheme", no_wrap=True),
            *("set", "threads", "us", "GB/s", "of roofline", "torch us", "speedup", "error"),
        )
        r: Gemv
        for r in rows.rows:
            table.add_row(
                "{} x {}".format(*r.shape),
                r.scheme,
                r.working_set,
                str(r.threads),
                f"{r.microseconds:.1f}",
                f"{r.gb_per_s:.1f}",
                f"{r.share_of_roofline:.0%}",
                f"{r.baseline_microseconds:.0f}",
                f"{r.speedup:.1f}x",
                f"{r.max_rel_err:.1e}",
            )
            for who, us in r.peers.items():
                times = f"{us / r.microseconds:.2f}x"
                table.add_row("", f"  {who}", r.working_set, str(r.threads), f"{us:.1f}", "", "", "", times)
        out.print(f"batch {batch}, {rows.rows[0].isa}, {precision}", highlight=False)
        show(table)
    rows.end(json)


def _on_gpu(
    shapes: list[tuple[int, int]],
    schemes: list[str],
    batch: int,
    kernel: str | None,
    dtype: str,
    energy: bool,
    results: Path | None,
    json: bool,
) -> None:
    from crelle.bench.kernels.cuda_timer import gpu, read_ceiling
    from crelle.bench.kernels.gemv_cuda import DTYPES, GemvCuda, baseline, measure

    if dtype not in DTYPES:
        raise SchemeError(f"--dtype must be {' or '.join(DTYPES)}, got '{dtype}'")
    with err.status("measuring the memory bandwidth"):
        ceiling = read_ceiling()
    rows = Rows(results, {"gpu": gpu(), "read_ceiling_gb_per_s": ceiling.gb_per_s, "read_ceiling": ceiling.how})
    for N, K in shapes:
        with err.status(f"{N}x{K} cuBLAS"):
            against = baseline(N, K, batch, DTYPES[dtype], energy)
        for s in schemes:
            rows.add(
                f"{N}x{K} {s}, batch {batch}",
                lambda N=N, K=K, s=s, against=against: measure(  # type: ignore[misc]
                    N, K, s, batch=batch, kernel=kernel, dtype=dtype, ceiling=ceiling, against=against, energy=energy
                ),
            )
    if rows.finish(json):
        table = Table(
            "shape",
            Column("scheme", no_wrap=True),
            *(
                "kernel",
                "us",
                "product",
                "digits",
                "GB/s",
                "of ceiling",
                "cuBLAS us",
                "faster",
                "product",
                "error",
                "mJ",
            ),
        )
        r: GemvCuda
        for r in rows.rows:
            table.add_row(
                "{} x {}".format(*r.shape),
                r.scheme,
                r.kernel,
                f"{r.microseconds:.2f}",
                _or_dash(r.product_microseconds, "{:.2f}"),
                _or_dash(r.encode_microseconds, "{:.2f}"),
                f"{r.gb_per_s:.0f}",
                f"{r.share_of_ceiling:.0%}",
                f"{r.baseline_microseconds:.2f}",
                f"{r.speedup:.2f}x",
                _or_dash(r.product_speedup, "{:.2f}x"),
                f"{r.rel_err:.1e}",
                _or_dash(r.joules_per_call and 1e3 * r.joules_per_call, "{:.3f}"),
            )
        out.print(f"{gpu()['name']}, batch {batch}, {dtype}", highlight=False)
        out.print(f"ceiling {ceiling.gb_per_s:.0f} GB/s ({ceiling.how})", highlight=False)
        show(table)
        if note := rows.rows[0].energy_note:
            out.print(f"energy was not measured: {note}", highlight=False, markup=False, soft_wrap=True)
    rows.end(json)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
