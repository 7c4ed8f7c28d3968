"""Where Crelle keeps what it can make or fetch again: downloaded models and compiled kernels."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return $CRELLE_CACHE, else crelle/ in the user's cache directory. It need not exist yet."""
    if own := os.environ.get("CRELLE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crelle"
