"""Hostile GGUF files."""

import os
import struct
from pathlib import Path
from typing import Any

from corpus_base import arm, case
from targets import small_gguf
from tiny_gguf import write_tiny_gguf

# GGUF ----------------------------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_bytes(
    values: list[tuple[str, int, bytes]], tensors: tuple[bytes, ...] = (), version: int = 3, counts: Any = None
) -> bytes:
    counted = counts or (len(tensors), len(values))
    data = b"GGUF" + struct.pack("<IQQ", version, *counted)
    for key, kind, value in values:
        data += string(key) + struct.pack("<I", kind) + value
    return data + b"".join(tensors)


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(name: str, words: str, data: bytes) -> None:
    def build(to: Path) -> Path:
        to.mkdir()
        (to / "m.gguf").write_bytes(data)
        return to / "m.gguf"

    case(f"gguf: {name}", words, build)


ARRAY = struct.pack("<IQ", 0, 10**15)
gguf(
    "99 bytes that claim 10^15 entries", "truncated", gguf_bytes([("general.architecture", 9, ARRAY)]).ljust(99, b"\0")
)
gguf("10^15 strings", "truncated", gguf_bytes([("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 10**15))]))
gguf("10^15 tensors", "claims 1000000000000000 tensors", gguf_bytes([], counts=(10**15, 0)))
gguf("10^15 metadata", "claims 1000000000000000 metadata", gguf_bytes([], counts=(0, 10**15)))
gguf("2^64 - 1 of both", "claims", gguf_bytes([], counts=(2**64 - 1, 2**64 - 1)))
gguf(
    "key of 2^63 bytes", "a metadata key has 9223372036854775808 bytes", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63)
)
gguf("string of 2^63 bytes", "ends after the file", gguf_bytes([("a", 8, struct.pack("<Q", 2**63))]))
gguf("arrays in arrays", "array of arrays", gguf_bytes([("a", 9, struct.pack("<IQ", 9, 1) * 50_000)]))
gguf("unknown type", "unknown type 77", gguf_bytes([("a", 77, b"")]))
gguf("the same key twice", "twice", gguf_bytes([("a", 4, b"0000"), ("a", 4, b"0000")]))
gguf("version 1", "version is 1", gguf_bytes([], version=1))
gguf("big-endian", "big-endian", gguf_bytes([], version=3 << 24))
gguf("only a magic", "truncated", b"GGUF")
gguf("alignment 0", "general.alignment", gguf_bytes([("general.alignment", 4, struct.pack("<I", 0))]))
gguf("alignment 3", "general.alignment", gguf_bytes([("general.alignment", 4, struct.pack("<I", 3))]))
gguf("alignment 2^31", "general.alignment", gguf_bytes([("general.alignment", 4, struct.pack("<I", 2**31))]))
gguf("alignment as text", "general.alignment", gguf_bytes([("general.alignment", 8, string("32"))]))
gguf("2^32 - 1 dimensions", "dimensions", gguf_bytes([], (string("t") + struct.pack("<I", 2**32 - 1),)))
gguf("product that overflows", "truncated", gguf_bytes([], (tensor("t", [2**32, 2**32], 0, 0),)))
gguf("offset that overflows", "truncated", gguf_bytes([], (tensor("t", [32], 0, 2**64 - 32),)))
gguf("size 0", "is invalid for", gguf_bytes([], (tensor("t", [0, 4], 0, 0),)))
gguf("part of a block", "is invalid for", gguf_bytes([], (tensor("t", [33], 8, 0),)))
gguf("unknown tensor type", "unknown type 999", gguf_bytes([], (tensor("t", [32], 999, 0),)))
for name, words, second in (
    ("tensors that overlap", "overlap", tensor("b", [32], 0, 64)),
    ("the same tensor twice", "twice", tensor("a", [32], 0, 128)),
):
    gguf(name, words, gguf_bytes([], (tensor("a", [32], 0, 0), second)) + bytes(512))
gguf("not UTF-8", "not UTF-8", gguf_bytes([("general.architecture", 8, struct.pack("<Q", 2) + b"\xff\xfe")]))
gguf(
    "10 MB of small integers",
    "has no metadata",
    gguf_bytes([("a", 9, struct.pack("<IQ", 0, 10 << 20) + bytes(10 << 20))]),
)


def changed_gguf(name: str, words: str, old: bytes, new: bytes) -> None:
    def build(to: Path) -> Path:
        to.mkdir()
        data = small_gguf(to / "m.gguf")
        assert len(old) == len(new) and data.count(old) == 1, name  # noqa: PT018
        (to / "m.gguf").write_bytes(data.replace(old, new))
        return to / "m.gguf"

    case(f"gguf: {name}", words, build)


def counted(key: str, value: int, kind: int = 4) -> bytes:
    return key.encode() + struct.pack("<II", kind, value)


changed_gguf("no heads", "head_count", counted("attention.head_count", 2), counted("attention.head_count", 0))
changed_gguf(
    "heads as a float", "head_count", counted("attention.head_count", 2), counted("attention.head_count", 2, 6)
)
changed_gguf("2^32 - 1 layers", "num_hidden_layers", counted("block_count", 1), counted("block_count", 2**32 - 1))
changed_gguf("width 0", "hidden_size|head_dim", counted("embedding_length", 32), counted("embedding_length", 0))
changed_gguf("context 0", "max_position_embeddings", counted("context_length", 16), counted("context_length", 0))
changed_gguf("unknown architecture", "from GGUF", string("llama"), string("mamba"))


def pipe_gguf(to: Path) -> Path:
    to.mkdir()
    os.mkfifo(to / "m.gguf")
    return to / "m.gguf"


def code_gguf(to: Path) -> Path:
    to.mkdir()
    arm(to)
    return write_tiny_gguf(to / "m.gguf")


case("gguf: a pipe", "pipe|not a model directory|no config.json", pipe_gguf)
case("gguf: foreign code beside it", None, code_gguf)
