"""What the benchmarks share: their options, and rows that reach the result file as soon as they are measured."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from crelle.cli.bench.plot import picture
from crelle.cli.common.console import Terminal, err, out, print_json
from crelle.errors import BuildError, CapacityError, CrelleError, SchemeError, UnsupportedError

ThreadCounts = Annotated[
    str, typer.Option("--threads", help="Numbers of CPU threads, e.g. 1,2; default: all available cores.")
]
ResultFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--results",
        help="Write NAME.json (results, machine, versions, command) and, if matplotlib is installed, NAME.png.",
    ),
]
Energy = Annotated[
    bool,
    typer.Option(
        "--energy/--no-energy", help="Measure the energy on a GPU with NVML; takes one or two seconds per row."
    ),
]


_WIDTH = 160


class Rows:
    """Measurements, one after the other; where one is refused, its sentence is kept and the others go on."""

    def __init__(self, results: Path | None, facts: dict[str, Any] | None = None) -> None:
        self.results, self.facts = results, facts or {}
        self.rows: list[Any] = []
        self.refused: dict[str, CrelleError] = {}

    def add(self, what: str, measure: Callable[[], Any]) -> Any | None:
        """Measure one row and write the file anew; return None where it was refused."""
        row = None
        try:
            with err.status(what):
                row = measure()
            self.rows.append(row)
        except (UnsupportedError, CapacityError, BuildError) as e:
            e.__context__ = None  # what led to it holds the model that was measured, and its memory
            self.refused[what] = e.with_traceback(None)
        self._write()
        return row

    def finish(self, json: bool, *, drawn: bool = True) -> bool:
        """Draw the picture, where there is one, and print the JSON, if asked to; return whether a table is wanted."""
        if not self.rows:
            self.end(json=False)
        if self.results and drawn:
            picture(self.results, [asdict(r) for r in self.rows])
        if json:
            print_json(self.rows[0] if len(self.rows) == 1 and not self.refused else self._content())
        return not json

    def end(self, json: bool) -> None:
        """End with an error that says all that was refused, if anything was; `json`: it is said there already."""
        if not self.refused:
            return
        if json:
            raise typer.Exit(2)
        sentences: dict[str, list[str]] = {}
        for what, e in self.refused.items():
            sentences.setdefault(str(e), []).append(what)
        if len(sentences) == 1:
            raise next(iter(self.refused.values()))
        raise UnsupportedError("; ".join(f"{', '.join(who)}: {why}" for why, who in sentences.items()))

    def _content(self) -> dict[str, Any]:
        refused = {"refused": {what: str(e) for what, e in self.refused.items()}} if self.refused else {}
        return {**self.facts, "rows": [asdict(r) for r in self.rows], **refused}

    def _write(self) -> None:
        from crelle.bench.environment import write_result

        if self.results:
            write_result(self.results, self._content())


def show(table: Table) -> None:
    """Print a table as wide as its figures need: in a log of 80 columns they would be truncated to nothing."""
    Terminal(width=max(out.width, _WIDTH)).print(table)


def parse_shapes(given: list[str]) -> list[tuple[int, int]]:
    """Read shapes like 4096x4096, given apart or with commas."""
    shapes = []
    for text in (part.strip() for option in given for part in option.split(",")):
        N, _, K = text.partition("x")
        if not (N.isdigit() and K.isdigit() and int(N) and int(K)):
            raise SchemeError(f"--shape must look like OUTPUTSxINPUTS, e.g. 4096x4096, got '{text}'")
        shapes.append((int(N), int(K)))
    return shapes


def parse_threads(text: str) -> list[int]:
    from crelle.kernels.threads import available_cores, check_threads

    if not text:
        return [available_cores()]
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and len(p) < 10 and int(p) for p in parts):
        raise SchemeError(f"--threads must look like 1,2, got '{text}'")
    return [check_threads(int(p)) for p in parts]


def refuse(device: str, **given: object) -> None:
    """Say that options make no sense on a device; those with a value of None or False were not given."""
    for name, value in given.items():
        if value is not None and value is not False and value != "" and value != []:
            raise SchemeError(f"--{name.replace('_', '-')} does not apply to --device {device}")
