"""Small GGUF files, written with the `gguf` package in the conventions of llama.cpp's converter."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType

Array = np.ndarray[Any, Any]

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY, CONTEXT = 64, 96, 2, 4, 2, 32, 260, 96

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in _TOP.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(k for k, v in _PARTS.items() if v == part)}.{kind}"


def permute(w: Array, heads: int) -> Array:
    """Reorder the rows of q or k as llama.cpp's converter does for the `llama` architecture."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tiny_tensors(arch: str, *, width: int = WIDTH, tied: bool = False, bias: bool = False) -> dict[str, Array]:
    """Return random f32 tensors of a tiny model under their Hugging Face names."""
    random = np.random.default_rng(0)

    def of(*shape: int) -> Array:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    tensors = {"model.embed_tokens.weight": of(VOCABULARY, width), "model.norm.weight": of(width)}
    if not tied:
        tensors["lm_head.weight"] = of(VOCABULARY, width)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        tensors |= {f"{at}.self_attn.{n}_proj.weight": of(*s) for n, s in sizes.items()}
        sizes = {"gate": (INNER, width), "up": (INNER, width), "down": (width, INNER)}
        tensors |= {f"{at}.mlp.{n}_proj.weight": of(*s) for n, s in sizes.items()}
        tensors |= {f"{at}.{n}.weight": of(width) for n in ("input_layernorm", "post_attention_layernorm")}
        if bias or arch == "qwen2":
            tensors |= {f"{at}.self_attn.{n}_proj.bias": of(s) for n, s in (("q", q), ("k", kv), ("v", kv))}
        if arch == "qwen3":
            tensors |= {f"{at}.self_attn.{n}_norm.weight": of(HEAD) for n in "qk"}
    return tensors


def byte_tokenizer(writer: GGUFWriter) -> None:
    """Add a byte-level tokenizer: 256 bytes, three special tokens and one merge; BOS starts every text."""
    from tokenizers import pre_tokenizers

    special = ["<|bos|>", "<|start|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special, "th"])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 3 + [TokenType.NORMAL])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(True)


def write_tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    tensors: Mapping[str, Array] | None = None,
    kind: Type = Type.F32,
    extra: Mapping[str, Array] | None = None,
    without: tuple[str, ...] = (),
    change: Callable[[GGUFWriter], None] | None = byte_tokenizer,
) -> Path:
    """Write a model: its matrices as `kind`, everything else f32.

    extra: tensors under llama.cpp's own names.  without: names of metadata to leave out.  change: adds more metadata.
    """
    tensors = tiny_tensors(arch) if tensors is None else tensors
    writer = GGUFWriter(path, arch)
    said = {
        "context_length": CONTEXT,
        "embedding_length": tensors["model.embed_tokens.weight"].shape[1],
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "key_length": HEAD,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e6,
    }
    for key, value in said.items():
        if key not in without:
            getattr(writer, f"add_{key}")(value)
    if change:
        change(writer)
    for name, w in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            w = permute(w, HEADS if "q_proj" in name else KV_HEADS)
        stored = gguf.quants.quantize(w, kind if w.ndim == 2 else Type.F32)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind if w.ndim == 2 else Type.F32)
    for name, w in (extra or {}).items():
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
