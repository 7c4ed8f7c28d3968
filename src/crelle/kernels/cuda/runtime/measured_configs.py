"""GEMV tile configs that were measured on this machine, for problems that autotune.json lacks.

step/autotune.py times them in a model's own decode step. They are kept in $CRELLE_CACHE/kernels, in a file named after
the GPU and a hash of all kernel sources, from which every later process takes them; `bmma_gemv.choose` asks here first.
"""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import is_recording

if TYPE_CHECKING:
    from crelle.kernels.cuda.planes.weight_layout import CudaWeight


class Problem(NamedTuple):
    """A product inside a decode step, as far as tile configs depend on it."""

    kind: str  # of scales
    P: int
    N: int
    K: int
    M: int  # columns of x
    groups: int
    blocks_per_scale: int
    planes: int  # that are stored
    scales: str  # their dtype
    epilogue: str

    @classmethod
    def of(cls, w: "CudaWeight", M: int, epilogue: str) -> "Problem":
        stored, dtype = w.words.shape[2], str(w.scales.dtype)
        return cls(w.kind.name, w.P, w.N, w.K, M, w.groups, w.blocks_per_scale, stored, dtype, epilogue)


Config = tuple[int, ...]  # the fields of a GemvTileConfig
_FIELDS = 8
_local = threading.local()


@contextmanager
def trying(configs: Mapping[Problem, Config]) -> Iterator[dict[Problem, list["CudaWeight"]]]:
    """Give this thread's problems these tile configs, and those of the table to all others.

    Yields the problems that are asked for meanwhile, with their weights.
    """
    before = getattr(_local, "trial", None)
    _local.trial = configs, defaultdict[Problem, list["CudaWeight"]](list)
    try:
        yield _local.trial[1]
    finally:
        _local.trial = before


def lookup(w: "CudaWeight", M: int, epilogue: str) -> Config | None:
    """Return the tile config that was measured for a problem, or None."""
    problem = Problem.of(w, M, epilogue)
    if (trial := getattr(_local, "trial", None)) is not None:
        configs, asked = trial
        asked[problem].append(w)
        tried: Config | None = configs.get(problem)
        return tried
    return known().get(problem)


def known() -> dict[Problem, Config]:
    """Return what was measured on the current device; empty without one."""
    if not torch.cuda.is_available():
        return {}
    return _read(torch.cuda.current_device())


def keep(found: Mapping[Problem, Config]) -> None:
    """Use these tile configs from now on, here and in later processes."""
    known().update(found)
    path = _path(torch.cuda.current_device())
    rows = {**_load(path), **found}  # of other processes, too
    made = [[list(problem), list(config)] for problem, config in rows.items()]
    jit.write_cached(path, json.dumps(made).encode())


@cache
def _read(device: int) -> dict[Problem, Config]:
    return _load(_path(device))


@cache
def _path(device: int) -> Path:
    what = json.dumps([torch.cuda.get_device_name(device), jit.toolchain()])
    return jit.kernel_directory() / f"tile-configs-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


def _load(path: Path) -> dict[Problem, Config]:
    """Return what a file holds; nothing where it is missing or damaged, since all of it can be measured again."""
    try:
        rows: Any = json.loads(path.read_bytes())
        return {Problem(*problem): tuple(map(int, config)) for problem, config in rows if len(config) == _FIELDS}
    except (OSError, ValueError, TypeError):
        return {}


def usable() -> bool:
    """Whether measuring makes sense now: launches are not only recorded."""
    return torch.cuda.is_available() and not is_recording()
