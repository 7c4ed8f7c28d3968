"""Reading files with checks, and writing them atomically.

Writers go through a temporary name and a rename; readers report every way a file can be broken in one sentence.
A temporary name is unique and created exclusively, so it never meets a file of the user's: NAME.<16 hex>.crelle-tmp.
Nothing here, or anywhere in Crelle, unpickles.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import safe_open
from torch import Tensor

from crelle.errors import CapacityError, FormatError

TEMPORARY = re.compile(r".*\.[0-9a-f]{16}\.crelle-tmp", re.DOTALL)  # the names that `whole_file` works under
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
# A JSON text of this size and with so many values becomes at most some 400 MB of Python objects: an empty list has 64
# bytes. The journal, index and config of DeepSeek-V3, with 45,000 matrices of 4 tensors each, have 16 to 20 MB.
MAX_JSON_BYTES, MAX_JSON_VALUES = 32 << 20, 6_000_000
MAX_TENSORS, MAX_NAME = 1 << 18, 1 << 10  # of a safetensors file, and characters of a tensor's name


@contextmanager
def writing(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn a full disk, a missing permission and their kin into a sentence about `path`."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path if path.exists() else path.parent).free / 1e6
            raise CapacityError(f"no space left while writing {path} ({free:.1f} MB free). {remedy}".strip()) from e
        raise FormatError(f"cannot write {path}: {e.strerror or e}. {remedy}".strip()) from e


def write_whole(path: Path, data: bytes) -> None:
    """Write data under a temporary name, force it to the disk, then give it its name."""
    with whole_file(path) as f:
        f.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name, and replaces an older one, only when the block has ended well."""
    tmp = path.with_name(f"{path.name[:64]}.{secrets.token_hex(8)}.crelle-tmp")
    with writing(path), open(tmp, "xb") as f:  # x: never an existing file, never through a link
        try:
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(tmp, path)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise


def is_plain_name(name: str) -> bool:
    """Tell whether a name that a file gives us is one that a file can have in the directory that it is looked up in."""
    fits = 0 < len(name.encode(errors="replace")) < 256 and "\0" not in name
    return fits and Path(name).name == name and name not in (".", "..")


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def to_json(value: Any, *, compact: bool = False) -> bytes:
    """Return value as JSON, readable or compact; the same value always gives the same bytes.

    What `read_json` would refuse is refused here already: NaN, infinity, and more bytes than it reads.
    """
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    try:
        data = (json.dumps(value, ensure_ascii=False, allow_nan=False, **layout) + "\n").encode()
    except ValueError as e:  # what `read_json` would refuse
        raise FormatError(f"a value is NaN or infinite, which JSON does not support ({e})") from e
    if len(data) > MAX_JSON_BYTES:
        raise CapacityError(
            f"a JSON file of {len(data):,} bytes would be too large to read (at most {MAX_JSON_BYTES:,} are allowed): "
            "the model has too many tensors, or their names are too long"
        )
    return data


def require_regular(path: Path) -> int:
    """Return the size of a regular file; anything else gets a sentence: opening a FIFO would wait for ever."""
    try:
        found = path.stat()
    except FileNotFoundError as e:
        raise FormatError(f"{path} does not exist") from e
    except (OSError, ValueError) as e:  # a loop of links, a name too long, a name with a zero byte
        raise FormatError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from e
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise FormatError(f"cannot read {path}: it is {kind}, not a file")
    return found.st_size


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes."""
    size = require_regular(path)
    if size > limit:
        raise FormatError(f"{path} has {size:,} bytes; at most {limit:,} are allowed")
    try:
        with open(path, "rb") as f:
            return f.read(limit)
    except OSError as e:
        raise FormatError(f"cannot read {path}: {e.strerror or e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or say what is wrong with it."""
    return parse_json(read_bounded(path, MAX_JSON_BYTES), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that some bytes are; `where` begins the sentence if they are none."""
    if len(data) > 2 * MAX_JSON_VALUES and sum(map(data.count, (b",", b":", b"[", b"{"))) > MAX_JSON_VALUES:
        raise FormatError(f"{where} has more than {MAX_JSON_VALUES:,} values, which is the limit")
    try:
        value = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as e:
        raise FormatError(f"{where} is not valid JSON: it is nested too deeply") from e
    except ValueError as e:
        raise FormatError(f"{where} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise FormatError(f"{where} should contain a JSON object, but contains a {type(value).__name__}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"it has the value {name}, which JSON does not support")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def shown(value: Any, limit: int = 80) -> str:
    """Return a value as an error message shows it: short, whatever the file holds."""
    if isinstance(value, str | bytes | list | dict) and len(value) > limit:
        if isinstance(value, str | bytes):
            return f"{value[: limit // 2]!r}... ({len(value):,} characters)"
        return f"a {type(value).__name__} of {len(value):,} entries"
    if isinstance(value, list | dict) and _has_more_values(value, 4 * limit):  # aliases of YAML: 9^9 in 300 bytes
        return f"a {type(value).__name__} of {len(value):,} entries"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 2 * limit else f"{text[: 2 * limit]}..."


def _has_more_values(value: Any, count: int) -> bool:
    """Tell whether a value holds more than `count` others, without looking at many more of them."""
    waiting, seen = [value], 0
    while waiting and seen <= count:
        inner = waiting.pop()
        seen += 1
        if isinstance(inner, list | dict):
            waiting += inner.values() if isinstance(inner, dict) else inner
    return seen > count


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def looks_pickled(path: Path) -> bool:
    """Tell whether a file is a pickle (or a zip archive of pickles, as torch.save writes)."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    with open(path, "rb") as f:
        head = f.read(4)
    return (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or head == b"PK\x03\x04"


def refuse_pickle(path: Path) -> FormatError:
    """Return the error for a file that only unpickling could open."""
    return FormatError(
        f"{path} is a pickle; loading it would run the code in it, so Crelle does not; "
        "save the model as safetensors and use that"
    )


class ShardReader:
    """One safetensors file, mapped into memory; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(path.name) > 255:
            raise FormatError(f"{path.parent}: a file name of {len(path.name)} characters is too long")
        if not os.path.lexists(path):
            raise FormatError(f"{path} is missing")
        require_regular(path)
        try:
            self._file: Any = safe_open(path, framework="pt")
            self._ordered: list[str] = list(self._file.keys())  # type: ignore[no-untyped-call]
            self._names = frozenset(self._ordered)
            if len(self._names) > MAX_TENSORS or any(len(n) > MAX_NAME for n in self._names):
                raise ValueError(f"more than {MAX_TENSORS} tensors, or a name of more than {MAX_NAME} characters")
        except Exception as e:  # SafetensorError, OSError, and whatever else the library makes of senseless headers
            if looks_pickled(path):
                raise refuse_pickle(path) from e
            raise FormatError(f"{path} is truncated or not a safetensors file ({shown(str(e), 300)})") from e

    def names(self) -> list[str]:
        return list(self._ordered)

    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._try(name, lambda: self._file.get_slice(name).get_shape()))

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._try(name, lambda: self._file.get_tensor(name))
        return tensor

    def read_slice(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        """Return a part of a tensor; only its bytes are read."""
        tensor: Tensor = self._try(name, lambda: self._file.get_slice(name)[part])
        return tensor

    def _try(self, name: str, get: Callable[[], Any]) -> Any:
        if name not in self._names:
            raise FormatError(f"{self.path} does not contain the tensor '{name}'")
        try:
            return get()
        except Exception as e:  # an element type that torch does not have, for one
            raise FormatError(f"{self.path}: the tensor '{name}' cannot be read ({e})") from e
