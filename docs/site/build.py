"""Builds the documentation site, strictly: `make docs`, or `python docs/site/build.py OUT`.

Pages are staged (pages.py), the reference is written from the code (reference.py), Zensical builds them with every
warning an error, and what came out is checked (check.py). OUT/site is the site; nothing in it is loaded from elsewhere.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import pages
import reference

HERE = Path(__file__).resolve().parent


def build(out: Path) -> Path:
    """Build the site below `out`, which is emptied first; return its directory, or exit with what is wrong."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "pages").mkdir(parents=True)
    shutil.copyfile(HERE / "zensical.toml", out / "zensical.toml")
    pages.stage(out / "pages")
    reference.write(out / "pages" / "reference")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(out / "zensical.toml")]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    if done.returncode:
        told, _, _ = done.stderr.partition("Traceback")  # of the generator's own, behind the faults
        sys.exit(re.sub(r"\x1b\[[0-9;]*m", "", f"{done.stdout}{told}the documentation has the faults above"))
    if faults := check.faults(out / "site"):
        sys.exit("\n".join([*faults, "the documentation has the faults above"]))
    return out / "site"


if __name__ == "__main__":
    site = build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve())
    print(f"{sum(1 for _ in site.rglob('*.html'))} pages in {site}")
