"""Hostile models, built by code: name -> (how to build it, the words of the sentence that must refuse it).

Cases without words are harmless, odd as they look: they must load. Every directory holds Python files and a pickle that
would leave a mark where they run.
"""

# ruff: noqa: E501  (a case on a line)
import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from conftest import write_tiny_model
from foreign_packers import SMALL, awq_gemm, compressed, compressed_config, gptq, write, write_models
from targets import small_gguf
from tiny_gguf import write_tiny_gguf

from crelle.quantizers.pipeline import quantize

MARK = "CRELLE_HOSTILE_MARK"  # the environment variable that names the file which foreign code would make
CODE = f"import os, pathlib\npathlib.Path(os.environ['{MARK}']).touch()\n"
Build = Callable[[Path], Path]
CASES: dict[str, tuple[Build, str | None]] = {}


def case(name: str, words: str | None, build: Build) -> None:
    assert name not in CASES
    CASES[name] = build, words


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE,)


def arm(to: Path) -> None:
    """Lay out what foreign code would be run from."""
    names = (
        "tokenization_evil",
        "modeling_evil",
        "configuration_evil",
        "__init__",
        "conftest",
        "sitecustomize",
        "torch",
    )
    for name in names:
        (to / f"{name}.py").write_text(CODE + "class Evil:\n    from_pretrained = classmethod(lambda *a, **k: None)\n")
    (to / "vocab.pkl").write_bytes(pickle.dumps(_Trap()))


