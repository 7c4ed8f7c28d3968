"""Every tensor type that the `gguf` package decodes: the same values as the package's, to the last bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from crelle.errors import UnsupportedError
from crelle.formats.importers import gguf_types
from crelle.formats.importers.gguf_types import decode, dequantize
from crelle.formats.storage.open import open_weights

DECODED = sorted(gguf.quants._type_traits, key=lambda t: t.name)  # what gguf.quants.dequantize knows besides F32, F16
QUANTIZED = [t for t in DECODED if t != Type.BF16]
# Where the f16 values lie in a block; the other bytes may be anything.
F16_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}
GRIDS = {  # format, bits, group
    "Q4_0": ("uniform", 4, 32),
    "Q5_0": ("uniform", 5, 32),
    "Q8_0": ("uniform", 8, 32),
    "Q4_1": ("affine", 4, 32),
    "Q5_1": ("affine", 5, 32),
    "Q2_K": ("affine", 2, 16),
    "Q3_K": ("uniform", 3, 16),
    "Q4_K": ("affine", 4, 32),
    "Q5_K": ("affine", 5, 32),
    "Q6_K": ("uniform", 6, 16),
    "TQ1_0": ("uniform", 2, 256),
    "TQ2_0": ("uniform", 2, 256),
    "MXFP4": ("uniform", 5, 32),
    "NVFP4": ("uniform", 5, 16),
    "IQ4_NL": ("uniform", 8, 32),
    "IQ4_XS": ("uniform", 8, 32),
    "IQ3_S": ("uniform", 5, 32),
    "IQ3_XXS": ("uniform", 7, 32),
    "IQ2_XXS": ("uniform", 7, 32),
    "IQ2_XS": ("uniform", 7, 16),
    "IQ2_S": ("uniform", 7, 16),
    "IQ1_S": ("uniform", 5, 32),
    "IQ1_M": ("uniform", 5, 16),
}


def random_bytes(kind: Type, rows: int, blocks: int = 3) -> tiny.Array:
    """Return rows of blocks of any bytes whose scales are finite."""
    random = np.random.default_rng(rows)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in F16_AT[kind.name]:
        raw[..., at : at + 2] = random.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if kind == Type.IQ1_M:  # its f16 is in the upper nibbles of four words
        d = random.standard_normal((rows, blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (d >> 4 * i & 15) << 4
    if kind == Type.MXFP4:  # a power of two; the largest would take the values out of f32
        raw[..., 0] = random.integers(0, 250, (rows, blocks))
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.name)
def test_a_file_of_each_type_is_read(tmp_path: Path, kind: Type) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tiny.tiny_tensors("qwen2", width=256)
    w = tensors.pop(name)
    try:
        raw = gguf.quants.quantize(w, kind)
    except NotImplementedError:
        raw = random_bytes(kind, tiny.INNER, 256 // gguf.GGML_QUANT_SIZES[kind][0])

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor(tiny.gguf_name(name), raw, raw_dtype=kind)

    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", "qwen2", tensors=tensors, change=add)
    want = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(want).all()
    assert want.std() > 0
    plain, encoded = open_weights(file), open_weights(file, encoded=True)
    assert plain.shape(name) == want.shape == (tiny.INNER, 256)
    assert np.array_equal(plain.read(name).numpy(), want)
    assert np.array_equal(encoded.matrix(name.removesuffix(".weight")).dequantize().numpy(), want)


@pytest.mark.parametrize("row_block", [1, 1 << 20], ids=["many blocks of rows", "one"])
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.name)
def test_any_bytes_give_the_values_of_the_package(kind: Type, row_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_types, "ROW_BLOCK", row_block * 768)
    raw = random_bytes(kind, 7)
    want = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(dequantize(kind.name, raw, want.shape).numpy(), want)
    w = decode(kind.name, raw, want.shape)
    assert w is not None
    assert (w.format, w.bits, w.group) == GRIDS[kind.name]
    assert w.shape == want.shape
    assert np.array_equal(w.dequantize().numpy(), want)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.name)
def test_scales_that_are_not_finite_stay_so(kind: Type) -> None:
    raw = np.full((2, gguf.GGML_QUANT_SIZES[kind][1]), 0xFF, np.uint8)
    shape = (2, gguf.GGML_QUANT_SIZES[kind][0])
    plain, w = dequantize(kind.name, raw, shape), decode(kind.name, raw, shape)
    assert w is not None
    assert bool(torch.isfinite(plain).all()) == bool(torch.isfinite(w.dequantize()).all()) == (kind == Type.NVFP4)


def test_tensors_of_more_axes_are_dequantized_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_types, "ROW_BLOCK", 64)
    raw = random_bytes(Type.Q4_0, 10).reshape(2, 5, -1)
    assert np.array_equal(dequantize("Q4_0", raw, (2, 5, 96)).numpy(), gguf.quants.dequantize(raw, Type.Q4_0))
    assert decode("Q4_0", raw, (2, 5, 96)) is None


@pytest.mark.parametrize("kind", ["F64", "I32", "Q8_1", "Q8_K"])
def test_types_that_the_package_cannot_decode_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"is {kind}, which Crelle cannot decode"):
        dequantize(kind, np.zeros((1, 64), np.uint8), (1, 256))
    assert decode(kind, np.zeros((1, 64), np.uint8), (1, 256)) is None
