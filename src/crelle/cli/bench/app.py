"""crelle bench: check results, then measure speed against a baseline in the same run."""

import typer

from crelle.cli.bench import accuracy, attention, decode, gemm, gemv, plot, quantize, serve, speculate, startup

NAME = "bench"
app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed. Every benchmark checks its results first and times a baseline in the same run.",
)

COMMANDS = (
    gemv,
    gemm,
    attention,
    decode,
    serve,
    speculate,
    quantize,
    accuracy,
    startup,
    plot,
)

for command in COMMANDS:
    app.command(name=command.NAME)(command.run)
