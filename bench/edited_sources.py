"""The CUDA sources with some lines replaced, to time a kernel without one of its parts."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crelle.kernels.cuda import jit, launch

Edit = tuple[str, str, str]  # file, what stands there once, what replaces it


@contextmanager
def edited(edits: Iterable[Edit]) -> Iterator[None]:
    """Compile kernels from an edited copy of the sources."""
    original = jit.SOURCES
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(shutil.copytree(original, Path(directory) / "csrc"))
        for file, old, new in edits:
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{file} has no longer one {old!r}"
            (copy / file).write_text(text.replace(old, new))
        jit.SOURCES = copy
        launch._load.cache_clear()
        try:
            yield
        finally:
            jit.SOURCES = original
            launch._load.cache_clear()
