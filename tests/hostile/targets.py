"""The loaders as targets of the fuzzer: what goes in, and the seeds that it starts from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import mutate
import numpy as np
import safetensors.torch
import torch
from conftest import CHAT_TEMPLATE, TINY, write_tokenizer
from foreign_packers import awq_gemm, awq_gemv, compressed, compressed_config, exl3, gptq, random_grid, write
from gguf import GGUFWriter
from target_base import Target, read_all
from targets_files import FILE_TARGETS
from targets_structured import STRUCTURED_TARGETS

from crelle.engine.tokenization import template_budget
from crelle.engine.tokenization.chat_template import ChatTemplate
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CrelleError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import FORMATS
from crelle.formats.importers.gguf import GGUFFile
from crelle.formats.importers.gguf_header import Header
from crelle.formats.importers.gguf_tokenizer import build_tokenizer
from crelle.formats.kv.format import kv_of_checkpoint
from crelle.formats.storage import hf
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.io import parse_json
from crelle.formats.storage.open import open_quantized, open_weights
from crelle.formats.storage.rust import panics_are
from crelle.models.loader import read_spec
from crelle.quantizers.pipeline import quantize

DTYPES = {
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "f32": torch.float32,
    "i8": torch.int8,
}

# GGUF ----------------------------------------------------------------------------------------------------------------


def small_gguf(to: Path, *, kind: str = "F32", model: str = "gpt2", arch: str = "llama") -> bytes:
    writer = GGUFWriter(to, arch)
    for key, value in {
        "context_length": 16,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
    }.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch == "gemma3":
        writer.add_sliding_window(8)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_scores([0.0, -1.0, -2.0, 0.0])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    qtype = gguf.GGMLQuantizationType[kind]
    for name, shape in {"token_embd": (4, 32), "blk.0.attn_q": (32, 32), "output_norm": (32,)}.items():
        w = np.ones(shape, np.float32)
        stored = gguf.quants.quantize(w, qtype if w.ndim == 2 else gguf.GGMLQuantizationType.F32)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=qtype if w.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to.read_bytes()


def gguf_target(tmp: Path) -> Target:
    def run(data: bytes) -> None:
        header = Header(data)
        for key in header.fields:
            header.get(key)
        file = GGUFFile(Path("f.gguf"), encoded=True, header=header)
        read_all(file)
        if len(data) % 16 == 0:  # it takes a hundred times as long as the rest
            try:
                with panics_are("the tokenizer"):
                    build_tokenizer(file.metadata)
            except CrelleError:
                raise
            except Exception:  # write_tokenizer makes a sentence of it
                pass
        read_spec(file)

    seeds = [
        small_gguf(tmp / f"{k}{m}.gguf", kind=k, model=m, arch=a)
        for k, m, a in (
            ("F32", "gpt2", "llama"),
            ("Q8_0", "llama", "llama"),
            ("F16", "gpt2", "qwen2"),
            ("MXFP4", "llama", "gemma3"),
        )
    ]
    words = ["general.architecture", "llama.block_count", "llama.attention.head_count", "GGUF", "rope_freqs.weight"]
    return Target(
        run,
        seeds,
        [*words, "llama.rope.scaling.type", "linear", "qwen2", "general.alignment", "output.weight", "gpt2", "IQ4_NL"],
    )


# Hugging Face directories --------------------------------------------------------------------------------------------


def directory_target(tmp: Path) -> Target:
    """The bytes of a safetensors file, and behind them those of an index."""
    (tmp / "config.json").write_text(json.dumps(TINY))
    tensors = {"a.weight": torch.ones(2, 3), "b.bias": torch.ones(2, dtype=torch.float16)}
    held = safetensors.torch.save(tensors)
    index = json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}).encode()
    mark = b"\n--\n"

    def run(data: bytes) -> None:
        shard, found, index = data.partition(mark)
        (tmp / "model.safetensors").write_bytes(shard)
        (tmp / "model.safetensors.index.json").unlink(missing_ok=True)
        if found:
            (tmp / "model.safetensors.index.json").write_bytes(index)
        read_all(open_weights(tmp))

    words = [
        "model.safetensors",
        "weight_map",
        "a.weight",
        "F8_E4M3",
        "data_offsets",
        "shape",
        "__metadata__",
        "BOOL",
        '"F64"',
    ]
    return Target(
        run, [held, held + mark + index], [*words, "[0,0]", '"../x"', "U64", "999999999999", "-1", "1e999", "NaN"]
    )


# Configs -------------------------------------------------------------------------------------------------------------


class _Config:
    """Weights that are nothing but a config."""

    path = Path("m")

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": False,
    "activation_function": "relu",
}
QWEN = {
    **TINY,
    "model_type": "qwen2",
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}


def config_target(_: Path) -> Target:
    def run(config: Any) -> None:
        text = json.dumps(config).encode()
        read_spec(_Config(parse_json(text, "config.json")))  # type: ignore[arg-type]

    seeds = [TINY, {**TINY, "rope_parameters": LLAMA3_ROPE}, {**TINY, "rope_scaling": {"type": "linear", "factor": 2}}]
    keys = [*LLAMA3_ROPE, *OPT, *QWEN]
    return Target(
        run, [*seeds, OPT, QWEN, {**TINY, "model_type": "mistral", "sliding_window": 4}], [*mutate.ODD, *keys]
    )


# Directories that others quantized -----------------------------------------------------------------------------------


class _Memory:
    """Stands for a shard: tensors by dtype, shape and the values that fill them in turn."""

    tensors: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, _: object) -> None:
        pass

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def read(self, name: str) -> torch.Tensor:
        kind, shape, fill = self.tensors[name]
        size = int(np.prod(shape))
        return (
            torch.tensor(fill, dtype=torch.int64).repeat(-(-size // len(fill)))[:size].to(DTYPES[kind]).reshape(shape)
        )


def _described(parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    kinds = {d: name for name, d in DTYPES.items()}
    return {f"m.{p}": [kinds[t.dtype], list(t.shape), t.flatten().long().tolist()[:64]] for p, t in parts.items()}


def _sound(tensor: Any) -> bool:
    """Whether a description is one of a tensor that a safetensors file can hold."""
    if not isinstance(tensor, list) or len(tensor) != 3 or not isinstance(tensor[0], str) or tensor[0] not in DTYPES:
        return False
    _, shape, fill = tensor
    sizes = isinstance(shape, list) and len(shape) < 5 and all(type(n) is int and 0 <= n < 5000 for n in shape)
    values = isinstance(fill, list) and fill and all(type(n) is int and abs(n) < 2**63 for n in fill)
    return bool(sizes and values and np.prod(shape) <= 50_000)


def encoded_target(_: Path) -> Target:
    def run(value: Any) -> None:
        if not isinstance(value, dict) or not isinstance(value.get("tensors"), dict):
            return
        _Memory.tensors = {n: t for n, t in value["tensors"].items() if _sound(t)}
        config = json.dumps({**TINY, "quantization_config": value.get("declared")}).encode()
        with (
            patch.object(hf, "ShardReader", _Memory),
            patch.object(hf.HFDirectory, "_shard_files", lambda self: [Path("x")]),
        ):
            said = parse_json(config, "config.json")["quantization_config"]
            read_all(open_quantized(Path("m"), dict(TINY), said))

    def case(parts: dict[str, torch.Tensor], declared: dict[str, Any]) -> dict[str, Any]:
        return {"declared": declared, "tensors": _described(parts)}

    grid = random_grid(8, 32, 4, 16)
    g3 = random_grid(8, 32, 3, 16, scattered=True)
    named = compressed_config(4, 16)
    named["config_groups"]["group_0"]["targets"] = [r"re:.*\.(m|n)\d*$", "re:m"]
    said = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 16, "sym": False, "meta": {}}
    seeds = [
        case(gptq(grid), said),
        case(gptq(g3), {**said, "bits": 3, "desc_act": True}),
        case({k: v for k, v in gptq(grid).items() if k != "g_idx"}, {**said, "sym": True}),
        case(awq_gemm(grid), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
        case(awq_gemv(grid), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}),
        case(compressed(grid), compressed_config(4, 16)),
        case(compressed(grid), named),
        case(compressed(g3, g_idx=True, dense=False), compressed_config(3, 16, actorder="group")),
        case(exl3(128, 128, 2), {"quant_method": "exl3", "bits": 2.0}),
    ]
    words = [
        "m.qweight",
        "m.g_idx",
        "m.su",
        "m.mcg",
        "gptq_v2",
        "is_marlin_format",
        "channel",
        "re:((a*)*)*b",
        "re:[a-",
        "re:(?=x)",
        "i32",
        "f16",
    ]
    return Target(
        run, seeds, [*mutate.ODD, *words, "m.weight_zero_point", "Linear", "m.weight", "symmetric", "re:x{1,99}"]
    )


# Tokenizers and templates --------------------------------------------------------------------------------------------

TEMPLATES = [
    CHAT_TEMPLATE,
    "{{ bos_token }}{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.content|trim %}"
    "{{ loop.index }}{% endfor %}{{ ns.s|upper }}{% macro f(x, n=3) %}{{ x * n }}{% endmacro %}{{ f('ab') }}",
    "{% for i in range(9) if i % 2 %}{{ '%s-%d' % (i, i) }}{% endfor %}{{ [1, 'b', {'c': 2}]|tojson(indent=2) }}"
    "{{ messages|map(attribute='role')|join(', ') }}{{ 'a,b'.split(',')[0].replace('a', 'bb')|center(9) }}",
    "{% generation %}{{ messages[::-1]|selectattr('role', 'equalto', 'user')|list }}{% endgeneration %}"
    "{% set x %}{{ strftime_now('%Y') }}{% endset %}{{ x|length }}{% call(u) f() %}{% endcall %}",
]
JINJA = ["{% for x in messages %}", "{% endfor %}", "{{ x * 99 }}", "|join(x)", "|replace('a','aaa')", " ** 9", "|list"]
JINJA += ["{% if x %}", "{% endif %}", "{% set x = [x, x] %}", "{% macro g() %}{{ g() }}{% endmacro %}{{ g() }}", "~ x"]
JINJA += [
    ".format(x)",
    "|format(x)",
    "|map('list')",
    "|batch(3)",
    "|sum",
    "|sort",
    "|tojson",
    "['__class__']",
    "|attr('x')",
]
JINJA += [
    "|indent(99)",
    "|int",
    "|string",
    ".join(messages)",
    "{{ loop(x) }}",
    " recursive %}",
    "{% break %}",
    "|groupby('role')",
]


def tokenizer_target(tmp: Path) -> Target:
    write_tokenizer(tmp)
    whole = json.loads((tmp / "tokenizer.json").read_text())
    whole["model"]["vocab"] = {c: i for i, c in enumerate("abcdHi?")}
    whole["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\w+"}, "behavior": "Isolated", "invert": False}
    config = json.loads((tmp / "tokenizer_config.json").read_text())
    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "abcd " * 9}]
    limits = {"MAX_SECONDS": 0.1, "MAX_STEPS": 20_000, "MAX_BYTES": 4 << 20}

    def run(value: Any) -> None:
        if isinstance(value, dict) and set(value) == {"template"}:
            if isinstance(value["template"], str):
                with patch.multiple(template_budget, **limits):
                    ChatTemplate(value["template"]).render(talk, {"bos_token": "<s>"})
            return
        for name in ("tokenizer", "tokenizer_config", "special_tokens_map"):
            (tmp / f"{name}.json").unlink(missing_ok=True)
            if isinstance(value, dict) and name in value:
                (tmp / f"{name}.json").write_text(json.dumps(value[name]))
        if (tmp / "tokenizer.json").exists():  # without it transformers would be asked, which takes far longer
            made = Tokenizer(tmp)
            made.decode(made.encode("Hi? abcd")[:9])
            with patch.multiple(template_budget, **limits):
                made.encode_chat(talk)

    seeds: list[Any] = [{"template": t} for t in TEMPLATES]
    seeds.append({"tokenizer": whole, "tokenizer_config": config, "special_tokens_map": {"eos_token": "</s>"}})
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}, {"type": "NFKC"}]
    steps.append({"type": "Replace", "pattern": {"Regex": " *"}, "content": "a"})
    normalized = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    decoded = {"decoder": {"type": "Sequence", "decoders": [steps[0], {"type": "Fuse"}]}}
    seeds.append({"tokenizer": whole | normalized | decoded, "tokenizer_config": config})
    seeds.append({"tokenizer": whole | {"pre_tokenizer": split}, "tokenizer_config": {**config, "add_bos_token": True}})
    return Target(
        run, seeds, [*mutate.ODD, *JINJA, "(a+)+", "chat_template", "auto_map", "bos_token", "vocab", "Regex"]
    )


# Our own checkpoints -------------------------------------------------------------------------------------------------

_ROWS = {"shape": [8, 24], "bits": 4, "group": 12, "outliers": 4, "permuted": True}
INTEGER_SPECS: list[dict[str, Any]] = [
    {**_ROWS, "format": "grouped", "outlier_bits": 8, "activation": ActivationSpec(4, 12, 4).to_json()},
    {**_ROWS, "format": "two-level", "activation": ActivationSpec(8, 24).to_json()},
    {"format": "mixed", "shape": [8, 24], "group": 8, "packing": "general", "block": 4, "four": 1, "outliers": 3},
]


def checkpoint_target(tmp: Path) -> Target:
    tensors = {"model.embed_tokens.weight": torch.ones(4, 24), "model.norm.weight": torch.ones(24)}
    tensors |= {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(8, 24) for n in ("up", "down")}
    model = write(tmp / "model", tensors, None, num_hidden_layers=1)
    seeds, directories = [], []
    for i, spec in enumerate(INTEGER_SPECS):
        directories.append(tmp / f"r{i}")
        with CheckpointWriter(directories[-1], {"crelle": "0"}) as writer:
            w = FORMATS[spec["format"]].random(spec, torch.Generator().manual_seed(0))
            others = {n: t for n, t in tensors.items() if "up_proj" not in n and "down_proj" not in n}
            writer.add("crelle-00001-of-00001.safetensors", {"model.layers.0.mlp.up_proj": w}, others)
            writer.finish(json.loads((model / "config.json").read_text()), "atom:w=4,a=4,kv=4:layers.0-1=8", {})
        seeds.append({"at": i, "config": json.loads((directories[-1] / "config.json").read_text())})
    schemes = ("bcq:bits=2,group=12", "rtn:bits=4,group=12", "bcq-nested:bits=3,group=12,lowest=2,data=false")
    for i, scheme in enumerate(schemes, len(directories)):
        directories.append(quantize(model, tmp / f"q{i}", scheme).out)
        seeds.append({"at": i, "config": json.loads((directories[-1] / "config.json").read_text())})

    def run(value: Any) -> None:
        if not isinstance(value, dict) or type(at := value.get("at")) is not int or not 0 <= at < len(directories):
            return
        (directories[at] / "config.json").write_text(json.dumps(value.get("config")))
        weights = open_weights(directories[at], verify=False)
        read_all(weights)
        spec, cache = read_spec(weights), kv_of_checkpoint(weights.config)
        cache.layers(len(spec.layers))

    words = [
        "kv=4:layers.0-7=8",
        "atom:kv=4:page=8",
        "grouped",
        "two-level",
        "mixed",
        "block",
        "activation",
        "bcq",
        "uniform",
        "affine",
        "nested",
        "permuted",
        "dense",
        "bits",
        "group",
        "shape",
        "precisions",
        "format",
    ]
    return Target(
        run, seeds, [*mutate.ODD, *words, "f16", "f32", "inner", "crelle", "model-00001-of-00003.safetensors"]
    )


TARGETS: dict[str, Callable[[Path], Target]] = {
    "gguf": gguf_target,
    "directory": directory_target,
    "config": config_target,
    "encoded": encoded_target,
    "tokenizer": tokenizer_target,
    "checkpoint": checkpoint_target,
    **STRUCTURED_TARGETS,
    **FILE_TARGETS,
}
