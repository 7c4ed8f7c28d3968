"""The header of a GGUF file, walked with bounds: every count and length is checked against the file's size first.

    magic "GGUF", version u32 (2 or 3), tensor count u64, metadata count u64
    metadata     key string, type u32, value                      string: length u64, UTF-8 bytes
                                                                   array: element type u32, count u64, elements
    tensors      name string, dimensions u32, sizes u64 each (innermost first), type u32, offset u64
    padding to `general.alignment` (32), then the tensors' bytes, each at data + offset

Nothing is allocated here in proportion to what the file claims. Arrays stay in the mapped file until they are asked
for. Arrays in arrays and big-endian files, which no model has, are refused.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crelle.errors import FormatError
from crelle.formats.storage.io import require_regular

MAX_METADATA = MAX_TENSORS = 1 << 16  # the largest models have some thousands
MAX_ENTRIES = 1 << 22  # of all string arrays together; the largest vocabularies have 2^18 tokens, and twice that merges
MAX_NAME = 1 << 10
MAX_STRING = 1 << 24
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TYPES = {kind: np.dtype(code) for kind, code in _SCALARS.items()}
_U32, _U64, _U32_U64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
Buffer = bytes | mmap.mmap


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value: where its bytes are, and what they mean."""

    kind: int
    at: int
    count: int | None  # of an array; None: a single value


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, unlike in the file
    kind: str  # the name of its ggml type, e.g. Q4_K
    start: int
    nbytes: int


