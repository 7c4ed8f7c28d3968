"""crelle bench: how fast, checked first, beside a baseline of the same run."""

import typer

from crelle.cli import (
    bench_accuracy,
    bench_attention,
    bench_decode,
    bench_gemm,
    bench_gemv,
    bench_plot,
    bench_quantize,
    bench_serve,
    bench_startup,
)

NAME = "bench"
app = typer.Typer(
    no_args_is_help=True, help="Measure speed: check first, then time, beside a baseline of the same run."
)

COMMANDS = (
    bench_gemv,
    bench_gemm,
    bench_attention,
    bench_decode,
    bench_serve,
    bench_quantize,
    bench_accuracy,
    bench_startup,
    bench_plot,
)

for command in COMMANDS:
    app.command(name=command.NAME)(command.run)
