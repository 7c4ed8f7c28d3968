"""The hashes of what CI installs: constraints-hashes.txt beside constraints.txt.

    python release/pins.py check            the two files agree (no network; part of `make test`)
    python release/pins.py update [WHEEL…]  ask PyPI for the hashes of new pins; WHEEL: torch's CPU builds, which it
                                            does not have

pip takes no hashes together with an editable install, and where one requirement has a hash, all must. So CI installs in
two steps (`make setup HASHES=1`): every pin by `--require-hashes --no-deps`, then our own tree with `--no-index`, which
can only succeed if the pins are complete. Who works on Crelle may leave HASHES out and gets the same versions.
A hash stands for a file: those of Linux wheels for x86-64 and aarch64 for CPython 3.11 and 3.12, and a source archive
where there is no wheel. Files of a version never change on PyPI, so hashes that are there are kept. Of torch only CPU
builds are known: pip prefers a file whose hash an index tells, and would take PyPI's, with gigabytes of CUDA packages.
"""

import hashlib
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PINS, HASHES = ROOT / "constraints.txt", ROOT / "constraints-hashes.txt"
HEADER = "# Made by release/pins.py from constraints.txt; `make setup HASHES=1` installs nothing else.\n"
INDEX = "https://pypi.org/simple/"
NOT_FROM_THERE = {"torch"}
PYTHONS = re.compile(r"py3|py2\.py3|cp31[12]")
LINUX = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)")
LINK = re.compile(r'href="([^"#]+)#sha256=([0-9a-f]{64})"')
Hashes = dict[str, list[str]]  # "name==version" to sha256s


def pins(text: str) -> dict[str, str]:
    """Return name: version of every pin."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)  # type: ignore[misc]


def read(text: str) -> Hashes:
    """Return the hashes that a file of `written` holds."""
    found: Hashes = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split()
            found[pin] = [h.removeprefix("--hash=sha256:") for h in hashes]
    return found


def written(hashes: Hashes) -> str:
    """Return the text of constraints-hashes.txt."""
    lines = [" \\\n    ".join([pin, *(f"--hash=sha256:{h}" for h in sorted(set(hashes[pin])))]) for pin in hashes]
    return HEADER + "\n".join(lines) + "\n"


def faults(constraints: str, hashes: str) -> list[str]:
    """Return a sentence for each pin without a hash, and for each hash without a pin."""
    wanted, found = {f"{name}=={version}" for name, version in pins(constraints).items()}, read(hashes)
    wrong = [f"{pin} has no hash: run `make pins`" for pin in sorted(wanted - found.keys())]
    wrong += [f"{pin} has hashes and is not pinned: run `make pins`" for pin in sorted(found.keys() - wanted)]
    bad = {pin for pin, each in found.items() if not each or not all(re.fullmatch("[0-9a-f]{64}", h) for h in each)}
    return wrong + [f"{pin} has something that is no SHA-256" for pin in sorted(bad)]


def chosen(page: str, name: str, version: str) -> list[str]:
    """Return the hashes of a version's files for CI's platforms, from an index page of the package."""
    wheels: list[str] = []
    archives: list[str] = []
    for url, digest in LINK.findall(page):
        file = unquote(urlsplit(url).path.rpartition("/")[2])
        if not _is(file, name, version):
            continue
        if file.endswith(".whl"):
            python, _, platform = file.removesuffix(".whl").split("-")[-3:]
            abi3 = "-abi3-" in file
            if (PYTHONS.fullmatch(python) or abi3) and any(LINUX.fullmatch(p) for p in platform.split(".")):
                wheels.append(digest)
        else:
            archives.append(digest)
    return wheels or archives


def _is(file: str, name: str, version: str) -> bool:
    """Tell whether a file is of this version; one with a local part (+cpu) is."""
    try:
        found, number, *_ = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    return found == canonicalize_name(name) and number.public == Version(version).public


def update(others: Iterable[Path]) -> None:
    """Write constraints-hashes.txt: known pins keep their hashes, PyPI is asked for the others."""
    wanted = pins(PINS.read_text())
    known = read(HASHES.read_text()) if HASHES.exists() else {}
    new = {n: v for n, v in wanted.items() if f"{n}=={v}" not in known and n not in NOT_FROM_THERE}
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(new, pool.map(lambda name: chosen(_page(name), name, new[name]), new), strict=True))
    if lost := [f"{name}=={new[name]}" for name, hashes in found.items() if not hashes]:
        sys.exit(f"PyPI has no file for CI's platforms of: {', '.join(lost)}")
    hashes = {f"{n}=={v}": list(known.get(f"{n}=={v}", found.get(n, []))) for n, v in wanted.items()}
    for file in others:
        pin = next((f"{n}=={v}" for n, v in wanted.items() if _is(file.name, n, v)), None)
        if pin is None:
            sys.exit(f"{file.name} is not a file of any pin")
        hashes[pin].append(hashlib.sha256(file.read_bytes()).hexdigest())
    if lost := [pin for pin, each in hashes.items() if not each]:
        sys.exit(f"give the files of: {', '.join(lost)}")
    HASHES.write_text(written(hashes))
    print(f"{HASHES.name}: {len(hashes)} pins, {sum(map(len, hashes.values()))} hashes, {len(new)} asked for")


def _page(name: str) -> str:
    try:
        with urllib.request.urlopen(f"{INDEX}{canonicalize_name(name)}/", timeout=60) as answer:
            return str(answer.read(), "utf-8")
    except urllib.error.URLError as e:
        sys.exit(f"cannot read the index page of {name}: {e}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check"]:
            if wrong := faults(PINS.read_text(), HASHES.read_text()):
                sys.exit("\n".join(wrong))
        case ["update", *others]:
            update(map(Path, others))
        case _:
            sys.exit(__doc__)
