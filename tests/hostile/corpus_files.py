"""Hostile directories: odd files, damaged safetensors and indexes, senseless configs."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus_base import Trap, case, tiny

# Files ---------------------------------------------------------------------------------------------------------------


def file_case(name: str, words: str | None, change: Callable[[Path], object]) -> None:
    def build(to: Path) -> Path:
        change(tiny(to))
        return to

    case(f"file: {name}", words, build)


def fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def loop(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file)


for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    file_case(f"{name} is a pipe", "no config.json|pipe, socket or device", lambda d, n=name: fifo(d / n))
file_case("generation_config.json is a pipe", None, lambda d: fifo(d / "generation_config.json"))
file_case("config.json is a loop of links", "no config.json", lambda d: loop(d / "config.json"))
file_case("model.safetensors is a loop of links", "cannot read", lambda d: loop(d / "model.safetensors"))
file_case(
    "model.safetensors is /dev/zero",
    "pipe, socket or device",
    lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").symlink_to("/dev/zero")),
)
file_case(
    "tokenizer.json is a directory",
    "a directory, not a file",
    lambda d: ((d / "tokenizer.json").unlink(), (d / "tokenizer.json").mkdir()),
)
file_case("deep JSON", "nested too deeply", lambda d: (d / "config.json").write_text("[" * 100_000 + "]" * 100_000))
file_case(
    "deep JSON of a tokenizer",
    "nested too deeply",
    lambda d: (d / "tokenizer_config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
)
file_case(
    "deep tokenizer.json",
    "not a readable tokenizer",
    lambda d: (d / "tokenizer.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
)
file_case(
    "JSON of 50 MiB",
    "are allowed",
    lambda d: (d / "config.json").write_text('{"a":"' + "x" * (50 << 20) + '"}'),
)
file_case(
    "JSON of 9 million lists",
    "more than 6,000,000 values",
    lambda d: (d / "config.json").write_text('{"a":[' + "[]," * 9_000_000 + "0]}"),
)
file_case(
    "JSON of 31 MiB of wide characters",
    "model type|lacks the key",
    lambda d: (d / "config.json").write_text('{"a":"\U0001f600' + "x" * (31 << 20) + '"}'),
)
file_case("NaN", "NaN", lambda d: (d / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": NaN}'))
file_case("infinity", "1e999", lambda d: (d / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e999}'))
file_case(
    "an integer of 5000 digits", "not valid JSON", lambda d: (d / "config.json").write_text('{"a":' + "9" * 5000 + "}")
)
file_case("a pickle for weights", "pickle", lambda d: (d / "model.safetensors").write_bytes(pickle.dumps(Trap())))
file_case("not UTF-8", "not valid JSON", lambda d: (d / "config.json").write_bytes(b'{"a": "\xff"}'))
for name, ids in (("text", ["</s>"]), ("nested", [[1]]), ("truth", True), ("fraction", 1.5)):
    file_case(
        f"end token as {name}",
        "eos_token_id",
        lambda d, i=ids: (d / "generation_config.json").write_text(json.dumps({"eos_token_id": i})),
    )


# safetensors and their index -----------------------------------------------------------------------------------------


def header(value: Any, data: bytes = b"") -> bytes:
    text = json.dumps(value).encode() if not isinstance(value, bytes) else value
    return struct.pack("<Q", len(text)) + text + data


def shard(name: str, words: str | None, data: Callable[[], bytes]) -> None:
    file_case(f"safetensors: {name}", words, lambda d: (d / "model.safetensors").write_bytes(data()))


def index(name: str, words: str, value: Any) -> None:
    file_case(f"index: {name}", words, lambda d: (d / "model.safetensors.index.json").write_text(json.dumps(value)))


BROKEN = "truncated or not a safetensors file"
shard("header of 2^63 bytes", BROKEN, lambda: struct.pack("<Q", 2**63) + b"{}")
shard("empty", BROKEN, lambda: b"")
shard(
    "tensor beyond the end",
    BROKEN,
    lambda: header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
)
shard(
    "shape that overflows",
    BROKEN,
    lambda: header({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
)
shard("negative size", BROKEN, lambda: header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000"))
shard("deep header", BROKEN, lambda: header(b"[" * 100_000))
shard("no tensors", "no tensor", lambda: header({}))
shard(
    "100,000 empty tensors",
    "no tensor",
    lambda: header({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}),
)
shard(
    "a name of 2 MB", BROKEN, lambda: header({"x" * (2 << 20): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
)
shard(
    "a name that is half a surrogate pair",
    BROKEN + "|no tensor",
    lambda: header(b'{"\\ud800": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}', b"0000"),
)
index("weight_map as a list", "weight_map", {"weight_map": [1]})
index("a file that is a number", "weight_map", {"weight_map": {"a": 1}})
index("a name of 5000 characters", "5000 characters|plain", {"weight_map": {"a": "x" * 5000}})
index("a name with a zero byte", "missing|should be|plain|cannot read", {"weight_map": {"a": "a\x00b"}})
index("no files", "no tensor|weight_map|no .*safetensors", {"weight_map": {}})


def twice(d: Path) -> None:
    shutil.copyfile(d / "model.safetensors", d / "other.safetensors")


file_case("a tensor in two shards", "in more than one", twice)


# Configs -------------------------------------------------------------------------------------------------------------


def config(name: str, words: str | None, **changes: Any) -> None:
    case(f"config: {name}", words, lambda to: tiny(to, **changes))


config("2^29 layers", "num_hidden_layers", num_hidden_layers=2**29)
config("4096 layers", "no tensor of layer 1", num_hidden_layers=4096)
config("no layers", "num_hidden_layers", num_hidden_layers=0)
config("eps in words", "rms_norm_eps", rms_norm_eps="x")
config("half a window", "sliding_window", model_type="mistral", sliding_window=1.5)
config(
    "short layer types",
    "layer_types",
    model_type="qwen3",
    num_hidden_layers=2,
    sliding_window=4,
    layer_types=["full_attention"],
)
config("head of -1", "head_dim", head_dim=-1)
config("head of 0", "head_dim", head_dim=0)
config("an enormous vocabulary", "vocab_size", vocab_size=2**62)
config("another vocabulary", "embed_tokens", vocab_size=260)
config("context of 2^60", "max_position_embeddings", max_position_embeddings=2**60)
config("context of 2^30", None, max_position_embeddings=2**30)
config("kv heads", "num_key_value_heads", num_key_value_heads=4)
config("heads as text", "num_attention_heads", num_attention_heads="6")
config("truth for a size", "hidden_size", hidden_size=True)
config("null for a size", "lacks the key 'hidden_size'", hidden_size=None)
config("rope as text", "rope_scaling", rope_scaling="linear")
config("rope of a list", "rope_type", rope_parameters={"rope_type": ["linear"]})
config("rope factor 0", "factor", rope_scaling={"type": "linear", "factor": 0})
config("rope theta 0", "rope_theta", rope_theta=0)
config(
    "rope per layer type", "differ from layer to layer", rope_parameters={"full_attention": {"rope_type": "default"}}
)
config("model type as a list", "model type", model_type=["llama"])
config("activation of 1 MB", "activation", hidden_act="x" * (1 << 20))
config("quantized by a number", "is quantized by .7., which Crelle cannot read", quantization_config=7)
config(
    "auto_map", None, auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
)
config("name of another repository", None, _name_or_path="evil/repository")
config("end token as a list of lists", "eos_token_id", eos_token_id=[[[]]])
