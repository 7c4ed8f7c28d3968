"""`crelle`: the entry point. Turns every CrelleError into one sentence and an exit code."""

import atexit
import gc
import io
import os
import sys
from typing import Annotated

# Torch's OpenMP threads spin while they wait, which starves other processes on the same cores. Set this before torch
# is loaded; a user's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# If torch allocates with mimalloc (Arm), freed memory goes back to the system after 10 ms and is cleared again for the
# next tensor: a tenth of the time of calibration.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "500")

import typer

from crelle.cli.bench import app as bench
from crelle.cli.commands import (
    ablate,
    chat,
    demo,
    doctor,
    embed,
    evaluate,
    explain,
    export,
    generate,
    inspect,
    plan,
    quantize,
    report,
    search,
    serve,
    tune,
    warmup,
)
from crelle.cli.common.console import err, print_json
from crelle.cli.common.options_in_errors import options_of, with_options
from crelle.errors import CrelleError
from crelle.version import __version__

_OBJECTS_BEFORE_COLLECTING = 1_000_000  # importing torch and loading a model make some 250,000, all of which stay

app = typer.Typer(
    name="crelle",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Quantize large language models to 1–4 bits and run them fast.\n\n"
    "Start with `crelle demo`. For your own model: `crelle quantize MODEL OUT --scheme auto:bits=4`, then "
    "`crelle generate OUT --prompt 'Hello'`.",
)

for command in (
    quantize,
    search,
    tune,
    inspect,
    evaluate,
    generate,
    chat,
    embed,
    serve,
    warmup,
    plan,
    explain,
    export,
    doctor,
    demo,
    report,
):
    app.command(name=command.NAME)(command.run)
app.add_typer(bench.app, name=bench.NAME)
app.add_typer(ablate.app, name=ablate.NAME)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"crelle {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user error prints one sentence on standard error and exits with code 2."""
    # Collecting garbage among the loaded modules takes a tenth of the start-up time, and the same again at exit.
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTING)
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal and pipe takes every character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="crelle")  # also for `python -m crelle`: completion is installed for this name
    except CrelleError as e:
        sentence = with_options(str(e), options_of(typer.main.get_command(app), sys.argv[1:]))
        if "--json" in sys.argv:
            print_json({"error": sentence})
        err.print(f"crelle: {sentence}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
