"""crelle bench gemm: products of many rows on a GPU, over the number of rows."""

from typing import Annotated

import typer
from rich.table import Column, Table

from crelle.cli.bench.rows import ResultFile, Rows, parse_shapes, show
from crelle.cli.common.console import Json, KernelName, err, out
from crelle.errors import SchemeError, UnsupportedError

NAME = "gemm"
SCHEMES = [f"atom:w={w},a={a},group=128,outliers=128" for w, a in ((4, 4), (4, 8), (8, 8))]
SCHEMES += ["atom:w=4,a=8,group=128,outliers=128,levels=2", "rtn:bits=4,group=128"]
SHAPES = ["4096x4096", "11008x4096", "8192x8192"]


def run(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help=f"OUTPUTSxINPUTS; repeatable or separated by commas. Default: {','.join(SHAPES)}."
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", help="Scheme to time; repeatable. Default: four variants of atom, and rtn:bits=4."),
    ] = None,
    rows: Annotated[
        str, typer.Option("--rows", help="Numbers of rows of x, separated by commas.")
    ] = "16,64,128,256,512",
    device: Annotated[str, typer.Option("--device", help="Device: cuda or auto.")] = "auto",
    kernel: KernelName = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of x and y: float16 or bfloat16.")] = "float16",
    peers: Annotated[
        bool,
        typer.Option(
            "--peers/--no-peers", help="Also time torch's int8 and fp8 products, and gemlite if it is installed."
        ),
    ] = True,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Time matrix products with many rows on a GPU, with cuBLAS and 8-bit products in the same run.

    Every kernel is first compared with an f64 product of the dequantized weight and the quantized x; a second run must
    be bitwise equal. Times are from graph replays over more weights than the cache holds. On a CPU, use `crelle bench
    gemv --batch`.

    **Example**: `crelle bench gemm --shape 4096x4096 --scheme atom:w=4,a=4 --rows 16,64,256 --out gemm`

    `--json` prints one object for one measurement, and {"rows": […]} for several.
    """
    from crelle.models.loader import choose_device

    shapes, counts = parse_shapes(shape or SHAPES), parse_rows(rows)
    if choose_device(device).type != "cuda":
        raise UnsupportedError("bench gemm needs a CUDA device; on a CPU use crelle bench gemv --batch ROWS")
    from crelle.bench.kernels.cuda_timer import gpu
    from crelle.bench.kernels.gemm_cuda import GemmCuda, Peers, measure_rows, time_peers
    from crelle.bench.kernels.gemv_cuda import DTYPES, baseline

    if dtype not in DTYPES:
        raise SchemeError(f"--dtype must be {' or '.join(DTYPES)}, got '{dtype}'")
    measured = Rows(results, {"gpu": gpu()})
    for (N, K), M in ((s, m) for s in shapes for m in counts):
        with err.status(f"{N}x{K}, {M} rows: baselines"):
            against = baseline(N, K, M, DTYPES[dtype], energy=False)
            others = time_peers(N, K, M) if peers else Peers({}, {})
        for s in scheme or SCHEMES:
            measured.add(
                f"{N}x{K} {s}, {M} rows",
                lambda N=N, K=K, M=M, s=s, against=against, others=others: measure_rows(  # type: ignore[misc]
                    N, K, s, M, kernel=kernel, dtype=dtype, against=against, peers=others
                ),
            )
    if measured.finish(json):
        names = list(dict.fromkeys(name for r in measured.rows for name in r.peers))
        table = Table(
            *("shape", "rows", Column("scheme", no_wrap=True), "kernel", "us", "product", "encode", "TFLOPS"),
            *("cuBLAS us", "speedup", "product", *names, "error"),
        )
        r: GemmCuda
        for r in measured.rows:
            table.add_row(
                *("{} x {}".format(*r.shape), str(r.rows), r.scheme, r.kernel, f"{r.microseconds:.1f}"),
                *(_or_dash(r.product_microseconds, "{:.1f}"), _or_dash(r.encode_microseconds, "{:.1f}")),
                *(f"{r.tflops:.0f}", f"{r.baseline_microseconds:.1f}", f"{r.speedup:.2f}x"),
                *(_or_dash(r.product_speedup, "{:.2f}x"), *(_or_dash(r.peers.get(n), "{:.1f}") for n in names)),
                f"{r.rel_err:.1e}",
            )
        out.print(f"{gpu()['name']}, {dtype}; baselines do not quantize x", highlight=False)
        show(table)
        for name, why in measured.rows[0].refused.items():
            out.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)
    measured.end(json)


def parse_rows(text: str) -> list[int]:
    """Read row counts like 16,64."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and len(p) < 10 and int(p) for p in parts):
        raise SchemeError(f"--rows must look like 16,64,256, got '{text}'")
    return [int(p) for p in parts]


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
