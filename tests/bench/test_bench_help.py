"""Every script under bench/ answers --help with its usage and docstring, writes nothing and needs no GPU."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

SCRIPTS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "bench").rglob("*.py"))
HELP = """
import importlib, json, os, runpy, sys
root, scripts, modules = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
for name in modules:  # once: the forks have them
    module, _, attribute = name.partition(":")
    getattr(importlib.import_module(module), attribute, None)  # transformers imports its own when they are asked for
found = {}
for script in scripts:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(write, stream)
        path = os.path.join(root, script)
        sys.argv, sys.path[0], code = [path, "--help"], os.path.dirname(path), 1
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as e:
            code = e.code or 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}")
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)
    os.close(write)
    with open(read) as said:
        text = said.read()
    found[script] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text
print(json.dumps(found))
"""  # a process for all: each would take seconds to load torch


def imported(script: str) -> set[str]:
    """Return the modules of installed packages that a script imports when it starts, `module:name` where it says so."""
    body = ast.parse((ROOT / script).read_text()).body
    names = {a.name for n in body if isinstance(n, ast.Import) for a in n.names}
    names |= {f"{n.module}:{a.name}" for n in body if isinstance(n, ast.ImportFrom) for a in n.names}
    return {name for name in names if importlib.util.find_spec(re.split("[.:]", name)[0])}


def test_every_script_answers_help(tmp_path: Path) -> None:
    modules = set().union(*map(imported, SCRIPTS))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    command = [sys.executable, "-c", HELP, str(ROOT), ",".join(SCRIPTS), ",".join(sorted(modules))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == SCRIPTS
    for script, (code, text) in found.items():
        assert code == 0, f"{script} --help ended with {code}: {text[-500:]}"
        assert text.startswith(f"usage: {Path(script).name}"), f"{script}: {text[:500]}"
        described = ast.get_docstring(ast.parse((ROOT / script).read_text()), clean=False)
        assert described, f"{script} has no docstring"
        assert described.strip() in text, f"{script} --help does not show its docstring"
    assert list(tmp_path.iterdir()) == []
