"""Unpack wheels for a machine that has torch, transformers and aiohttp, but no network: a folder for its PYTHONPATH.

    python release/gpu_packages.py [.gpu-packages]
    PYTHONPATH=src:.gpu-packages python3 -m crelle serve DIR           # on the other machine

The wheels are those of CPython 3.12 on x86-64 Linux, at the versions of constraints.txt, and as pip checks them against
constraints-hashes.txt. What no code imports is left out: tests of packages, type stubs, compiled caches.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from pins import HASHES, PINS, ROOT, pins, read

SERVER = ("llguidance", "msgspec", "prometheus_client")
OPENAI = ("openai", "httpx2", "httpcore2", "h11", "anyio", "sniffio", "idna", "truststore", "jiter", "pydantic")
PYDANTIC = ("pydantic_core", "annotated-types", "typing-inspection", "typing_extensions")
NAMES = (*SERVER, *OPENAI, *PYDANTIC, "gguf")  # numpy, PyYAML, tqdm, requests are there with transformers
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
FOLDERS, ENDINGS = {"tests", "test", "sboms", "__pycache__"}, (".pyi", ".pyc")  # that no code imports


def requirements(names: Iterable[str]) -> str:
    """Return the pins of these packages with their hashes, as pip reads them."""
    versions, hashes = pins(PINS.read_text()), read(HASHES.read_text())
    if missing := [name for name in names if name not in versions]:
        raise SystemExit(f"constraints.txt has no version of {', '.join(missing)}")
    lines = [f"{name}=={versions[name]}" for name in names]
    return "".join(f"{pin} {' '.join(f'--hash=sha256:{h}' for h in hashes[pin])}\n" for pin in lines)


def download(to: Path, wanted: str) -> None:
    """Have pip put the wheels into a folder; they are not installed, so this machine may be of any kind."""
    file = to / "requirements.txt"
    file.write_text(wanted)
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", *TARGET, *platforms]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(to), "--requirement", str(file)], check=True
    )


def unpack(wheels: Iterable[Path], to: Path) -> None:
    """Replace a folder by what the wheels hold and code may import."""
    shutil.rmtree(to, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to, filter(_imported, archive.namelist()))


def _imported(name: str) -> bool:
    """Whether a file of a wheel is one that code may import or read; not scripts and manual pages either."""
    return not FOLDERS.intersection(name.split("/")) and not name.endswith(ENDINGS) and ".data/" not in name


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def main() -> None:
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".gpu-packages"
    if to.exists() and any(to.iterdir()) and not list(to.glob("*.dist-info")):
        raise SystemExit(f"{to} holds something else than unpacked packages; give another folder")
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), requirements(NAMES))
        wheels = sorted(Path(folder).glob("*.whl"))
        unpack(wheels, to)
    print(f"{len(wheels)} packages, {size(to) / 1e6:.1f} MB in {to}")


if __name__ == "__main__":
    main()