class Header:
    """The metadata and the tensors of a GGUF file; `data` is the whole file or a mapping of it."""

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self._at, self._entries = 0, 0
        if self._bytes(4) != b"GGUF":
            raise FormatError("it does not begin with 'GGUF'")
        version = self._u32()
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            raise FormatError("it is big-endian" if swapped else f"its version is {version}; 2 and 3 can be read")
        tensors, values = self._u64(), self._u64()
        _at_most(tensors, MAX_TENSORS, "tensors")
        _at_most(values, MAX_METADATA, "metadata values")
        self.fields: dict[str, Value] = {}
        for _ in range(values):
            key = self._name("a metadata key")
            if key in self.fields:
                raise FormatError(f"it has the metadata '{key}' twice")
            self.fields[key] = self._value(key)
        claimed = [self._tensor() for _ in range(tensors)]
        align = self._alignment()
        data_start = -(-self._at // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for info in claimed:
            if info.name in self.tensors:
                raise FormatError(f"it has the tensor '{info.name}' twice")
            if (end := data_start + info.start + info.nbytes) > len(data):
                raise FormatError(f"it is truncated: '{info.name}' should end at byte {end} of {len(data)}")
            place = (data_start + info.start, info.nbytes)
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, *place)
        self._refuse_overlaps()

    def array(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        """Return a tensor's values in the mapped file: f32 and f16 as such, any other type as rows of bytes."""
        code = {"F32": "<f4", "F16": "<f2"}.get(info.kind, "u1")
        flat = np.frombuffer(self.data, code, info.nbytes // np.dtype(code).itemsize, info.start)
        return flat.reshape(*info.shape[:-1], -1)

    def get(self, key: str) -> Any:
        """Return a metadata value as Python has it: int, float, bool, str, or a list of one of them."""
        value = self.fields[key]
        if value.kind == _STRING:
            if value.count is None:
                return self._text(value.at, key)[0]
            found, at = [], value.at
            for _ in range(value.count):
                text, at = self._text(at, key)
                found.append(text)
            return found
        values = np.frombuffer(self.data, _TYPES[value.kind], 1 if value.count is None else value.count, value.at)
        if value.kind == _BOOL:
            values = values.astype(bool)
        return values.tolist() if value.count is not None else values[0].item()

    # The walk: `_at` never passes the end of the file.

    def _need(self, count: int) -> int:
        at, self._at = self._at, self._at + count
        if self._at > len(self.data):
            raise FormatError(f"it is truncated: it has {len(self.data)} bytes, but {count} are needed at byte {at}")
        return at

    def _bytes(self, count: int) -> bytes:
        at = self._need(count)
        return self.data[at : at + count]

    def _u32(self) -> int:
        return _U32.unpack_from(self.data, self._need(4))[0]  # type: ignore[no-any-return]

    def _u64(self) -> int:
        return _U64.unpack_from(self.data, self._need(8))[0]  # type: ignore[no-any-return]

    def _name(self, what: str) -> str:
        length = self._u64()
        if length > MAX_NAME:
            raise FormatError(f"{what} has {length} bytes; at most {MAX_NAME} are allowed")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as e:
            raise FormatError(f"{what} is not UTF-8 text") from e

    def _text(self, at: int, key: str) -> tuple[str, int]:
        """Return the string at a place that the walk has checked, and where it ends."""
        start = at + 8
        end: int = start + _U64.unpack_from(self.data, at)[0]
        try:
            return self.data[start:end].decode(), end
        except UnicodeDecodeError as e:
            raise FormatError(f"the metadata '{key}' is not UTF-8 text") from e

    def _value(self, key: str) -> Value:
        kind, count = self._u32(), None
        if kind == _ARRAY:
            kind, count = _U32_U64.unpack_from(self.data, self._need(12))
            if kind == _ARRAY:
                raise FormatError(f"the metadata '{key}' is an array of arrays")
        at = self._at
        if kind == _STRING:
            self._strings(key, 1 if count is None else count)
        elif kind in _TYPES:
            self._need(_TYPES[kind].itemsize * (1 if count is None else count))
        else:
            raise FormatError(f"the metadata '{key}' has the unknown type {kind}")
        return Value(kind, at, count)

    def _strings(self, key: str, count: int) -> None:
        """Step over strings; each takes at least the 8 bytes of its length, so their count is bounded first."""
        data, size, at = self.data, len(self.data), self._at
        self._entries += count
        if count > (size - at) // 8:
            raise FormatError(f"it is truncated: the metadata '{key}' claims {count} strings in {size - at} bytes")
        _at_most(self._entries, MAX_ENTRIES, "strings in arrays")
        read = _U64.unpack_from
        for _ in range(count):
            if at + 8 > size or (length := read(data, at)[0]) > size - at - 8:
                raise FormatError(f"it is truncated: a string in the metadata '{key}' ends after the file")
            if length > MAX_STRING:
                raise FormatError(
                    f"a string in the metadata '{key}' has {length} bytes; at most {MAX_STRING} are allowed"
                )
            at += 8 + length
        self._at = at

    def _tensor(self) -> TensorInfo:
        """Read one tensor's entry; its start is relative to the data yet."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._name("a tensor's name")
        dimensions = self._u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise FormatError(f"'{name}' has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        inner_first = struct.unpack_from(f"<{dimensions}Q", self.data, self._need(8 * dimensions))
        type_id, offset = _U32_U64.unpack_from(self.data, self._need(12))
        try:
            kind = GGMLQuantizationType(type_id)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as e:
            raise FormatError(f"'{name}' has the unknown type {type_id}") from e
        if not all(inner_first) or inner_first[0] % block:
            sizes = " x ".join(map(str, reversed(inner_first)))
            raise FormatError(f"'{name}' is {sizes}, which is invalid for {kind.name} (rows of blocks of {block})")
        return TensorInfo(name, tuple(reversed(inner_first)), kind.name, offset, math.prod(inner_first) // block * size)

    def _refuse_overlaps(self) -> None:
        """Tensors that share bytes would make a model many times as large as its file."""
        end, last = 0, ""
        for info in sorted(self.tensors.values(), key=lambda t: t.start):
            if info.start < end:
                raise FormatError(f"'{last}' and '{info.name}' overlap")
            end, last = info.start + info.nbytes, info.name

    def _alignment(self) -> int:
        if (value := self.fields.get("general.alignment")) is None:
            return 32
        align = self.get("general.alignment") if value.count is None and value.kind == 4 else None
        if align is None or not 1 <= align <= MAX_ALIGNMENT or align & (align - 1):
            raise FormatError(f"'general.alignment' should be a power of two up to {MAX_ALIGNMENT}, but is {align}")
        return int(align)


def read_header(path: Path) -> Header:
    """Map a GGUF file into memory and walk its header."""
    if not require_regular(path):
        raise FormatError(f"{path} is empty")
    try:
        with open(path, "rb") as f:
            return Header(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as e:
        raise FormatError(f"cannot read {path}: {e.strerror or e}") from e
    except FormatError as e:
        raise FormatError(f"{path} is truncated or not a valid GGUF file: {e}") from e


def _at_most(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise FormatError(f"it claims {count} {what}; at most {limit} are allowed")
