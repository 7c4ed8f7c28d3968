"""Which kernel sources a change touches, by git: what is compiled for more architectures than `make test` takes."""

import subprocess
from pathlib import Path


def changed_sources(folder: Path) -> set[str] | None:
    """Return names, relative to `folder`, that differ from where this branch left main; on main, from HEAD.

    Files that git does not track yet count as changed. None where there is no repository.
    """

    def git(*args: str) -> list[str] | None:
        try:
            done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.splitlines() if done.returncode == 0 else None

    bases = (git(*how) for how in (("merge-base", "HEAD", "origin/main"), ("merge-base", "HEAD", "main")))
    base = next((found[0] for found in bases if found), "HEAD")
    changed = git("diff", "--name-only", "--relative", base, "--", ".")
    new = git("ls-files", "--others", "--exclude-standard", ".")
    return None if changed is None or new is None else {*changed, *new}