def tiny(to: Path, tokenizer: bool = True, **config: Any) -> Path:
    """The tiny model with another config; the file is changed behind the weights' back."""
    write_tiny_model(to, num_hidden_layers=1)
    said = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(said))
    if not tokenizer:
        (to / "tokenizer.json").unlink()
    arm(to)
    return to


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
    "not a tokenizer that can be read",
    lambda d: (d / "tokenizer.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
)
file_case(
    "JSON of 20 MB",
    "such a file may have",
    lambda d: (d / "config.json").write_text('{"a":"' + "x" * (20 << 20) + '"}'),
)
file_case("NaN", "NaN", lambda d: (d / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": NaN}'))
file_case("infinity", "1e999", lambda d: (d / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e999}'))
file_case(
    "an integer of 5000 digits", "not valid JSON", lambda d: (d / "config.json").write_text('{"a":' + "9" * 5000 + "}")
)
file_case("a pickle for weights", "pickle", lambda d: (d / "model.safetensors").write_bytes(pickle.dumps(_Trap())))
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


def shard(name: str, words: str | None, data: bytes) -> None:
    file_case(f"safetensors: {name}", words, lambda d: (d / "model.safetensors").write_bytes(data))


def index(name: str, words: str, value: Any) -> None:
    file_case(f"index: {name}", words, lambda d: (d / "model.safetensors.index.json").write_text(json.dumps(value)))


BROKEN = "truncated or not a safetensors file"
shard("header of 2^63 bytes", BROKEN, struct.pack("<Q", 2**63) + b"{}")
shard("empty", BROKEN, b"")
shard("tensor beyond the end", BROKEN, header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}))
shard("shape that overflows", BROKEN, header({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}))
shard("negative size", BROKEN, header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000"))
shard("deep header", BROKEN, header(b"[" * 100_000))
shard("no tensors", "no tensor", header({}))
shard(
    "100,000 empty tensors",
    "no tensor",
    header({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}),
)
shard("a name of 2 MB", BROKEN, header({"x" * (2 << 20): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}))
shard(
    "a name that is half a surrogate pair",
    BROKEN + "|no tensor",
    header(b'{"\\ud800": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}', b"0000"),
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
config("quantized by a number", "already quantized", quantization_config=7)
config(
    "auto_map", None, auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
)
config("name of another repository", None, _name_or_path="evil/repository")
config("end token as a list of lists", "eos_token_id", eos_token_id=[[[]]])


# Tokenizers ----------------------------------------------------------------------------------------------------------


def tokenizer(name: str, words: str | None, json_changes: dict[str, Any] | None = None, **said: Any) -> None:
    def build(to: Path) -> Path:
        tiny(to, tokenizer=json_changes is not None)
        edit(to / "tokenizer_config.json", **said)
        if json_changes:
            edit(to / "tokenizer.json", **json_changes)
        return to

    case(f"tokenizer: {name}", words, build)


AUTO = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
tokenizer("auto_map beside a tokenizer.json", None, {}, auto_map=AUTO, tokenizer_class="Evil")
tokenizer("auto_map alone", "needs Python code", auto_map=AUTO, tokenizer_class="Evil")
tokenizer("auto_map as a list", "needs Python code", auto_map=["tokenization_evil.Evil", None])
tokenizer("auto_map of another repository", "needs Python code", auto_map={"AutoTokenizer": ["evil/r--t.Evil", None]})
tokenizer("a class that unpickles", "tokenizer class 'TransfoXLTokenizer'", tokenizer_class="TransfoXLTokenizer")
tokenizer("a class that is no name", "tokenizer class", tokenizer_class={"a": 1})
tokenizer("nothing at all", "holds no tokenizer")
tokenizer("special token as a number", "'bos_token' should be text", {}, bos_token=7)
tokenizer("half a surrogate pair", "'bos_token' should be text", {}, bos_token="\ud800", add_bos_token=True)
tokenizer("add_bos_token as text", "'add_bos_token' should be true or false", {}, add_bos_token="yes")
tokenizer("cut and padded", None, {
    "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                "pad_token": "!"}})  # fmt: skip
BAD_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
tokenizer("a pattern that backtracks", "can take for ever", {"pre_tokenizer": BAD_SPLIT})
tokenizer(
    "ids beyond the model",
    "outside the vocabulary",
    {"model": {"type": "WordLevel", "vocab": {"Hi": 4294967295, "u": 4294967294}, "unk_token": "u"}},
)
tokenizer("merges of nothing", "not a tokenizer", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}})


def from_vocabulary(to: Path) -> Path:
    """Vocabulary files only, and a config that lures transformers to code."""
    tiny(to, tokenizer=False, auto_map={"AutoConfig": "configuration_evil.Evil"}, _name_or_path="evil/repository")
    (to / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("Hi abcdeuslortn")}))
    (to / "merges.txt").write_text("#version: 0.2\n")
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return to


def broken_vocabulary(to: Path) -> Path:
    from_vocabulary(to)
    (to / "vocab.json").write_text("[[[")
    return to


def broken_sentencepiece(to: Path) -> Path:
    tiny(to, tokenizer=False)
    edit(to / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    (to / "tokenizer.model").write_bytes(b"\x80\x04\x95" + b"\xff" * 1000)
    return to


case("tokenizer: vocabulary files beside foreign code", None, from_vocabulary)
case("tokenizer: broken vocabulary", "that transformers can load", broken_vocabulary)
case("tokenizer: broken sentencepiece", "that transformers can load", broken_sentencepiece)


# Templates -----------------------------------------------------------------------------------------------------------

GROW = "{% set ns = namespace(s='aaaaaaaaaa', l=[1]) %}{% for i in range(60) %}"
TEMPLATES: dict[str, tuple[str, str]] = {
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "filtered loops": ("{% for i in range(99999) if i > 10**6 %}{% endfor %}" * 99, "takes more than"),
    "a long string": ("{{ 'a' * 10**10 }}", "makes more than"),
    "a long list": ("{{ [0] * 10**10 }}", "makes more than"),
    "an enormous integer": ("{{ (10**400)**(10**9) }}", "enormous integer"),
    "doubling by ~": (GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}", "makes more than"),
    "doubling by +": (GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}", "makes more than"),
    "doubling by blocks": (GROW + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}", "makes more"),
    "lists of lists": (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "takes more than"),
    "objects of objects": (GROW + "{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l|tojson }}", "takes more than"),
    "namespaces": (GROW + "{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}", "takes more than"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "branching macro": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes more"),
    "endless block": ("{% block a %}{{ self.a() }}{% endblock %}", "calls itself without end"),
    "endless recursive loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself without end"),
    "wide format": ("{{ '%1000000000d' % 1 }}", "width"),
    "wide format method": ("{{ '{:1000000000d}'.format(1) }}", "width"),
    "computed width": ("{{ '%*d' % (10**9, 1) }}", "width"),
    "wide filter": ("{{ 'a'|center(10**10) }}", "width"),
    "wide method": ("{{ 'a'.ljust(10**10) }}", "width"),
    "wide indent": ("{{ 'a\nb'|indent(10**9) }}", "width"),
    "wide JSON": ("{{ [1]|tojson(indent=10**9) }}", "width"),
    "wide batch": ("{{ [1]|batch(10**9, 0)|list }}", "width"),
    "join": ("{% set l = ['a' * 99999] * 9999 %}{{ l|join }}", "makes a list"),
    "join method": ("{% set l = ['a' * 99999] * 9999 %}{{ ''.join(l) }}", "makes a list"),
    "replace": ("{% set l = 'a' * 99999 %}{{ l|replace('a', l) }}", "makes more than"),
    "replace method": ("{% set l = 'a' * 99999 %}{{ l.replace('a', l) }}", "makes more than"),
    "sum of lists": ("{{ ([[1] * 999] * 999)|sum(start=[]) }}", "not numbers|takes more"),
    "sorting": ("{% for i in range(9999) %}{% set x = range(99999)|sort %}{% endfor %}", "takes more than"),
    "sorting of long strings": ("{% set a = 'a' * 10**6 %}{% set b = a ~ 'a' %}{{ ([a, b] * 50000)|sort|length }}", "makes a list"),
    "searching of long strings": ("{% set a = 'a' * 10**6 %}{{ (a ~ 'a') in [a ~ 'b'] * 10**6 }}", "makes a list|takes more"),
    "much output": ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "far more text"),
    "Python's internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "internals by a filter": ("{{ (''|attr('__class__')).mro() }}", "unsafe|undefined"),
    "internals by a format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "functions' internals": ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    "bytes": ("{{ (1).to_bytes(10**10, 'big') }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "deep parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "calls itself without end"),
    "deep blocks": ("{% for i in [1] %}" * 200 + "{% endfor %}" * 200, "nests more than"),
    "a template of 100,000 characters": ("{% if 1 %}{{ 1 }}{% endif %}" * 4000, "65,536 are allowed"),
    "syntax": ("{{ ", "refuses this conversation"),
}  # fmt: skip
for name, (text, words) in TEMPLATES.items():
    tokenizer(f"template with {name}", words, {}, chat_template=text)
tokenizer("template as a number", "'chat_template' should be text", {}, chat_template=7)
tokenizer("a template without a name", "none is called 'default'", {}, chat_template=[{"template": "a"}])
tokenizer("templates without a default", "none is called 'default'", {}, chat_template=[{"name": "x", "template": "a"}])


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
gguf("key of 2^63 bytes", "a metadata key should have", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63))
gguf("string of 2^63 bytes", "runs over the end", gguf_bytes([("a", 8, struct.pack("<Q", 2**63))]))
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
gguf("size 0", "cannot be", gguf_bytes([], (tensor("t", [0, 4], 0, 0),)))
gguf("part of a block", "cannot be", gguf_bytes([], (tensor("t", [33], 8, 0),)))
gguf("unknown tensor type", "unknown type 999", gguf_bytes([], (tensor("t", [32], 999, 0),)))
gguf(
    "tensors that overlap",
    "overlap",
    gguf_bytes(
        [],
        (
            tensor("a", [32], 0, 0),
            tensor("b", [32], 0, 64),
        ),
    )
    + bytes(512),
)
gguf(
    "the same tensor twice",
    "twice",
    gguf_bytes(
        [],
        (
            tensor("a", [8], 0, 0),
            tensor("a", [8], 0, 32),
        ),
    )
    + bytes(512),
)
gguf("not UTF-8", "not UTF-8", gguf_bytes([("general.architecture", 8, struct.pack("<Q", 2) + b"\xff\xfe")]))
gguf(
    "10 MB of small integers",
    "lacks the metadata",
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
changed_gguf("unknown architecture", "from GGUF Crelle reads", string("llama"), string("mamba"))


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


# GPTQ, AWQ, compressed-tensors ---------------------------------------------------------------------------------------

PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "sym": False}),
    "awq": (awq_gemm, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "ct": (compressed, compressed_config(4, 32)),
}


