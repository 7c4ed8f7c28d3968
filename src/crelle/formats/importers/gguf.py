"""GGUF files: one file with weights, config and tokenizer, as llama.cpp uses them.

Tensors are presented under their Hugging Face names and in that layout. Types: F32, F16, BF16, and every quantized type
that the `gguf` package can turn back into numbers (Q8_0, Q4_0, Q4_1, the K-quants, …); those come as f32, or, for a
file that is opened `encoded`, as one of our tensors where gguf_blocks.py knows the type.
Two things differ from Hugging Face and are undone here: in the `llama` architecture the rows of q and k are
reordered (pairs interleaved for rope), and Llama 3's rope scaling is stored as a table of factors.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.importers.gguf_blocks import decode

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

    def __init__(self, path: Path, encoded: bool = False) -> None:
        import gguf

        self.path, self.encoded = path, encoded
        try:
            self._understand(gguf.GGUFReader(path))
        except CrelleError:
            raise
        except Exception as e:  # the package raises whatever its parsing trips over
            raise FormatError(f"{path} is truncated or not a valid GGUF file ({e})") from e

    def _understand(self, reader: Any) -> None:
        path = self.path
        self.fields = reader.fields
        self._tensors = {t.name: t for t in reader.tensors}
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        if end > path.stat().st_size:
            raise FormatError(f"{path} is truncated: it should have {end} bytes and has {path.stat().st_size}")
        if (parts := self.get("split.count", 1)) > 1:
            raise UnsupportedError(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first")
        self.arch = str(self.get("general.architecture"))
        if self.arch not in _CLASSES:
            known = ", ".join(_CLASSES)
            raise UnsupportedError(f"{path} holds a '{self.arch}' model; from GGUF Crelle reads {known}")
        if "token_embd.weight" not in self._tensors:
            raise FormatError(f"{path} has no tensor 'token_embd.weight', so it is not a whole model")
        self.config = self._config()
        self._where = {hf: t for t in self._tensors if (hf := _hf_name(t)) is not None}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, or the default; without a default its absence is an error."""
        field = self.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise FormatError(f"{self.path} lacks the metadata '{key}'")
        return default

    def _arch(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.arch}.{key}", default)

    def _config(self) -> dict[str, Any]:
        """Return the Hugging Face config that this file's metadata amounts to."""
        heads, width = self._arch("attention.head_count"), self._arch("embedding_length")
        return {
            "architectures": [_CLASSES[self.arch]],
            "model_type": self.arch,
            "hidden_size": width,
            "intermediate_size": self._arch("feed_forward_length"),
            "num_hidden_layers": self._arch("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._arch("attention.head_count_kv", heads),
            "head_dim": self._arch("attention.key_length", width // heads),
            "max_position_embeddings": self._arch("context_length"),
            "rms_norm_eps": _shortest(self._arch("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(),
            "vocab_size": self._tensors["token_embd.weight"].data.shape[0],
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
        table = np.asarray(self._tensors[_ROPE_FACTORS].data, dtype=np.float32)
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
        return tuple(int(n) for n in reversed(self._tensor(name).shape))

    def _tensor(self, name: str) -> Any:
        if name not in self._where:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return self._tensors[self._where[name]]

    def packed(self, name: str) -> bool:
        """Tell whether a tensor is stored in a quantized type, so that `read` has to unpack it."""
        return self._tensor(name).tensor_type.name not in ("F32", "F16", "BF16")

    def read(self, name: str) -> Tensor:
        import gguf

        t = self._tensor(name)
        kind = t.tensor_type
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            w = torch.from_numpy(np.array(t.data))
        elif kind == gguf.GGMLQuantizationType.BF16:
            w = torch.from_numpy(np.array(t.data)).view(torch.bfloat16)
        else:
            try:
                w = torch.from_numpy(gguf.quants.dequantize(t.data, kind))
            except NotImplementedError as e:
                raise UnsupportedError(f"{self.path}: '{t.name}' is {kind.name}, which nothing here can decode") from e
        w = w.reshape(self.shape(name))
        return self._undo_rope_order(name, w) if self.arch == "llama" else w

    def _undo_rope_order(self, name: str, w: Tensor) -> Tensor:
        """From pairs (0, D/2), (1, D/2+1), … side by side back to the two halves of a head."""
        if not re.search(r"\.[qk]_proj\.", name):
            return w
        heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)

    def matrix(self, module: str) -> QuantTensor:
        name = f"{module}.weight"
        t = self._tensor(name)
        w = decode(t.tensor_type.name, t.data, self.shape(name)) if self.encoded else None
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


def _shortest(x: float) -> float:
    """Undo the widening of an f32: 9.999999747378752e-06 was meant as 1e-05."""
    return float(str(np.float32(x)))
