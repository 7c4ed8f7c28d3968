"""The command line without a process of its own: quicker by the seconds that importing torch takes."""

import io
import json
import os
import re
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import typer.main

from crelle.cli.main import main

_command = cache(typer.main.get_command)  # a process builds its commands once; here that takes longer than many a run
WORKER = "PYTEST_XDIST_WORKER" in os.environ  # one of several processes that share the cores
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object that standard output must be."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def run(*args: object, stdin: str | bytes = "") -> Result:
    """Run `crelle ARGS` through the true entry point, errors and exit codes included; in a worker on one core."""
    given = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), encoding="utf-8")
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["crelle", *map(str, args)]),
        patch.object(sys, "stdin", given),
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(typer.main, "get_command", _command),
        patch("crelle.kernels.threads.available_cores", lambda: 1) if WORKER else nullcontext(),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    return Result(code, _ANSI.sub("", out.getvalue()), _ANSI.sub("", err.getvalue()))


def succeed(*args: object, stdin: str | bytes = "") -> Result:
    """Run a command that must end with code 0."""
    result = run(*args, stdin=stdin)
    assert result.code == 0, result.err
    return result
