"""The header's walk: what gguf writes is read alike, what a file only claims is not believed."""

import resource
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_tiny_gguf

from crelle.errors import FormatError
from crelle.formats.importers.gguf_header import Header, read_header
from crelle.formats.storage.open import open_weights


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_header_is_that_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("words", ["a", "", "é" * 40])
    writer.add_array("truths", [True, False])
    writer.add_array("wide", [1.5, -2.0])
    for name, value in {"bool": True, "uint8": 255, "int64": -(2**40), "float64": 0.1, "string": "x"}.items():
        getattr(writer, f"add_{name}")(name, value)
    qtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("w", gguf.quants.quantize(w, qtype), raw_dtype=qtype)
    writer.add_tensor("v", np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs, ours = gguf.GGUFReader(tmp_path / "m.gguf"), read_header(tmp_path / "m.gguf")
    assert set(ours.fields) == {k for k in theirs.fields if not k.startswith("GGUF.")}
    for key in ours.fields:
        assert ours.get(key) == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.shape, info.kind) == (tuple(reversed(t.shape.tolist())), t.tensor_type.name)
        assert ours.array(info).tobytes() == t.data.tobytes()
        assert ours.array(info).shape == t.data.shape


def test_99_bytes_that_claim_10_to_the_15_entries_are_refused(tmp_path: Path) -> None:
    claim = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 10**15)
    (tmp_path / "m.gguf").write_bytes(claim.ljust(99, b"\0"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=r"m\.gguf is truncated .* 1000000000000000 are needed"):
        open_weights(tmp_path / "m.gguf")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_vocabulary_of_150_000_tokens_is_walked_within_a_second(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([f"token {i}" for i in range(150_000)])
    writer.add_token_merges([f"{i} {i}" for i in range(300_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    began = time.process_time()
    header = read_header(tmp_path / "m.gguf")
    assert header.get("tokenizer.ggml.tokens")[149_999] == "token 149999"
    assert time.process_time() - began < 1


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("sound") / "m.gguf").read_bytes()


@settings(deadline=None, max_examples=200)
@given(cut=st.integers(0, 20_000))
def test_every_truncation_is_refused(cut: int, sound: bytes) -> None:
    with pytest.raises(FormatError, match="truncated"):
        Header(sound[: min(cut, len(sound) - 1)] if cut >= 4 else b"GGUF"[:cut])