def packed(
    kind: str, name: str, words: str | None, said: dict[str, Any] | None = None, tensors: Any = None, **config: Any
) -> None:
    """A whole quantized model, of which the config's statements or some tensors are changed."""

    def build(to: Path) -> Path:
        pack, how = PACKED[kind]
        path, _ = write_models(to, pack, {**how, **(said or {})}, bits=4, group=32)
        if tensors:
            found = safetensors.torch.load_file(path / "model.safetensors")
            kept = {name: t for name, t in (found | tensors(found)).items() if t is not None}
            write(path, kept, {**how, **(said or {})}, **{**SMALL, "num_hidden_layers": 2, **config})
        arm(path)
        return path

    case(f"{kind}: {name}", words, build)


def groups(**changes: Any) -> dict[str, Any]:
    scheme = compressed_config(4, 32)["config_groups"]["group_0"]
    weights = scheme["weights"] | {k: v for k, v in changes.items() if k != "targets"}
    return {"config_groups": {"group_0": {**scheme, "weights": weights, "targets": changes.get("targets", ["Linear"])}}}


def without_g_idx(tensors: dict[str, Any]) -> dict[str, None]:
    return {name: None for name in tensors if name.endswith("g_idx")}


UP = "model.layers.0.mlp.up_proj"
packed("gptq", "as it should be", None)
for value in (-1, 0, 1000, "4", True, 10**30, [4]):
    packed("gptq", f"bits {value!r} and no g_idx", "bits", {"bits": value}, without_g_idx)
    packed("awq", f"bits {value!r}", "bits", {"bits": value})
    packed("ct", f"bits {value!r}", "bits", groups(num_bits=value))
