"""crelle bench: how fast, checked first, beside a baseline of the same run."""

import typer

from crelle.cli.bench import accuracy, attention, decode, gemm, gemv, plot, quantize, serve, startup

NAME = "bench"
app = typer.Typer(
    no_args_is_help=True, help="Measure speed: check first, then time, beside a baseline of the same run."
)

COMMANDS = (
    gemv,
    gemm,
    attention,
    decode,
    serve,
    quantize,
    accuracy,
    startup,
    plot,
)

for command in COMMANDS:
    app.command(name=command.NAME)(command.run)
