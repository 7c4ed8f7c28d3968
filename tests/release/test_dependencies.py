"""What the Makefile installs beside the compiler is what the package says it needs."""

import subprocess
import sys
from importlib.metadata import requires

from conftest import ROOT

SCRIPT = str(ROOT / "release" / "dependencies.py")


def printed(extras: str) -> list[str]:
    done = subprocess.run([sys.executable, SCRIPT, extras], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def names(requirements: list[str]) -> set[str]:
    return {r.split(";")[0].split(">")[0].split("=")[0].split("<")[0].strip() for r in requirements}


def test_they_are_those_of_the_installed_package() -> None:
    installed = requires("crelle") or []
    plain = names([r for r in installed if "extra ==" not in r])
    assert names(printed("plots")) == plain | {"matplotlib"}
    everything = {n for n in names(installed) if not n.startswith("crelle[")}
    assert names(printed("dev")) == everything


def test_an_extra_that_is_missing_is_said() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "plot"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no extra 'plot'; there are cuda, docs,")
