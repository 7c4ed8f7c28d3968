"""Targets whose input describes a file that is then written consistently: lengths and counts agree unless they are
what was changed. So the numbers inside a header are reached, where changed bytes break the file first.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
from conftest import write_tiny_model
from target_base import Target, read_all

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.formats.importers.gguf import GGUFFile
from crelle.formats.importers.gguf_header import Header
from crelle.formats.storage.open import open_weights
from crelle.models.loader import read_spec

_DATA = 1 << 16  # bytes of tensors that a described file may have
_MASK = 2**64 - 1


def _integer(value: Any, default: int = 0) -> int:
    return value if type(value) is int else default


def _list(value: Any) -> list[Any]:
    return value if type(value) is list else []


def safetensors_target(tmp: Path) -> Target:
    """A header of safetensors, as JSON, with so many bytes of data; and an index."""
    write_tiny_model(tmp, num_hidden_layers=1)
    (tmp / "model.safetensors").unlink()
    file, index = tmp / "model.safetensors", tmp / "model.safetensors.index.json"

    def run(value: Any) -> None:
        if not isinstance(value, dict):
            return
        header = json.dumps(value.get("header")).encode()
        length = _integer(value.get("length"), len(header)) & _MASK
        data = bytes(min(max(0, _integer(value.get("data"))), _DATA))
        file.write_bytes(struct.pack("<Q", length) + header + data)
        index.unlink(missing_ok=True)
        if "index" in value:
            index.write_text(json.dumps(value["index"]))
        read_all(open_weights(tmp))

    tensors = {
        "a.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b.bias": {"dtype": "BF16", "shape": [8], "data_offsets": [128, 144]},
        "c.weight": {"dtype": "I64", "shape": [2, 2], "data_offsets": [144, 176]},
    }
    held = {"header": {"__metadata__": {"format": "pt"}, **tensors}, "data": 176}
    seeds = [held, {**held, "index": {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}}]
    words = ["F8_E4M3", "F64", "BOOL", "U64", "F4", "C64", "I8", "data_offsets", "shape", "dtype", "__metadata__"]
    return Target(run, seeds, [*mutate.ODD, *words, "length", "data", "weight_map", "a.weight", "model.safetensors"])


_KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "u64": 10, "i64": 11}
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 7: 1, 10: 8, 11: 8}


def described_gguf(value: dict[str, Any]) -> bytes:
    """Return the GGUF file that a description means: fields [key, kind, value, count], tensors, bytes of data."""

    def text(s: Any) -> bytes:
        data = str(s).encode("utf-8", "replace")
        return struct.pack("<Q", len(data)) + data

    def packed(kind: int, v: Any) -> bytes:
        if kind == 8:
            return text(v)
        if kind == 6:
            return struct.pack("<f", v if isinstance(v, float) and abs(v) < 1e38 else 0.0)
        width = _WIDTHS.get(kind, 4)
        number = v if type(v) is int else int(v) if isinstance(v, float) and abs(v) < 1e300 else 0
        return (number & _MASK).to_bytes(8, "little")[:width]

    fields = [f for f in _list(value.get("fields")) if type(f) is list and len(f) >= 3]
    tensors = [t for t in _list(value.get("tensors")) if type(t) is list and len(t) >= 4]
    counts = [_integer(value.get(n), len(held)) & _MASK for n, held in (("tensor_count", tensors), ("count", fields))]
    out = [b"GGUF", struct.pack("<IQQ", 3, *counts)]
    for key, name, v, *more in fields:
        kind = _KINDS.get(name, 4) if isinstance(name, str) else _integer(name) & (2**32 - 1)
        out.append(text(key))
        if type(v) is list:
            count = _integer(more[0] if more else None, len(v)) & _MASK
            out += [struct.pack("<IIQ", 9, kind, count), *(packed(kind, each) for each in v)]
        else:
            out += [struct.pack("<I", kind), packed(kind, v)]
    for name, shape, kind, offset, *_ in tensors:
        sizes = [_integer(n) & _MASK for n in _list(shape)]
        out += [text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        out.append(struct.pack("<IQ", _integer(kind) & (2**32 - 1), _integer(offset) & _MASK))
    head = b"".join(out)
    return head + bytes(-len(head) % 32 + min(max(0, _integer(value.get("data"))), _DATA))


def described_gguf_target(_: Path) -> Target:
    def run(value: Any) -> None:
        if isinstance(value, dict):
            header = Header(described_gguf(value))
            for key in header.fields:
                header.get(key)
            file = GGUFFile(Path("f.gguf"), encoded=True, header=header)
            read_spec(file)
            read_all(file)

    def fields(arch: str) -> list[Any]:
        sizes = {"context_length": 16, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
        sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "vocab_size": 4, "rope.dimension_count": 16}
        return [
            ["general.architecture", "str", arch],
            *([f"{arch}.{key}", "u32", n] for key, n in sizes.items()),
            [f"{arch}.attention.layer_norm_rms_epsilon", "f32", 1e-5],
            ["tokenizer.ggml.tokens", "str", ["a", "b", "ab", "<s>"]],
            ["tokenizer.ggml.token_type", "i32", [1, 1, 1, 3]],
        ]

    def tensors(kind: int, row: int) -> list[Any]:
        # sizes innermost first; `row`: bytes of 32 values
        shapes = {"token_embd.weight": [32, 4], "blk.0.attn_q.weight": [32, 32], "blk.0.ffn_down.weight": [64, 32]}
        found, at = [], 0
        for name, (k, n) in shapes.items():
            found.append([name, [k, n], kind, at])
            at += -(-k // 32 * n * row // 32) * 32
        return [*found, ["output_norm.weight", [32], 0, at]]

    kinds = {0: 128, 1: 64, 8: 34, 2: 18}  # F32, F16, Q8_0, Q4_0
    seeds = [
        {"fields": fields(arch), "tensors": tensors(kind, row), "data": 20_000}
        for (kind, row), arch in zip(kinds.items(), ("llama", "qwen2", "llama", "gemma3"), strict=True)
    ]
    words = [*_KINDS, "llama.rope.scaling.factor", "llama.rope.scaling.type", "general.alignment", "llama.expert_count"]
    return Target(
        run, seeds, [*mutate.ODD, *words, "count", "tensor_count", "rope_freqs.weight", "llama.rope.freq_base"]
    )


def model_target(tmp: Path) -> Target:
    """A whole model, loaded and run, with another config.json and generation_config.json."""
    write_tiny_model(tmp, num_hidden_layers=1)
    config = json.loads((tmp / "config.json").read_text())

    def run(value: Any) -> None:
        if not isinstance(value, dict):
            return
        for name in ("config", "generation_config"):
            (tmp / f"{name}.json").write_text(json.dumps(value.get(name, {})))
        llm = LLM.load(tmp, device="cpu")
        llm.generate("Hi", Sampling(max_tokens=2))

    ropes = [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
    said = {"eos_token_id": [258, 3], "temperature": 0.5, "top_k": 20, "top_p": 0.9, "do_sample": True}
    seeds: list[Any] = [{"config": config}, {"config": config, "generation_config": said}]
    seeds += [{"config": {**config, "rope_scaling": rope, "sliding_window": 8}} for rope in ropes]
    seeds.append({"config": {**config, "model_type": "mistral", "sliding_window": 4, "max_position_embeddings": 2**20}})
    return Target(run, seeds, [*mutate.ODD, *config, "rope_theta", "layer_types", "original_max_position_embeddings"])


STRUCTURED_TARGETS: dict[str, Callable[[Path], Target]] = {
    "safetensors": safetensors_target,
    "described_gguf": described_gguf_target,
    "model": model_target,
}
