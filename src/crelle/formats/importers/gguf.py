"""GGUF files: one file with weights, config and tokenizer, as llama.cpp uses them.

Tensors are presented under their Hugging Face names and in that layout. Types: F32, F16, BF16, and every quantized type
that the `gguf` package can turn back into numbers (Q8_0, Q4_0, Q4_1, the K-quants, …); those come as f32, or, for a
file that is opened `encoded`, as one of our tensors where gguf_blocks.py knows the type. The header is read by
gguf_header.py, which checks every length in it: the package's own reader allocates whatever a file claims.
Two things differ from Hugging Face and are undone here: in the `llama` architecture the rows of q and k are
reordered (pairs interleaved for rope), and Llama 3's rope scaling is stored as a table of factors.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.files import shown
from crelle.formats.importers.gguf_blocks import decode
from crelle.formats.importers.gguf_header import Header, TensorInfo, read_header

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
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
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A GGUF file behind the interface of `source.Weights`."""

    def __init__(self, path: Path, encoded: bool = False, header: Header | None = None) -> None:
        """header: where it has been read already."""
        self.path, self.encoded = path, encoded
        self.header = header or read_header(path)
        self._tensors = self.header.tensors
        try:
            self._understand()
        except CrelleError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError) as e:
            raise FormatError(f"{path}: the metadata of this GGUF file makes no sense ({e})") from e

    def _understand(self) -> None:
        path = self.path
        if (parts := self.get("split.count", 1)) > 1:
            raise UnsupportedError(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first")
        self.arch = str(self.get("general.architecture"))
        if self.arch not in _CLASSES:
            known = ", ".join(_CLASSES)
            raise UnsupportedError(f"{path} holds a {shown(self.arch)} model; from GGUF Crelle reads {known}")
        if "token_embd.weight" not in self._tensors:
            raise FormatError(f"{path} has no tensor 'token_embd.weight', so it is not a whole model")
        self.config = self._config()
        self._where = {hf: t for t in self._tensors if (hf := _hf_name(t)) is not None}

    @property
    def fields(self) -> Collection[str]:
        """The names of the metadata."""
        return self.header.fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, or the default; without a default its absence is an error."""
        if key in self.header.fields:
            try:
                return self.header.get(key)
            except FormatError as e:
                raise FormatError(f"{self.path}: {e}") from e
        if default is None:
            raise FormatError(f"{self.path} lacks the metadata '{key}'")
        return default

    def _arch(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.arch}.{key}", default)

    def _config(self) -> dict[str, Any]:
        """Return the Hugging Face config that this file's metadata amounts to."""
        heads, width = self._arch("attention.head_count"), self._arch("embedding_length")
        kv_heads = self._arch("attention.head_count_kv", heads)
        for key, value in (("attention.head_count", heads), ("attention.head_count_kv", kv_heads)):
            if type(value) is not int or value < 1:
                raise FormatError(f"{self.path}: '{self.arch}.{key}' should be a positive integer, not {shown(value)}")
        return {
            "architectures": [_CLASSES[self.arch]],
            "model_type": self.arch,
            "hidden_size": width,
            "intermediate_size": self._arch("feed_forward_length"),
            "num_hidden_layers": self._arch("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self._arch("attention.key_length", width // heads),
            "max_position_embeddings": self._arch("context_length"),
            "rms_norm_eps": _shortest(self._arch("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(),
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": False,
            "hidden_act": "silu",
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id", -1),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id", -1),
        }

    def _rope(self) -> dict[str, Any]:
        theta = _shortest(self._arch("rope.freq_base", 10000.0))
        kind = self._arch("rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": self._arch("rope.scaling.factor")}
        if kind != "none":
            raise UnsupportedError(f"{self.path} uses rope scaling '{kind}', which Crelle does not read from GGUF")
        if _ROPE_FACTORS not in self._tensors:
            return {"rope_type": "default", "rope_theta": theta}
        return self._llama3_rope(theta)

    def _llama3_rope(self, theta: float) -> dict[str, Any]:
        """Find the Llama 3 parameters that give the file's table of factors."""
        info = self._tensors[_ROPE_FACTORS]
        if info.kind != "F32":
            raise FormatError(f"{self.path}: '{_ROPE_FACTORS}' should be F32, but is {info.kind}")
        table = self.header.array(info).flatten()
        found = float(table.max())
        wavelength = 2 * np.pi * theta ** (np.arange(len(table)) / len(table))
        for original in (8192, 4096, 16384):
            smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
            if np.allclose(1 / ((1 - smooth) / found + smooth), table, rtol=1e-3):
                sizes = {"factor": found, "original_max_position_embeddings": original}
                return {**_LLAMA3_ROPE, "rope_theta": theta, **sizes}
        raise UnsupportedError(f"{self.path} has rope factors that are not those of Llama 3")

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._where:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return self._tensors[self._where[name]]

    def packed(self, name: str) -> bool:
        """Tell whether a tensor is stored in a quantized type, so that `read` has to unpack it."""
        return self._tensor(name).kind not in ("F32", "F16", "BF16")

    def read(self, name: str) -> Tensor:
        import gguf

        t = self._tensor(name)
        stored = self.header.array(t)
        if t.kind in ("F32", "F16"):
            w = torch.from_numpy(np.array(stored))
        elif t.kind == "BF16":
            w = torch.from_numpy(np.array(stored)).view(torch.bfloat16)
        else:
            try:
                w = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[t.kind]))
            except NotImplementedError as e:
                raise UnsupportedError(f"{self.path}: '{t.name}' is {t.kind}, which nothing here can decode") from e
        w = w.reshape(self.shape(name))
        return self._undo_rope_order(name, w) if self.arch == "llama" else w

    def _undo_rope_order(self, name: str, w: Tensor) -> Tensor:
        """From pairs (0, D/2), (1, D/2+1), … side by side back to the two halves of a head."""
        if not re.search(r"\.[qk]_proj\.", name):
            return w
        heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        if w.shape[0] % (2 * heads):
            raise FormatError(f"{self.path}: '{name}' has {w.shape[0]} rows, which {heads} heads cannot share")
        return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)

    def matrix(self, module: str) -> QuantTensor:
        name = f"{module}.weight"
        t = self._tensor(name)
        w = decode(t.kind, self.header.array(t), t.shape) if self.encoded else None
        if w is None:
            return DenseTensor(self.read(name))
        if self.arch != "llama":
            return w
        order = self._undo_rope_order(name, torch.arange(w.shape[0])[:, None]).flatten()
        return w.rows(order)

    def copy_tokenizer(self, to: Path) -> None:
        from crelle.formats.importers.gguf_tokenizer import write_tokenizer

        write_tokenizer(self, to)


def _hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor; None for tensors that Hugging Face keeps in the config."""
    if name == _ROPE_FACTORS:
        return None
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    if (m := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and m[2] in _INNER:
        return f"model.layers.{m[1]}.{_INNER[m[2]]}.{kind}"
    raise UnsupportedError(f"the GGUF tensor '{name}' has no place in a Llama-family model")


def _shortest(x: Any) -> float:
    """Undo the widening of an f32: 9.999999747378752e-06 was meant as 1e-05."""
    return float(str(np.float32(x)))