for value in (0, -7, "32", 1.5, True):
    packed("awq", f"group {value!r}", "group_size", {"group_size": value})
    packed("ct", f"group {value!r}", "group_size", groups(group_size=value))
packed("gptq", "group_size of 400 digits and no g_idx", "g_idx", {"group_size": 10**400}, without_g_idx)
packed("gptq", "desc_act in words", None, {"desc_act": "yes"})
packed("gptq", "g_idx out of range", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"] + 1000})
packed("gptq", "g_idx negative", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"] - 5})
packed("gptq", "g_idx empty", "g_idx|qweight", tensors=lambda t: {f"{UP}.g_idx": torch.zeros(0, dtype=torch.int32)})
packed("gptq", "g_idx as floats", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"].float()})
packed("gptq", "scales that do not fit", "scales", tensors=lambda t: {f"{UP}.scales": t[f"{UP}.scales"][:, 1:]})
packed("gptq", "empty words", "qweight", tensors=lambda t: {f"{UP}.qweight": torch.zeros(0, 0, dtype=torch.int32)})
packed(
    "gptq",
    "no zeros in a symmetric grid",
    "qzeros",
    {"sym": True},
    tensors=lambda t: {n: z[:0] for n, z in t.items() if n.endswith("qzeros")},
)
packed("awq", "zeros that do not fit", "qzeros", tensors=lambda t: {f"{UP}.qzeros": t[f"{UP}.qzeros"][:1]})
packed("awq", "words in one dimension", "qweight", tensors=lambda t: {f"{UP}.qweight": t[f"{UP}.qweight"].flatten()})
packed(
    "ct",
    "shape of 2^62",
    "weight_packed|weight_scale",
    tensors=lambda t: {f"{UP}.weight_shape": torch.tensor([2**62, 2**62])},
)
packed("ct", "shape of -1", "weight_shape", tensors=lambda t: {f"{UP}.weight_shape": torch.tensor([-1, 64])})
packed("ct", "a pattern that backtracks", None, groups(targets=["re:(.*)*(.*)*(.*)*x", "Linear"]))
packed("ct", "a pattern that repeats repeats", None, groups(targets=["re:((a+)+)+$", r"re:(\w+\.?)+!", "Linear"]))
packed("ct", "a pattern that grows", "states", groups(targets=["re:((((x{99}){99}){99}){99})"]))
packed("ct", "a long pattern", "1000 characters", groups(targets=["re:" + "a?" * 5000]))
packed("ct", "look-ahead", "look-ahead", groups(targets=["re:(?=(a+)+$)"]))
packed("ct", "back reference", "not in the language", groups(targets=[r"re:(a*)\1+$"]))
packed("ct", "targets of no kind", "should be text", groups(targets=[7]))
packed("ct", "1000 patterns", None, groups(targets=["re:.*a.*b.*c.*d.*e!"] * 999 + ["Linear"]))
packed("ct", "100,000 patterns", "more than 1000 targets", groups(targets=["re:.*a.*b.*c.*d.*e!"] * 100_000))


# Crelle's own checkpoints ----------------------------------------------------------------------------------------------


def checkpoint(name: str, words: str, change: Callable[[Path, dict[str, Any]], None]) -> None:
    """A quantized model whose quantization_config, and what goes with it, is changed."""

    def build(to: Path) -> Path:
        quantize(tiny(to.with_name("source")), to, "fp16")
        said = json.loads((to / "config.json").read_text())
        change(to, said["quantization_config"])
        (to / "config.json").write_text(json.dumps(said))
        return to

    case(f"checkpoint: {name}", words, build)


def without_a_part(to: Path, said: dict[str, Any]) -> None:
    for shard, facts in said["shards"].items():
        tensors = safetensors.torch.load_file(to / shard)
        if tensors.pop(f"{UP}.weight", None) is not None:
            safetensors.torch.save_file(tensors, to / shard)
            data = (to / shard).read_bytes()
            facts.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


checkpoint("a plain matrix without its tensor", f"has no tensor '{UP}.weight'|already quantized", without_a_part)
checkpoint("a list as a format", "unknown format", lambda _, said: said["tensors"][UP].update(format=["dense"]))
