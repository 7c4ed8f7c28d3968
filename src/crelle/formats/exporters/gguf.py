"""A model as one GGUF file, as llama.cpp loads it: weights bit for bit, metadata and tokenizer.

For the families that crelle.formats.importers.gguf reads under `llama`, `qwen2` and `qwen3`; gguf_blocks.py says which
grids have a type. Matrices that are not quantized stay as they are, norms and biases become F32, rows of q and k are
reordered for rope in the `llama` architecture. Tensors are read twice, first to choose types, so that one at a time is
in memory. The file has another name until it is whole, and only a file that Crelle wrote is replaced: it says so
under MARK, with the bytes of its tensors, so that what others made of such a file is not taken for it.
"""

import os
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.exporters import gguf_blocks, gguf_metadata
from crelle.formats.exporters.directory import Progress, speaking_of
from crelle.formats.exporters.gguf_tokenizer import TokenizerMetadata, tokenizer_metadata
from crelle.formats.importers.gguf_architectures import ROPE_FACTORS, Architecture
from crelle.formats.importers.gguf_header import read_header
from crelle.formats.importers.gguf_types import FLOATS
from crelle.formats.storage.destination import destination, refuse_overlap
from crelle.formats.storage.io import whole_file
from crelle.formats.storage.open import Weights
from crelle.version import __version__

MARK = "crelle.export.tensor_bytes"
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}


def export_gguf(
    weights: Weights, out: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Write a model as a GGUF file; return its architecture and the number of tensors of each type."""
    try:
        import gguf
    except ImportError as e:
        raise UnsupportedError("GGUF export needs the package gguf: pip install gguf") from e
    out = destination(out)
    refuse_overlap(out, weights.path)
    _refuse_finished(out, overwrite)
    config = weights.config
    try:
        name, arch = gguf_metadata.architecture(config)
        said, rope = gguf_metadata.values(config, arch), gguf_metadata.rope(config)
    except (UnsupportedError, FormatError) as e:
        raise type(e)(f"{weights.path}: {e}") from e
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
        raise FormatError(f"{weights.path}: its config is invalid ({e!r})") from e
    tokenizer = tokenizer_metadata(weights, weights.shape("model.embed_tokens.weight")[0])
    names = [n for n in weights.names() if not _left_out(n, config)]
    places: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for n in names:
        with speaking_of(weights, n.removesuffix(".weight")):
            places[n] = arch.gguf_name(n)
            kinds[n] = gguf_blocks.plan(_matrix(weights, n, arch)).kind
    if all(kind in FLOATS for kind in kinds.values()):
        raise UnsupportedError(f"{weights.path} has no quantized matrix to export; quantize it first")
    commonest = Counter(k for n, k in kinds.items() if len(weights.shape(n)) == 2).most_common(1)[0][0]
    with whole_file(out) as f:
        writer = gguf.GGUFWriter(f.name, name)
        try:
            _describe(writer, weights.path.stem, name, said, rope)
            _add_tokenizer(writer, tokenizer)
            sizes = {n: _size(gguf, kinds[n], weights.shape(n)) for n in names}
            extra = {} if rope.factors is None else {ROPE_FACTORS: rope.factors}
            writer.add_file_type(_FILE_TYPES[commonest])
            writer.add_uint64(MARK, sum(prod(s) for s in sizes.values()) + sum(a.nbytes for a in extra.values()))
            for n in names:
                kind = gguf.GGMLQuantizationType[kinds[n]]
                writer.add_tensor_info(places[n], sizes[n], np.dtype(np.uint8), prod(sizes[n]), kind)
            for place, array in extra.items():
                writer.add_tensor_info(place, array.shape, array.dtype, array.nbytes)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done, total = 0, sum(prod(weights.shape(n)) for n in names)
            for n in names:
                writer.write_tensor_data(gguf_blocks.stored(_matrix(weights, n, arch)))
                done += prod(weights.shape(n))
                if progress:
                    progress(done, total, n)
            for array in extra.values():
                writer.write_tensor_data(array)
        finally:
            writer.close()
        _refuse_finished(out, overwrite)  # again: the work may have taken long
    return {"architecture": name, "types": dict(Counter(kinds.values()).most_common())}


def _left_out(name: str, config: Mapping[str, Any]) -> bool:
    """Tell whether a tensor follows from the config or from another one."""
    tied = name == "lm_head.weight" and config.get("tie_word_embeddings") is True
    return tied or name.endswith("rotary_emb.inv_freq")


def _matrix(weights: Weights, name: str, arch: Architecture) -> QuantTensor:
    """Return a tensor as a matrix with its rows in llama.cpp's order: q and k of `llama` have rope pairs side by side.

    Norms and biases become a column of f32, which is what llama.cpp multiplies by and adds.
    """
    shape = weights.shape(name)
    w = DenseTensor(weights.read(name).float()[:, None]) if len(shape) == 1 else _weight(weights, name)
    if (key := arch.interleaved_heads(name)) is None:
        return w
    heads = weights.config.get(key) or weights.config["num_attention_heads"]
    if shape[0] % (2 * heads):
        raise FormatError(f"it has {shape[0]} rows, which are not divisible by {heads} heads")
    return w.rows(torch.arange(shape[0]).reshape(heads, 2, -1).transpose(1, 2).flatten())


def _weight(weights: Weights, name: str) -> QuantTensor:
    module, _, kind = name.rpartition(".")
    if kind != "weight" or len(weights.shape(name)) != 2:
        raise UnsupportedError("it is neither a matrix nor a vector, which GGUF export needs")
    return weights.matrix(module)


def _size(gguf: Any, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's bytes."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return (*shape[:-1], shape[-1] // weights * size)


def _describe(writer: Any, title: str, name: str, said: Mapping[str, int | float], rope: gguf_metadata.Rope) -> None:
    writer.add_name(title)
    writer.add_quantization_version(2)
    writer.add_string("general.quantized_by", f"crelle {__version__}")
    for key, value in said.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{name}.{key}", value)
    writer.add_rope_freq_base(rope.theta)
    if rope.linear is not None:
        writer.add_string(f"{name}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope.linear)


def _add_tokenizer(writer: Any, t: TokenizerMetadata) -> None:
    writer.add_tokenizer_model(t.model)
    writer.add_tokenizer_pre(t.pre)
    writer.add_token_list(t.tokens)
    writer.add_token_types(t.types)
    if t.model == "gpt2":
        writer.add_token_merges(t.merges)
    else:
        writer.add_token_scores(t.scores)
    for key, i in t.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", i)
    for key, on in t.flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", on)
    if t.chat_template:
        writer.add_chat_template(t.chat_template)


def _refuse_finished(out: Path, overwrite: bool) -> None:
    """Refuse an OUT that exists, unless it is a file of ours that may be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise FormatError(f"{out} already exists; choose another name, or replace it with `overwrite=True`")
    ours = False
    if out.is_file() and not out.is_symlink():
        try:
            header = read_header(out)
            ours = MARK in header.fields and header.get(MARK) == sum(t.nbytes for t in header.tensors.values())
        except FormatError:
            ours = False
    if not ours:
        raise FormatError(
            f"{out} is not a GGUF file that Crelle wrote, so it is not replaced; move it or choose another name"
        )
